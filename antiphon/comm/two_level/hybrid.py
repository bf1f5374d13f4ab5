"""The `AttentionExchange` of ranks that hold attention and experts both, over a `TwoLevel` topology.

Every rank dispatches its rows, computes what arrives for the experts here, and takes its rows' sums back. So all ranks
make the same calls: `dispatch` and then `combine` of every layer and of every micro-batch in which any attention group
has rows, with no rows where this one has none. Rows leave in `dispatch`; a micro-batch's messages travel while the next
one's attention is computed. Everything else happens in `combine`.

Letters: T rows here, R rows received, H hidden, K choices.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.comm.m2n.traffic import Traffic
from antiphon.comm.two_level.exchange import Dispatch
from antiphon.comm.two_level.levels import Levels
from antiphon.specs.placement import ExpertPlacement, Owners

# (layer, rows_RH, global ids_RK, -1 for experts elsewhere, weights_RK) -> this rank's share of the weighted sums [R, H]
Experts = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class HybridExchange:
    """`placement`: its workers are the parts of the experts, one for each expert group (`TwoLevel.part_of`).

    Waits are bounded by the groups' timeout. `exposed_s` is `wait_s`: what a wait does not cover has been hidden.
    `fused`: the form of every exchange from the next dispatch on (`forms` chooses it)."""

    def __init__(self, levels: Levels, placement: ExpertPlacement, experts: Experts, *, fused: bool = True) -> None:
        if placement.num_workers != levels.topology.expert_ep:
            raise UserError(
                f"experts are placed on {placement.num_workers} groups of ranks, the topology has "
                f"{levels.topology.expert_ep}: make them equal"
            )
        self._levels = levels
        num_experts = max(map(len, placement.owners.values()))
        self._counts = {layer: np.zeros(num_experts, dtype=np.int64) for layer in placement.owners}
        self._placement: ExpertPlacement | None = None
        self.place(placement)
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
        if placement is not self._placement:
            self._placement = placement
            self._owners = {layer: _LayerOwners(owners, placement) for layer, owners in placement.owners.items()}

    def parts_of_any_layer(self, ids_TK: Tensor) -> Tensor:
        """As `Dispatch` takes them, for rows that belong to no rank."""
        return next(iter(self._owners.values())).parts_of(ids_TK)

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        """All ranks take part in every micro-batch; `participants` are needed by who calls."""
        self._under_way.clear()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._counts[layer] += np.bincount(ids_TK.numpy().ravel(), minlength=len(self._counts[layer]))
        parts_TK = self._owners[layer].parts_of(ids_TK)
        self._under_way[micro_batch] = Dispatch(self._levels, parts_TK, rows_TH, ids_TK, weights_TK, fused=self.fused)

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
        partial_RH = self._experts(layer, arrived.rows_RH, arrived.ids_RK, arrived.weights_RK)
        computed_s = time.monotonic()
        total_TH = dispatch.combine(partial_RH)
        self.wait_s += time.monotonic() - computed_s + computing_s - started_s
        return total_TH

    def abort(self, epoch: int) -> None:
        """Any thread: see `RankGroup.abort`."""
        self._levels.abort(epoch)

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Begin `epoch`; `tickets` of all ranks of the topology. Blocks until all have begun it."""
        self._under_way.clear()
        self._levels.reset(epoch, tickets)

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
        self._split = (
            None
            if len(self._all) == len(owners)
            else _m2n.ExpertSplit(placement.num_workers, owners, placement.speeds, placement.knee)
        )

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
