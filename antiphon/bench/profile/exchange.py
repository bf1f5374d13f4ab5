"""The exchange between one attention and one expert worker, without computing: the library's own way there and back, as
the engine calls it. Both ends add numbers where they would compute: their caches and clocks are those of a busy core,
and a thread that waits falls asleep and has to be woken, as in the engine.

Kinds of rounds, distinguished by the layer their messages name:
0. plain: from the dispatch's begin to the receive's end, from the reply's begin to the combine's end
1. the attention worker comes late to its combine, which then takes only what it takes of that worker's core
2. the expert worker comes late to the next receive, likewise

Rejected: one number for a round trip. With two micro-batches or more the calls keep their cores from computing, and the
way does not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import PeerLost, PeerTimeout
from antiphon.comm.m2n.native import SPIN_S, NativeAttentionExchange, NativeExpertExchange
from antiphon.comm.rank_group import RankGroup
from antiphon.comm.two_level.hybrid import HybridExchange
from antiphon.comm.two_level.levels import Levels, TwoLevel
from antiphon.cost.curves import Curve
from antiphon.cost.profile import RowCalls
from antiphon.kernels.select import resolve_dtype
from antiphon.models.config import load_model_spec
from antiphon.serve.worker.endpoints import exchange_shape
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import contiguous_placement

NUM_KINDS = 3
NUM_WARM = 5
_LATE_COMBINE, _LATE_RECEIVE = 1, 2
_TIMEOUT_S = 30.0
_IDLE_S = 0.2
_WORK_S = 0.001
_LATE_S = 0.004
_NUM_NUMBERS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The attention worker's side of each round, nanoseconds of the machine's clock: the begin and end of the dispatch,
    and of the combine. `message_bytes`: what one dispatch sends."""

    dispatch_ns: list[tuple[int, int]]
    combine_ns: list[tuple[int, int]]
    message_bytes: int


@dataclass
class Served:
    """The expert worker's side of all rounds since it joined, in their order."""

    receive_ns: list[tuple[int, int]] = field(default_factory=list)
    reply_ns: list[tuple[int, int]] = field(default_factory=list)


def exchange_medians(rounds: Rounds, served: Served, first: int) -> dict[str, float]:
    """Seconds with one number of rows, as `ExchangeTimes` names them: the four calls, and one way beside them.

    From both sides' clocks; the expert worker's round `first` is the attention worker's first one that counts."""
    count = len(rounds.dispatch_ns) // NUM_KINDS
    there, back, dispatch, reply = [], [], [], []
    for index in range(count):
        (sent, sent_end), (_, combined) = rounds.dispatch_ns[index], rounds.combine_ns[index]
        received = served.receive_ns[first + index][1]
        replied, replied_end = served.reply_ns[first + index]
        there.append((received - sent) * 1e-9)
        back.append((combined - replied) * 1e-9)
        dispatch.append((sent_end - sent) * 1e-9)
        reply.append((replied_end - replied) * 1e-9)
    late = [(end - begin) * 1e-9 for begin, end in rounds.combine_ns[count : 2 * count]]
    # The first round of the last kind follows one in which the expert worker did not have to be late.
    begin = first + 2 * count + 1
    received_late = [(end - start) * 1e-9 for start, end in served.receive_ns[begin : begin + count - 1]]
    dispatch_s, reply_s, combine_s = median(dispatch), median(reply), median(late)
    receive_s = median(received_late)
    # Somebody is woken on each way: on a machine that others use too, half of the times tell of them.
    ways = quantiles(there, n=4)[0] + quantiles(back, n=4)[0] - dispatch_s - receive_s - reply_s - combine_s
    return {
        "dispatch_s": dispatch_s,
        "receive_s": receive_s,
        "reply_s": reply_s,
        "combine_s": combine_s,
        "one_way_s": max(0.0, ways / 2),
    }


def _endpoint(role: str, waiting: str, secret: bytes) -> _m2n.Endpoint:
    return _m2n.Endpoint(
        f"{role}[0]", "shm", host="127.0.0.1", secret=secret, waiting=waiting, local_processes=2, spin_s=SPIN_S
    )


def _keep_busy(numbers: Tensor, seconds: float) -> None:
    """In the place of kernels: a core and its caches work on `numbers`."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        numbers.add_(1.0)


class AttentionEnd:
    """The attention worker's end."""

    def __init__(self, model: str, dtype: str, waiting: str, max_rows: int, secret: bytes) -> None:
        self._spec = load_model_spec(model)
        self._dtype = resolve_dtype(dtype)
        shape = exchange_shape(self._spec, self._dtype, 1, 1, 1, max_rows)
        placement = contiguous_placement(self._spec.router.num_experts, 1, (0, _LATE_COMBINE, _LATE_RECEIVE))
        self._exchange = NativeAttentionExchange(
            _endpoint("attention", waiting, secret), shape, 0, placement, _TIMEOUT_S
        )
        self._step = 0
        self._numbers = torch.zeros(_NUM_NUMBERS)

    def join(self, ticket: bytes) -> None:
        self._exchange.reset(1, [ticket])

    def time(self, rows: int, num_rounds: int) -> Rounds:
        """`NUM_WARM` plain rounds that do not count, then `num_rounds` of each kind in turn."""
        router = self._spec.router
        rows_TH = torch.randn(rows, self._spec.hidden_size).to(self._dtype)
        ids_TK = torch.stack([torch.randperm(router.num_experts)[: router.top_k] for _ in range(rows)]).int()
        weights_TK = torch.full((rows, router.top_k), 1 / router.top_k)
        dispatch_ns, combine_ns = [], []
        sent_before = self._exchange.bytes_sent
        kinds = [0] * (NUM_WARM + num_rounds) + [_LATE_COMBINE] * num_rounds + [_LATE_RECEIVE] * num_rounds
        for kind in kinds:
            _keep_busy(self._numbers, _WORK_S)
            self._step += 1
            self._exchange.begin_step(self._step, [[0]])
            begin = time.monotonic_ns()
            self._exchange.dispatch(kind, 0, rows_TH, ids_TK, weights_TK)
            dispatch_ns.append((begin, time.monotonic_ns()))
            if kind == _LATE_COMBINE:
                _keep_busy(self._numbers, _LATE_S)
            begin = time.monotonic_ns()
            self._exchange.combine(kind, 0, _TIMEOUT_S)
            combine_ns.append((begin, time.monotonic_ns()))
        return Rounds(
            dispatch_ns=dispatch_ns[NUM_WARM:],
            combine_ns=combine_ns[NUM_WARM:],
            message_bytes=(self._exchange.bytes_sent - sent_before) // len(kinds),
        )

    def close(self) -> None:
        self._exchange.close()


class ExpertEnd:
    """The expert worker's end: gives back what it gets, after a rest."""

    def __init__(self, model: str, dtype: str, waiting: str, max_rows: int, secret: bytes) -> None:
        shape = exchange_shape(load_model_spec(model), resolve_dtype(dtype), 1, 1, 1, max_rows)
        self._exchange = NativeExpertExchange(_endpoint("experts", waiting, secret), shape, 0)
        self._exchange.reset(1, [self._exchange.ticket])
        self.ticket = self._exchange.ticket
        self.served = Served()
        self._numbers = torch.zeros(_NUM_NUMBERS)

    def serve_one(self) -> None:
        """Answer one batch, or none within a moment."""
        try:
            begin = time.monotonic_ns()
            batch = self._exchange.receive(_IDLE_S, _TIMEOUT_S)
            if batch is None:
                return
            self.served.receive_ns.append((begin, time.monotonic_ns()))
            answer_RH = batch.rows_RH.clone()
            _keep_busy(self._numbers, _WORK_S)
            begin = time.monotonic_ns()
            self._exchange.reply(batch, answer_RH, (begin, begin))
            self.served.reply_ns.append((begin, time.monotonic_ns()))
            if batch.layer == _LATE_RECEIVE:
                _keep_busy(self._numbers, _LATE_S)
        except (PeerLost, PeerTimeout):
            return  # the other end has left; the order to leave is on its way

    def close(self) -> None:
        self._exchange.close()


# --- row calls
# What a rank that shares experts with others computes itself, in each layer, to send rows to them and back: choosing,
# cutting, joining and adding up. The groups' own time is left out: it is the network's, or that of a message.
#
# The exchange of serving runs against groups whose other rank is this one's mirror image: it posts what this rank posts
# and sends what it sends. So there is no wait, and processor time is the time it takes. In a step the weights of
# attention and experts pass through the caches in between, so as many bytes are read here: calls that are repeated
# without take half as long.
#
# Rejected: two processes and their round trip. It is short or long by what the cores do between them, and holds a wire,
# which on another network is another one.


_NUM_WARM_LAYERS = 3
_MOST_BYTES = 128 << 20  # beyond any cache


class _Mirror(RankGroup):
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
        self._posted.append(
            self._timed(lambda: torch.cat([piece.contiguous().view(torch.uint8).flatten() for piece in pieces]))
        )

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
    attention, experts, across = (
        mirror if size > 1 else RankGroup() for mirror, size in zip(mirrors, sizes, strict=True)
    )
    levels = Levels(topology=topology, rank=0, attention=attention, experts=experts, across=across)
    placement = contiguous_placement(spec.router.num_experts, topology.expert_ep, spec.expert_layers)
    exchange = HybridExchange(levels, placement, weights.experts)
    layer, top_k = spec.expert_layers[0], spec.router.top_k
    generator = torch.Generator().manual_seed(num_rows)
    x_TH = torch.randn(num_rows, spec.hidden_size, generator=generator).to(resolve_dtype(dtype))
    ids_TK = torch.rand(num_rows, spec.router.num_experts, generator=generator).topk(top_k).indices.int()
    weights_TK = torch.ones(num_rows, top_k)

    def left_out_s() -> float:
        return weights.took_s + sum(each.took_s for each in mirrors)

    took_s = []
    for _ in range(_NUM_WARM_LAYERS + num_rounds):
        weights.attention()
        before_s, started_s = left_out_s(), time.thread_time()
        exchange.dispatch(layer, 0, x_TH, ids_TK, weights_TK)
        exchange.combine(layer, 0, 1.0)
        elapsed_s = time.thread_time() - started_s
        took_s.append(max(0.0, elapsed_s - (left_out_s() - before_s)))
    return median(took_s[_NUM_WARM_LAYERS:])


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
