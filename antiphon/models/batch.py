"""What attention has to know of a micro-batch: an `AttentionBatch` from the scheduler's plain integers.

A handful of numpy calls, and one copy to the device. Letters as in `antiphon.kernels.api`; B blocks of the longest
sequence.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from antiphon.kernels.api import AttentionBatch
from antiphon.specs.counts import blocks_of

Ints = npt.NDArray[np.int32]


class SequenceRows(Protocol):
    """New rows of one sequence, from position `start` on, and the blocks that its table gets for them."""

    @property
    def slot(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def start(self) -> int: ...

    @property
    def first_new_block(self) -> int: ...

    @property
    def new_blocks(self) -> Sequence[int]: ...


class BlockTables:
    """A worker's copy of every request's block table, and the attention metadata built from it.

    The engine sends only newly appended blocks. One row per slot of the scheduler; `num_slots` bounds the number of
    running requests. All tables are one int32 matrix, so that the metadata of a micro-batch of a thousand sequences is
    a few array operations instead of a Python loop."""

    def __init__(self, block_size: int, num_slots: int, max_blocks_per_request: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        self._table = np.zeros((num_slots, max_blocks_per_request), dtype=np.int32)
        self._flat = self._table.reshape(-1).data

    def update(self, sequence: SequenceRows) -> None:
        """Write the blocks that came with a step; writing the same step twice changes nothing."""
        if sequence.new_blocks:
            first = sequence.first_new_block
            self._table[sequence.slot, first : first + len(sequence.new_blocks)] = sequence.new_blocks

    @property
    def most_blocks(self) -> int:
        """The most blocks that a request may have."""
        return self._table.shape[1]

    def blocks(self, slot: int, num_tokens: int) -> Tensor:
        """The blocks of the first tokens in that slot, int32 in host memory; a copy."""
        return torch.from_numpy(self._table[slot, : blocks_of(num_tokens, self.block_size)].copy())

    def attention_batch(self, sequences: Sequence[SequenceRows]) -> AttentionBatch:
        """Metadata of one micro-batch; its rows are the sequences' tokens, one sequence after the other."""
        queries = np.fromiter((len(s.token_ids) for s in sequences), np.int32, len(sequences))
        contexts = np.fromiter((s.start for s in sequences), np.int32, len(sequences)) + queries
        slots = np.fromiter((s.slot for s in sequences), np.int64, len(sequences))
        tables = self._table[slots, : blocks_of(int(contexts.max()), self.block_size)]
        return _batch(queries, contexts, tables, self.block_size, self._device)

    def decode_rows(self, sequences: Sequence[SequenceRows], num_blocks: int) -> tuple[Ints, Ints, Ints]:
        """(positions [S], cache slots [S], block tables [S, `num_blocks`]) of sequences with one new row each, in host
        memory; columns of a table beyond the sequence's own are any."""
        positions = np.fromiter((s.start for s in sequences), np.int32, len(sequences))
        numbers = np.fromiter((s.slot for s in sequences), np.int64, len(sequences))
        tables = np.zeros((len(sequences), num_blocks), np.int32)
        known = self._table[numbers, :num_blocks]
        tables[:, : known.shape[1]] = known
        blocks = tables[np.arange(len(sequences)), positions // self.block_size]
        return positions, blocks * np.int32(self.block_size) + positions % self.block_size, tables

    def write_decode_rows(self, sequences: Sequence[SequenceRows], into: "DecodeBuffers") -> None:
        """The same, into the first rows of buffers.

        Python's own integers: after a step's weights have passed the caches, each operation of NumPy or PyTorch takes
        20 to 100 µs, because its code and its tables come from memory."""
        count, size, width, table = len(sequences), self.block_size, self.most_blocks, self._flat
        starts = [sequence.start for sequence in sequences]
        firsts = [sequence.slot * width for sequence in sequences]
        slots = [
            table[first + start // size] * size + start % size for first, start in zip(firsts, starts, strict=True)
        ]
        into.positions[:count] = array("i", starts)
        into.contexts[:count] = array("i", [start + 1 for start in starts])
        into.slots[:count] = array("i", slots)
        for own, first, start in zip(range(0, count * width, width), firsts, starts, strict=True):
            num_blocks = start // size + 1
            into.tables[own : own + num_blocks] = table[first : first + num_blocks]


class DecodeBuffers(NamedTuple):
    """int32 memory of positions, cache slots, context lengths and block tables, of as many rows as there may be; the
    tables are flat, each as wide as the longest."""

    positions: "memoryview[int]"
    slots: "memoryview[int]"
    contexts: "memoryview[int]"
    tables: "memoryview[int]"


def refilled_batch(
    positions_T: Tensor, slots_T: Tensor, context_lens_T: Tensor, block_tables_TB: Tensor, *, block_size: int
) -> AttentionBatch:
    """One row a sequence on buffers that get the values of one step after another (`AttentionBatch.refilled`)."""
    rows, most_blocks = block_tables_TB.shape
    return AttentionBatch(
        positions_T=positions_T,
        slots_T=slots_T,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device=slots_T.device),
        context_lens_S=context_lens_T,
        block_tables_SB=block_tables_TB,
        query_lens=(1,) * rows,
        context_lens=(most_blocks * block_size,) * rows,
        refilled=True,
    )


def make_attention_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str,
) -> AttentionBatch:
    """Rows of sequence s are its last `query_lens[s]` of `context_lens[s]` tokens; its blocks must cover them all."""
    queries = np.fromiter(query_lens, np.int32, len(query_lens))
    contexts = np.fromiter(context_lens, np.int32, len(query_lens))
    return _batch(queries, contexts, _padded_tables(block_tables), block_size, torch.device(device))


def _batch(queries: Ints, contexts: Ints, tables: Ints, block_size: int, device: torch.device) -> AttentionBatch:
    """`tables` [S, B]."""
    starts = _starts(queries)
    owners = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    positions = np.arange(starts[-1], dtype=np.int32) + (contexts - queries - starts[:-1])[owners]
    slots = tables[owners, positions // block_size] * np.int32(block_size) + positions % block_size
    flat = _to_device([positions, slots, starts, contexts, tables.reshape(-1)], device)
    return AttentionBatch(
        positions_T=flat[0],
        slots_T=flat[1],
        query_starts=flat[2],
        context_lens_S=flat[3],
        block_tables_SB=flat[4].view(tables.shape),
        query_lens=tuple(queries.tolist()),
        context_lens=tuple(contexts.tolist()),
    )


def _starts(query_lens: npt.ArrayLike) -> Ints:
    """The first row of each sequence, and the number of all rows."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(query_lens, dtype=np.int32)))


def select_sequences(batch: AttentionBatch, sequences: Sequence[int]) -> tuple[Tensor, AttentionBatch]:
    """The rows [T'] of the chosen sequences, and the batch they make on their own."""
    device = batch.slots_T.device
    query_lens = [batch.query_lens[s] for s in sequences]
    starts = _starts(batch.query_lens)
    rows = np.concatenate([np.arange(starts[s], starts[s + 1], dtype=np.int32) for s in sequences])
    rows_T, chosen_S, starts_S = _to_device([rows, np.asarray(sequences, np.int32), _starts(query_lens)], device)
    return rows_T, AttentionBatch(
        positions_T=batch.positions_T.index_select(0, rows_T),
        slots_T=batch.slots_T.index_select(0, rows_T),
        query_starts=starts_S,
        context_lens_S=batch.context_lens_S.index_select(0, chosen_S),
        block_tables_SB=batch.block_tables_SB.index_select(0, chosen_S),
        query_lens=tuple(query_lens),
        context_lens=tuple(batch.context_lens[s] for s in sequences),
    )


def _padded_tables(block_tables: Sequence[Sequence[int]]) -> Ints:
    """[S, B], zero beyond each sequence's last block."""
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    tables = np.zeros((len(block_tables), max(1, int(lengths.max(initial=1)))), np.int32)
    filled = np.arange(tables.shape[1]) < lengths[:, None]
    tables[filled] = np.fromiter(chain.from_iterable(block_tables), np.int32, int(lengths.sum()))
    return tables


def _to_device(arrays: list[Ints], device: torch.device) -> list[Tensor]:
    """All arrays in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)
    return list(torch.split(together, [array.size for array in arrays]))
