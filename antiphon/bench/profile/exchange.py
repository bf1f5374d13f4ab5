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
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from antiphon import _m2n
from antiphon.base.errors import PeerLost, PeerTimeout
from antiphon.bench.profile.orders import OpenExchange, Rounds, Served
from antiphon.comm.m2n.native import SPIN_S, NativeAttentionExchange, NativeExpertExchange
from antiphon.kernels.select import resolve_dtype
from antiphon.models.config import load_model_spec
from antiphon.serve.worker.endpoints import exchange_shape
from antiphon.specs.placement import contiguous_placement

NUM_KINDS = 3
NUM_WARM = 5
_LATE_COMBINE, _LATE_RECEIVE = 1, 2
_TIMEOUT_S = 30.0
_IDLE_S = 0.2
_WORK_S = 0.001
_LATE_S = 0.004


@dataclass(frozen=True, kw_only=True)
class ExchangeMedians:
    """Seconds with one number of rows: the four calls, and one way beside them."""

    dispatch_s: float
    receive_s: float
    reply_s: float
    combine_s: float
    one_way_s: float


def exchange_medians(rounds: Rounds, served: Served, first: int) -> ExchangeMedians:
    """From both sides' clocks; the expert worker's round `first` is the attention worker's first one that counts."""
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
    return ExchangeMedians(
        dispatch_s=dispatch_s,
        receive_s=receive_s,
        reply_s=reply_s,
        combine_s=combine_s,
        one_way_s=max(0.0, ways / 2),
    )


def _endpoint(order: OpenExchange) -> _m2n.Endpoint:
    return _m2n.Endpoint(
        f"{order.role}[0]",
        "shm",
        host="127.0.0.1",
        secret=order.secret,
        waiting=order.waiting,
        local_processes=2,
        spin_s=SPIN_S,
    )


class _Work:
    """Stands for the kernels: keeps a core and its caches busy for a time."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(1 << 18)

    def do(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._numbers.add_(1.0)


class AttentionEnd:
    """The attention worker's end."""

    def __init__(self, order: OpenExchange) -> None:
        self._spec = load_model_spec(order.model)
        self._dtype = resolve_dtype(order.dtype)
        shape = exchange_shape(self._spec, self._dtype, 1, 1, 1, order.max_rows)
        placement = contiguous_placement(self._spec.router.num_experts, 1, (0, _LATE_COMBINE, _LATE_RECEIVE))
        self._exchange = NativeAttentionExchange(_endpoint(order), shape, 0, placement, _TIMEOUT_S)
        self._step = 0
        self._work = _Work()

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
            self._work.do(_WORK_S)
            self._step += 1
            self._exchange.begin_step(self._step, [[0]])
            begin = time.monotonic_ns()
            self._exchange.dispatch(kind, 0, rows_TH, ids_TK, weights_TK)
            dispatch_ns.append((begin, time.monotonic_ns()))
            if kind == _LATE_COMBINE:
                self._work.do(_LATE_S)
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

    def __init__(self, order: OpenExchange) -> None:
        spec = load_model_spec(order.model)
        shape = exchange_shape(spec, resolve_dtype(order.dtype), 1, 1, 1, order.max_rows)
        self._exchange = NativeExpertExchange(_endpoint(order), shape, 0)
        self._exchange.reset(1, [self._exchange.ticket])
        self._receive_ns: list[tuple[int, int]] = []
        self._reply_ns: list[tuple[int, int]] = []
        self._work = _Work()

    @property
    def ticket(self) -> bytes:
        return self._exchange.ticket

    def serve_one(self) -> None:
        """Answer one batch, or none within a moment."""
        try:
            begin = time.monotonic_ns()
            batch = self._exchange.receive(_IDLE_S, _TIMEOUT_S)
            if batch is None:
                return
            self._receive_ns.append((begin, time.monotonic_ns()))
            answer_RH = batch.rows_RH.clone()
            self._work.do(_WORK_S)
            begin = time.monotonic_ns()
            self._exchange.reply(batch, answer_RH, (begin, begin))
            self._reply_ns.append((begin, time.monotonic_ns()))
            if batch.layer == _LATE_RECEIVE:
                self._work.do(_LATE_S)
        except (PeerLost, PeerTimeout):
            return  # the other end has left; the order to leave is on its way

    def served(self) -> Served:
        return Served(receive_ns=self._receive_ns, reply_ns=self._reply_ns)

    def close(self) -> None:
        self._exchange.close()
