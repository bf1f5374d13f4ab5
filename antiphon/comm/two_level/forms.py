"""Which form the exchanges of a step take, fused or synchronous, by phase: as asked for, or as measured.

Fusing hides one level of links behind the other, but cuts the inner collective into rounds of a node each, with a wait
in every one. Which is faster hangs on the rows, so prefill and decode may differ. `auto`: the first step of every epoch
times both forms at a few numbers of rows, between the ranks that there are then. Every rank adds up the times of all,
in the same order, so all have the same sums and choose alike. Both forms send the same messages and give the same bits.

Rejected: to measure while the groups connect. A rank that is late there is asked again by itself, and would then wait
for others that have measured; a step that fails is void for all ranks.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from antiphon.base.logging import get_logger
from antiphon.comm.two_level.exchange import Dispatch
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels
from antiphon.specs.plan import Collectives

# Of one number of rows: seconds of a dispatch and its combine, fused and synchronous, on the average rank.
FormTimes = tuple[float, float]

_log = get_logger("hybrid")
_ROWS = (1, 16, 128, 512)  # of an attention group
_NUM_TURNS = 3  # of which the best counts, after one that does not
_ENOUGH_S = 0.25  # no larger number of rows is timed once so much time has gone


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """The rows that travel: how wide, how many experts each has, of how many; the most rows of a message."""

    hidden_size: int
    top_k: int
    num_experts: int
    dtype: torch.dtype
    max_rows: int


class Forms:
    """Sets the form of `exchange` before each step. All ranks of `levels` make the same calls."""

    def __init__(
        self, exchange: HybridExchange, levels: Levels, rows: Travelling, *, prefill: Collectives, decode: Collectives
    ) -> None:
        self._exchange = exchange
        self._levels = levels
        self._rows = rows
        self._asked: dict[bool, Collectives] = {True: prefill, False: decode}
        # With one node, or one rank an expert, a level has no links: the forms differ in nothing.
        differ = levels.topology.num_nodes > 1 and levels.topology.expert_tp > 1
        self._measures = differ and "auto" in (prefill, decode)
        self._times: Mapping[int, FormTimes] = {}
        self._measured_epoch = -1

    def begin_step(self, *, prefill: bool, most_rows: int) -> None:
        """`prefill`: the step has rows of prompts, of any rank; `most_rows`: those of the largest micro-batch of any
        attention group. The first step of an epoch may measure: then it waits for all ranks, and raises, as their
        collectives do."""
        if self._measures and self._levels.epoch != self._measured_epoch:
            self._times = measure(self._exchange, self._levels, self._rows)
            self._measured_epoch = self._levels.epoch
        asked = self._asked[prefill]
        self._exchange.fused = fused_is_faster(self._times, most_rows) if asked == "auto" else asked == "fused"


def fused_is_faster(times: Mapping[int, FormTimes], num_rows: int) -> bool:
    """By the number of rows that is nearest in ratio among those timed; true if none was, or both are equal."""
    if not times:
        return True
    nearest = min(times, key=lambda timed: abs(math.log(timed / max(1, num_rows))))
    fused_s, synchronous_s = times[nearest]
    return fused_s <= synchronous_s


def measure(exchange: HybridExchange, levels: Levels, rows: Travelling) -> dict[int, FormTimes]:
    """By number of rows, the same on all ranks, which all call this. Waits and raises as the groups' collectives do."""
    times: dict[int, FormTimes] = {}
    spent_s = 0.0
    for num_rows in [count for count in _ROWS if count == 1 or count <= rows.max_rows]:
        both_s = torch.full((2,), math.inf)
        for turn in range(1 + _NUM_TURNS):
            for form, fused in enumerate((True, False)):
                took_s = round_trip_s(exchange, levels, rows, num_rows, fused=fused)
                if turn:
                    both_s[form] = min(float(both_s[form]), took_s)
        levels.sum_over_all(both_s)
        fused_s, synchronous_s = (both_s / levels.topology.size).tolist()
        times[num_rows] = fused_s, synchronous_s
        spent_s += (1 + _NUM_TURNS) * (fused_s + synchronous_s)
        if spent_s > _ENOUGH_S:
            break
    if levels.rank == 0:
        said = (f"{count}: {1e6 * fused:.0f} and {1e6 * other:.0f}" for count, (fused, other) in times.items())
        _log.info("µs of an exchange by rows, fused and synchronous: %s", ", ".join(said))
    return times


def round_trip_s(exchange: HybridExchange, levels: Levels, rows: Travelling, num_rows: int, *, fused: bool) -> float:
    """Seconds on this rank to exchange this many rows of every attention group; nothing is computed in between."""
    chosen = (torch.arange(num_rows * rows.top_k, dtype=torch.int32) % rows.num_experts).view(num_rows, -1)
    x_TH = torch.zeros(num_rows, rows.hidden_size, dtype=rows.dtype)
    weights_TK = torch.ones(num_rows, rows.top_k)
    started_s = time.perf_counter()
    dispatch = Dispatch(levels, exchange.parts_of_any_layer(chosen), x_TH, chosen, weights_TK, fused=fused)
    dispatch.combine(dispatch.wait().rows_RH)
    return time.perf_counter() - started_s
