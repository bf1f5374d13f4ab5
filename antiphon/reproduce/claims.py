"""Rows of the papers: what is printed, how we get ours, when the two agree, and which rows are asked for.

1. What a paper prints is data. ``data/msi.toml`` has rows whose values ``msi.py`` computes: each names an entry of the
   module's `OURS` and its arguments, ``ours = ["per price", "H20", "memory"]``. A ``[[claim]]`` is one row, or has
   several under ``rows`` that share its other keys. Rejected: rows as code. They hide the few lines that compute among
   the many that state.
2. `theirs` is what the paper prints, or what its printed equation gives for the numbers named in `what`.
3. `ours` is a function, run only when the row is asked for; it never sees `theirs`. What was measured here stands in
   ``data/measured.toml`` with its commit and command. Rejected: running it then. It needs minutes to hours, and a
   machine on which nothing else runs.
4. The tolerance is chosen by kind before ours is known: a counted number may differ by the rounding of the printed
   digit only, a modelled or simulated one by 15 to 25% (gains near 1: 10%), text not at all.
5. A row that does not hold, or holds loosely, stays with `reason`: what was found when it was looked into.

Rejected: expected results as tests. A test that fails is repaired or removed; a row that fails is a result.
"""

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.reproduce import lina, mix, msi, msm
from antiphon.specs.checked import did_you_mean, nearest_names, read, read_mapping

DATA = Path(__file__).parent / "data"
MEASURED_HERE = DATA / "measured.toml"
MEASURED = "measured here"  # of `ours`: names an effect of that file
LOSS_OVER = "loss over"  # names two of them
MODULES: tuple[ModuleType, ...] = (msi, mix, msm, lina)
Paper = Literal["MSI", "MIX", "MSM", "LINA"]
Kind = Literal["counted", "simulated", "modelled", "measured"]
Relation = Literal["within", "at_most", "at_least"]
Value = float | str
PAPERS: dict[Paper, str] = {
    "MSI": "MegaScale-Infer (arXiv 2504.02263)",
    "MIX": "MixServe",
    "MSM": "MegaScale-MoE (EuroSys 2026)",
    "LINA": "Lina (USENIX ATC 2023)",
}
ROUNDING = 1e-9  # of floating point, relative
GAINS = (0.9, 10.0)  # numbers without a unit in this range are ratios to something without the gain
CALIBRATING = "chose the calibration"
"""Part of the note of rows by which a cluster's calibration was chosen: that they hold predicts nothing."""
JSON_KEYS = (
    *("id", "paper", "source", "what", "theirs", "ours", "unit", "tolerance", "relation", "holds", "kind", "cluster"),
    *("reason", "note"),
)
NOT_ANALYSED = "not analysed: the row held when the reasons were written"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`source`: table, figure or section. `ours`: the function of our value. `tolerance`: largest difference, as
    a fraction of `theirs`; with a relation other than "within" the limit may be missed by as much. `cluster`: whose
    calibration the value rests on."""

    id: str
    paper: Paper
    source: str
    what: str
    theirs: Value
    ours: Any
    unit: str = ""
    tolerance: float = 0.0
    relation: Relation = "within"
    kind: Kind
    cluster: str = ""
    reason: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise UserError(f"claim {self.id}: tolerance is {self.tolerance}: it must be at least 0 and below 1")
        if isinstance(self.theirs, str) and (self.tolerance or self.relation != "within"):
            raise UserError(f"claim {self.id}: {self.theirs!r} is text: it holds exactly or not at all")


@dataclass(frozen=True, kw_only=True)
class Row(Claim):
    """A claim with our value in the place of the function. `reason` is empty where the row holds, and not loosely."""

    ours: Value
    holds: bool

    @property
    def sort(self) -> str:
        """What it says that the row holds; one of `SORTS`."""
        if self.kind in ("counted", "measured"):
            return self.kind
        if CALIBRATING in self.note:
            return "calibrating"
        if isinstance(self.theirs, str):
            return "order"
        if self.relation != "within":
            return "limit"
        return "number" if self.kind == "modelled" else "simulated"

    @property
    def holds_loosely(self) -> bool:
        """Whether a ratio holds that is off by more than a third of the gain it claims, or has the wrong sign."""
        if isinstance(self.theirs, str) or isinstance(self.ours, str) or self.unit or self.relation != "within":
            return False
        if not GAINS[0] <= self.theirs <= GAINS[1] or self.theirs == 1 or self.kind == "counted":
            return False
        return self.holds and abs(self.ours - self.theirs) > abs(self.theirs - 1) / 3

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; a value that is no number (a plan that does not exist) is None."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in JSON_KEYS}
        for name in ("theirs", "ours"):
            if isinstance(fields[name], float) and not math.isfinite(fields[name]):
                fields[name] = None
        return fields


SORTS = {
    "number": "numbers that the cost model predicts, within the tolerance",
    "simulated": "numbers simulated from the paper's own times",
    "order": "orders and words that are predicted",
    "limit": "limits that are kept",
    "calibrating": "rows that chose a calibration",
    "counted": "counted by formulas, which predicts nothing",
    "measured": "measured",
}
"""What rows predict, the hardest first: a number may miss on either side, an order has few values, a limit one side."""


def headline(rows: Sequence[Row]) -> list[str]:
    """How many rows of each sort hold, a line each; the numbers that were predicted come first."""
    lines = []
    for sort, what in SORTS.items():
        of_sort = [row for row in rows if row.sort == sort]
        if not of_sort:
            continue
        holding = [row for row in of_sort if row.holds]
        loose = [row.id for row in holding if row.holds_loosely]
        line = f"{what}: {len(holding)} of {len(of_sort)}, {len(holding) / len(of_sort):.0%}"
        if loose and sort != "calibrating":
            line += f"; {len(loose)} of these hold loosely, off by more than a third of the gain ({', '.join(loose)})"
        lines.append(line)
    return lines


def evaluate(claim: Claim) -> Row:
    """Compute our value and compare."""
    ours = claim.ours()
    ours = ours if isinstance(ours, str) else float(ours)
    fits = holds(claim.theirs, ours, claim.tolerance, claim.relation)
    row = Row(**{**vars(claim), "ours": ours, "holds": fits})
    if fits and not row.holds_loosely:
        return replace(row, reason="")
    return replace(row, reason=claim.reason or NOT_ANALYSED)


def holds(theirs: Value, ours: Value, tolerance: float, relation: Relation = "within") -> bool:
    """Whether `ours` agrees: text word for word; numbers within the tolerance, or on the right side of the limit."""
    if isinstance(theirs, str) or isinstance(ours, str):
        return theirs == ours
    if not math.isfinite(ours):
        return False
    slack = (tolerance + ROUNDING) * abs(theirs)
    if relation == "at_most":
        return ours <= theirs + slack
    if relation == "at_least":
        return ours >= theirs - slack
    return abs(ours - theirs) <= slack


def digit(theirs: float, last_digit: float) -> float:
    """The tolerance of a printed number whose last digit counts `last_digit`: half of it. digit(15.2, 0.1) = 0.33%."""
    return 0.5 * last_digit / abs(theirs)


@dataclass(frozen=True, kw_only=True)
class MeasuredEffect:
    """`value`: a ratio, a share, or a loss (at the end of a run, mean of its last tenth, nats a token). `differs`: how
    machine and case are others than the paper's."""

    value: float
    commit: str
    command: str
    machine: str = ""
    differs: str = ""

    @property
    def origin(self) -> str:
        return f"measured at commit {self.commit}: {self.command}"


@cache
def _effects() -> dict[str, MeasuredEffect]:
    mapping = read_mapping(MEASURED_HERE)
    return {
        name: read(
            MeasuredEffect, {**mapping["shared"].get(entry.pop("like", ""), {}), **entry}, f"{MEASURED_HERE}: {name}"
        )
        for name, entry in mapping["effects"].items()
    }


def measured_effect(name: str) -> MeasuredEffect:
    """`UserError` for a name that is not in the file."""
    if name not in _effects():
        raise UserError(f"{MEASURED_HERE} has no effect {name!r}: {did_you_mean(name, _effects())}")
    return _effects()[name]


@cache
def all_claims() -> tuple[Claim, ...]:
    """Every claim once; ids are unique."""
    found = tuple(claim for module in MODULES for claim in _claims_of(module))
    ids = [claim.id for claim in found]
    assert len(set(ids)) == len(ids), f"ids repeat: {sorted({one for one in ids if ids.count(one) > 1})}"
    return found


def _claims_of(module: ModuleType) -> Iterator[Claim]:
    name = module.__name__.rpartition(".")[2]
    for group in tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))["claim"]:
        for row in group.pop("rows", [{}]):
            yield _claim(module, name, {**group, **row})


def _claim(module: ModuleType, paper: str, row: dict[str, Any]) -> Claim:
    function, *arguments = row["ours"]
    if function == MEASURED:
        (effect,) = map(measured_effect, arguments)
        for key in ("machine", "differs"):
            if not getattr(effect, key):
                raise UserError(f"{MEASURED_HERE}: {arguments[0]} has no {key}, which a measured row says: add it")
        note = f"{effect.origin}; {effect.machine}. {effect.differs}"
        row |= {"kind": "measured", "ours": lambda: effect.value, "note": note}
        row.setdefault("reason", effect.differs)
    elif function == LOSS_OVER:
        one, plain = map(measured_effect, arguments)
        beside = "" if plain.command == one.command else f"; over {plain.command}"
        row |= {"ours": lambda: one.value / plain.value, "note": f"{row['note']}; {one.origin}{beside}"}
    else:
        row["ours"] = partial(module.OURS[function], *arguments)
    row |= {"id": f"{paper}-{row['id']}", "paper": paper.upper()}
    if "last_digit" in row:
        row["tolerance"] = digit(row["theirs"], row.pop("last_digit"))
    return Claim(**row)


def select(ids: Sequence[str] = (), paper: str | None = None) -> list[Claim]:
    """Claims by id, or by the beginning of one (``msi-fig12``, ``lina-fig7``: all of that figure), in the order of the
    papers; without ids all of them. `UserError` for what matches nothing, with the nearest ids."""
    claims = all_claims()
    if paper is not None:
        wanted = checked_paper(paper)
        claims = tuple(claim for claim in claims if claim.paper == wanted)
    if not ids:
        return list(claims)
    chosen: set[str] = set()
    for name in ids:
        matching = [claim.id for claim in claims if _is_of(claim.id, name)]
        if not matching:
            raise UserError(_unknown(name, [claim.id for claim in claims], paper))
        chosen.update(matching)
    return [claim for claim in claims if claim.id in chosen]


def _is_of(id: str, name: str) -> bool:
    """Whether `name` is the id or names its group: what follows is a dash, or a letter behind a number."""
    if not name or not id.startswith(name):
        return False
    rest = id[len(name) :]
    return rest == "" or rest[0] == "-" or (name[-1].isdigit() and rest[0].isalpha())


def checked_paper(name: str) -> Paper:
    for paper in PAPERS:
        if paper.lower() == name.lower():
            return paper
    raise UserError(f"--paper is {name!r}: it must be one of {', '.join(PAPERS)}")


def reproduce(claims: Sequence[Claim], report: Report) -> list[Row]:
    """One row for each claim, in their order."""
    rows = []
    for number, claim in enumerate(claims):
        report(number, len(claims))
        rows.append(evaluate(claim))
    report(len(claims), len(claims))
    return rows


def by_reason(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Those that have a reason; rows with the same one are together."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.reason:
            found.setdefault(row.reason, []).append(row)
    return found


def _unknown(name: str, known: list[str], paper: str | None) -> str:
    groups = {"-".join(one.split("-")[:2]) for one in known}
    near = nearest_names(name, [*known, *sorted(groups)])
    among = "" if paper is None else f" of {checked_paper(paper)}"
    hint = f"did you mean {', '.join(near)}?" if near else "--list shows all"
    return f"no row{among} is called {name!r}: {hint}"
