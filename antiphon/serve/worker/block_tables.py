"""Where each running request's keys and values lie, and what attention has to know of a micro-batch."""

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.kernels.api import AttentionBatch
from antiphon.serve.policy.step import SequenceStep


class BlockTables:
    """The worker's copy of every request's block table, and the attention metadata built from it.

    The engine sends only newly appended blocks. One row per slot of the scheduler; `num_slots` bounds the number of
    running requests. All tables are one int32 matrix, so that the metadata of a micro-batch of a thousand sequences is
    a few array operations instead of a Python loop.

    S sequences, T rows (tokens), B blocks of the longest sequence."""

    def __init__(self, block_size: int, num_slots: int, max_blocks_per_request: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._table = np.zeros((num_slots, max_blocks_per_request), dtype=np.int32)

    def update(self, sequence: SequenceStep) -> None:
        """Write the blocks that came with a step; writing the same step twice changes nothing."""
        if sequence.new_blocks:
            first = sequence.first_new_block
            self._table[sequence.slot, first : first + len(sequence.new_blocks)] = sequence.new_blocks

    def attention_batch(self, sequences: list[SequenceStep]) -> AttentionBatch:
        """Metadata of one micro-batch; its rows are the sequences' tokens, one sequence after the other."""
        query_lens_S = np.fromiter((len(s.token_ids) for s in sequences), dtype=np.int32, count=len(sequences))
        starts_S = np.fromiter((s.start for s in sequences), dtype=np.int32, count=len(sequences))
        rows_S = np.fromiter((s.slot for s in sequences), dtype=np.int64, count=len(sequences))
        context_lens_S = starts_S + query_lens_S
        query_starts = np.zeros(len(sequences) + 1, dtype=np.int32)
        np.cumsum(query_lens_S, out=query_starts[1:])
        sequence_T = np.repeat(np.arange(len(sequences)), query_lens_S)
        offsets_T = np.arange(query_starts[-1], dtype=np.int32) - query_starts[sequence_T]
        positions_T = starts_S[sequence_T] + offsets_T
        num_blocks = -(-int(context_lens_S.max()) // self._block_size)
        tables_SB = self._table[rows_S, :num_blocks]
        blocks_T = tables_SB[sequence_T, positions_T // self._block_size]
        slots_T = blocks_T * self._block_size + positions_T % self._block_size
        return AttentionBatch(
            positions_T=self._to_device(positions_T),
            slots_T=self._to_device(slots_T),
            query_starts=self._to_device(query_starts),
            context_lens_S=self._to_device(context_lens_S),
            block_tables_SB=self._to_device(tables_SB),
            query_lens=tuple(query_lens_S.tolist()),
            context_lens=tuple(context_lens_S.tolist()),
        )

    def _to_device(self, array: NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
