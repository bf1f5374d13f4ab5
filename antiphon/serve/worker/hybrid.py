"""The hybrid layout in a process: its groups on both levels, and the part of the experts that it computes for all.

A hybrid instance is several replicas that deal out one set of experts among all their ranks (MixServe, section III):
attention is split inside a replica, rows travel to the ranks with their experts and back (`comm/two_level`).
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.comm.m2n.api import AttentionExchange
from antiphon.comm.two_level.exchange import message_bytes
from antiphon.comm.two_level.hybrid import Forms, HybridExchange, Travelling
from antiphon.comm.two_level.levels import Levels, open_levels
from antiphon.comm.two_level.topology import TwoLevel
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.shares import Share, share_of
from antiphon.serve.worker.experts import ExpertCounters
from antiphon.serve.worker.messages import Configure
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement


def hybrid_levels(
    configure: Configure, spec: ModelSpec, dtype: torch.dtype, endpoint: Callable[..., _m2n.Endpoint]
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
        message_bytes=message_bytes(topology, exchange.max_rows, spec.hidden_size, spec.router.top_k, dtype),
        num_micro_batches=exchange.num_micro_batches,
        timeout_s=configure.timeout_s,
    )


def hybrid_experts(
    levels: Levels, spec: ModelSpec, placement: ExpertPlacement, layers: range
) -> tuple[dict[int, tuple[int, ...]], Share]:
    """Which experts of each of these layers this rank holds, and its columns of each."""
    share = share_of(spec, levels.experts.rank, levels.experts.size)
    held = placement.experts_of(levels.topology.part_of(levels.rank))
    return {layer: experts for layer, experts in held.items() if layer in layers}, share


def hybrid_exchange(
    levels: Levels, placement: ExpertPlacement, half: ExpertHalf, counters: ExpertCounters | None
) -> HybridExchange:
    """The exchange of this rank; `half` computes what arrives, `counters` counts it."""

    def compute(layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        started_s = time.monotonic()
        partial_RH = half.forward(layer, rows_RH, half.to_local(layer, ids_RK), weights_RK)
        if counters is not None:
            counters.add(layer, ids_RK, time.monotonic() - started_s)
        return partial_RH

    return HybridExchange(levels, placement, compute)


def hybrid_forms(
    configure: Configure, spec: ModelSpec, dtype: torch.dtype, levels: Levels | None, exchange: AttentionExchange
) -> Forms | None:
    """What decides the form of each step's exchanges; None where replicas do not share experts."""
    if levels is None:
        return None
    assert configure.exchange is not None, "ranks of an instance reach each other"
    assert configure.hybrid is not None, "only hybrid replicas share experts"
    assert isinstance(exchange, HybridExchange), "it goes over the levels"
    rows = Travelling(
        hidden_size=spec.hidden_size,
        top_k=spec.router.top_k,
        num_experts=spec.router.num_experts,
        dtype=dtype,
        max_rows=configure.exchange.max_rows,
    )
    return Forms(exchange, levels, rows, prefill=configure.hybrid.prefill, decode=configure.hybrid.decode)
