"""Which ranks are slow: those that work longer than the others and do not wait (MegaScale-MoE, section 7: stragglers).

A rank that hangs is named by its timeout. One that is slow makes all others wait, so the step is long and every rank
but one looks idle. What tells is the time that a rank does not wait: its step less its waiting. It is held against the
median of the other ranks of its stage, in logged steps; a rank that is `SLOW_OVER` times that for `PATIENCE` of them in
a row is named, with the operator that takes it longest beyond the others, and with the rows of its experts: many rows
are the router's doing, few are the machine's.

Rejected: the times of collectives. The slow rank is the one that waits least, and says so by nothing else.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.base.units import format_seconds

SLOW_OVER, PATIENCE, LEAST_S = 1.3, 5, 0.01


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank in one step. `busy_s`: without waiting. `operator_s`: of its operators, waiting among them. `stage`:
    whose ranks do alike. `rows_over_mean`: of its experts, over the mean of all ranks."""

    host: str
    stage: int
    busy_s: float
    operator_s: Mapping[str, float]
    rows_over_mean: float = 1.0


@dataclass
class SlowRanks:
    """Tells of ranks that begin, and end, to be slow."""

    _since: dict[int, tuple[int, int]] = field(default_factory=dict)  # first step, and how many in a row

    def observe(self, step: int, ranks: Sequence[RankWork]) -> list[str]:
        """What is to be said after logged step `step`. `ranks`: in order."""
        said = []
        for rank, own in enumerate(ranks):
            others = [each for place, each in enumerate(ranks) if place != rank and each.stage == own.stage]
            if not others:
                continue
            usual_s = statistics.median(each.busy_s for each in others)
            since, count = self._since.get(rank, (step, 0))
            if own.busy_s > SLOW_OVER * usual_s and own.busy_s - usual_s > LEAST_S:
                self._since[rank] = since, count + 1
                if count + 1 == PATIENCE:
                    said.append(_words(rank, own, others, usual_s, since))
            elif self._since.pop(rank, None) is not None and count >= PATIENCE:
                said.append(f"rank {rank} ({own.host}), slow since step {since}, keeps up at step {step}")
        return said


def _words(rank: int, own: RankWork, others: Sequence[RankWork], usual_s: float, since: int) -> str:
    working = {name: each for name, each in own.operator_s.items() if "wait" not in name}
    excess = {
        name: seconds - statistics.median(each.operator_s.get(name, 0.0) for each in others)
        for name, seconds in working.items()
    }
    worst = max(excess, key=lambda name: excess[name], default="")
    where = f", {format_seconds(excess[worst])} of it in {worst}" if worst and excess[worst] > 0 else ""
    advice = "look at its machine: its clock, other processes, its memory"
    if own.rows_over_mean > SLOW_OVER:
        advice = "raise loss.balance, or set parallel.row_budget or loss.capacity"
    return (
        f"rank {rank} ({own.host}) is slow: it works for {format_seconds(own.busy_s)} a step where the others work for "
        f"{format_seconds(usual_s)}, since step {since}{where}; its experts have {own.rows_over_mean:.1f} times the "
        f"mean of rows: {advice}"
    )
