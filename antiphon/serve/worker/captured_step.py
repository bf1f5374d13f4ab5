"""Decode steps without the host between the first layer and the sampled token, so that each is one CUDA graph.

A step qualifies if each of its sequences has one row that samples, and the worker holds all layers and all experts.
Shapes are those of a bucket: rows and blocks a sequence, each rounded up to a power of two. Rows beyond the step's own
are padding: their experts are -1, their keys go to a block that no sequence has, and their tokens are not read.

1. The host writes the step's integers and its draws' parameters into the bucket's buffers: two transfers.
2. All layers, the head and the sampling run on the buffers. Nothing is read back, no shape depends on a value. On a GPU
   a bucket's second step is recorded, and the later ones replay the record; on a CPU, and where recording fails, the
   same calls are made each time.
3. One transfer brings the tokens, or, where a request edits or reports logits (bias, penalties, grammar, log
   probabilities), `RowSampler` takes the logits from there.

A step that does not qualify runs as ever. Rejected: one graph per layer between exchanges (the host would launch as
often as there are layers), and one bucket of the longest context (short sequences would read all of it).

Letters as in `antiphon.kernels.api`; here T is the bucket's rows, one for each sequence; M blocks of a sequence.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.cost.kv_blocks import blocks_of
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import BlockTables, refilled_batch
from antiphon.models.expert_half import ExpertHalf
from antiphon.serve.policy.step import SequenceStep
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.sampling import Draws, RowDraw, draw_on_device

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
        own = self.tables.decode_rows(sequences, blocks)
        heads[0, :count] = [sequence.token_ids[0] for sequence in sequences]
        heads[1, :count], heads[2, :count], tables[:count] = own.positions, own.slots, own.tables
        heads[3, :count] = own.positions + 1
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
