"""What a rank that shares experts with others computes itself, in each layer, to send rows to them and back: choosing,
cutting, joining and adding up. The groups' own time is left out: it is the network's, or that of a message.

The exchange of serving runs against groups whose other rank is this one's mirror image: it posts what this rank posts
and sends what it sends. So there is no wait, and processor time is the time it takes. In a step the weights
of attention and experts pass through the caches in between, so as many bytes are read here: calls that are repeated
without take half as long.

Rejected: two processes and their round trip. It is short or long by what the cores do between them, and holds a wire,
which on another network is another one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from antiphon.base.ranges import split_evenly
from antiphon.comm.rank_group import Alone, RankGroup
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels
from antiphon.comm.two_level.topology import TwoLevel
from antiphon.cost.curves import Curve
from antiphon.cost.local_times import RowCalls
from antiphon.kernels.select import resolve_dtype
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement

_NUM_WARM = 3
_MOST_BYTES = 128 << 20  # beyond any cache


class _Mirror(Alone):
    """Rank 0 of two, the other of which does as this one. `took_s`: what its calls took."""

    size = 2

    def __init__(self) -> None:
        self.took_s = 0.0
        self._posted: list[Tensor] = []

    def all_gather(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        return self._timed(lambda: torch.cat([tensor] * len(rows_by_rank)))

    def reduce_scatter(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        return self._timed(tensor[: rows_by_rank[0]].clone)

    def post(self, exchange: int, peer: int, pieces: Sequence[Tensor]) -> None:
        self._posted.append(self._timed(lambda: torch.cat([_bytes(piece) for piece in pieces])))

    def take(self, exchange: int, peer: int) -> Tensor:
        return self._posted[-1]

    def release(self, exchange: int, peer: int) -> None:
        self._posted.clear()

    def _timed(self, call: Callable[[], Tensor]) -> Tensor:
        started_s = time.thread_time()
        result = call()
        self.took_s += time.thread_time() - started_s
        return result


class _Weights:
    """Bytes to be read in the place of a rank's weights of one layer. `took_s`: what reading those of experts took."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, topology: TwoLevel) -> None:
        one = 3 * spec.hidden_size * spec.feed_forward.intermediate * dtype.itemsize
        num_bytes = min(_MOST_BYTES, spec.router.num_experts * one // topology.size)
        self._experts = torch.ones(num_bytes // 8 + 1, dtype=torch.int64)
        self._attention = torch.ones(4 * spec.hidden_size**2 * dtype.itemsize // topology.attention_tp // 4 + 1)
        self.took_s = 0.0

    def attention(self) -> None:
        self._attention.sum()

    def experts(self, layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        started_s = time.thread_time()
        self._experts.sum()
        self.took_s += time.thread_time() - started_s
        return rows_RH


def _bytes(piece: Tensor) -> Tensor:
    return piece.contiguous().view(torch.uint8).flatten()


def row_calls(spec: ModelSpec, dtype: str, rows: Sequence[int], num_rounds: int) -> RowCalls:
    """Seconds of one layer by rows of a rank, medians of `num_rounds`; computed with one thread, as a rank does."""

    def by_rows(topology: TwoLevel) -> Curve:
        with _one_thread(), torch.inference_mode():
            seconds = tuple(_layer_s(topology, spec, dtype, count, num_rounds) for count in rows)
        return Curve(tuple(map(float, rows)), seconds)

    return RowCalls(
        across_s=by_rows(TwoLevel(num_nodes=2)),
        gathered_s=by_rows(TwoLevel(expert_tp=2)),
        completed_s=by_rows(TwoLevel(attention_tp=2)),
    )


def _layer_s(topology: TwoLevel, spec: ModelSpec, dtype: str, num_rows: int, num_rounds: int) -> float:
    mirrors = [_Mirror() for _ in range(3)]
    weights = _Weights(spec, resolve_dtype(dtype), topology)
    sizes = (topology.attention_tp, topology.expert_tp, topology.num_nodes)
    attention, experts, across = (mirror if size > 1 else Alone() for mirror, size in zip(mirrors, sizes, strict=True))
    exchange = _exchange(topology, spec, attention, experts, across, weights)
    layer, top_k = spec.expert_layers[0], spec.router.top_k
    generator = torch.Generator().manual_seed(num_rows)
    x_TH = torch.randn(num_rows, spec.hidden_size, generator=generator).to(resolve_dtype(dtype))
    ids_TK = torch.rand(num_rows, spec.router.num_experts, generator=generator).topk(top_k).indices.int()
    weights_TK = torch.ones(num_rows, top_k)

    def left_out_s() -> float:
        return weights.took_s + sum(each.took_s for each in mirrors)

    took_s = []
    for _ in range(_NUM_WARM + num_rounds):
        weights.attention()
        before_s, started_s = left_out_s(), time.thread_time()
        exchange.dispatch(layer, 0, x_TH, ids_TK, weights_TK)
        exchange.combine(layer, 0, 1.0)
        elapsed_s = time.thread_time() - started_s
        took_s.append(max(0.0, elapsed_s - (left_out_s() - before_s)))
    return median(took_s[_NUM_WARM:])


def _exchange(
    topology: TwoLevel,
    spec: ModelSpec,
    attention: RankGroup,
    experts: RankGroup,
    across: RankGroup,
    weights: "_Weights",
) -> HybridExchange:
    levels = Levels(topology=topology, rank=0, attention=attention, experts=experts, across=across)
    parts = split_evenly(spec.router.num_experts, topology.expert_ep)
    owners = tuple((part,) for part, (first, last) in enumerate(parts) for _ in range(first, last))
    placement = ExpertPlacement(topology.expert_ep, dict.fromkeys(spec.expert_layers, owners))
    return HybridExchange(levels, placement, weights.experts)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
