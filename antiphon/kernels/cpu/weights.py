"""Weights in the native layout. The memory belongs to the native object and goes with it.

Letters as in `antiphon.kernels.api`; O output width, I inner width of a plain linear.
"""

import torch
from torch import Tensor

from antiphon import _native


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
