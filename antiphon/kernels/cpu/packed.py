"""Weights, and paged keys and values, in the native layout; and what the kernels need to know of a micro-batch.

The memory of packed weights belongs to the native object and goes with it. Letters as in `antiphon.kernels.api`; O
output width, I inner width of a plain linear.
"""

import torch
from torch import Tensor

from antiphon import _native
from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import AttentionBatch, KVCacheSpec, RotaryTable


def checked_matrix(name: str, matrix: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix on the CPU in `dtype` with consecutive inner elements; a view of it where that is already so."""
    if tuple(matrix.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected {shape}")
    matrix = matrix.detach().to(device="cpu", dtype=dtype)
    return matrix if matrix.stride(1) == 1 or shape[1] <= 1 else matrix.contiguous()


def checked_bias(name: str, bias: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The bias through `dtype`, as the model stores it, then in float32, as the kernels add it."""
    if bias.shape != (width,):
        raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected ({width},)")
    return bias.detach().to(device="cpu", dtype=dtype).float().contiguous()


class CpuLinear:
    """Weight [out, in] in panels, bias in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        weight = checked_matrix("weight", weight, (self.out_features, self.in_features), dtype)
        if bias is not None:
            bias = checked_bias("bias", bias, self.out_features, dtype)
        self.native = _native.PackedLinear(
            dtype == torch.bfloat16,
            self.out_features,
            self.in_features,
            weight.data_ptr(),
            weight.stride(0),
            0 if bias is None else bias.data_ptr(),
        )
        self.num_bytes = self.native.num_bytes


class CpuExperts:
    """Gate and up interleaved in one stream, down in another, for each expert; biases in float32."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: str,
        dtype: torch.dtype,
        *,
        alpha: float,
        limit: float,
        has_bias: bool,
    ) -> None:
        self.num_experts = num_experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.dtype = dtype
        self.native = _native.PackedExperts(
            dtype == torch.bfloat16, num_experts, hidden, intermediate, activation, alpha, limit, has_bias
        )
        self.num_bytes = self.native.num_bytes

    def set_expert(self, index: int, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> None:
        self._check_index(index)
        wide, tall = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        gate = checked_matrix("gate", gate_IH, wide, self.dtype)
        up = checked_matrix("up", up_IH, wide, self.dtype)
        down = checked_matrix("down", down_HI, tall, self.dtype)
        self.native.set_expert(
            index,
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            down.data_ptr(),
            down.stride(0),
        )

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        self._check_index(index)
        gate = checked_bias("gate bias", gate_I, self.intermediate, self.dtype)
        up = checked_bias("up bias", up_I, self.intermediate, self.dtype)
        down = checked_bias("down bias", down_H, self.hidden, self.dtype)
        self.native.set_bias(index, gate.data_ptr(), up.data_ptr(), down.data_ptr())

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.num_experts:
            raise ValueError(f"expert index {index} is outside 0..{self.num_experts - 1}")


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
