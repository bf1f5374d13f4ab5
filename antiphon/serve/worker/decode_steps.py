"""Decode steps of a replica with little between the first layer and the tokens: one CUDA graph, or one native call.

A step qualifies if each of its sequences has one row that samples, and the worker holds all layers and all experts. A
step that does not qualify runs as ever.

`CapturedSteps`, where there is a GPU. Shapes are those of a bucket: rows and blocks a sequence, each rounded up to a
power of two. Rows beyond the step's own are padding: their experts are -1, their keys go to a block that no sequence
has, and their tokens are not read.

1. The host writes the step's integers and its draws' parameters into the bucket's buffers: two transfers.
2. All layers, the head and the sampling run on the buffers. Nothing is read back, no shape depends on a value. On a GPU
   a bucket's second step is recorded, and the later ones replay the record; on a CPU, and where recording fails, the
   same calls are made each time.
3. One transfer brings the tokens, or, where a request edits or reports logits (bias, penalties, grammar, log
   probabilities), `RowSampler` takes the logits from there.

`NativeSteps`, on a CPU. The first step that qualifies notes which kernels the layers ask for (`kernels/noted_calls`);
this one and the later ones make those calls. There is no padding: the same calls are made for as many rows as the step
has. Whether a family's layers can be noted is found out by trying; where PyTorch computes something between the
kernels, steps run as ever.

1. Write the step's integers into the buffers, and the rows of the embedding.
2. Make the calls.
3. Choose tokens from the logits (`RowSampler`).

Rejected: one graph per layer between exchanges (the host would launch as often as there are layers), one bucket of the
longest context (short sequences would read all of it), and one class for both. The buckets, the padding and the draws
on the device would each ask which of the two it is.

Letters as in `antiphon.kernels.api`; here T is the bucket's rows, one for each sequence, or the most rows of a step; M
blocks of a sequence.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import AttentionExchange
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.noted_calls import CannotNote, NotedCalls
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables, DecodeBuffers, refilled_batch
from antiphon.models.expert_half import ExpertHalf
from antiphon.serve.policy.request import SequenceStep
from antiphon.serve.worker.exchange import LocalExperts
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.sampling import Draws, RowDraw, draw_on_device
from antiphon.serve.worker.spans import ATTENTION, DISPATCH, INPUTS, SAMPLE, SpanRecorder
from antiphon.specs.counts import blocks_of

_log = get_logger("worker")
_cuda: Any = torch.cuda  # its classes have no types
_LEAST_BLOCKS = 8  # of a bucket: fewer graphs, and a short context reads a few keys too many
_INTEGERS_OF_A_ROW = 6  # token, position, slot, context, last rank, greedy; then its blocks


@dataclass(kw_only=True, eq=False)
class _Bucket:
    """Buffers of one pair of sizes, and what was made of them. `host_*` are pinned where there is a GPU."""

    host_integers: Tensor
    host_numbers: Tensor
    integers: Tensor
    numbers: Tensor
    valid_T1: Tensor
    tokens_T: Tensor
    batch: AttentionBatch
    draws: Draws
    graphs: dict[str, Any]  # by form; None: not recorded
    outputs: dict[str, Tensor]
    cannot_record: set[str] = field(default_factory=set)  # forms


@dataclass(eq=False)
class DecodeSteps(ABC):
    """Decode steps of a replica, which has all layers and all experts. Not thread-safe."""

    half: AttentionHalf
    experts: ExpertHalf
    cache: KVCache
    tables: BlockTables
    sampler: RowSampler

    @abstractmethod
    def run(self, step: RunStep) -> list[Sampled] | None:
        """The step's tokens, or None if it does not qualify: nothing has happened then. Its `released` and `starts`
        have been obeyed."""


@dataclass(eq=False)
class CapturedSteps(DecodeSteps):
    """Runs the steps that qualify. `pad_block`: a block of the cache that no sequence has."""

    pad_block: int = field(kw_only=True)
    _buckets: dict[tuple[int, int], _Bucket] = field(default_factory=dict, init=False)
    _has_warned: bool = field(default=False, init=False)
    _pool: Any = field(default=None, init=False)  # memory that all graphs share: one runs at a time

    def __post_init__(self) -> None:
        self._records = self.half.backend.device.type == "cuda"

    def warm_up(self, most_rows: int) -> None:
        """Compile and record the buckets of short contexts, for steps of up to `most_rows` rows, before any request.
        Longer contexts take the same kernels and are recorded in their second step."""
        started, sizes = time.monotonic(), [1 << power for power in range(_rounded(most_rows).bit_length())]
        for rows in sizes:
            bucket = self._bucket(rows, _LEAST_BLOCKS)
            self._fill(bucket, [], [])
            for form in ("greedy", "drawn") * 2:
                self._compute(bucket, form)
        _log.info("decode steps of up to %d rows: ready after %.1f s", sizes[-1], time.monotonic() - started)

    def run(self, step: RunStep) -> list[Sampled] | None:
        if (sequences := decoding_sequences(step)) is None:
            return None
        for sequence in sequences:
            self.tables.update(sequence)
        bucket = self._bucket_of(sequences)
        draws = self.sampler.draws(sequences, step.bitmasks)
        self._fill(bucket, sequences, draws)
        form = "logits" if draws is None else "drawn" if any(not each.params.greedy for each in draws) else "greedy"
        output = self._compute(bucket, form)
        if draws is None:
            return self.sampler.sample(output[: len(sequences)], sequences, step.bitmasks)
        token_ids: list[int] = output[: len(sequences)].tolist()
        return [Sampled(each.request_id, token) for each, token in zip(sequences, token_ids, strict=True)]

    def _compute(self, bucket: _Bucket, form: str) -> Tensor:
        """Step 2; the output belongs to the bucket, until the same form runs again."""
        if not self._records:
            return self.forward(bucket, form)
        if form not in bucket.graphs:
            bucket.graphs[form] = None  # the first time everything is compiled, loaded and warmed: not recorded
            return self.forward(bucket, form)
        if bucket.graphs[form] is None and form not in bucket.cannot_record:
            self._capture(bucket, form)
        if bucket.graphs[form] is None:
            return self.forward(bucket, form)
        bucket.graphs[form].replay()
        return bucket.outputs[form]

    def _capture(self, bucket: _Bucket, form: str) -> None:
        """Record this form; one that cannot be recorded (memory, a call that asks the host) is computed as on a CPU."""
        graph = _cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with _cuda.graph(graph, pool=self._pool):
                bucket.outputs[form] = self.forward(bucket, form)
        except RuntimeError as error:
            bucket.cannot_record.add(form)
            if not self._has_warned:
                _log.warning("a decode step cannot be recorded and is launched kernel by kernel: %s", error)
                self._has_warned = True
            return
        self._pool = self._pool or graph.pool()
        bucket.graphs[form] = graph
        rows, blocks = bucket.batch.block_tables_SB.shape
        _log.info("recorded a decode step of %d rows and %d blocks a sequence (%s)", rows, blocks, form)

    def forward(self, bucket: _Bucket, form: str) -> Tensor:
        """From the bucket's buffers to token ids [T], or to logits. Asks the host nothing."""
        self.half.backend.asks_host = False
        try:
            return self._forward(bucket, form)
        finally:
            self.half.backend.asks_host = True

    def _forward(self, bucket: _Bucket, form: str) -> Tensor:
        half, batch = self.half, bucket.batch
        x_TH = half.embed(bucket.tokens_T)
        delta_TH: Tensor | None = None
        for layer in half.layers:
            x_TH, y_TH = half.attend(layer, x_TH, delta_TH, self.cache, batch)
            delta_TH = half.local_feed_forward(layer, y_TH)
            if half.routes(layer):
                ids_TK, weights_TK = half.gate(layer, y_TH)
                ids_TK = torch.where(bucket.valid_T1, ids_TK, -1)
                routed_TH = self.experts.forward(layer, y_TH, ids_TK, weights_TK)
                delta_TH = routed_TH if delta_TH is None else routed_TH + delta_TH
        logits_TW = half.head(x_TH, delta_TH)
        if form == "logits":
            return logits_TW
        return logits_TW.argmax(dim=-1) if form == "greedy" else draw_on_device(logits_TW, bucket.draws)

    # --- buffers

    def _bucket_of(self, sequences: list[SequenceStep]) -> _Bucket:
        num_blocks = blocks_of(max(sequence.start for sequence in sequences) + 1, self.tables.block_size)
        return self._bucket(_rounded(len(sequences)), max(_LEAST_BLOCKS, _rounded(num_blocks)))

    def _bucket(self, rows: int, blocks: int) -> _Bucket:
        if (rows, blocks) not in self._buckets:
            self._buckets[rows, blocks] = self._new_bucket(rows, blocks)
        return self._buckets[rows, blocks]

    def _new_bucket(self, rows: int, blocks: int) -> _Bucket:
        device = self.half.backend.device
        pinned = device.type == "cuda"
        host_integers = torch.zeros(rows * (_INTEGERS_OF_A_ROW + blocks), dtype=torch.int32, pin_memory=pinned)
        host_numbers = torch.zeros(4 * rows, dtype=torch.float64, pin_memory=pinned)
        integers, numbers = (torch.zeros_like(each, device=device) for each in (host_integers, host_numbers))
        tokens_T, positions_T, slots_T, contexts_T, last_ranks_T, greedy_T = integers[: rows * _INTEGERS_OF_A_ROW].view(
            _INTEGERS_OF_A_ROW, rows
        )
        temperatures_T, top_ps_T, min_ps_T, uniforms_T = numbers.view(4, rows)
        tables_TM = integers[rows * _INTEGERS_OF_A_ROW :].view(rows, blocks)
        return _Bucket(
            host_integers=host_integers,
            host_numbers=host_numbers,
            integers=integers,
            numbers=numbers,
            valid_T1=torch.zeros((rows, 1), dtype=torch.bool, device=device),
            tokens_T=tokens_T,
            batch=refilled_batch(positions_T, slots_T, contexts_T, tables_TM, block_size=self.tables.block_size),
            draws=Draws(temperatures_T, last_ranks_T, top_ps_T, min_ps_T, uniforms_T, greedy_T),
            graphs={},
            outputs={},
        )

    def _fill(self, bucket: _Bucket, sequences: list[SequenceStep], draws: list[RowDraw] | None) -> None:
        """Step 1."""
        rows, blocks = bucket.batch.block_tables_SB.shape
        count, pad_slot = len(sequences), self.pad_block * self.tables.block_size
        integers = bucket.host_integers.numpy()
        heads = integers[: rows * _INTEGERS_OF_A_ROW].reshape(_INTEGERS_OF_A_ROW, rows)
        tables = integers[rows * _INTEGERS_OF_A_ROW :].reshape(rows, blocks)
        heads[:, count:] = np.array([[0], [0], [pad_slot], [1], [0], [1]])
        tables[count:] = self.pad_block
        positions, slots, own_tables = self.tables.decode_rows(sequences, blocks)
        heads[0, :count] = [sequence.token_ids[0] for sequence in sequences]
        heads[1, :count], heads[2, :count], tables[:count] = positions, slots, own_tables
        heads[3, :count] = positions + 1
        numbers = bucket.host_numbers.numpy().reshape(4, rows)
        numbers[:] = np.array([[1.0], [1.0], [0.0], [0.0]])
        vocabulary = self.half.spec.vocab_size
        for row, draw in enumerate(draws or ()):
            params = draw.params
            heads[4, row], heads[5, row] = draw.last_rank(vocabulary), params.greedy
            numbers[:, row] = 1.0 if params.greedy else params.temperature, params.top_p, params.min_p, draw.uniform
        bucket.integers.copy_(bucket.host_integers, non_blocking=True)
        bucket.numbers.copy_(bucket.host_numbers, non_blocking=True)
        bucket.valid_T1.copy_((bucket.integers[2 * rows : 3 * rows] != pad_slot).unsqueeze(1))


def decoding_sequences(step: RunStep) -> list[SequenceStep] | None:
    """Its sequences if all are in one micro-batch, and have one row each, which samples and reports no prompt."""
    filled = [each for each in step.micro_batches if each]
    if len(filled) != 1:
        return None
    for sequence in filled[0]:
        if len(sequence.token_ids) != 1 or not sequence.samples or sequence.logprob_begin != sequence.logprob_end:
            return None
    return filled[0]


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()


class _Buffers(NamedTuple):
    """What the calls read, and `logits_TW`, which they make. `numbers` are those of `batch`; `embed` writes the first
    layer's rows. `largest`: a call of its own, which makes the tokens of the largest logits in `tokens`."""

    batch: AttentionBatch
    numbers: DecodeBuffers
    embed: Callable[[list[int]], None]
    logits_TW: Tensor
    calls: NotedCalls
    largest: NotedCalls
    tokens: "memoryview[int]"


def native_steps(
    half: AttentionHalf,
    exchange: AttentionExchange,
    cache: KVCache,
    tables: BlockTables,
    sampler: RowSampler | None,
    recorder: SpanRecorder,
    *,
    most_rows: int,
) -> "NativeSteps | None":
    """None where rows leave the process between two layers, or other kernels compute."""
    is_whole = half.ranks.size == 1 and half.output_head is not None
    if not (is_whole and isinstance(half.backend, CpuBackend) and isinstance(exchange, LocalExperts)):
        return None
    if sampler is None or not isinstance(exchange.experts, ExpertHalf):
        return None
    return NativeSteps(half, exchange.experts, cache, tables, sampler, recorder, most_rows=most_rows)


@dataclass(eq=False)
class NativeSteps(DecodeSteps):
    """Runs the steps that qualify, of up to `most_rows` rows."""

    recorder: SpanRecorder
    most_rows: int = field(kw_only=True)
    _buffers: _Buffers | None = field(default=None, init=False)
    _cannot: bool = field(default=False, init=False)
    _spans: list[tuple[int, int]] = field(default_factory=list, init=False)  # name and layer of each time of a step

    def run(self, step: RunStep) -> list[Sampled] | None:
        sequences = decoding_sequences(step)
        if sequences is None or self._cannot or len(sequences) > self.most_rows:
            return None
        buffers = self._buffers or self._noted()
        if buffers is None:
            return None
        start_ns, count, recorder = time.monotonic_ns(), len(sequences), self.recorder
        self._fill(buffers, sequences)
        recorder.add(INPUTS, start_ns, rows=count)
        recorder.add_all(self._spans, buffers.calls.run(count).tobytes(), rows=count)
        start_ns = time.monotonic_ns()
        sampled = self._sample(buffers, sequences, step.bitmasks)
        recorder.add(SAMPLE, start_ns)
        return sampled

    def _fill(self, buffers: _Buffers, sequences: list[SequenceStep]) -> None:
        """Step 1."""
        for sequence in sequences:
            self.tables.update(sequence)
        self.tables.write_decode_rows(sequences, buffers.numbers)
        buffers.embed([sequence.token_ids[0] for sequence in sequences])

    def _sample(self, buffers: _Buffers, sequences: list[SequenceStep], bitmasks: dict[str, bytes]) -> list[Sampled]:
        """Step 3."""
        count, request_ids = len(sequences), [sequence.request_id for sequence in sequences]
        if not self.sampler.takes_largest(request_ids, bitmasks):
            return self.sampler.sample(buffers.logits_TW[:count], sequences, bitmasks)
        buffers.largest.run(count)
        return list(map(Sampled, request_ids, buffers.tokens[:count].tolist()))

    def _noted(self) -> _Buffers | None:
        """Note the calls; None where that cannot be done, now and later."""
        rows, calls, largest = self.most_rows, NotedCalls(), NotedCalls()
        shapes: list[tuple[int, ...]] = [(rows,), (rows,), (rows,), (rows, self.tables.most_blocks)]
        numbers: list[NDArray[np.int32]] = [np.zeros(shape, np.int32) for shape in shapes]
        batch = refilled_batch(*map(torch.from_numpy, numbers), block_size=self.tables.block_size)
        x_TH = torch.zeros((rows, self.half.spec.hidden_size), dtype=self.half.backend.dtype)
        self._spans.clear()
        try:
            logits_TW = calls.note(lambda: self._forward(x_TH, batch, calls))
            tokens_T = largest.note(lambda: self._backend.argmax_rows(logits_TW))
        except CannotNote as error:
            self._cannot = True
            _log.info("decode steps are not one native call: %s between its kernels", error)
            return None
        _log.info("decode steps of up to %d rows: %d kernels in one native call", rows, len(calls) - len(self._spans))
        buffers = DecodeBuffers(*(each.reshape(-1).data for each in numbers))
        embed, tokens = self.half.embedder(x_TH), tokens_T.numpy().data
        self._buffers = _Buffers(batch, buffers, embed, logits_TW, calls, largest, tokens)
        return self._buffers

    @property
    def _backend(self) -> CpuBackend:
        assert isinstance(self.half.backend, CpuBackend), "it makes the native calls"
        return self.half.backend

    def _forward(self, x_TH: Tensor, batch: AttentionBatch, calls: NotedCalls) -> Tensor:
        """From embedded rows to logits."""
        half, backend = self.half, self._backend
        delta_TH: Tensor | None = None
        for layer in half.layers:
            x_TH, y_TH = half.attend(layer, x_TH, delta_TH, self.cache, batch)
            if half.routes(layer):
                ids_TK, weights_TK = half.gate(layer, y_TH)
                self._mark(calls, ATTENTION, layer)
                delta_TH = self.experts.forward(layer, y_TH, ids_TK, weights_TK)
                self._mark(calls, DISPATCH, layer)  # as `LocalExperts`, which computes in its dispatch
                if (local_TH := half.local_feed_forward(layer, y_TH)) is not None:
                    delta_TH = backend.add_rows(delta_TH, local_TH)
                    self._mark(calls, ATTENTION, layer)
            else:
                delta_TH = half.dense_feed_forward(layer, y_TH)
                self._mark(calls, ATTENTION, layer)
            calls.next_layer()
        logits_TW = half.head(x_TH, delta_TH)
        self._mark(calls, SAMPLE, -1)
        return logits_TW

    def _mark(self, calls: NotedCalls, name: int, layer: int) -> None:
        calls.mark()
        self._spans.append((name, layer))
