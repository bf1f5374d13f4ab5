"""Gradients summed and parameters gathered over data parallelism, once per iteration (MegaScale-MoE, section 5, A.1).

1. Tensor-parallel weights: each rank's P/n is reduce-scattered and all-gathered over d ranks of other nodes.
2. Weights replicated over n ranks of a node (sequence-parallel attention): reduce-scatter inside the node, then
   across on P/n, all-gather across, then inside. The bytes across are the same as with tensor parallelism.
3. The two levels are different wires, so chunks of one hide the other: the longer counts, and of the shorter what
   overlap leaves. Eq. 10 is their ratio; above 1 the inside is hidden.
4. On the wire gradients are FP32 or BF16. BF16 travels by all-to-all, each rank adding up in FP32 what it gets: the
   same bytes as a reduce-scatter in BF16, but one rounding.

Rejected: an all-reduce over all n * d ranks of replicated weights. It sends n times the bytes across nodes.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import Network
from antiphon.cost.parts import Number, Parts, longest, select
from antiphon.cost.training.dispatch import gather
from antiphon.cost.training.layer_time import hidden_behind


@dataclass(frozen=True, kw_only=True)
class SyncBytes:
    """Bytes of one rank's parameters before any collective, in one wire format."""

    sharded: Number
    replicated: Number


@dataclass(frozen=True, kw_only=True)
class SyncTime:
    """Reduce-scatter of gradients and all-gather of parameters."""

    gradients: Parts
    parameters: Parts

    @property
    def total(self) -> Parts:
        return self.gradients + self.parameters


def across_to_inside(
    degree: Number, data_parallel: Number, inside_bytes_per_s: Number, across_bytes_per_s: Number
) -> Number:
    """MegaScale-MoE eq. 10: time across nodes over time inside, 1/n * bandwidths * n (d - 1) / (d (n - 1))."""
    n, d = np.asarray(degree, dtype=np.float64), np.asarray(data_parallel, dtype=np.float64)
    ratio: Number = 1 / n * (inside_bytes_per_s / across_bytes_per_s) * (n * (d - 1)) / (d * (n - 1))
    return ratio


def sync_time(
    network: Network,
    *,
    degree: Number,
    data_parallel: Number,
    gradients: SyncBytes,
    parameters: SyncBytes,
    by_all_to_all: bool = False,
) -> SyncTime:
    """One iteration's synchronisation, nothing of it hidden behind computation. `by_all_to_all`: gradients travel in
    BF16 and are added up in FP32 by the owner of each shard."""
    return SyncTime(
        gradients=_one_way(network, gradients, degree, data_parallel, by_all_to_all),
        parameters=_one_way(network, parameters, degree, data_parallel, False),
    )


def _one_way(network: Network, size: SyncBytes, degree: Number, data_parallel: Number, by_all_to_all: bool) -> Parts:
    together = network.ranks_per_domain(data_parallel, degree)
    shard = size.sharded + size.replicated / np.asarray(degree, dtype=np.float64)
    over = network.all_to_all if by_all_to_all else network.reduce_scatter
    across = over(shard, data_parallel, together)
    inside = select(np.asarray(size.replicated) > 0, gather(network, size.replicated, degree), Parts())
    slower = longest(across, inside)
    faster = select(np.asarray(across.total_s >= inside.total_s), inside, across)
    return slower + hidden_behind(faster, slower.total_s, network.overlap)
