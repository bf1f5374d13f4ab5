"""One step of an attention worker: micro-batches shuttled between attention here and experts elsewhere.

Ping-pong (MegaScale-Infer, section 4.1): for each layer, for each micro-batch i: combine what the experts made of its
previous layer, compute attention and gate, dispatch, go on with micro-batch i+1. While the experts work on i, this
worker is busy with the others. The shared expert runs right after the dispatch, hidden behind the exchange.

How rows travel is the business of `worker/exchange`. Which layers are here is that of the process's place among the
stages of its worker. `AllLayers` embeds tokens, runs all micro-batches in turns, and samples from what the last layer
made. `PipelineStage` has some of the layers, and runs one micro-batch after another, so that the next stage can begin
with the first one; the rows that need logits come back to the first stage, which samples (`comm/stages`).

A worker may be a group of ranks: its leader passes each step on, and all make the same calls on their parts of the
model.

A micro-batch's whole state between layers is (x, delta): the residual stream and what the feed-forward adds to it. So
a step can be repeated from its plan alone: keys and values are written again at the same places, with the same bits.

Rejected: steps from the engine to every rank (its thread would send each one as often as there are ranks); one class
with a pipeline that may be missing, each of whose methods would ask first.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
from torch import Tensor

from antiphon import _native
from antiphon.comm.rank_group import RankGroup
from antiphon.comm.stages import Stages
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables
from antiphon.placement.split import IntArray
from antiphon.serve.policy.request import PENDING, SequenceStep
from antiphon.serve.worker.decode_steps import DecodeSteps
from antiphon.serve.worker.endpoints import hear_leader
from antiphon.serve.worker.exchange import RowRouting, StepExchange
from antiphon.serve.worker.kv_transfer import KVSender
from antiphon.serve.worker.messages import RunStep, Sampled, StepResult
from antiphon.serve.worker.row_sampler import RowSampler, needs_logits, rows_with_logits
from antiphon.serve.worker.spans import ATTENTION, HAND_OVER, INPUTS, RECEIVE, SAMPLE, STEP, SpanRecorder

_ENCODER = msgspec.msgpack.Encoder()
_DECODE_STEP = msgspec.msgpack.Decoder(RunStep)
_FLUSH_WORTH_SHOWING_NS = 20_000


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch on its way through the layers. Between two layers (x, delta) is its whole state."""

    sequences: list[SequenceStep]
    batch: AttentionBatch
    x_TH: Tensor
    delta_TH: Tensor | None = None  # complete: to be added to x by the next layer
    local_TH: Tensor | None = None  # the shared expert's part, while the experts' part is under way
    in_flight: int | None = None  # layer whose experts still owe their part
    recorded_T: IntArray | None = None  # rows of a record whose experts these rows go to
    prompt_T: Tensor | None = None  # 1 for rows of prompts, if there are any and they are counted


Numbered = tuple[int, list[SequenceStep]]  # a micro-batch's number in the step, and its sequences


@dataclass(eq=False)
class AllLayers:
    """The place of a process that has all layers. `sampler` None: the leader samples, and knows the requests. `wait_s`:
    spent in this step waiting for other stages."""

    half: AttentionHalf
    sampler: RowSampler | None
    wait_s: float = field(default=0.0, init=False)

    def begin_step(self, step: RunStep) -> None:
        """Forget requests that ended, add those that start."""
        self.wait_s = 0.0
        if self.sampler is not None:
            for request_id in step.released:
                self.sampler.remove(request_id)
            for start in step.starts:
                self.sampler.add(start)

    def rounds(self, micro_batches: list[list[SequenceStep]]) -> list[list[Numbered]]:
        """The micro-batches that take turns in the layers, round by round: here all of them at once."""
        return [list(enumerate(micro_batches))]

    def rows(self, token_ids: list[int]) -> Tensor:
        """[T, H]: what the first layer of this process begins with."""
        return self.half.embed(torch.tensor(token_ids, dtype=torch.int64, device=self.half.backend.device))

    def pass_on(self, micro_batch: MicroBatch) -> None:
        """The layers of this process are done with `micro_batch`."""

    def take_back(self, micro_batches: list[MicroBatch]) -> None:
        """Wait for the stages behind this one."""

    def sample(self, micro_batches: list[MicroBatch], bitmasks: dict[str, bytes]) -> list[Sampled]:
        """Logits of the rows that need them, all micro-batches in one product, and the tokens chosen from them."""
        micro_batches = [each for each in micro_batches if any(map(needs_logits, each.sequences))]
        if not micro_batches:
            return []
        logits_RV = self._logits(micro_batches)
        sequences = [each for micro_batch in micro_batches for each in micro_batch.sequences if needs_logits(each)]
        return [] if self.sampler is None else self.sampler.sample(logits_RV, sequences, bitmasks)

    def _logits(self, micro_batches: list[MicroBatch]) -> Tensor:
        parts, deltas = list[Tensor](), list[Tensor]()
        for each in micro_batches:
            assert each.delta_TH is not None, "every layer has a feed-forward"
            index = torch.tensor(rows_with_logits(each.sequences), device=self.half.backend.device)
            parts.append(each.x_TH.index_select(0, index))
            deltas.append(each.delta_TH.index_select(0, index))
        return self.half.head(torch.cat(parts), torch.cat(deltas))


@dataclass(eq=False)
class PipelineStage(AllLayers):
    """The place of a process that has the layers of one stage; `stages` connects it to the others."""

    stages: Stages
    recorder: SpanRecorder

    def rounds(self, micro_batches: list[list[SequenceStep]]) -> list[list[Numbered]]:
        """One micro-batch a round."""
        return [[each] for each in enumerate(micro_batches)]

    def rows(self, token_ids: list[int]) -> Tensor:
        """[T, H]: embedded in the first stage, else what the stage before made. Waits for it."""
        if self.stages.place.is_first:
            return super().rows(token_ids)
        start_ns = time.monotonic_ns()
        x_TH = self._take(len(token_ids))
        self.recorder.add(RECEIVE, start_ns, next(iter(self.half.layers)), rows=len(token_ids))
        self.wait_s += (time.monotonic_ns() - start_ns) * 1e-9
        return x_TH

    def pass_on(self, micro_batch: MicroBatch) -> None:
        """Give the next stage all rows; the last one gives the first stage those that it wants."""
        assert micro_batch.delta_TH is not None, "every layer has a feed-forward"
        x_TH = micro_batch.x_TH + micro_batch.delta_TH
        self.stages.give(x_TH[_returned(micro_batch)] if self.stages.place.is_last else x_TH)

    def take_back(self, micro_batches: list[MicroBatch]) -> None:
        """In the first stage: the last one's rows, [R, H], in place of each micro-batch's. Then all stages have
        computed the step."""
        if not self.stages.place.is_first:
            return
        start_ns = time.monotonic_ns()
        for each in micro_batches:
            each.x_TH, each.delta_TH = self._take(len(_returned(each))), None
        self.recorder.add(RECEIVE, start_ns)
        self.wait_s += (time.monotonic_ns() - start_ns) * 1e-9

    def sample(self, micro_batches: list[MicroBatch], bitmasks: dict[str, bytes]) -> list[Sampled]:
        return super().sample(micro_batches, bitmasks) if self.stages.place.is_first else []

    def _logits(self, micro_batches: list[MicroBatch]) -> Tensor:
        return self.half.head(torch.cat([each.x_TH for each in micro_batches]), None)

    def _take(self, num_rows: int) -> Tensor:
        width, dtype = self.half.spec.hidden_size, self.half.backend.dtype
        return self.stages.take(num_rows, width, dtype).to(self.half.backend.device)


def _returned(micro_batch: MicroBatch) -> list[int]:
    """Rows that the last stage returns: those that need logits, or one. Once a step is answered no stage computes it
    again, so every stage must have computed it by then."""
    return rows_with_logits(micro_batch.sequences) or [0]


@dataclass(eq=False)
class AttentionRunner:
    """Runs steps over the attention half of `stage` and its KV cache. `sender`: takes keys and values that other
    workers are to have, layer by layer. `decode_steps`: runs the steps that need no host, or no Python, between
    the first layer and the logits. Not thread-safe."""

    exchange: StepExchange
    cache: KVCache
    tables: BlockTables
    stage: AllLayers
    routing: RowRouting
    sender: KVSender | None = None
    decode_steps: DecodeSteps | None = None
    half: AttentionHalf = field(init=False)
    recorder: SpanRecorder = field(init=False)
    _newest: list[Sampled] = field(default_factory=list, init=False)  # what the last step sampled

    def __post_init__(self) -> None:
        self.half, self.recorder = self.stage.half, self.exchange.recorder

    @torch.inference_mode()
    def run(self, step: RunStep) -> StepResult | None:
        """Compute all micro-batches of the step and sample. Raises `StepAborted` or `PeerTimeout` from the exchange;
        the same step may then be run again. Nothing reads the step's pages afterwards. None, and nothing has happened:
        it was planned behind a step that failed, and the engine sends both again."""
        newest, self._newest = self._newest, []
        known = []
        for sequences in step.micro_batches:
            if (found := with_sampled(sequences, newest)) is None:
                return None
            known.append(found)
        result = self._run_known(msgspec.structs.replace(step, micro_batches=known))
        self._newest = result.requests
        return result

    def _run_known(self, step: RunStep) -> StepResult:
        self._open(step)
        try:
            result = self._run(step)
        except BaseException:
            self._flush()
            raise
        return result if self.sender is None else msgspec.structs.replace(result, hand_over_s=self._flush())

    def _open(self, step: RunStep) -> None:
        """Some of its keys and values may be for other workers."""
        if self.sender is not None:
            self.sender.open(step.offers)

    def _flush(self) -> float:
        """Wait until what was computed for other workers has left the pages; seconds."""
        if self.sender is None:
            return 0.0
        flush_ns = time.monotonic_ns()
        self.sender.flush()
        flushed_ns = time.monotonic_ns() - flush_ns
        if flushed_ns > _FLUSH_WORTH_SHOWING_NS:
            self.recorder.add(HAND_OVER, flush_ns)
        return flushed_ns * 1e-9

    def _run(self, step: RunStep) -> StepResult:
        started_ns = time.monotonic_ns()
        exchange, stage, recorder = self.exchange, self.stage, self.recorder
        recorder.step = step.step
        self.routing.begin_step()
        stage.begin_step(step)
        exchange.begin_step(step)
        if self.decode_steps is not None and (sampled := self.decode_steps.run(step)) is not None:
            _native.release_core()  # for the engine, which would take this thread's
            for layer in self.half.layers if self.sender is not None else ():
                for sequences in step.micro_batches:
                    self._give(layer, sequences)
            return self._result(sampled, started_ns, sum(map(len, step.micro_batches)))
        done: list[MicroBatch] = []
        for numbered in stage.rounds(step.micro_batches):
            micro_batches = [(index, self._begin(sequences)) for index, sequences in numbered]
            self._run_layers(micro_batches)
            for _, micro_batch in micro_batches:
                if micro_batch is not None:
                    stage.pass_on(micro_batch)
                    done.append(micro_batch)
        stage.take_back(done)
        sample_ns = time.monotonic_ns()
        requests = stage.sample(done, step.bitmasks)
        _native.release_core()
        recorder.add(SAMPLE, sample_ns)
        return self._result(requests, started_ns, sum(each.batch.num_tokens for each in done))

    def _result(self, requests: list[Sampled], started_ns: int, rows: int) -> StepResult:
        exchange, stage = self.exchange, self.stage
        dispatch_bytes = exchange.bytes_sent  # first: in stream order it waits until the times are known
        routed, forecasts = self.routing.of_step()
        self.recorder.add(STEP, started_ns, rows=rows)
        return StepResult(
            step=self.recorder.step,
            requests=requests,
            step_s=(time.monotonic_ns() - started_ns) * 1e-9,
            wait_s=exchange.wait_s + stage.wait_s,
            exposed_s=exchange.exposed_s,
            dispatch_bytes=dispatch_bytes,
            expert_rows=exchange.take_counts(),
            routed=routed,
            forecasts=forecasts,
            prompt_rows=self.routing.prompt_counts(),
            prefetch=exchange.take_prefetch_counts(),
        )

    def _begin(self, sequences: list[SequenceStep]) -> MicroBatch | None:
        if not sequences:
            return None
        start_ns = time.monotonic_ns()
        for sequence in sequences:
            self.tables.update(sequence)
        batch = self.tables.attention_batch(sequences)
        x_TH = self.stage.rows([token for sequence in sequences for token in sequence.token_ids])
        self.recorder.add(INPUTS, start_ns, rows=batch.num_tokens)
        return MicroBatch(
            sequences,
            batch,
            x_TH,
            recorded_T=self.routing.recorded_rows(sequences),
            prompt_T=self.routing.prompt_rows(sequences),
        )

    def _run_layers(self, micro_batches: list[tuple[int, MicroBatch | None]]) -> None:
        for layer in self.half.layers:
            for index, micro_batch in micro_batches:
                if micro_batch is None:
                    self.exchange.serve_others(layer, index)
                else:
                    self._collect(index, micro_batch)
                    self._attend(layer, index, micro_batch)
        for index, micro_batch in micro_batches:
            if micro_batch is None:
                self.exchange.serve_others(None, index)
            else:
                self._collect(index, micro_batch)

    def _attend(self, layer: int, index: int, micro_batch: MicroBatch) -> None:
        """Attention and gate of one layer, then the dispatch; a dense layer is finished here."""
        half, recorder, rows = self.half, self.recorder, micro_batch.batch.num_tokens
        start_ns = time.monotonic_ns()
        x_TH, y_TH = half.attend(layer, micro_batch.x_TH, micro_batch.delta_TH, self.cache, micro_batch.batch)
        micro_batch.x_TH, micro_batch.delta_TH = x_TH, None
        self._give(layer, micro_batch.sequences)
        if not half.routes(layer):
            micro_batch.delta_TH = half.dense_feed_forward(layer, y_TH)
            recorder.add(ATTENTION, start_ns, layer, index, rows)
            return
        choices = self.routing.choose(layer, y_TH, micro_batch.recorded_T, micro_batch.prompt_T)
        recorder.add(ATTENTION, start_ns, layer, index, rows)
        self.exchange.dispatch(layer, index, y_TH, choices)
        micro_batch.in_flight = layer
        start_ns = time.monotonic_ns()
        micro_batch.local_TH = half.local_feed_forward(layer, y_TH)
        if micro_batch.local_TH is not None:
            recorder.add(ATTENTION, start_ns, layer, index, rows)

    def _give(self, layer: int, sequences: list[SequenceStep]) -> None:
        """The keys and values of this layer are in the pages; not waiting."""
        if self.sender is None:
            return
        for sequence in sequences:
            until = sequence.start + len(sequence.token_ids)
            blocks = partial(self.tables.blocks, sequence.slot, until)
            self.sender.layer_done(sequence.request_id, layer, until, blocks)

    def _collect(self, index: int, micro_batch: MicroBatch) -> None:
        """Wait for the experts' part of the layer under way, if any, and complete `delta_TH`."""
        if micro_batch.in_flight is None:
            return
        micro_batch.delta_TH = self.exchange.combine(micro_batch.in_flight, index, micro_batch.local_TH)
        micro_batch.local_TH, micro_batch.in_flight = None, None


def with_sampled(sequences: list[SequenceStep], newest: list[Sampled]) -> list[SequenceStep] | None:
    """A micro-batch with the tokens that the step before it sampled in the place of each `PENDING`. None if that step
    sampled nothing for one of them."""
    if all(each.token_ids != (PENDING,) for each in sequences):
        return sequences
    tokens = {each.request_id: each.token_id for each in newest}
    known = []
    for each in sequences:
        if each.token_ids != (PENDING,):
            known.append(each)
        elif (token_id := tokens.get(each.request_id)) is None:
            return None
        else:
            where, reported = each[3:6], each[6:]  # `_replace` takes twice as long
            known.append(SequenceStep(each.request_id, each.slot, (token_id,), *where, *reported))
    return known


@dataclass(eq=False)
class AttentionRanks:
    """Several ranks that run the engine's steps together. A worker of one rank uses `AttentionRunner` alone."""

    ranks: RankGroup
    runner: AttentionRunner

    def run(self, step: RunStep) -> StepResult | None:
        """Lead one step, see `AttentionRunner.run`. Followers do not sample, so they get nothing of what that takes."""
        passed_on = msgspec.structs.replace(step, released=[], starts=[], bitmasks={})
        self.ranks.broadcast_bytes(_ENCODER.encode(passed_on))
        return self.runner.run(step)

    def serve_one(self, idle_s: float, timeout_s: float) -> bool:
        """Follow one step of the leader; False if none came within `idle_s`. Raises as the leader's collectives do."""
        heard = hear_leader(self.ranks, idle_s)
        if heard is None:
            return False
        self.runner.run(_DECODE_STEP.decode(heard))
        return True
