"""Decode steps of a replica on a CPU in one native call: all layers and the head, on buffers that stay.

The first step that qualifies notes which kernels the layers ask for (`kernels/noted_calls`); this one and the later
ones make those calls. A step qualifies if each of its sequences has one row that samples, and the worker holds all
layers and all experts. There is no padding: the same calls are made for as many rows as the step has. Whether a
family's layers can be noted is found out by trying; where PyTorch computes something between the kernels, steps run as
ever.

1. Write the step's integers into the buffers, and the rows of the embedding.
2. Make the calls.
3. Choose tokens from the logits (`RowSampler`).

On a GPU the same is `captured_step`. Rejected: that file for both. Its buckets, its padding and its draws on the device
would each ask which of the two it is.

Letters as in `antiphon.kernels.api`; here T is the most rows of a step, one for each sequence.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.m2n.api import AttentionExchange
from antiphon.cost.kv_blocks import blocks_of
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.noted_calls import CannotNote, NotedCalls
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables, refilled_batch
from antiphon.models.expert_half import ExpertHalf
from antiphon.serve.policy.step import SequenceStep
from antiphon.serve.worker.captured_step import DecodeSteps, decoding_sequences
from antiphon.serve.worker.exchange import LocalExperts
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.spans import ATTENTION, DISPATCH, INPUTS, SAMPLE, SpanRecorder

_log = get_logger("worker")


class _Buffers(NamedTuple):
    """What the calls read, and `logits_TW`, which they make. `numbers`: positions, slots, contexts and block tables of
    the batch, as arrays on its tensors."""

    batch: AttentionBatch
    numbers: list[NDArray[np.int32]]
    x_TH: Tensor
    logits_TW: Tensor
    calls: NotedCalls


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
    if sampler is None or not isinstance(exchange.half, ExpertHalf):
        return None
    return NativeSteps(half, exchange.half, cache, tables, sampler, recorder, most_rows=most_rows)


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
        sampled = self.sampler.sample(buffers.logits_TW[:count], sequences, step.bitmasks)
        recorder.add(SAMPLE, start_ns)
        return sampled

    def _fill(self, buffers: _Buffers, sequences: list[SequenceStep]) -> None:
        """Step 1."""
        count, tables = len(sequences), self.tables
        for sequence in sequences:
            tables.update(sequence)
        longest = max(sequence.start for sequence in sequences) + 1
        rows = tables.decode_rows(sequences, blocks_of(longest, tables.block_size))
        positions, slots, contexts, block_tables = buffers.numbers
        positions[:count], slots[:count] = rows.positions, rows.slots
        np.add(rows.positions, 1, out=contexts[:count])
        block_tables[:count, : rows.tables.shape[1]] = rows.tables
        token_ids = torch.tensor([sequence.token_ids[0] for sequence in sequences])
        buffers.x_TH[:count] = self.half.embed(token_ids)

    def _noted(self) -> _Buffers | None:
        """Note the calls; None where that cannot be done, now and later."""
        rows, calls = self.most_rows, NotedCalls()
        shapes: list[tuple[int, ...]] = [(rows,), (rows,), (rows,), (rows, self.tables.most_blocks)]
        numbers: list[NDArray[np.int32]] = [np.zeros(shape, np.int32) for shape in shapes]
        batch = refilled_batch(*map(torch.from_numpy, numbers), block_size=self.tables.block_size)
        x_TH = torch.zeros((rows, self.half.spec.hidden_size), dtype=self.half.backend.dtype)
        self._spans.clear()
        try:
            logits_TW = calls.note(lambda: self._forward(x_TH, batch, calls))
        except CannotNote as error:
            self._cannot = True
            _log.info("decode steps are not one native call: %s between its kernels", error)
            return None
        _log.info("decode steps of up to %d rows: %d kernels in one native call", rows, len(calls) - len(self._spans))
        self._buffers = _Buffers(batch, numbers, x_TH, logits_TW, calls)
        return self._buffers

    def _forward(self, x_TH: Tensor, batch: AttentionBatch, calls: NotedCalls) -> Tensor:
        """From embedded rows to logits."""
        half, backend = self.half, self.half.backend
        assert isinstance(backend, CpuBackend), "it makes the native calls"
        delta_TH: Tensor | None = None
        for layer in half.layers:
            x_TH, y_TH = half.attend(layer, x_TH, delta_TH, self.cache, batch)
            if half.routes(layer):
                ids_TK, weights_TK = half.gate(layer, y_TH)
                self._mark(calls, ATTENTION, layer)
                delta_TH = self.experts.forward(layer, y_TH, ids_TK, weights_TK)
                self._mark(calls, DISPATCH, layer)
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
