"""One printed number (or order) of a paper, how we get ours, and when the two agree.

1. `theirs` is what the paper prints, or what its printed equation gives for the numbers named in `what`.
2. `ours` is a function, run only when the row is asked for; it never sees `theirs`.
3. The tolerance is chosen by kind before ours is known: a counted number may differ by the rounding of the printed
   digit only, a modelled or simulated one by 15 to 25% (gains near 1: 10%), text not at all.
4. A row that does not hold, or holds loosely, stays with `reason`: what was found when it was looked into.

Rejected: expected results as tests. A test that fails is repaired or removed; a row that fails is a result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.specs.catalog import shipped_model_config
from antiphon.specs.cluster import load_cluster
from antiphon.specs.device import load_device
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import load_workload

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
"""In the note of rows by which a cluster's calibration was chosen: that they hold predicts nothing."""
NOT_ANALYSED = "not analysed: the row held when the reasons were written"
shipped_cluster, shipped_device, shipped_workload = cache(load_cluster), cache(load_device), cache(load_workload)


@cache
def shipped_model(name: str) -> ModelSpec:
    """A model that is shipped, read once."""
    return load_model_spec(shipped_model_config(name))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`source`: table, figure or section. `tolerance`: largest difference, as a fraction of `theirs`; with a relation
    other than "within" the limit may be missed by as much. `cluster`: whose calibration the value rests on."""

    id: str
    paper: Paper
    source: str
    what: str
    theirs: Value
    ours: Callable[[], Any]
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
class Row:
    """A claim with our value. `reason` is empty where the row holds, and not loosely."""

    id: str
    paper: Paper
    source: str
    what: str
    theirs: Value
    ours: Value
    unit: str
    tolerance: float
    relation: Relation
    holds: bool
    kind: Kind
    cluster: str
    reason: str
    note: str

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
        fields: dict[str, Any] = dict(vars(self))
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
"""Of rows, the hardest first: a number may miss on either side, an order has few values, a limit one side."""


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
