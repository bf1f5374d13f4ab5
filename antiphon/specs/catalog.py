"""The files that are shipped (devices, clusters, workloads, models, engines), how a name or a path leads to one, and
which kind a user's file is of.

A name is looked up without regard to case, spaces and dashes, by file name and by the aliases a file states. Whatever
exists as a file, or looks like a path, is a path: a user's own file is written like the shipped ones.
Rejected: one big table per kind, in which a user finds nothing to copy.

A reader stands in `a_file_of`, for the error where one kind of file was given in the place of another: a plan where a
model belongs. When it refuses the file, its kind is found by keys that no other kind has, or by its first bytes, and
the error says what the file is and which command takes it. Files that can be read cost nothing.
Rejected: a name of the kind in every file, which those of users and of other programs do not have.
"""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from antiphon.base.errors import UserError
from antiphon.specs.checked import canonical, nearest_names

DATA = Path(__file__).parent / "data"
Kind = Literal["device", "cluster", "workload", "model", "engine"]
FOLDERS: dict[Kind, str] = {
    "device": "devices",
    "cluster": "clusters",
    "workload": "workloads",
    "model": "models",
    "engine": "engines",
}
SUFFIXES = (".toml", ".json", ".jsonl", ".csv")
LISTED = ("aliases", "summary")  # keys of a shipped file that are for lists alone


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One shipped file. `summary` is a line for lists; `stated` what its publisher says of it, where we have that."""

    kind: Kind
    name: str
    path: Path
    aliases: tuple[str, ...]
    summary: str
    source: str
    stated: dict[str, float]


@cache
def catalog(kind: Kind) -> tuple[Entry, ...]:
    """All shipped files of a kind, by name."""
    if kind == "model":
        return _models()
    return tuple(_entry(kind, path) for path in sorted((DATA / FOLDERS[kind]).glob("*.toml")))


def names(kind: Kind) -> list[str]:
    return [entry.name for entry in catalog(kind)]


def shipped_file(kind: Kind, name_or_path: str | Path) -> Path:
    """The path meant by a shipped name or a path; `UserError` with the nearest names if there is neither."""
    path = Path(name_or_path)
    if _exists(kind, path):
        return path
    wanted = canonical(str(name_or_path))
    for entry in catalog(kind):
        if wanted in {canonical(name) for name in (entry.name, entry.path.stem, *entry.aliases)}:
            return entry.path
    if path.suffix.lower() in SUFFIXES or len(path.parts) > 1:
        raise UserError(f"{path}: there is no such file: give a {kind} file, or one of {', '.join(names(kind))}")
    near = nearest_names(str(name_or_path), names(kind))
    guess = f"did you mean {', '.join(near)}? " if near else ""
    raise UserError(
        f"{kind} {str(name_or_path)!r} is unknown: {guess}Shipped: {', '.join(names(kind))}; "
        "or give the path of your own file"
    )


def _exists(kind: Kind, path: Path) -> bool:
    """Whether the path itself is meant; a checkpoint may be a folder."""
    try:
        return path.is_file() or (kind == "model" and path.parts != () and path.is_dir())
    except OSError:  # too long for a file name, or in a folder we may not look into
        return False


def _entry(kind: Kind, path: Path) -> Entry:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return Entry(
        kind=kind,
        name=content["name"],
        path=path,
        aliases=tuple(content.get("aliases", ())),
        summary=content.get("summary", ""),
        source=content.get("source", ""),
        stated={},
    )


def _models() -> tuple[Entry, ...]:
    """`models/index.toml` says what a `config.json` has no key for: aliases, source, what the publisher states."""
    index = tomllib.loads((DATA / FOLDERS["model"] / "index.toml").read_text(encoding="utf-8"))
    return tuple(
        Entry(
            kind="model",
            name=name,
            path=DATA / FOLDERS["model"] / f"{name}.json",
            aliases=tuple(about.get("aliases", ())),
            summary=about["summary"],
            source=about["source"],
            stated=dict(about.get("stated", {})),
        )
        for name, about in sorted(index.items())
    )


# --- the kind of a file


_MOST_BYTES = 64 << 20  # what is larger is not looked into


class FileKind(NamedTuple):
    """`keys`: those at the top of each such file, in one text. `name`: as `a_file_of` has it."""

    name: str
    keys: str
    what: str
    use: str


_CONFIG = ("a model's config.json", "antiphon plan takes it, other commands its folder")
KINDS = (
    FileKind("model", "num_hidden_layers", *_CONFIG),
    FileKind("model", "model_type", *_CONFIG),
    FileKind("result", "num_requests num_finished", "the result of a simulation", "no command reads it"),
    FileKind("plan", "version phases", "a plan", "antiphon serve MODEL --plan and antiphon simulate take it"),
    FileKind("plan", "version phase layout", "a plan", "antiphon train --plan takes it"),
    FileKind("profile", "version machine attention", "a profile of a machine", "antiphon plan --profile takes it"),
    FileKind("cluster", "groups", "a cluster", "antiphon plan --cluster takes it"),
    FileKind("device", "kind memory_bytes", "a device", "the group of a cluster's file names it: device = FILE"),
    FileKind("engine", "step_s collective_s", "an engine's constants", "a file of antiphon reproduce --fit"),
    FileKind("workload", "input_tokens output_tokens", "a workload", "antiphon plan --workload takes it"),
    FileKind("workload", "trace", "a workload", "antiphon plan --workload takes it"),
    FileKind("placement", "num_workers owners", "a placement of experts", "antiphon serve --placement takes it"),
    FileKind("tokenizer", "model added_tokens", "a model's tokenizer", "commands take the folder it is in"),
    FileKind("run", "model data", "what to train", "antiphon train takes it"),
    FileKind("result", "bench rows", "the result of a benchmark", "no command reads it"),
    FileKind("requests", "custom_id body", "a batch of requests", "antiphon batch takes it"),
    FileKind("timeline", "traceEvents", "a timeline", "ui.perfetto.dev shows it"),
)
_BY_FIRST_BYTES = (
    (b"GGUF", FileKind("model", "", "a model in a GGUF file", "antiphon serve takes it")),
    (b"PK\x03\x04", FileKind("paths", "", "a zip archive", "--path-profile takes what antiphon placement writes")),
)
_RECORDING = FileKind("recording", "", "a recording of routing", "antiphon placement and --routing take it")
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
    return next((kind for kind in KINDS if mapping.keys() >= {*kind.keys.split()}), None)


def _first_object(text: str) -> Any:
    """The whole text, or its first line where each line is one."""
    return json.JSONDecoder().raw_decode(text.lstrip())[0]
