"""Weights of the cpu back-end: dense matrices and experts, floats or codes, copied into the native layout.

Memory belongs to a native object and goes with it. A source tensor is handed over where it lies, if the kernels can
read it there, and may be dropped afterwards. Rejected: converting in Python, which would hold a second copy.
"""

from dataclasses import replace

import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels.api import ExpertFormats, ExpertShape, address
from antiphon.kernels.quantized import AnyWeight, QuantizedWeight, WeightFormat
from antiphon.kernels.reference import checked_format

_MOST_BYTES = 1 << 46


def packed_format(form: WeightFormat | None, num_columns: int, dtype: torch.dtype) -> _native.PackedFormat:
    """How the kernels keep a matrix of `num_columns`: floats of `dtype`, or codes. 4-bit codes with groups that are no
    multiple of 8 columns are kept in 8 bits; see `CpuSource`."""
    if form is None:
        return _native.PackedFormat.floats(dtype == torch.bfloat16)
    form = _native_form(form, num_columns)
    scale_name = str(form.scale_dtype).removeprefix("torch.")
    group = form.columns_per_scale or max(8, -(-num_columns // 8) * 8)
    return _native.PackedFormat.quantized(form.codes, scale_name, form.offset, group)


def _native_form(form: WeightFormat, num_columns: int) -> WeightFormat:
    group = form.columns_per_scale
    if not form.nibbles or group is None or group % 8 == 0:
        return form
    if group >= num_columns:
        return replace(form, columns_per_scale=None)
    return form.in_bytes()


def check_addressable(num_bytes: int) -> None:
    """`MemoryError` for more than a process can have addresses for, which the native sizes could not count."""
    if num_bytes >= _MOST_BYTES:
        raise MemoryError(f"{num_bytes} bytes")


class CpuSource:
    """A matrix whose parts the kernels can read: on the CPU, consecutive inner elements, a scale for every row. Parts
    are views where that is so already; they live as long as this object."""

    def __init__(
        self,
        name: str,
        matrix: AnyWeight,
        shape: tuple[int, int],
        form: WeightFormat | None,
        dtype: torch.dtype,
    ) -> None:
        matrix = checked_format(name, matrix, shape, form)
        if isinstance(matrix, Tensor):
            if not matrix.is_floating_point() or matrix.layout != torch.strided:
                raise ValueError(f"{name} is {matrix.dtype} in the layout {matrix.layout}: give dense floats")
            matrix = matrix.detach().to(device="cpu", dtype=dtype)
            codes = matrix if matrix.stride(1) == 1 or shape[1] <= 1 else matrix.contiguous()
            scales, offsets, units = None, None, None
        else:
            codes, scales, offsets, units = _readable_parts(name, matrix.in_stored_order())
        self._parts = codes, scales, offsets, units
        self.addresses = _native.SourceAddresses(
            address(codes),
            codes.stride(0) * codes.itemsize,
            address(scales),
            address(offsets),
            address(units),
            0 if scales is None else scales.stride(0),
        )


def _readable_parts(name: str, matrix: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scales, zero points or offsets, and units; `ValueError` if one is not a number."""
    assert matrix.format is not None
    if _native_form(matrix.format, matrix.num_columns).codes != matrix.format.codes:
        matrix = matrix.in_bytes()
    matrix = matrix.with_scale_per_row()
    codes, scales = matrix.codes.cpu(), matrix.scales.cpu().contiguous()
    offsets = matrix.zeros if matrix.zeros is not None else matrix.offsets
    if not matrix.is_finite():
        raise ValueError(f"{name} holds values that are not finite numbers: the checkpoint is damaged")
    if codes.stride(1) != 1 and codes.shape[1] > 1:
        codes = codes.contiguous()
    offsets, units = (None if part is None else part.cpu().contiguous() for part in (offsets, matrix.units))
    return codes, scales, offsets, units


def checked_bias(name: str, bias: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The bias through `dtype`, as the model stores it, then in float32, as the kernels add it."""
    if bias.shape != (width,):
        raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected ({width},)")
    return bias.detach().to(device="cpu", dtype=dtype).float().contiguous()


class CpuLinear:
    """Weight [out, in] in panels, bias in float32."""

    def __init__(self, weight: AnyWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        if len(weight.shape) != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected [out, in]")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        form = None if isinstance(weight, Tensor) else weight.format
        order = None if isinstance(weight, Tensor) else weight.order
        self.quantized = form is not None
        self.order = None if order is None else order.clamp(min=0).to(torch.int32)  # fillers meet zeros in the weight
        num_columns = self.in_features if order is None else order.numel()
        source = CpuSource("weight", weight, (self.out_features, self.in_features), form, dtype)
        if bias is not None:
            bias = checked_bias("bias", bias, self.out_features, dtype)
        self.native = _native.PackedLinear(
            dtype == torch.bfloat16,
            packed_format(form, num_columns, dtype),
            self.out_features,
            num_columns,
            source.addresses,
            address(bias),
        )
        self.num_bytes = self.native.num_bytes + (0 if self.order is None else self.order.nbytes)


class CpuExperts:
    """Gate and up interleaved in one stream, down in another, for each expert; biases in float32."""

    def __init__(self, shape: ExpertShape, formats: ExpertFormats, dtype: torch.dtype) -> None:
        self.shape = shape
        self.formats = formats
        self.dtype = dtype
        check_addressable(12 * shape.num_experts * shape.hidden * shape.intermediate)
        self.native = _native.PackedExperts(
            dtype == torch.bfloat16,
            packed_format(formats.gate_up, shape.hidden, dtype),
            packed_format(formats.down, shape.intermediate, dtype),
            shape.num_experts,
            shape.hidden,
            shape.intermediate,
            shape.activation,
            shape.alpha,
            shape.limit,
            shape.has_bias,
            formats.ordered,
        )
        self.num_bytes = self.native.num_bytes

    def set_expert(self, index: int, gate_IH: AnyWeight, up_IH: AnyWeight, down_HI: AnyWeight) -> None:
        self._check_index(index)
        wide = self.shape.intermediate, self.shape.hidden
        self._check_orders(gate_IH, up_IH, down_HI)
        gate = CpuSource("gate", gate_IH, wide, self.formats.gate_up, self.dtype)
        up = CpuSource("up", up_IH, wide, self.formats.gate_up, self.dtype)
        down = CpuSource("down", down_HI, wide[::-1], self.formats.down, self.dtype)
        self.native.set_expert(index, gate.addresses, up.addresses, down.addresses)
        if self.formats.ordered:
            order = self._order(gate_IH, up_IH)
            self.native.set_order(index, address(order))

    def _order(self, gate: AnyWeight, up: AnyWeight) -> Tensor:
        """The order of the columns of both, int32."""
        orders = [None if isinstance(matrix, Tensor) else matrix.order for matrix in (gate, up)]
        hidden = self.shape.hidden
        first, second = (torch.arange(hidden, device="cpu") if order is None else order for order in orders)
        if not torch.equal(first, second):
            raise ValueError("gate and up have their columns in different orders")
        return first.to(torch.int32)

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        self._check_index(index)
        gate = checked_bias("gate bias", gate_I, self.shape.intermediate, self.dtype)
        up = checked_bias("up bias", up_I, self.shape.intermediate, self.dtype)
        down = checked_bias("down bias", down_H, self.shape.hidden, self.dtype)
        self.native.set_bias(index, address(gate), address(up), address(down))

    def _check_orders(self, *matrices: AnyWeight) -> None:
        """`ValueError` for an order that there is no room for."""
        ordered = self.formats.ordered
        for name, matrix, taken in zip(("gate", "up", "down"), matrices, (ordered, ordered, False), strict=True):
            order = None if isinstance(matrix, Tensor) else matrix.order
            if order is not None and (not taken or order.numel() != self.shape.hidden):
                raise ValueError(f"{name} has its columns in an order of its own, which these experts do not take")

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.shape.num_experts:
            raise ValueError(f"expert index {index} is outside 0..{self.shape.num_experts - 1}")
