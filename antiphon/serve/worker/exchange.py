"""The way of an attention worker's rows to their experts and back, as its steps use it.

A `StepExchange` stands between the step's loop and an `AttentionExchange`. It counts and times one step, and it
completes what comes back: the sum over the ranks, with the shared expert's part. What a layout adds is a subclass,
chosen once when the worker is built: `BlockExchange` for ranks that sum beside their products, `worker/hybrid` for
replicas that hold experts for each other, `worker/prefetch` for copies ahead of a layer. So the loop asks for no
feature.

Where nothing travels, the `AttentionExchange` itself is here: `LocalExperts` and `LeadersExperts`.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.comm.ledger import Traffic
from antiphon.comm.m2n.api import AttentionExchange
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.expert_half import ExpertHalf, OffloadedExperts
from antiphon.serve.engine_api import PrefetchCounts
from antiphon.serve.worker.messages import RunStep
from antiphon.serve.worker.routing import Choices
from antiphon.serve.worker.spans import COMBINE, DISPATCH, PREDICT, SpanRecorder
from antiphon.specs.placement import ExpertPlacement


@dataclass(eq=False)
class StepExchange:
    """`exchange` over one step after another. Waits for experts at most `timeout_s`. `counts_rows`: say how many rows
    each expert got. Not thread-safe."""

    exchange: AttentionExchange
    half: AttentionHalf
    recorder: SpanRecorder
    timeout_s: float
    counts_rows: bool = field(default=False, kw_only=True)
    _before: tuple[float, float, int] = field(default=(0.0, 0.0, 0), init=False)  # as the step began, see `_counted`

    def begin_step(self, step: RunStep) -> None:
        """Announce the step; counting begins anew."""
        if self.counts_rows:
            self.exchange.take_counts()  # of a step that failed
        self._before = self._counted()
        self.exchange.begin_step(step.step, step.participants)

    def _counted(self) -> tuple[float, float, int]:
        """`wait_s`, `exposed_s` and `bytes_sent` of the exchange so far."""
        bytes_sent = self.exchange.bytes_sent  # first: in stream order it waits until the times are known
        return self.exchange.wait_s, self.exchange.exposed_s, bytes_sent

    def dispatch(self, layer: int, micro_batch: int, y_TH: Tensor, choices: Choices) -> None:
        """Send the rows to the experts that they chose; does not wait."""
        start_ns = time.monotonic_ns()
        self.exchange.dispatch(layer, micro_batch, y_TH, choices.ids_TK, choices.weights_TK)
        self.recorder.add(DISPATCH, start_ns, layer, micro_batch, y_TH.shape[0])

    def combine(self, layer: int, micro_batch: int, local_TH: Tensor | None) -> Tensor:
        """[T, H]: what the experts made of the rows, plus `local_TH`, summed over the ranks. Waits; raises
        `PeerTimeout` or `StepAborted`."""
        start_ns = time.monotonic_ns()
        experts_TH = self.exchange.combine(layer, micro_batch, self.timeout_s)
        delta_TH = self._complete(experts_TH.to(self.half.backend.device), local_TH)
        self.recorder.add(COMBINE, start_ns, layer, micro_batch, delta_TH.shape[0])
        return delta_TH

    def _complete(self, experts_TH: Tensor, local_TH: Tensor | None) -> Tensor:
        return self.half.sum_over_ranks(experts_TH if local_TH is None else experts_TH + local_TH)

    def serve_others(self, layer: int | None, micro_batch: int) -> None:
        """`micro_batch` has no rows here. `layer`: the one whose turn it is, None: behind the last one."""

    @property
    def wait_s(self) -> float:
        """Seconds of this step spent waiting for experts."""
        return self.exchange.wait_s - self._before[0]

    @property
    def exposed_s(self) -> float:
        """The part of `wait_s` in which the experts did not compute."""
        return self.exchange.exposed_s - self._before[1]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this step has dispatched."""
        return self.exchange.bytes_sent - self._before[2]

    def take_counts(self) -> bytes:
        """Rows of each expert, as in `AttentionExchange.take_counts`; empty unless counted."""
        return self.exchange.take_counts() if self.counts_rows else b""

    def take_prefetch_counts(self) -> PrefetchCounts | None:
        """What was copied ahead of layers; None where that is not done."""
        return None


@dataclass(eq=False)
class BlockExchange(StepExchange):
    """Steps of a rank with its columns of all experts: a block of rows passes them while the ranks sum the one before.

    So a micro-batch is computed when it is collected."""

    experts: ExpertHalf = field(kw_only=True)
    _rows: dict[int, tuple[Tensor, Choices]] = field(default_factory=dict, init=False)  # by micro-batch

    def begin_step(self, step: RunStep) -> None:
        self._rows.clear()
        super().begin_step(step)

    def dispatch(self, layer: int, micro_batch: int, y_TH: Tensor, choices: Choices) -> None:
        self._rows[micro_batch] = y_TH, choices

    def combine(self, layer: int, micro_batch: int, local_TH: Tensor | None) -> Tensor:
        start_ns = time.monotonic_ns()
        y_TH, choices = self._rows.pop(micro_batch)

        def made(first: int, last: int) -> Tensor:
            rows = slice(first, last)
            part_TH = self.experts.forward(layer, y_TH[rows], choices.ids_TK[rows], choices.weights_TK[rows])
            return part_TH if local_TH is None else part_TH + local_TH[rows]

        delta_TH = self.half.sum_of_rows(y_TH.shape[0], made)
        self.recorder.add(COMBINE, start_ns, layer, micro_batch, y_TH.shape[0])
        return delta_TH


@dataclass(eq=False)
class OffloadingExchange(StepExchange):
    """Steps over experts that stay in the checkpoint's file: those of the next layer are read while this one computes,
    as its router expects them from the rows that enter this layer's experts."""

    experts: OffloadedExperts = field(kw_only=True)

    def dispatch(self, layer: int, micro_batch: int, y_TH: Tensor, choices: Choices) -> None:
        start_ns = time.monotonic_ns()
        self.experts.need(layer, choices.ids_TK)
        if (forecast := choices.forecast()) is not None:
            self.experts.fetch_ahead(forecast.layer, forecast.ids_TK)
        self.recorder.add(PREDICT, start_ns, layer, micro_batch, y_TH.shape[0])
        super().dispatch(layer, micro_batch, y_TH, choices)

    def take_prefetch_counts(self) -> PrefetchCounts:
        num_ahead, num_late = self.experts.take_counts()
        return PrefetchCounts(num_copies=num_ahead, num_late=num_late)


@dataclass(eq=False)
class _NoPeers:
    """An `AttentionExchange` without another side, but for what it makes of the rows."""

    wait_s = 0.0
    exposed_s = 0.0
    bytes_sent = 0
    _results: dict[int, Tensor] = field(default_factory=dict, init=False)  # by micro-batch

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
        """There is no peer to reach."""

    def traffic(self) -> Traffic:
        return Traffic(pairs=[], waits=[], round_trips=[])

    def close(self) -> None:
        """There is no peer."""


@dataclass(eq=False)
class LocalExperts(_NoPeers):
    """The `AttentionExchange` of the colocated layout: this process holds all experts, and nothing travels.

    The attention step dispatches a micro-batch and turns to the next one; here the work is done at once."""

    half: ExpertHalf | OffloadedExperts

    def close(self) -> None:
        if isinstance(self.half, OffloadedExperts):
            self.half.close()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = self.half.forward(layer, rows_TH, ids_TK, weights_TK)


class LeadersExperts(_NoPeers):
    """The `AttentionExchange` of a rank that follows: the leader exchanges rows with the experts, and what comes back
    enters the sum over the ranks there. Here it is zeros."""

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = torch.zeros_like(rows_TH)
