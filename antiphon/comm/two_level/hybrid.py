"""The `AttentionExchange` of ranks that hold attention and experts both, over a `TwoLevel` topology.

Every rank dispatches its rows, computes what arrives for the experts here, and takes its rows' sums back. So all ranks
make the same calls: `dispatch` and then `combine` of every layer and of every micro-batch in which any attention group
has rows, with no rows where this one has none. Rows leave in `dispatch`; a micro-batch's messages travel while the next
one's attention is computed. Everything else happens in `combine`.

`Forms` chooses by phase which form the exchanges of a step take, fused or synchronous: as asked for, or as measured.
Fusing hides one level of links behind the other, but cuts the inner collective into rounds of a node each, with a wait
in every one. Which is faster depends on the rows, so prefill and decode may differ. `auto`: the first step of every
epoch times both forms at a few numbers of rows, between the ranks that there are then. Every rank adds up the times of
all, in the same order, so all have the same sums and choose alike. Both forms send the same messages and give the same
bits. Rejected: to measure while the groups connect. A rank that is late there is asked again by itself, and would then
wait for others that have measured; a step that fails is void for all ranks.

Letters: T rows here, R rows received, H hidden, K choices.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.comm.ledger import Traffic
from antiphon.comm.m2n.api import CopyingExchange
from antiphon.comm.two_level.exchange import Dispatch
from antiphon.comm.two_level.levels import Levels
from antiphon.placement.split import BoolArray, IntArray, Prefetch
from antiphon.specs.placement import ExpertPlacement, Owners
from antiphon.specs.plan import Collectives

# (layer, rows_RH, global ids_RK, -1 for experts elsewhere, weights_RK) -> this rank's share of the weighted sums [R, H]
Experts = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class HybridExchange(CopyingExchange):
    """`placement`: its workers are the parts of the experts, one for each expert group (`TwoLevel.part_of`).

    Waits are bounded by the groups' timeout. `exposed_s` is `wait_s`: what a wait does not cover has been hidden.
    `fused`: the form of every exchange from the next dispatch on (`forms` chooses it). `fetch`: begins to copy experts
    that attention groups ask of this part, (number of the group, layer, expert); None: none may ask. Where they may, an
    attention group fills its node, so a node is a group."""

    def __init__(
        self,
        levels: Levels,
        placement: ExpertPlacement,
        experts: Experts,
        *,
        fused: bool = True,
        fetch: Callable[[list[tuple[int, int, int]]], None] | None = None,
    ) -> None:
        if placement.num_workers != levels.topology.expert_ep:
            raise UserError(
                f"experts are placed on {placement.num_workers} groups of ranks, the topology has "
                f"{levels.topology.expert_ep}: make them equal"
            )
        super().__init__()
        self._levels = levels
        levels.on_reset = self._begin_anew
        num_experts = max(map(len, placement.owners.values()))
        self._counts = {layer: np.zeros(num_experts, dtype=np.int64) for layer in placement.owners}
        self._fetch = fetch
        self._asked: dict[int, list[tuple[int, int]]] = {}  # by part, what rides on the next dispatch
        self._owners: dict[int, _LayerOwners] = {}
        super().place(placement)
        self._experts = experts
        self.fused = fused
        self._under_way: dict[int, Dispatch] = {}
        self.wait_s = 0.0

    @property
    def exposed_s(self) -> float:
        return self.wait_s

    @property
    def bytes_sent(self) -> int:
        return self._levels.bytes_sent

    @property
    def ticket(self) -> bytes:
        """How the other ranks reach this one."""
        return self._levels.ticket

    def place(self, placement: ExpertPlacement) -> None:
        """Rows go by `placement` from now on. All ranks of an instance have to change in the same step."""
        if placement is not self.placement:
            super().place(placement)

    def _place_layer(self, layer: int) -> None:
        self._owners[layer] = _LayerOwners(self._owners_of(layer), self.placement)

    def _request(self, worker: int, layer: int, expert: int) -> None:
        self._asked.setdefault(worker, []).append((layer, expert))

    def wanted_copies(self, layer: int, counts_E: IntArray, open_W: BoolArray) -> list[Prefetch]:
        return self._owners[layer].wanted_copies(counts_E, open_W)

    def parts_of_any_layer(self, ids_TK: Tensor) -> Tensor:
        """As `Dispatch` takes them, for rows that belong to no rank."""
        return next(iter(self._owners.values())).parts_of(ids_TK)

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        """All ranks take part in every micro-batch; `participants` are needed by who calls."""
        self._under_way.clear()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        ids_TK = ids_TK.cpu()
        self._counts[layer] += np.bincount(ids_TK.numpy().ravel(), minlength=len(self._counts[layer]))
        parts_TK = self._owners[layer].parts_of(ids_TK)
        requests, self._asked = None if self._fetch is None else self._asked, {}
        self._under_way[micro_batch] = Dispatch(
            self._levels, parts_TK, rows_TH, ids_TK, weights_TK, fused=self.fused, requests=requests
        )

    def take_counts(self) -> bytes:
        """Rows of each expert that this rank has dispatched since the last call: uint32, layer after layer."""
        taken = np.concatenate(list(self._counts.values())).astype(np.uint32).tobytes()
        for counts in self._counts.values():
            counts[:] = 0
        return taken

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        dispatch = self._under_way.pop(micro_batch)
        started_s = time.monotonic()
        arrived = dispatch.wait()
        computing_s = time.monotonic()
        if self._fetch is not None and dispatch.requests:
            self._fetch(dispatch.requests)
        partial_RH = self._experts(layer, arrived.rows, arrived.ids_RK, arrived.weights_RK)
        computed_s = time.monotonic()
        total_TH = dispatch.combine(partial_RH)
        self.wait_s += time.monotonic() - computed_s + computing_s - started_s
        return total_TH

    def abort(self, epoch: int) -> None:
        """Any thread: see `RankGroup.abort`."""
        self._levels.abort(epoch)

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Begin `epoch`; `tickets` of all ranks of the topology. Blocks until all have begun it."""
        self._levels.reset(epoch, tickets)

    def _begin_anew(self) -> None:
        self._under_way.clear()
        self._asked.clear()
        self._forget_copies()  # who was started again has none

    def traffic(self) -> Traffic:
        """What this rank has carried in all its groups since its start."""
        parts = [group.traffic() for group in self._levels.groups()]
        return Traffic(
            pairs=[pair for part in parts for pair in part.pairs],
            waits=[sum(counts) for counts in zip(*(part.waits for part in parts if part.waits), strict=True)],
            round_trips=[
                sum(counts) for counts in zip(*(part.round_trips for part in parts if part.round_trips), strict=True)
            ],
        )

    def close(self) -> None:
        self._levels.close()


class _LayerOwners:
    """Which part of the experts serves each choice, in one layer. The rows of copied experts are split anew each time
    (`placement/split`). Ranks with the same rows agree without a message, since the split follows from the choices."""

    def __init__(self, owners: Owners, placement: ExpertPlacement) -> None:
        self._first = torch.tensor([parts[0] for parts in owners])
        self._all = torch.tensor([part for parts in owners for part in parts])
        self._make_split = partial(_m2n.ExpertSplit, placement.num_workers, owners, placement.speeds, placement.knee)
        self._split = None if len(self._all) == len(owners) else self._make_split()

    def wanted_copies(self, counts_E: IntArray, open_W: BoolArray) -> list[Prefetch]:
        """See `HybridExchange.wanted_copies`."""
        wanted = (self._split or self._make_split()).wanted_copies(counts_E.astype(np.uint32), open_W)
        return [Prefetch(*each) for each in wanted]

    def parts_of(self, ids_TK: Tensor) -> Tensor:
        """[T, K] from the experts' global ids."""
        ids_TK = ids_TK.long()
        if self._split is None:
            return self._first[ids_TK]
        ids = ids_TK.flatten()
        counts = np.bincount(ids.numpy(), minlength=len(self._first)).astype(np.uint32)
        rows = torch.from_numpy(self._split.split(counts).astype(np.int64))
        parts = torch.empty_like(ids)
        parts[ids.argsort(stable=True)] = self._all.repeat_interleave(rows)
        return parts.view(ids_TK.shape)


# Seconds of a dispatch and its combine for one number of rows, fused and synchronous, on the average rank.
FormTimes = tuple[float, float]

_log = get_logger("hybrid")
_ROWS = (1, 16, 128, 512)  # of an attention group
_NUM_TURNS = 3  # of which the best counts, after one that does not
_ENOUGH_S = 0.25  # no larger number of rows is timed once so much time has gone


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """The rows that travel: how wide, how many experts each has, of how many; the most rows of a message; where they
    are."""

    hidden_size: int
    top_k: int
    num_experts: int
    dtype: torch.dtype
    max_rows: int
    device: torch.device


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
    x_TH = torch.zeros(num_rows, rows.hidden_size, dtype=rows.dtype, device=rows.device)
    weights_TK = torch.ones(num_rows, rows.top_k)
    started_s = time.perf_counter()
    dispatch = Dispatch(levels, exchange.parts_of_any_layer(chosen), x_TH, chosen, weights_TK, fused=fused)
    dispatch.combine(dispatch.wait().rows).cpu()  # waits for a device
    return time.perf_counter() - started_s
