"""The loop of an expert worker and of its ranks, and what they count.

The loop: take the rows of (layer, micro-batch) from all attention workers, one grouped feed-forward over the experts
held here, weighted partial sums back. No request, no sequence, no step outlives a batch. Which rows of a layer become
one batch where attention workers step freely is decided in `comm/m2n/ready_batches`.

A worker may be a group of ranks, each with some columns of every expert (`models/shares`). The leader gets the rows and
announces each batch; all ranks then make the same calls, and the collectives in between add the parts up. A follower
answers to the leader alone, and waits for its next announcement. How experts move to a worker that serves is in
`expert_moves`.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import ExpertBatch, ExpertExchange
from antiphon.comm.rank_group import RankGroup
from antiphon.models.expert_half import FREE, ExpertHalf
from antiphon.serve.worker.endpoints import hear_leader
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.messages import ExpertReport
from antiphon.serve.worker.spans import EXPERTS, RECEIVE, REPLY, SpanRecorder

_log = get_logger("worker")
_ENCODER = msgspec.msgpack.Encoder()
_cuda: Any = torch.cuda  # its classes have no types


class ExpertCounters:
    """What `half` computed since the last report, as worker `index` of those that experts are placed on."""

    def __init__(self, index: int, half: ExpertHalf) -> None:
        self._index = index
        self._half = half
        self._num_batches = 0
        self._rows_per_layer: Counter[int] = Counter()
        self._counts: dict[int, NDArray[np.int64]] = {}  # by layer: [1 + experts], the first of rows served elsewhere
        self._busy_s = 0.0
        self._under_way: deque[tuple[Any, Any]] = deque()

    def add_span(self, begin: Any, end: Any) -> None:
        """A device computes a batch between these events. Counted once it is over: no device is waited for."""
        self._under_way.append((begin, end))

    def add(self, layer: int, ids_RK: Tensor, busy_s: float) -> None:
        """A batch. `ids_RK`: global ids, -1 for experts elsewhere, in host memory, so that no device is waited for.
        `busy_s`: 0 if `add_span` says it."""
        self._num_batches += 1
        self._rows_per_layer[layer] += len(ids_RK)
        self._busy_s += busy_s
        counts = np.bincount(ids_RK.numpy().ravel() + 1, minlength=self._half.spec.router.num_experts + 1)
        before = self._counts.get(layer)
        self._counts[layer] = counts if before is None else before + counts

    def report(self) -> ExpertReport | None:
        """Then counting begins anew; None if nothing happened."""
        if not self._rows_per_layer:
            return None
        while self._under_way and self._under_way[0][1].query():
            begin, end = self._under_way.popleft()
            self._busy_s += begin.elapsed_time(end) * 1e-3
        report = ExpertReport(
            index=self._index,
            num_batches=self._num_batches,
            rows_per_layer=dict(self._rows_per_layer),
            rows_per_expert={
                layer: {expert: int(counts[1 + expert]) for expert in self._half.expert_ids[layer] if expert != FREE}
                for layer, counts in self._counts.items()
            },
            busy_s=self._busy_s,
        )
        self._num_batches = 0
        self._rows_per_layer.clear()
        self._counts.clear()
        self._busy_s = 0.0
        return report


class _Announced(msgspec.Struct, frozen=True, array_like=True):
    """What followers must know of a batch of rows before the rows come."""

    step: int
    layer: int
    micro_batch: int
    num_rows: int
    prefetches: tuple[tuple[int, int, int], ...] = ()


_DECODE_BATCH = msgspec.msgpack.Decoder(_Announced)


@dataclass(eq=False)
class ExpertRanks:
    """The experts of one worker over its ranks: each computes some columns of every expert."""

    ranks: RankGroup
    half: ExpertHalf
    moves: ExpertMoves
    recorder: SpanRecorder

    def lead(self, batch: ExpertBatch) -> Tensor:
        """The weighted partial sums of a batch: the followers get its rows, and add their columns."""
        self.moves.check(batch.placements)
        self.moves.prefetched.start(batch.prefetches)
        rows_RH = batch.rows_RH.to(self.half.backend.dtype)
        if self.ranks.size == 1:
            return self._part(batch.layer, rows_RH, batch.ids_RK, batch.weights_RK)
        announced = _Announced(batch.step, batch.layer, batch.micro_batch, rows_RH.shape[0], batch.prefetches)
        self.ranks.broadcast_bytes(_ENCODER.encode(announced))
        return self._together(announced, rows_RH, batch.ids_RK, batch.weights_RK)

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Follow one batch of the leader; False if none came within `idle_s`."""
        heard = hear_leader(self.ranks, idle_s)
        if heard is None:
            return False
        batch = _DECODE_BATCH.decode(heard)
        half, self.recorder.step = self.half, batch.step
        self.moves.prefetched.start(batch.prefetches)
        rows_RH = torch.empty(0, half.spec.hidden_size, dtype=half.backend.dtype)
        nothing_K = torch.empty(0, half.spec.router.top_k)
        self._together(batch, rows_RH, nothing_K.int(), nothing_K)
        return True

    def _together(self, batch: _Announced, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """The leader's rows go to all, the sum of the parts to the leader; the others return no rows."""
        num_rows = [batch.num_rows] + [0] * (self.ranks.size - 1)
        rows_RH, ids_RK, weights_RK = (self.ranks.all_gather(x, num_rows) for x in (rows_RH, ids_RK, weights_RK))
        part_RH = self._part(batch.layer, rows_RH, ids_RK, weights_RK)
        part_RH = part_RH if self.ranks.takes(part_RH.device) else part_RH.cpu()
        return self.ranks.reduce_scatter(part_RH, num_rows)

    def _part(self, layer: int, rows_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        half, device = self.half, self.half.backend.device
        local_RK = self.moves.prefetched.local_ids(layer, ids_RK)
        if device.type == "cpu":
            return half.forward(layer, rows_RH, local_RK, weights_RK)
        rows_RH, weights_RK = (each.to(device, non_blocking=True) for each in (rows_RH, weights_RK))
        return half.forward(layer, rows_RH, local_RK, weights_RK)


@dataclass(eq=False)
class ExpertRunner:
    """Serves one batch at a time and counts it. `in_stream_order`: replies are in the order of the device's stream, and
    its events say when it computed; on a CPU they are not."""

    ranks: ExpertRanks
    exchange: ExpertExchange
    counters: ExpertCounters
    recorder: SpanRecorder
    in_stream_order: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.in_stream_order &= self.ranks.half.backend.device.type != "cpu"

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Answer one batch; False if none came within `idle_s`. Raises `StepAborted`, or `PeerTimeout` when some
        attention workers of a batch stayed away for `timeout_s`."""
        start_ns = time.monotonic_ns()
        batch = self.exchange.receive(idle_s, timeout_s)
        if batch is None:
            return False
        compute_ns = time.monotonic_ns()
        rows = batch.rows_RH.shape[0]
        self.recorder.step = batch.step
        self.recorder.add(RECEIVE, start_ns, batch.layer, batch.micro_batch, rows)
        if self.in_stream_order:
            stream = _cuda.current_stream(self.ranks.half.backend.device)  # another device may be the current one
            begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            partial_RH = self.ranks.lead(batch)
            end.record(stream)
            self.counters.add_span(begin, end)
        else:
            partial_RH = self.ranks.lead(batch).cpu()  # else only the launch is timed
        self.recorder.add(EXPERTS, compute_ns, batch.layer, batch.micro_batch, rows)
        computed_s = 0.0 if self.in_stream_order else (time.monotonic_ns() - compute_ns) * 1e-9
        self.counters.add(batch.layer, batch.ids_RK, computed_s)  # after the reply its memory is the next sender's
        end_ns = time.monotonic_ns()
        self.exchange.reply(batch, partial_RH, (compute_ns, end_ns))
        self.recorder.add(REPLY, end_ns, batch.layer, batch.micro_batch, rows)
        return True
