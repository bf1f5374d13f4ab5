"""The files that are shipped (devices, clusters, workloads, models, engines) and how a name or a path leads to one.

A name is looked up without regard to case, spaces and dashes, by file name and by the aliases a file states. Whatever
exists as a file, or looks like a path, is a path: a user's own file is written like the shipped ones.
Rejected: one big table per kind, in which a user finds nothing to copy.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

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


def shipped_model_config(name_or_path: str | Path) -> Path:
    """The `config.json` of a shipped model, or the file or checkpoint folder at that path; `models.config` reads it."""
    return shipped_file("model", name_or_path)


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
