"""Degrees that somebody has fixed, for a question about a layout of one's own; what is not fixed is searched.

`experts_ep` is the number of expert workers, or of EP ranks where attention and experts share devices. `batch` is that
of one instance, as in plan.json: requests in flight in decode, tokens of a pass in prefill. It is then taken as it is,
not lowered until promises hold.
Rejected: pinning columns after the search. What was never a candidate cannot be found among them.
"""

from dataclasses import dataclass, fields

import numpy as np

from antiphon.base.errors import UserError
from antiphon.planner.candidates import BoolArray, Candidates, IntArray

PIN_NAMES = {
    "attention.tp": "attention_tp",
    "attention.dp": "attention_dp",
    "experts.tp": "expert_tp",
    "experts.ep": "expert_ep",
    "pp": "pp",
    "micro_batches": "micro_batches",
    "batch": "batch",
}
SHORT_NAMES = {"tp": "attention.tp", "dp": "attention.dp", "ep": "experts.ep"}
MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Pins:
    """None: searched."""

    attention_tp: int | None = None
    attention_dp: int | None = None
    expert_tp: int | None = None
    expert_ep: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        """As it is written: ``attention.tp=2, pp=4``; empty where nothing is fixed."""
        given = ((name, getattr(self, field)) for name, field in PIN_NAMES.items())
        return ", ".join(f"{name}={value}" for name, value in given if value is not None)

    def only(self, name: str) -> tuple[int, ...]:
        """The one value allowed for a degree; empty: any."""
        value: int | None = getattr(self, name)
        return () if value is None else (value,)

    def allow(self, candidates: Candidates) -> BoolArray:
        """Which candidates have these degrees, batch left out."""
        allowed = np.ones(len(candidates), dtype=bool)
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name != "batch":
                allowed &= getattr(candidates, field.name) == value
        return allowed

    def batches(self, candidates: Candidates, limits: IntArray) -> IntArray:
        """Largest batch of a worker and micro-batch: `limits`, or the fixed one; 0 where that does not fit or cannot be
        shared out evenly."""
        if self.batch is None:
            return limits
        each, rest = np.divmod(self.batch, candidates.micro_batches * candidates.attention_dp)
        return np.asarray(np.where((rest == 0) & (each <= limits), each, 0))


def parse_pins(texts: list[str]) -> Pins:
    """``["attention.tp=8", "ep=32"]``; `UserError` names what is not known or given twice."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, written = text.partition("=")
        name = SHORT_NAMES.get(name.strip(), name.strip())
        if name not in PIN_NAMES:
            raise UserError(f"--pin {text!r}: {name!r} is none of {', '.join(PIN_NAMES)}")
        if not (written.strip().isdecimal() and 1 <= int(written) <= MOST):
            raise UserError(f"--pin {text!r}: write a whole number from 1 to {MOST:,}, for example {name}=4")
        if PIN_NAMES[name] in found:
            raise UserError(f"--pin {text!r}: {name} is given twice: leave one of them out")
        found[PIN_NAMES[name]] = int(written)
    return Pins(**found)
