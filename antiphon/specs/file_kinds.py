"""What a file is, for the error where one kind of file was given in the place of another: a plan where a model belongs.

A reader stands in `a_file_of`. When it refuses the file, its kind is found by keys that no other kind has, or by its
first bytes, and the error says what the file is and which command takes it. Files that can be read cost nothing.
Rejected: a name of the kind in every file, which those of users and of other programs do not have.
"""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.base.errors import UserError

_MOST_BYTES = 64 << 20  # what is larger is not looked into


class FileKind(NamedTuple):
    """`keys`: those at the top of each such file. `name`: as `a_file_of` has it."""

    name: str
    keys: frozenset[str]
    what: str
    use: str


def _kind(name: str, keys: str, what: str, use: str) -> FileKind:
    return FileKind(name, frozenset(keys.split()), what, use)


KINDS = (
    _kind("model", "num_hidden_layers", "a model's config.json", "antiphon plan takes it, other commands its folder"),
    _kind("model", "model_type", "a model's config.json", "antiphon plan takes it, other commands its folder"),
    _kind("result", "num_requests num_finished", "the result of a simulation", "no command reads it"),
    _kind("plan", "version phases", "a plan", "antiphon serve MODEL --plan and antiphon simulate take it"),
    _kind("plan", "version phase layout", "a plan", "antiphon train --plan takes it"),
    _kind("profile", "version machine attention", "a profile of a machine", "antiphon plan --profile takes it"),
    _kind("cluster", "groups", "a cluster", "antiphon plan --cluster takes it"),
    _kind("device", "kind memory_bytes", "a device", "the group of a cluster's file names it: device = FILE"),
    _kind("engine", "step_s collective_s", "an engine's constants", "a file of antiphon reproduce --fit"),
    _kind("workload", "input_tokens output_tokens", "a workload", "antiphon plan --workload takes it"),
    _kind("workload", "trace", "a workload", "antiphon plan --workload takes it"),
    _kind("placement", "num_workers owners", "a placement of experts", "antiphon serve --placement takes it"),
    _kind("tokenizer", "model added_tokens", "a model's tokenizer", "commands take the folder it is in"),
    _kind("run", "model data", "what to train", "antiphon train takes it"),
    _kind("result", "bench rows", "the result of a benchmark", "no command reads it"),
    _kind("requests", "custom_id body", "a batch of requests", "antiphon batch takes it"),
    _kind("timeline", "traceEvents", "a timeline", "ui.perfetto.dev shows it"),
)
_BY_FIRST_BYTES = (
    (b"GGUF", _kind("model", "", "a model in a GGUF file", "antiphon serve takes it")),
    (b"PK\x03\x04", _kind("paths", "", "a zip archive", "--path-profile takes what antiphon placement writes")),
)
_RECORDING = _kind("recording", "", "a recording of routing", "antiphon placement and --routing take it")
_ALSO_WANTED = {"paths": "a profile of sample paths", "recording": _RECORDING.what}


@contextmanager
def a_file_of(name: str, path: Path) -> Iterator[None]:
    """A `UserError` within it says what `path` is, where that is another kind of file than `name`."""
    try:
        yield
    except UserError:
        refuse_another(name, path)
        raise


def refuse_another(name: str, path: Path) -> None:
    """`UserError` if `path` is known as another kind of file."""
    found = file_kind(path)
    if found is not None and found.name != name:
        wanted = _ALSO_WANTED.get(name) or next(each.what for each in KINDS if each.name == name)
        raise UserError(f"{path} is {found.what}, not {wanted}: {found.use}")


def file_kind(path: Path) -> FileKind | None:
    """None for what cannot be read, or is of no known kind."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        data = path.read_bytes()
        for start, kind in _BY_FIRST_BYTES:
            if data.startswith(start):
                return kind
        if b"antiphon routing" in data[:64]:
            return _RECORDING
        text = data.decode("utf-8-sig")
        mapping = _first_object(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(mapping, dict):
        return None
    return next((kind for kind in KINDS if kind.keys <= mapping.keys()), None)


def _first_object(text: str) -> Any:
    """The whole text, or its first line where each line is one."""
    return json.JSONDecoder().raw_decode(text.lstrip())[0]
