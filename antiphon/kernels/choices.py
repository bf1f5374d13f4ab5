"""Which implementation of an operation is the quickest on this GPU: measured once, kept in a file with the reason.

`antiphon tune` calls `choose` for each operation. Our own kernel is the first candidate and the measure of the others:
a candidate is out that is not installed, fails, gives other numbers, or gives a row other bits among other rows than
alone. Of the rest the quickest is taken, by geometric mean over the sizes.

Workers ask `choice_of` for what the file says and measure nothing, because a stopwatch would decide a row's bits anew
in every process. The file lies beside the table of tiles: `tiles.choices.json` beside `tiles.json`.

The file of tiles of grouped products is a JSON file of entries: what weight on what GPU, and a list of [most rows an
expert, tile] in ascending order, one a batch bucket. `inputs` of a tile is the order in which a row is summed, so it is
the same in all buckets of an entry; and entries do not depend on how many experts a worker holds. So workers with the
same table and the same kind of GPU give a row the same bits. `antiphon.kernels.triton.grouped` reads it for a weight.

Both files are read once a process. Rejected: a measurement at the first batch (its size would decide for all others,
and workers would disagree).
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger

_log = get_logger("kernels")
OWN = "triton"
MOST_ERROR = 2e-2  # of the largest number: two roundings to bfloat16


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`run(case)` computes the rows of a case, `alone(case)` its last row without the others. `why_not`: why it cannot
    be tried; empty: it can."""

    name: str
    run: Callable[[int], Tensor]
    alone: Callable[[int], Tensor]
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Seconds of each case, or why there are none."""

    name: str
    times_s: list[float]
    why_not: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The candidate to use, and why."""

    name: str
    why: str
    tried: list[Tried]


def choose(
    candidates: Sequence[Candidate], cases: Sequence[str], measure_s: Callable[[Callable[[], Tensor]], float]
) -> Choice:
    """The quickest of `candidates`, the first of which is our own and cannot be out. `cases` name the sizes."""
    own, *others = candidates
    tried = [Tried(name=own.name, times_s=_times(own, cases, measure_s), why_not="")]
    for other in others:
        why_not = other.why_not or _why_not(own, other, cases)
        tried.append(
            Tried(name=other.name, times_s=[] if why_not else _times(other, cases, measure_s), why_not=why_not)
        )
    best = min((each for each in tried if not each.why_not), key=lambda each: sum(map(math.log, each.times_s)))
    return Choice(name=best.name, why=_reason(best, tried, len(cases)), tried=tried)


def _times(candidate: Candidate, cases: Sequence[str], measure_s: Callable[..., float]) -> list[float]:
    return [measure_s(partial(candidate.run, case)) for case in range(len(cases))]


def _why_not(own: Candidate, other: Candidate, cases: Sequence[str]) -> str:
    for case, name in enumerate(cases):
        try:
            found = other.run(case)
            if not near(found, own.run(case)):
                return f"gives other numbers ({name})"
            if not torch.equal(found[-1], other.alone(case)[-1]):
                return f"gives a row other bits among others than alone ({name})"
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError, ImportError) as error:
            return f"fails ({name}): {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""


def _reason(best: Tried, tried: Sequence[Tried], num_cases: int) -> str:
    def ratio(other: Tried) -> float:
        logs = [math.log(theirs / ours) for theirs, ours in zip(other.times_s, best.times_s, strict=True)]
        return math.exp(sum(logs) / max(1, len(logs)))

    parts = [
        f"{each.name}: {each.why_not}" if each.why_not else f"{ratio(each):.2f} times as quick as {each.name}"
        for each in tried
        if each is not best
    ]
    return f"{', '.join(parts) or 'there is no other'} (over {num_cases} sizes)"


def near(found: Tensor, expected: Tensor) -> bool:
    """Equal up to two roundings to bfloat16."""
    if not expected.numel():
        return found.shape == expected.shape
    scale = expected.float().abs().max().clamp(min=1e-6)
    return bool(((found.float() - expected.float()).abs().max() / scale) < MOST_ERROR)


# --- the file of choices

Key = tuple[Any, ...]  # an operation, a GPU, sizes, formats
ChoiceTable = dict[Key, tuple[str, str]]  # a name and why


def table_path() -> Path:
    """The table of tiles: the file that ANTIPHON_TILES names, or that of this user."""
    return Path(os.environ.get("ANTIPHON_TILES") or Path.home() / ".cache" / "antiphon" / "tiles.json")


def choices_path(table: Path | None = None) -> Path:
    """The choices that belong to this table."""
    return (table or table_path()).with_suffix(".choices.json")


def read_choices(path: Path) -> ChoiceTable:
    """`UserError` for a file that has no choices; an absent one has none."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["choices"]
        return {tuple(entry["key"]): (str(entry["choice"]), str(entry["why"])) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} has no choices of kernels ({error}): write it with antiphon tune") from error


def write_choices(path: Path, choices: ChoiceTable) -> None:
    """The reverse of `read_choices`."""
    entries = [{"key": list(key), "choice": name, "why": why} for key, (name, why) in choices.items()]
    _write(path, {"choices": entries})


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@cache
def process_choices() -> ChoiceTable:
    """Those of this process, read by the first call."""
    return read_choices(choices_path())


def choice_of(key: Key, why_not: Callable[[str], str]) -> str:
    """The name to use for this key; ours where the file has none, or one that `why_not` has a reason against. The log
    says which, if there is a file: ask once."""
    choices = process_choices()
    if key not in choices:
        if choices:
            _log.info("kernels: %s: %s (%s has no such entry)", _named(key), OWN, choices_path())
        return OWN
    name, why = choices[key]
    if name != OWN and (reason := why_not(name)):
        _log.warning("kernels: %s: %s, not %s as %s says: %s", _named(key), OWN, name, choices_path(), reason)
        return OWN
    _log.info("kernels: %s: %s: %s", _named(key), name, why)
    return name


def _named(key: Key) -> str:
    return ", ".join(map(str, key))


# --- the file of tiles


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """What one program makes: `rows` by `columns`, `inputs` at a time; and its warps and stages of loads in flight."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


# Of a weight: (most rows an expert, tile) in ascending order, or none where the rule's tiles are the quickest.
Tiles = list[tuple[float, ProductTile]]
Table = dict[Key, Tiles]


@cache
def process_table() -> Table:
    """The table of this process, read by the first call. `UserError` if ANTIPHON_TILES names no file."""
    path = table_path()
    if not path.exists():
        if os.environ.get("ANTIPHON_TILES"):
            raise UserError(f"ANTIPHON_TILES is {path}, which is no file: write it with antiphon tune, or unset it")
        return {}
    return read_table(path)


def read_table(path: Path) -> Table:
    """Entries by key; `UserError` for a file that is not such a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return {
            tuple(entry["key"]): [(float(most), ProductTile(**tile)) for most, tile in entry["tiles"]]
            for entry in found
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no table of tiles ({error}): write it with antiphon tune") from error


def write_table(path: Path, table: Table) -> None:
    """The reverse of `read_table`."""
    entries = [
        {"key": list(key), "tiles": [[most, vars(tile)] for most, tile in tiles]} for key, tiles in table.items()
    ]
    _write(path, {"entries": entries})
