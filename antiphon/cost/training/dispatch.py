"""Collectives of one model-parallel group, and the choice between all-to-all and all-gather / reduce-scatter.

1. All-gather and reduce-scatter run as a ring inside a scale-up domain: neighbours stream without pause, the start is
   paid once: latency + (bytes + half) / bandwidth.
2. All-to-all sends n - 1 separate messages, each of which pays the start: (n - 1) (block + half) / bandwidth. So it
   reaches Util(block) = block / (block + half) of the bandwidth, and loses before its bytes do.
3. Theory prefers all-gather when k > n. With `half` = 1.5 MB, the one constant calibrated for MegaScale-MoE's cluster
   (`EfficiencySpec.scale_up_half_bytes`), the change at n = 8 and Mixtral-8x7B's rows lies between k = 6 and k = 7, as
   its Figure 7 measures; from 1.23 to 2.44 MB it does.
4. Groups wider than a domain take the two-level network's collectives (`cost.network`).

Rejected: a fixed threshold k > 6. Smaller micro-batches send smaller blocks, so the change comes earlier.
"""

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.network import Link, Network
from antiphon.cost.parts import Number, Parts, select


def stream_gather(link: Link, size_bytes: Number, degree: Number) -> Number:
    """Seconds of an all-gather or reduce-scatter of `size_bytes` over a ring inside a domain; in a mesh each rank's
    part goes straight to every other."""
    if link.num_wires:
        return block_exchange(link, size_bytes, degree)
    sent = size_bytes * (np.asarray(degree, dtype=np.float64) - 1) / degree
    return link.send_s(sent)


def block_exchange(link: Link, size_bytes: Number, degree: Number) -> Number:
    """Seconds of an all-to-all inside a domain; `size_bytes` is what one rank holds, its own block included."""
    return link.send_s(size_bytes / np.asarray(degree, dtype=np.float64), np.asarray(degree, dtype=np.float64) - 1)


def gather(network: Network, size_bytes: Number, degree: Number) -> Parts:
    """All-gather or reduce-scatter of `size_bytes` (of the whole tensor) over neighbouring ranks."""
    inside = Parts(
        scale_up_s=stream_gather(network.scale_up, size_bytes, degree), fixed_s=_fixed(network.collective_s, degree)
    )
    return select(_within(network, degree), inside, network.all_gather(size_bytes, degree))


def exchange(network: Network, size_bytes: Number, degree: Number) -> Parts:
    """All-to-all of `size_bytes` held by each of `degree` neighbouring ranks."""
    wire_s = block_exchange(network.scale_up, size_bytes, degree)
    inside = Parts(scale_up_s=wire_s, fixed_s=_fixed(network.exchange_s, degree))
    return select(_within(network, degree), inside, network.all_to_all(size_bytes, degree))


def _within(network: Network, degree: Number) -> NDArray[np.bool_]:
    return np.asarray(np.asarray(degree) <= network.domain)


def _fixed(once_s: Number, degree: Number) -> Number:
    fixed: Number = np.where(np.asarray(degree) > 1, once_s, 0.0)
    return fixed


def dispatch_by_all_to_all(
    network: Network, tokens: Number, row_bytes: Number, degree: Number, copies: Number
) -> Parts:
    """One way: the group's `tokens` rows, 1/n of them on each rank, `copies` of each row to other ranks (the share of
    a rank itself stays)."""
    return exchange(network, tokens / np.asarray(degree, dtype=np.float64) * copies * row_bytes, degree)


def dispatch_by_all_gather(network: Network, tokens: Number, row_bytes: Number, degree: Number) -> Parts:
    """One way: every rank gets every row (dispatch), or the sums of all go back to their ranks (combine)."""
    return gather(network, tokens * row_bytes, degree)


def prefers_all_gather(
    network: Network, tokens: Number, row_bytes: Number, degree: Number, copies: Number
) -> NDArray[np.bool_]:
    """Whether all-gather and reduce-scatter take less time than two all-to-alls; equal times keep all-to-all, which
    holds less memory."""
    gathered = dispatch_by_all_gather(network, tokens, row_bytes, degree).total_s
    exchanged = dispatch_by_all_to_all(network, tokens, row_bytes, degree, copies).total_s
    return np.asarray(gathered) < np.asarray(exchanged)


def crossover_top_k(network: Network, tokens: float, row_bytes: float, degree: int, limit: int = 64) -> int:
    """The largest k for which all-to-all is still the faster one (Figure 7: 6); `limit` if it always is, 0 if never."""
    faster = [k for k in range(1, limit + 1) if not prefers_all_gather(network, tokens, row_bytes, degree, k)]
    return max(faster, default=0)
