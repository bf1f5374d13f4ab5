"""Who computes the experts: another process, whose loop is here, or the attention worker's own.

The loop: take the rows of (layer, micro-batch) from all attention workers, one grouped feed-forward over the experts
held here, weighted partial sums back. No request, no sequence, no step outlives a batch.
"""

import time
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.comm.ledger import Traffic
from antiphon.comm.m2n.api import ExpertExchange
from antiphon.models.expert_half import FREE, ExpertHalf
from antiphon.serve.worker.messages import ExpertReport
from antiphon.serve.worker.ranks import ExpertRanks
from antiphon.serve.worker.spans import EXPERTS, RECEIVE, REPLY, SpanRecorder
from antiphon.specs.placement import ExpertPlacement


class _NoPeers:
    """An `AttentionExchange` without another side, but for what it makes of the rows."""

    wait_s = 0.0
    exposed_s = 0.0
    bytes_sent = 0

    def __init__(self) -> None:
        self._results: dict[int, Tensor] = {}

    def begin_step(self, step: int, participants: list[list[int]]) -> None:
        self._results.clear()

    def place(self, placement: ExpertPlacement) -> None:
        """All experts are here, or with the leader."""

    def take_counts(self) -> bytes:
        return b""

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


class LocalExperts(_NoPeers):
    """The `AttentionExchange` of the colocated layout: this process holds all experts, and nothing travels.

    The attention step dispatches a micro-batch and turns to the next one; here the work is done at once."""

    def __init__(self, half: ExpertHalf) -> None:
        super().__init__()
        self._half = half

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = self._half.forward(layer, rows_TH, ids_TK, weights_TK)


class LeadersExperts(_NoPeers):
    """The `AttentionExchange` of a rank that follows: the leader exchanges rows with the experts, and what comes back
    enters the sum over the ranks there. Here it is zeros."""

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = torch.zeros_like(rows_TH)


class ExpertCounters:
    """What `half` computed since the last report, as worker `index` of those that experts are placed on."""

    def __init__(self, index: int, half: ExpertHalf) -> None:
        self._index = index
        self._half = half
        self._num_batches = 0
        self._rows_per_layer: Counter[int] = Counter()
        self._counts: dict[int, NDArray[np.int64]] = {}  # by layer: [1 + experts], the first of rows served elsewhere
        self._busy_s = 0.0

    def add(self, layer: int, ids_RK: Tensor, busy_s: float) -> None:
        """A batch. `ids_RK`: global ids, -1 for experts elsewhere, in host memory, so that no device is waited for."""
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


class ExpertRunner:
    """Serves one batch at a time and counts it."""

    def __init__(
        self, ranks: ExpertRanks, exchange: ExpertExchange, counters: ExpertCounters, recorder: SpanRecorder
    ) -> None:
        self._ranks = ranks
        self._exchange = exchange
        self._counters = counters
        self._recorder = recorder

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
        partial_RH = self._ranks.lead(batch)
        self._recorder.add(EXPERTS, compute_ns, batch.layer, batch.micro_batch, rows)
        computed_s = (time.monotonic_ns() - compute_ns) * 1e-9
        self._counters.add(batch.layer, batch.ids_RK, computed_s)  # after the reply its memory is the next sender's
        end_ns = time.monotonic_ns()
        self._exchange.reply(batch, partial_RH, (compute_ns, end_ns))
        self._recorder.add(REPLY, end_ns, batch.layer, batch.micro_batch, rows)
        return True
