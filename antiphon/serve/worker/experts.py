"""Who computes the experts: another process, whose loop is here, or the attention worker's own.

The loop: take the rows of (layer, micro-batch) from all attention workers, one grouped feed-forward over the experts
held here, weighted partial sums back. No request, no sequence, no step outlives a batch.
"""

import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.comm.m2n.api import ExpertBatch, ExpertExchange
from antiphon.comm.m2n.traffic import Traffic
from antiphon.models.expert_half import ExpertHalf
from antiphon.serve.worker.messages import ExpertReport
from antiphon.serve.worker.spans import EXPERTS, RECEIVE, REPLY, SpanRecorder


class LocalExperts:
    """The `AttentionExchange` of the colocated layout: this process holds all experts, and nothing travels.

    The attention step dispatches a micro-batch and turns to the next one; here the work is done at once."""

    wait_s = 0.0
    exposed_s = 0.0
    bytes_sent = 0

    def __init__(self, half: ExpertHalf) -> None:
        self._half = half
        self._results: dict[int, Tensor] = {}

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._results.clear()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = self._half.forward(layer, rows_TH, ids_TK, weights_TK)

    def combine(self, layer: int, micro_batch: int, timeout_s: float) -> Tensor:
        return self._results.pop(micro_batch)

    def abort(self, epoch: int) -> None:
        """Nothing waits."""

    def reset(self, epoch: int, tickets: list[bytes]) -> None:
        """Nobody is to be reached."""

    def traffic(self) -> Traffic:
        return Traffic(pairs=[], waits=[], round_trips=[])

    def close(self) -> None:
        """There is no peer."""


class ExpertRunner:
    """Serves one batch at a time and keeps counters for the engine's metrics."""

    def __init__(self, index: int, half: ExpertHalf, exchange: ExpertExchange, recorder: SpanRecorder) -> None:
        self._index = index
        self._half = half
        self._on_host = half.backend.device.type == "cpu"
        self._exchange = exchange
        self._recorder = recorder
        self._rows_per_layer: Counter[int] = Counter()
        self._counts: dict[int, NDArray[np.int64]] = {}  # by layer: [1 + experts], the first of rows served elsewhere
        self._busy_s = 0.0
        self._reported_wait_s = 0.0

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Answer one batch; False if none came within `idle_s`. Raises `StepAborted`, or `PeerTimeout` when some
        attention workers of a batch stayed away for `timeout_s`."""
        start_ns = time.monotonic_ns()
        batch = self._exchange.receive(idle_s, timeout_s)
        if batch is None:
            return False
        compute_ns = time.monotonic_ns()
        rows = batch.rows_RH.shape[0]
        self._recorder.step = batch.step
        self._recorder.add(RECEIVE, start_ns, batch.layer, batch.micro_batch, rows)
        partial_RH = self._compute(batch)
        self._recorder.add(EXPERTS, compute_ns, batch.layer, batch.micro_batch, rows)
        self._count(batch)  # the batch's memory is the next sender's after the reply
        end_ns = time.monotonic_ns()
        self._exchange.reply(batch, partial_RH, (compute_ns, end_ns))
        self._recorder.add(REPLY, end_ns, batch.layer, batch.micro_batch, rows)
        self._rows_per_layer[batch.layer] += rows
        self._busy_s += (end_ns - compute_ns) * 1e-9
        return True

    def _count(self, batch: ExpertBatch) -> None:
        """Rows of each expert; from the host's copy of the ids, so that no device is waited for."""
        counts = np.bincount(batch.ids_RK.numpy().ravel() + 1, minlength=self._half.spec.router.num_experts + 1)
        before = self._counts.get(batch.layer)
        self._counts[batch.layer] = counts if before is None else before + counts

    def _compute(self, batch: ExpertBatch) -> Tensor:
        """The rows' weighted partial sums, in host memory."""
        half = self._half
        if self._on_host:
            return half.forward(batch.layer, batch.rows_RH, half.to_local(batch.layer, batch.ids_RK), batch.weights_RK)
        device = half.backend.device
        local_RK = half.to_local(batch.layer, batch.ids_RK.to(device))
        return half.forward(batch.layer, batch.rows_RH.to(device), local_RK, batch.weights_RK.to(device)).cpu()

    def report(self) -> ExpertReport | None:
        """Counters since the last report, None if nothing happened."""
        if not self._rows_per_layer:
            return None
        report = ExpertReport(
            index=self._index,
            rows_per_layer=dict(self._rows_per_layer),
            rows_per_expert={
                layer: {expert: int(counts[1 + expert]) for expert in self._half.expert_ids[layer]}
                for layer, counts in self._counts.items()
            },
            busy_s=self._busy_s,
            wait_s=self._exchange.wait_s - self._reported_wait_s,
        )
        self._rows_per_layer.clear()
        self._counts.clear()
        self._busy_s = 0.0
        self._reported_wait_s = self._exchange.wait_s
        return report
