"""Weights of linear layers and of experts as the grouped product reads them: floats, or codes in their stored format.

One tensor of codes for all experts, and others for scales and zero points or offsets. Gate and up projections are two
parts of one weight, each with its own blocks of scales. Codes stay as they are; whole scales with units become float32.

Letters: E experts (1 for a linear layer), P parts (gate and up, or one), R rows (outputs), C columns or their bytes.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import ExpertFormats, ExpertShape
from antiphon.kernels.quantized import AnyWeight, WeightFormat
from antiphon.kernels.reference import checked_format


class StackedWeight:
    """`codes` [E, P, R, C] in the dtype of the back-end, or uint8; `scales` and `shifts` [E, P, rows and columns of
    scales]; `bias` [E, P, R] in the dtype of the back-end."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        form: WeightFormat | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_bias: bool,
    ) -> None:
        self.num_experts, self.num_parts, self.num_rows, self.num_columns = shape
        self.format = form = None if form is None else form.with_float_scales()
        self.dtype = dtype
        outer = shape[:2]
        self.scales: Tensor | None = None
        self.shifts: Tensor | None = None
        if form is None:
            self.codes = torch.empty(shape, dtype=dtype, device=device)
        else:
            width = -(-shape[3] // 2) if form.nibbles else shape[3]
            self.codes = torch.empty((*outer, shape[2], width), dtype=torch.uint8, device=device)
            scale_shape = (*outer, *form.scale_shape(shape[2], shape[3]))
            kept = torch.uint8 if form.scale_dtype == torch.float8_e8m0fnu else form.scale_dtype
            self.scales = torch.empty(scale_shape, dtype=kept, device=device)
            if form.offset != "none":
                zero = torch.uint8 if form.codes == "int4" else torch.int8
                shift_dtype = zero if form.offset == "zeros" else torch.float32
                self.shifts = torch.empty(scale_shape, dtype=shift_dtype, device=device)
        self.bias = torch.zeros(shape[:3], dtype=dtype, device=device) if has_bias else None
        tensors = (self.codes, self.scales, self.shifts, self.bias)
        self.num_bytes = sum(each.nbytes for each in tensors if each is not None)

    def set(self, expert: int, part: int, matrix: AnyWeight, name: str) -> None:
        """Copy one matrix in. `ValueError` if its shape or format is another."""
        matrix = matrix if isinstance(matrix, Tensor) else matrix.with_float_scales()
        matrix = checked_format(name, matrix, (self.num_rows, self.num_columns), self.format)
        if isinstance(matrix, Tensor):
            self.codes[expert, part].copy_(matrix)
            return
        assert self.scales is not None
        assert self.format is not None
        assert matrix.order is None, "this back-end orders no columns"
        self.codes[expert, part].copy_(matrix.codes.view(torch.uint8))
        is_byte = self.scales.dtype == torch.uint8
        self.scales[expert, part].copy_(matrix.scales.view(torch.uint8) if is_byte else matrix.scales)
        shift = matrix.zeros if matrix.zeros is not None else matrix.offsets
        if shift is not None:
            assert self.shifts is not None
            self.shifts[expert, part].copy_(shift)


class TritonLinear(StackedWeight):
    """One matrix [out, in] and its bias."""

    def __init__(self, weight: AnyWeight, bias_O: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        form = None if isinstance(weight, Tensor) else weight.format
        shape = (1, 1, self.out_features, self.in_features)
        super().__init__(shape, form, device, dtype, has_bias=bias_O is not None)
        self.set(0, 0, weight, "weight")
        if bias_O is not None:
            assert self.bias is not None
            self.bias[0, 0].copy_(bias_O)


class TritonExperts:
    """E gated feed-forwards."""

    def __init__(self, shape: ExpertShape, formats: ExpertFormats, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.formats = formats
        self.dtype = dtype
        num_experts, hidden, width = shape.num_experts, shape.hidden, shape.intermediate
        wide, narrow = (num_experts, 2, width, hidden), (num_experts, 1, hidden, width)
        self.gate_up = StackedWeight(wide, formats.gate_up, device, dtype, has_bias=shape.has_bias)
        self.down = StackedWeight(narrow, formats.down, device, dtype, has_bias=shape.has_bias)
        self.num_bytes = self.gate_up.num_bytes + self.down.num_bytes

    @property
    def gate_up_EJH(self) -> Tensor:
        """The float weights as the reference back-end keeps them, and so below; views."""
        return self.gate_up.codes.flatten(1, 2)

    @property
    def down_EHI(self) -> Tensor:
        return self.down.codes.flatten(1, 2)

    @property
    def gate_up_bias_EJ(self) -> Tensor | None:
        return None if self.gate_up.bias is None else self.gate_up.bias.flatten(1, 2)

    @property
    def down_bias_EH(self) -> Tensor | None:
        return None if self.down.bias is None else self.down.bias.flatten(1, 2)

    def set_expert(self, index: int, gate_IH: AnyWeight, up_IH: AnyWeight, down_HI: AnyWeight) -> None:
        self.gate_up.set(index, 0, gate_IH, "gate")
        self.gate_up.set(index, 1, up_IH, "up")
        self.down.set(index, 0, down_HI, "down")

    def set_bias(self, index: int, gate_I: Tensor, up_I: Tensor, down_H: Tensor) -> None:
        if self.gate_up.bias is None or self.down.bias is None:
            raise ValueError("these experts were made without room for biases")
        self.gate_up.bias[index, 0].copy_(gate_I)
        self.gate_up.bias[index, 1].copy_(up_I)
        self.down.bias[index, 0].copy_(down_H)
