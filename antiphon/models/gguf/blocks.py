"""Rows of ggml's blocks as codes and scales, every value as ggml computes it in float32.

A row is whole blocks, each with its scales in front of or behind its numbers (ggml-common.h). They become one matrix of
codes and one of scales (`kernels/quantized`):

    Q8_0, Q5_0         int8, a float16 a group of 32            Q4_0        int4, a float16 a group of 32
    Q5_1               the same with a minimum                  Q4_1        the same with a minimum
    Q5_K               int8, groups of 32, with a minimum       Q4_K        int4, groups of 32, with a minimum
    Q6_K               int8, groups of 16                       MXFP4       mxfp4, an exponent a group of 32

The K types have 6-bit (Q6_K: 8-bit) scales in units of a float16 for 256 numbers. The product of both is exact in
float32 and is what is kept, so nothing is rounded: 5 to 6 bits become 8, which the next multiplication reads fastest.

The native module reads the blocks (`csrc/kernels/ggml_blocks.cpp`), in one pass. Rejected: PyTorch's operations, which
make ten passes over single bytes and took longer than a disk reads.
"""

import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels.quantized import CODE_DTYPES, CodeKind, QuantizedWeight, WeightFormat
from antiphon.models.gguf.container import BlockType


def _format(codes: CodeKind, per_scale: int, scale_dtype: torch.dtype, *, minimum: bool = False) -> WeightFormat:
    offset = "offsets" if minimum else "none"
    return WeightFormat(codes=codes, columns_per_scale=per_scale, scale_dtype=scale_dtype, offset=offset)  # type: ignore[arg-type]


_FORMATS = {
    "Q4_0": _format("int4", 32, torch.float16),
    "Q4_1": _format("int4", 32, torch.float16, minimum=True),
    "Q5_0": _format("int8", 32, torch.float16),
    "Q5_1": _format("int8", 32, torch.float16, minimum=True),
    "Q8_0": _format("int8", 32, torch.float16),
    "Q4_K": _format("int4", 32, torch.float32, minimum=True),
    "Q5_K": _format("int8", 32, torch.float32, minimum=True),
    "Q6_K": _format("int8", 16, torch.float32),
    "MXFP4": _format("mxfp4", 32, torch.float8_e8m0fnu),
}


def read_blocks(kind: BlockType, data: Tensor, num_columns: int) -> QuantizedWeight:
    """The rows uint8 [R, bytes of a row] of a type with blocks, as a new matrix [R, num_columns]."""
    num_rows, num_blocks, form = data.shape[0], num_columns // kind.size, _FORMATS[kind.name]
    assert data.dtype == torch.uint8, data.dtype
    assert data.shape[1] == num_blocks * kind.num_bytes, data.shape
    if data.stride(1) != 1:
        data = data.contiguous()
    width = num_columns // 2 if form.nibbles else num_columns
    codes = torch.empty((num_rows, width), dtype=CODE_DTYPES[form.codes])
    scales = torch.empty(form.scale_shape(num_rows, num_columns), dtype=form.scale_dtype)
    offsets = torch.empty(scales.shape) if form.offset == "offsets" else None
    _native.read_ggml_rows(
        kind.name,
        data.data_ptr(),
        data.stride(0),
        num_rows,
        num_blocks,
        codes.data_ptr(),
        scales.data_ptr(),
        0 if offsets is None else offsets.data_ptr(),
    )
    return QuantizedWeight(format=form, num_columns=num_columns, codes=codes, scales=scales, offsets=offsets)
