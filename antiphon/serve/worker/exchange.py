"""The way of an attention worker's rows to their experts and back, as its steps use it; and which experts those are.

`RowRouting` chooses: as the gate says, or as a record says (`serve --record-routing FILE` keeps one, `bench balance
--routing FILE` replays it). What rows will choose next is said by the next layer's router, which sees them now, or by
the path that they took so far (`--balance paths`).

A `StepExchange` stands between the step's loop and an `AttentionExchange`. It counts and times one step, and it
completes what comes back: the sum over the ranks, with the shared expert's part. What a layout adds is a subclass,
chosen once when the worker is built: `BlockExchange` for ranks that sum beside their products, `worker/hybrid` for
replicas that hold experts for each other, `worker/expert_prefetch` for copies ahead of a layer. So the loop asks for no
feature.

Where nothing travels, the `AttentionExchange` itself is here: `LocalExperts` and `LeadersExperts`.

Letters as in `antiphon.kernels.api`; L MoE layers.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.ledger import Traffic
from antiphon.comm.m2n.api import AttentionExchange
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.expert_half import ExpertHalf, OffloadedExperts
from antiphon.placement.routing_trace import IdArray, RoutingTrace
from antiphon.placement.sample_paths import PathProfile
from antiphon.placement.split import FloatArray, IntArray
from antiphon.serve.engine_api import PrefetchCounts
from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.worker.messages import RunStep
from antiphon.serve.worker.spans import COMBINE, DISPATCH, PREDICT, SpanRecorder
from antiphon.specs.model import ModelSpec
from antiphon.specs.placement import ExpertPlacement


class Forecast(NamedTuple):
    """Experts that rows will probably choose in a later layer, int32 [T, K]. `shares_TK`: how probable each is,
    float64 [T, K]; None: as good as certain."""

    layer: int
    ids_TK: Tensor
    shares_TK: FloatArray | None = None


class Choices(NamedTuple):
    """The experts of a layer's rows: ids int32 [T, K], weights float32 [T, K]. `forecast`: as `RowRouting.forecast`,
    for these rows."""

    ids_TK: Tensor
    weights_TK: Tensor
    forecast: Callable[[], Forecast | None]


class RoutingReplay:
    """The choices of recorded rows in place of the gates', so that any model of as many experts has their load.

    A row at position p of a request takes a recorded row between p x `width` and (p + 1) x `width`. So requests that
    generate together are at one time of the record, and the choice does not depend on how rows are batched. With more
    MoE layers than were recorded, the recorded ones take turns. `UserError` if the record does not fit the model."""

    def __init__(self, trace: RoutingTrace, spec: ModelSpec, width: int) -> None:
        recorded, router = trace.header, spec.router
        if (recorded.num_experts, recorded.top_k) != (router.num_experts, router.top_k):
            raise UserError(
                f"the recorded rows choose {recorded.top_k} of {recorded.num_experts} experts, this model's "
                f"{router.top_k} of {router.num_experts}: record one that chooses as this one does"
            )
        if trace.num_rows == 0:
            raise UserError("the record has no rows: record while requests are served")
        self._ids_LTK = trace.ids_LTK().astype(np.int32)
        forecasts_LTK = trace.forecasts_LTK()
        self._forecasts_LTK = None if forecasts_LTK is None else forecasts_LTK.astype(np.int32)
        self._layers = {layer: number % recorded.num_layers for number, layer in enumerate(spec.expert_layers)}
        self._width = width

    def rows_of(self, sequences: Sequence[SequenceStep]) -> IntArray:
        """The recorded rows [T] whose choices a micro-batch takes."""
        rows = [
            np.arange(each.start, each.start + len(each.token_ids)) * self._width + _number(each) % self._width
            for each in sequences
        ]
        recorded_T: IntArray = np.concatenate(rows) % self._ids_LTK.shape[1]
        return recorded_T

    def choose(self, layer: int, rows_T: IntArray) -> Tensor:
        """Their ids [T, K] in one layer, in host memory."""
        return torch.from_numpy(self._ids_LTK[self._layers[layer], rows_T])

    def forecast(self, layer: int, rows_T: IntArray) -> Forecast | None:
        """What they were expected to choose in `layer`, in the layer before; None if the record does not say."""
        number = self._layers[layer] - 1
        if self._forecasts_LTK is None or number < 0:
            return None
        return Forecast(layer, torch.from_numpy(self._forecasts_LTK[number, rows_T]))


class RowRouting:
    """The experts of one attention worker's rows. `record`: keep them for `of_step`. `counts_prompts`: count them where
    rows are of prompts. `replay`: a record's choices in place of the gates'. `paths`: what forecasts are made of; None:
    the next layer's router. Not thread-safe."""

    def __init__(
        self,
        half: AttentionHalf,
        *,
        record: bool = False,
        replay: RoutingReplay | None = None,
        paths: PathProfile | None = None,
        counts_prompts: bool = False,
    ) -> None:
        layers = [layer for layer in half.layers if half.routes(layer)]
        self._half = half
        self._replay = replay
        self._paths = paths
        self._number = {layer: number for number, layer in enumerate(layers)}
        self._firsts: list[list[IntArray]] = [[] for _ in layers]  # by layer and micro-batch, each row's best choice
        self._following = dict(pairwise(layers))
        self._record = record
        self._counts_prompts = counts_prompts
        self._prompt_counts_LE: Tensor | None = None  # int64, on the device: read once, at the end of a step
        self._ids: dict[int, list[IdArray]] = {layer: [] for layer in layers}
        self._forecasts: dict[int, list[IdArray]] = {layer: [] for layer in layers[1:]}

    def begin_step(self) -> None:
        """Forget what a step that failed has left."""
        for kept in (*self._ids.values(), *self._forecasts.values()):
            kept.clear()
        for of_layer in self._firsts:
            of_layer.clear()
        self._prompt_counts_LE = None

    def prompt_rows(self, sequences: Sequence[SequenceStep]) -> Tensor | None:
        """Which rows of a micro-batch belong to prompts, int64 [T], 0 or 1: to sequences with more rows than the one
        behind their last token. None if there are none, or they are not counted."""
        sizes = [len(sequence.token_ids) for sequence in sequences] if self._counts_prompts else []
        if not any(size > 1 for size in sizes):
            return None
        belong = np.repeat([int(size > 1) for size in sizes], sizes)
        return torch.from_numpy(belong).to(self._half.backend.device, non_blocking=True)

    def recorded_rows(self, sequences: Sequence[SequenceStep]) -> IntArray | None:
        """The rows [T] of the record whose choices a micro-batch takes, if it takes any."""
        return None if self._replay is None else self._replay.rows_of(sequences)

    def choose(self, layer: int, y_TH: Tensor, recorded_T: IntArray | None, prompt_T: Tensor | None = None) -> Choices:
        """Where these rows go. Micro-batches come in the same order in every layer. `prompt_T`: as `prompt_rows`."""
        ids_TK, weights_TK = self._half.gate(layer, y_TH)
        if self._replay is not None and recorded_T is not None:
            ids_TK = self._replay.choose(layer, recorded_T).to(ids_TK.device)
        if prompt_T is not None:
            self._count_prompts(layer, ids_TK, prompt_T)
        path_LT = self._path(layer, ids_TK)
        choices = Choices(ids_TK, weights_TK, partial(self.forecast, layer, y_TH, recorded_T, path_LT))
        if self._record:
            self._ids[layer].append(_kept(ids_TK))
            if (forecast := choices.forecast()) is not None:
                self._forecasts[forecast.layer].append(_kept(forecast.ids_TK))
        return choices

    def _count_prompts(self, layer: int, ids_TK: Tensor, prompt_T: Tensor) -> None:
        if self._prompt_counts_LE is None:
            shape = len(self._number), self._half.spec.router.num_experts
            self._prompt_counts_LE = torch.zeros(shape, dtype=torch.int64, device=ids_TK.device)
        ones_TK = prompt_T[:, None].expand(ids_TK.shape)
        self._prompt_counts_LE[self._number[layer]].scatter_add_(0, ids_TK.flatten().long(), ones_TK.flatten())

    def prompt_counts(self) -> bytes:
        """Rows of prompts in this step by MoE layer and expert, uint32 one layer after the other; empty without any."""
        counts_LE = self._prompt_counts_LE
        return b"" if counts_LE is None else counts_LE.cpu().numpy().astype("<u4").tobytes()

    def _path(self, layer: int, ids_TK: Tensor) -> list[IntArray]:
        """The first choices of these rows in the layers so far, this one included; empty where paths say nothing."""
        if self._paths is None:
            return []
        number = self._number[layer]
        self._firsts[number].append(ids_TK[:, 0].cpu().numpy().copy())  # a gate's buffers are used again
        micro_batch = len(self._firsts[number]) - 1
        return [of_layer[micro_batch] for of_layer in self._firsts[: number + 1]]

    def forecast(
        self, layer: int, y_TH: Tensor, recorded_T: IntArray | None, path_LT: list[IntArray]
    ) -> Forecast | None:
        """What rows will choose in the next layer with experts: as rows of their paths did; or as recorded; or what the
        next layer's router says of the rows that enter the experts of `layer`. None after the last layer, and where a
        record does not say."""
        following = self._following.get(layer)
        if following is None:
            return None
        if self._paths is not None:
            experts_TK, shares_TK = self._paths.expected(np.stack(path_LT), len(path_LT))
            return Forecast(following, torch.from_numpy(experts_TK.astype(np.int32)), shares_TK)
        if self._replay is not None and recorded_T is not None:
            return self._replay.forecast(following, recorded_T)
        return Forecast(following, self._half.gate(following, y_TH)[0])

    def of_step(self) -> tuple[bytes, bytes]:
        """As `RoutedRows.ids` and `RoutedRows.forecasts`; empty unless recorded."""
        if not self._record:
            return b"", b""
        return _joined(self._ids), _joined(self._forecasts)


def _kept(ids_TK: Tensor) -> IdArray:
    return ids_TK.cpu().numpy().astype("<u2")


def _joined(by_layer: dict[int, list[IdArray]]) -> bytes:
    return b"".join(np.concatenate(parts).tobytes() for parts in by_layer.values() if parts)


def _number(sequence: SequenceStep) -> int:
    """Requests with numbers for names take different rows of the record."""
    name = sequence.request_id
    return int(name) if name.isdecimal() else zlib.crc32(name.encode())


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

    experts: ExpertHalf | OffloadedExperts

    def close(self) -> None:
        if isinstance(self.experts, OffloadedExperts):
            self.experts.close()

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = self.experts.forward(layer, rows_TH, ids_TK, weights_TK)


class LeadersExperts(_NoPeers):
    """The `AttentionExchange` of a rank that follows: the leader exchanges rows with the experts, and what comes back
    enters the sum over the ranks there. Here it is zeros."""

    def dispatch(self, layer: int, micro_batch: int, rows_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._results[micro_batch] = torch.zeros_like(rows_TH)
