"""Lina on all-to-all beside all-reduce in backward, and on pipelining and packing experts (USENIX ATC 2023).

1. Two collectives that share a link fairly each get half of it: the shorter takes as long as twice its bytes, the
   longer the sum of both. So fair sharing alone slows an all-to-all by 1 to 2 times.
2. Micro-ops: all-to-all waits at most for the chunk of all-reduce that is on the wire, instead of for all of it.
3. Pipelining: with c chunks a layer's all-to-all and feed-forward take c times the longer of both chunks plus one of
   the shorter. Efficiency is the computation stream's busy share while all-to-all runs.
4. Packing: experts per device are doubled until the feed-forward of a chunk takes as long as its all-to-all: less is
   exchanged, more computed.
5. Eq. 1: devices for an expert in inference, in proportion to its estimated popularity.

Exact timelines (Figure 7, orders of arrival) are the simulator's. Rejected: the measured median of 1.83 as a
constant; it lies inside what fair sharing gives, and the worst of 4.14 does not follow from sharing a link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.parts import FloatArray, Number


def fair_sharing_end(first_s: Number, second_s: Number, second_starts_s: Number = 0.0) -> tuple[Number, Number]:
    """When two transfers end that take `first_s` and `second_s` alone, the second starting later, both sharing fairly.

    Times count from the start of the first. Before the second starts, and after one ends, the other has the whole
    link."""
    first, second = np.asarray(first_s, dtype=np.float64), np.asarray(second_s, dtype=np.float64)
    start = np.asarray(second_starts_s, dtype=np.float64)
    left = np.maximum(first - start, 0.0)
    apart = first <= start
    both = np.minimum(left, second)
    first_end = np.where(apart, first, start + both + np.maximum(left, both))
    second_end = np.where(apart, start + second, start + both + np.maximum(second, both))
    return first_end, second_end


def slowdown(all_to_all_s: Number, all_reduce_s: Number, all_to_all_starts_s: Number = 0.0) -> Number:
    """How many times longer an all-to-all takes beside an all-reduce that began `all_to_all_starts_s` before it: 1 (the
    all-reduce was over) to 2 (it lasts longer). Lina's Figure 3 measures a median of 1.83 and a worst case of 4.14."""
    _, end = fair_sharing_end(all_reduce_s, all_to_all_s, all_to_all_starts_s)
    factor: Number = (end - np.asarray(all_to_all_starts_s)) / all_to_all_s
    return factor


def longest_wait(all_reduce_s: Number, all_reduce_bytes: Number, chunk_bytes: Number) -> Number:
    """What an all-to-all with priority waits at most when all-reduce travels in chunks: one chunk's time. A chunk as
    large as the tensor is priority without preemption (Figure 7b)."""
    wait: Number = all_reduce_s * np.minimum(1.0, np.asarray(chunk_bytes, dtype=np.float64) / all_reduce_bytes)
    return wait


def pipelined_layer(all_to_all_s: Number, feed_forward_s: Number, num_chunks: Number) -> Number:
    """All-to-all, feed-forward on what has come, chunk by chunk: T = c max(a, f) / c + min(a, f) / c. One way."""
    chunks = np.asarray(num_chunks, dtype=np.float64)
    longer, shorter = np.maximum(all_to_all_s, feed_forward_s), np.minimum(all_to_all_s, feed_forward_s)
    total: Number = longer + shorter / chunks
    return total


def pipelining_efficiency(all_to_all_s: Number, feed_forward_s: Number) -> Number:
    """Busy share of the computation stream while all-to-all runs (Lina, Table 3): the feed-forward's time over the
    all-to-all's, at most 1."""
    share: Number = np.minimum(1.0, np.asarray(feed_forward_s, dtype=np.float64) / all_to_all_s)
    return share


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Experts per device, and what a chunk takes then."""

    experts_per_device: int
    all_to_all_s: float
    feed_forward_s: float

    @property
    def efficiency(self) -> float:
        return float(np.asarray(pipelining_efficiency(self.all_to_all_s, self.feed_forward_s)))


def pack_experts(
    num_experts: int, num_devices: int, all_to_all_s: float, feed_forward_s: float, limit: int | None = None
) -> Packing:
    """Lina section 4.2: powers of two experts per device until the feed-forward exceeds the all-to-all.

    With c experts per device a row finds its expert on its own device c times as often: of N devices (N - c)/(N - 1) of
    the bytes still travel. The feed-forward takes c times as long: c experts run one after another, each on its full
    capacity. That is our reading; it gives 73% to 77% where Table 3 has 79% and 85% (c = 2), and all where it has 86%
    (c = 4). `limit`: experts that a device's memory holds."""
    if num_experts < 1 or num_devices < 1:
        raise UserError(f"packing: {num_experts} experts on {num_devices} devices: both must be at least 1")
    most = num_experts if limit is None else min(limit, num_experts)
    packed = 1
    while True:
        travel = max(0.0, (num_devices - packed) / (num_devices - 1)) if num_devices > 1 else 0.0
        found = Packing(
            experts_per_device=packed, all_to_all_s=all_to_all_s * travel, feed_forward_s=feed_forward_s * packed
        )
        if found.feed_forward_s >= found.all_to_all_s or 2 * packed > most:
            return found
        packed *= 2


def devices_per_expert(path_popularity: Sequence[Sequence[float]] | FloatArray, num_devices: int) -> FloatArray:
    """Lina eq. 1: n_e = N * sum over tokens of P(e | path of the token) / number of tokens.

    `path_popularity[t][e]`: estimated probability that token t's next expert is e, given its path. Fractions of
    devices, adding up to N where each token's probabilities add up to 1; packing them is `placement`'s."""
    popularity = np.asarray(path_popularity, dtype=np.float64)
    if popularity.ndim != 2 or 0 in popularity.shape:
        raise UserError(f"popularity has shape {popularity.shape}: give one row per token, one column per expert")
    if np.min(popularity) < 0:
        raise UserError(f"popularity: {np.min(popularity):.3g} is below 0: probabilities are from 0 to 1")
    result: FloatArray = num_devices * np.sum(popularity, axis=0) / popularity.shape[0]
    return result
