"""One step of an attention worker: micro-batches shuttled between attention here and experts elsewhere.

Ping-pong (MegaScale-Infer, section 4.1): for each layer, for each micro-batch i: combine what the experts made of its
previous layer, compute attention and gate, dispatch, go on with micro-batch i+1. While the experts work on i, this
worker is busy with the others. The shared expert runs right after the dispatch, hidden behind the exchange.

A stage of a pipeline runs its layers for one micro-batch after another instead, so that the next stage can begin with
the first one; rows that need logits come back to the first stage (`comm/stages`).

A micro-batch's whole state between layers is (x, delta): the residual stream and what the feed-forward adds to it. So
a step can be repeated from its plan alone: keys and values are written again at the same places, with the same bits.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from antiphon.comm.m2n.api import AttentionExchange
from antiphon.comm.stages import Stages
from antiphon.comm.two_level.hybrid import Forms
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables
from antiphon.placement.split import IntArray
from antiphon.serve.policy.step import SequenceStep
from antiphon.serve.worker.expert_moves import ExpertMoves
from antiphon.serve.worker.messages import RunStep, Sampled, StepResult
from antiphon.serve.worker.prefetch import Prefetcher
from antiphon.serve.worker.routing import Routing
from antiphon.serve.worker.row_sampler import RowSampler, needs_logits, rows_with_logits
from antiphon.serve.worker.spans import ATTENTION, COMBINE, DISPATCH, PREDICT, RECEIVE, SAMPLE, STEP, SpanRecorder


@dataclass(slots=True)
class _MicroBatch:
    """A micro-batch on its way through the layers."""

    sequences: list[SequenceStep]
    batch: AttentionBatch
    x_TH: Tensor
    delta_TH: Tensor | None = None  # complete: to be added to x by the next layer
    local_TH: Tensor | None = None  # the shared expert's part, while the experts' part is under way
    in_flight: int | None = None  # layer whose experts still owe their part
    recorded_T: IntArray | None = None  # rows of a record whose experts these rows go to


class AttentionRunner:
    """Runs steps over one attention half and its KV cache. Waits for experts at most `timeout_s`. Not thread-safe."""

    def __init__(
        self,
        half: AttentionHalf,
        experts: AttentionExchange,
        cache: KVCache,
        tables: BlockTables,
        sampler: RowSampler | None,
        recorder: SpanRecorder,
        timeout_s: float,
        routing: Routing,
        *,
        count_rows: bool = False,
        forms: Forms | None = None,
        moves: ExpertMoves | None = None,
        stages: Stages | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        """`sampler` None: another rank of this worker samples. `count_rows`: results say how many rows each expert got.
        `forms`: how rows travel where other workers' rows are computed in `experts` too, so that every micro-batch goes
        there, rows or none; what comes back is the whole sum, on every rank. `moves`: of the experts here, if they
        serve others too; each step then names the placement by which rows go. `stages`: this process's place in a
        pipeline; None: it has all layers. `prefetcher`: asks for copies ahead of layers."""
        self._forms = forms
        self._moves = moves
        self._shared = forms is not None
        self._stages = stages
        self._half = half
        self._count_rows = count_rows
        self._routing = routing
        self._prefetcher = prefetcher
        self._device = half.backend.device
        self._experts = experts
        self._cache = cache
        self._tables = tables
        self._sampler = sampler
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._stage_wait_s = 0.0  # of this step, for other stages
        self._served: dict[int, int] = {}  # by micro-batch without rows here: the layer under way

    @torch.inference_mode()
    def run(self, step: RunStep) -> StepResult:
        """Compute all micro-batches of the step and sample. Raises `StepAborted` or `PeerTimeout` from the exchange;
        the same step may then be run again."""
        started_ns = time.monotonic_ns()
        experts = self._experts
        if self._count_rows:
            experts.take_counts()  # of a step that failed
        self._routing.begin_step()
        wait_s, exposed_s, num_bytes = experts.wait_s, experts.exposed_s, experts.bytes_sent
        self._recorder.step = step.step
        if self._sampler is not None:
            for request_id in step.released:
                self._sampler.remove(request_id)
            for start in step.starts:
                self._sampler.add(start)
        self._served.clear()
        if self._prefetcher is not None:
            self._prefetcher.begin_step([sum(len(each.token_ids) for each in rows) for rows in step.micro_batches])
        self._stage_wait_s = 0.0
        if self._moves is not None:
            experts.place(self._moves.named(step.placement))
        experts.begin_step(step.step, step.participants)
        if self._forms is not None:
            self._forms.begin_step(prefill=step.prefill, most_rows=step.most_rows)
        if self._stages is None:
            micro_batches = [self._begin(sequences) for sequences in step.micro_batches]
            self._run_layers(list(enumerate(micro_batches)))
        else:
            micro_batches = self._run_stage(self._stages, step.micro_batches)
        came = None
        if self._stages is not None and self._stages.place.is_first:
            came = self._take_back(self._stages, micro_batches)
        routed, forecasts = self._routing.of_step()
        sample_ns = time.monotonic_ns()
        requests = self._sample(micro_batches, came, step.bitmasks)
        self._recorder.add(SAMPLE, sample_ns)
        self._recorder.add(STEP, started_ns, rows=sum(m.batch.num_tokens for m in micro_batches if m))
        return StepResult(
            requests=requests,
            step_s=(time.monotonic_ns() - started_ns) * 1e-9,
            wait_s=experts.wait_s - wait_s + self._stage_wait_s,
            exposed_s=experts.exposed_s - exposed_s,
            dispatch_bytes=experts.bytes_sent - num_bytes,
            expert_rows=experts.take_counts() if self._count_rows else b"",
            routed=routed,
            forecasts=forecasts,
            prefetch=None if self._prefetcher is None else self._prefetcher.take_counts(),
        )

    def _begin(self, sequences: list[SequenceStep]) -> _MicroBatch | None:
        if not sequences:
            return None
        for sequence in sequences:
            self._tables.update(sequence)
        token_ids = [token for sequence in sequences for token in sequence.token_ids]
        batch, half, stages = self._tables.attention_batch(sequences), self._half, self._stages
        if stages is None or stages.place.is_first:
            x_TH = half.embed(torch.tensor(token_ids, dtype=torch.int64, device=self._device))
        else:
            start_ns = time.monotonic_ns()
            x_TH = stages.take(len(token_ids), half.spec.hidden_size, half.backend.dtype).to(self._device)
            self._recorder.add(RECEIVE, start_ns, next(iter(half.layers)), rows=len(token_ids))
            self._stage_wait_s += (time.monotonic_ns() - start_ns) * 1e-9
        return _MicroBatch(sequences, batch, x_TH, recorded_T=self._routing.recorded_rows(sequences))

    def _run_stage(self, stages: Stages, micro_batches: list[list[SequenceStep]]) -> list[_MicroBatch | None]:
        """The layers of this stage, micro-batch by micro-batch, and what the next stage gets of each."""
        done = []
        for index, sequences in enumerate(micro_batches):
            micro_batch = self._begin(sequences)
            self._run_layers([(index, micro_batch)])
            done.append(micro_batch)
            if micro_batch is None:
                continue
            assert micro_batch.delta_TH is not None, "every layer has a feed-forward"
            x_TH = micro_batch.x_TH + micro_batch.delta_TH
            stages.give(x_TH[_returned(sequences)] if stages.place.is_last else x_TH)
        return done

    def _take_back(self, stages: Stages, micro_batches: list[_MicroBatch | None]) -> list[Tensor | None]:
        """What the last stage returns of each micro-batch, to the first one: then all stages have computed it."""
        start_ns = time.monotonic_ns()
        width, dtype = self._half.spec.hidden_size, self._half.backend.dtype
        came = [
            None if each is None else stages.take(len(_returned(each.sequences)), width, dtype).to(self._device)
            for each in micro_batches
        ]
        self._recorder.add(RECEIVE, start_ns)
        self._stage_wait_s += (time.monotonic_ns() - start_ns) * 1e-9
        return came

    def _run_layers(self, micro_batches: list[tuple[int, _MicroBatch | None]]) -> None:
        for layer in self._half.layers:
            for index, micro_batch in micro_batches:
                if micro_batch is not None:
                    self._collect(index, micro_batch)
                    self._attend(layer, index, micro_batch)
                elif self._shared:
                    self._serve_others(layer, index)
        for index, micro_batch in micro_batches:
            if micro_batch is not None:
                self._collect(index, micro_batch)
            elif self._shared:
                self._serve_others(None, index)

    def _serve_others(self, layer: int | None, index: int) -> None:
        """A micro-batch in which other workers have rows and this one has none: its experts are needed all the same."""
        half = self._half
        before = self._served.pop(index, None)
        if before is not None:
            self._experts.combine(before, index, self._timeout_s)
        if layer is not None and half.routes(layer):
            nothing_K = torch.empty(0, half.spec.router.top_k)
            rows_TH = torch.empty(0, half.spec.hidden_size, dtype=half.backend.dtype)
            self._experts.dispatch(layer, index, rows_TH, nothing_K.int(), nothing_K)
            self._served[index] = layer

    def _attend(self, layer: int, index: int, micro_batch: _MicroBatch) -> None:
        """Attention and gate of one layer, then the dispatch; a dense layer is finished here."""
        half, recorder = self._half, self._recorder
        rows = micro_batch.batch.num_tokens
        start_ns = time.monotonic_ns()
        x_TH, y_TH = half.attend(layer, micro_batch.x_TH, micro_batch.delta_TH, self._cache, micro_batch.batch)
        micro_batch.x_TH, micro_batch.delta_TH = x_TH, None
        if not half.routes(layer):
            local_TH = half.local_feed_forward(layer, y_TH)
            assert local_TH is not None, "a layer without experts has a dense feed-forward"
            micro_batch.delta_TH = half.sum_over_ranks(local_TH)
            recorder.add(ATTENTION, start_ns, layer, index, rows)
            return
        ids_TK, weights_TK = self._routing.choose(layer, y_TH, micro_batch.recorded_T)
        recorder.add(ATTENTION, start_ns, layer, index, rows)
        if self._prefetcher is not None:
            start_ns = time.monotonic_ns()
            forecast = partial(self._routing.forecast, layer, y_TH, micro_batch.recorded_T)
            self._prefetcher.ask(layer, index, ids_TK, forecast)
            recorder.add(PREDICT, start_ns, layer, index, rows)
        start_ns = time.monotonic_ns()
        self._experts.dispatch(layer, index, y_TH, ids_TK, weights_TK)
        recorder.add(DISPATCH, start_ns, layer, index, rows)
        micro_batch.in_flight = layer
        start_ns = time.monotonic_ns()
        micro_batch.local_TH = half.local_feed_forward(layer, y_TH)
        if micro_batch.local_TH is not None:
            recorder.add(ATTENTION, start_ns, layer, index, rows)

    def _collect(self, index: int, micro_batch: _MicroBatch) -> None:
        """Wait for the experts' part of the layer under way, if any, and complete `delta_TH`."""
        layer = micro_batch.in_flight
        if layer is None:
            return
        start_ns = time.monotonic_ns()
        delta_TH = self._experts.combine(layer, index, self._timeout_s)
        if delta_TH.device != micro_batch.x_TH.device:
            delta_TH = delta_TH.to(micro_batch.x_TH.device)
        local_TH = micro_batch.local_TH
        if self._shared and local_TH is not None:
            delta_TH = delta_TH + self._half.sum_over_ranks(local_TH)
        elif not self._shared:
            delta_TH = self._half.sum_over_ranks(delta_TH if local_TH is None else delta_TH + local_TH)
        micro_batch.delta_TH, micro_batch.local_TH, micro_batch.in_flight = delta_TH, None, None
        self._recorder.add(COMBINE, start_ns, layer, index, micro_batch.batch.num_tokens)

    def _sample(
        self, micro_batches: list[_MicroBatch | None], came: list[Tensor | None] | None, bitmasks: dict[str, bytes]
    ) -> list[Sampled]:
        """Logits of the rows that need them, all micro-batches in one product, and the tokens chosen from them. `came`:
        those rows, of each micro-batch, if the last stage of a pipeline has computed them."""
        half, stages = self._half, self._stages
        if stages is not None and not stages.place.is_first:
            return []
        sequences: list[SequenceStep] = []
        parts: list[Tensor] = []
        deltas: list[Tensor] = []
        for number, micro_batch in enumerate(micro_batches):
            rows = [] if micro_batch is None else rows_with_logits(micro_batch.sequences)
            if micro_batch is None or not rows:
                continue
            sequences.extend(s for s in micro_batch.sequences if needs_logits(s))
            if came is not None:
                returned_RH = came[number]
                assert returned_RH is not None, "it has rows"
                parts.append(returned_RH)
                continue
            index = torch.tensor(rows, device=self._device)
            assert micro_batch.delta_TH is not None, "every layer has a feed-forward"
            parts.append(micro_batch.x_TH.index_select(0, index))
            deltas.append(micro_batch.delta_TH.index_select(0, index))
        if not parts:
            return []
        logits_RV = half.head(torch.cat(parts), torch.cat(deltas) if deltas else None)
        return [] if self._sampler is None else self._sampler.sample(logits_RV, sequences, bitmasks)


def _returned(sequences: list[SequenceStep]) -> list[int]:
    """Rows of a micro-batch that the last stage returns: those that need logits, or one. A step that was answered must
    have been computed by all stages: nobody computes it again."""
    return rows_with_logits(sequences) or [0]
