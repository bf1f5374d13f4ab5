"""Nested dicts and lists as YAML, for manifests: the block style people edit, strings quoted where YAML asks for it.

Rejected: a YAML library as a dependency for one writer; reading YAML is nobody's job here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "none", "y", "n"}


def yaml_text(value: Mapping[str, object]) -> str:
    """A document of one mapping; values are mappings, sequences, text, numbers, booleans."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{_scalar(str(key))}:", inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _item(inner)
    else:
        yield _scalar(value)


def _entry(key: str, value: object) -> Iterator[str]:
    """``key: value`` in one line, or the value below the key."""
    if isinstance(value, str) and "\n" in value:
        yield f"{key} |"
        yield from (f"  {line}" for line in value.splitlines())
    elif isinstance(value, (Mapping, list, tuple)) and value:
        yield key
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _item(value: object) -> Iterator[str]:
    """An element of a list: its first line behind a dash, the others below."""
    if isinstance(value, str) and "\n" in value:
        yield "- |"
        yield from (f"  {line}" for line in value.splitlines())
        return
    first, *rest = _lines(value)
    yield f"- {first}"
    yield from (f"  {line}" for line in rest)


def _scalar(value: object) -> str:
    """Text stays bare only if no reader can take it for something else."""
    if isinstance(value, str):
        bare = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if bare else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
