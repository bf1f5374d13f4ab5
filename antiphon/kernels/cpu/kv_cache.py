"""Paged keys and values in the native layout, and what the kernels are told about a micro-batch.

Letters as in `antiphon.kernels.api`.
"""

import torch

from antiphon import _native
from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import AttentionBatch, KVCacheSpec, RotaryTable

PANEL_WIDTH = 16


class CpuKVCache:
    """Reserved, not touched: pages come into being as blocks are written. Unwritten memory reads as zero."""

    def __init__(self, spec: KVCacheSpec, dtype: torch.dtype) -> None:
        if spec.block_size % PANEL_WIDTH != 0:
            raise ValueError(
                f"block_size {spec.block_size} does not fit the cpu back-end: use a multiple of {PANEL_WIDTH}"
            )
        self.spec = spec
        self.dtype = dtype
        try:
            self.native = _native.KVCache(
                dtype == torch.bfloat16,
                spec.num_layers,
                spec.num_blocks,
                spec.block_size,
                spec.num_kv_heads,
                spec.key_dim,
                spec.value_dim,
            )
        except MemoryError as error:
            wanted = spec.num_blocks * spec.block_bytes(dtype.itemsize)
            raise ResourceError(
                f"cannot reserve a KV cache of {format_bytes(wanted)} ({spec.num_blocks} blocks of "
                f"{spec.block_size} tokens): lower the number of blocks"
            ) from error


class BatchAddresses:
    """The addresses of the last batch and rotary table seen: every layer of a step asks for the same ones."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._rotary: RotaryTable | None = None
        self._native_batch: _native.BatchAddresses | None = None
        self._native_rotary: _native.RotaryAddresses | None = None

    def of_batch(self, batch: AttentionBatch) -> _native.BatchAddresses:
        if batch is self._batch and self._native_batch is not None:
            return self._native_batch
        tables = batch.block_tables_SB
        arrays = (batch.positions_T, batch.slots_T, batch.query_starts, batch.context_lens_S, tables)
        for array in arrays:
            if array.dtype != torch.int32 or not array.is_contiguous():
                raise ValueError(f"batch tensors must be contiguous int32, got {array.dtype} {tuple(array.shape)}")
        positions, slots, starts, lengths, table = (array.data_ptr() for array in arrays)
        native = _native.BatchAddresses(
            positions, slots, starts, lengths, table, tables.shape[1], len(batch.query_lens), batch.num_tokens
        )
        self._batch, self._native_batch = batch, native
        return native

    def of_rotary(self, rotary: RotaryTable) -> _native.RotaryAddresses:
        if rotary is self._rotary and self._native_rotary is not None:
            return self._native_rotary
        for table in (rotary.cos, rotary.sin):
            if table.dtype != torch.float32 or not table.is_contiguous():
                raise ValueError(f"rotary tables must be contiguous float32, got {table.dtype}")
        native = _native.RotaryAddresses(
            rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1], rotary.interleaved
        )
        self._rotary, self._native_rotary = rotary, native
        return native
