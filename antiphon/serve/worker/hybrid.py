"""The hybrid layout in a process: its groups on both levels, and the part of the experts that it computes for all.

A hybrid instance is several replicas whose ranks all share one set of experts (MixServe, section III): attention is
split inside a replica, rows travel to the ranks with their experts and back (`comm/two_level`).

All ranks take part in the exchange of every micro-batch in which any of them has rows (`HybridStepExchange`). What
comes back is the whole sum, on every rank.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.comm.two_level.exchange import message_bytes
from antiphon.comm.two_level.hybrid import Forms, HybridExchange, Travelling
from antiphon.comm.two_level.levels import Levels, TwoLevel, open_levels
from antiphon.kernels.api import KernelBackend
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.shares import Share, share_of
from antiphon.serve.worker.endpoints import group_maker
from antiphon.serve.worker.exchange import StepExchange
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.expert_prefetch import PrefetchingExchange, PrefetchSlots
from antiphon.serve.worker.experts import ExpertCounters
from antiphon.serve.worker.messages import Configure, RunStep
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement


def hybrid_levels(
    configure: Configure, spec: ModelSpec, backend: KernelBackend, endpoint: Callable[..., _m2n.Endpoint]
) -> Levels:
    """This process among all ranks of its stage of the instance, not yet connected."""
    exchange = configure.exchange
    assert exchange is not None, "ranks of an instance reach each other"
    assert configure.hybrid is not None, "only hybrid replicas share experts"
    tp = configure.tp
    topology = TwoLevel.of_ranks(exchange.num_attention * tp, tp, configure.hybrid.expert_tp)
    first = configure.rank // tp * tp  # of this stage
    is_node = tp == topology.ranks_per_node  # else a node is several workers, maybe on several machines
    return open_levels(
        topology,
        configure.index * tp + configure.rank % tp,
        inside=partial(endpoint, of_ranks=is_node),
        across=endpoint,
        names=[f"{configure.role}[{each // tp}][{first + each % tp}]" for each in range(topology.size)],
        message_bytes=message_bytes(topology, exchange.max_rows, spec.hidden_size, spec.router.top_k, backend.dtype),
        num_micro_batches=exchange.num_micro_batches,
        timeout_s=configure.timeout_s,
        inner_group=group_maker(configure, backend.device),
    )


def hybrid_experts(
    levels: Levels, spec: ModelSpec, placement: ExpertPlacement, layers: range
) -> tuple[dict[int, tuple[int, ...]], Share]:
    """Which experts of each of these layers this rank holds, and its columns of each."""
    share = share_of(spec, levels.experts.rank, levels.experts.size)
    held = placement.experts_of(levels.topology.part_of(levels.rank))
    return {layer: experts for layer, experts in held.items() if layer in layers}, share


def hybrid_exchange(
    levels: Levels, placement: ExpertPlacement, half: ExpertHalf, counters: ExpertCounters | None, slots: PrefetchSlots
) -> HybridExchange:
    """The exchange of this rank; `half` computes what arrives, `counters` counts it, `slots` are for copies."""

    def compute(layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        started_s, device = time.monotonic(), half.backend.device
        local_RK = slots.local_ids(layer, ids_RK)
        partial_RH = half.forward(layer, rows_RH.to(device), local_RK, weights_RK.to(device))
        if counters is not None:
            counters.add(layer, ids_RK, time.monotonic() - started_s)
        return partial_RH

    return HybridExchange(levels, placement, compute, fetch=slots.start if slots.num_slots else None)


@dataclass(eq=False)
class HybridStepExchange(StepExchange):
    """Steps over `exchange`, whose experts serve other workers too. `moves`: of the experts here. `forms`: how the rows
    of a step travel."""

    exchange: HybridExchange
    moves: ExpertMoves = field(kw_only=True)
    forms: Forms = field(kw_only=True)
    _served: dict[int, int] = field(default_factory=dict, init=False)  # by micro-batch without rows here: its layer

    def begin_step(self, step: RunStep) -> None:
        """Rows go by the placement that the step names. The first step of an epoch may measure, and wait."""
        self._served.clear()
        self.exchange.place(self.moves.named(step.placement))
        super().begin_step(step)
        self.forms.begin_step(prefill=step.prefill, most_rows=step.most_rows)

    def _complete(self, experts_TH: Tensor, local_TH: Tensor | None) -> Tensor:
        return experts_TH if local_TH is None else experts_TH + self.half.sum_over_ranks(local_TH)

    def serve_others(self, layer: int | None, micro_batch: int) -> None:
        """Other workers may have rows in this micro-batch: the experts here are needed all the same."""
        before = self._served.pop(micro_batch, None)
        if before is not None:
            self.exchange.combine(before, micro_batch, self.timeout_s)
        if layer is not None and self.half.routes(layer):
            spec = self.half.spec
            nothing_K = torch.empty(0, spec.router.top_k)
            backend = self.half.backend
            rows_TH = torch.empty(0, spec.hidden_size, dtype=backend.dtype, device=backend.device)
            self.exchange.dispatch(layer, micro_batch, rows_TH, nothing_K.int(), nothing_K)
            self._served[micro_batch] = layer


@dataclass(eq=False)
class PrefetchingHybrid(PrefetchingExchange, HybridStepExchange):
    """The same with copies asked for ahead of a layer; all ranks of a replica decide alike."""


def hybrid_forms(
    configure: Configure, spec: ModelSpec, backend: KernelBackend, levels: Levels, exchange: HybridExchange
) -> Forms:
    """What decides the form of each step's exchanges."""
    assert configure.exchange is not None, "ranks of an instance reach each other"
    assert configure.hybrid is not None, "only hybrid replicas share experts"
    rows = Travelling(
        hidden_size=spec.hidden_size,
        top_k=spec.router.top_k,
        num_experts=spec.router.num_experts,
        dtype=backend.dtype,
        max_rows=configure.exchange.max_rows,
        device=backend.device,
    )
    return Forms(exchange, levels, rows, prefill=configure.hybrid.prefill, decode=configure.hybrid.decode)
