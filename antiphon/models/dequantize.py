"""Matrices in few bits with a scale beside them, and multiplying out what must be floats.

Float8 and int8: a scale beside a weight of [..., R, C] says by its shape what it covers:

    [R, 1]                      one row: compressed-tensors "channel"
    [ceil(R/128), ceil(C/128)]  a block of 128 x 128: DeepSeek-V3, section 3.3, and compressed-tensors "block"
    [] or [1] or [1, 1]         the whole tensor

with the axes before R, those of stacked experts, in front. Rejected: asking `config.json` which of them it is, where
one strategy stands for a group of modules named by regular expressions.

MXFP4: blocks of 32 four-bit numbers that share an exponent (OCP Microscaling Formats 1.0). gpt-oss stores a matrix
[R, C] as bytes `<stem>_blocks` [R, C / 32, 16], two numbers a byte, the low half first, and as `<stem>_scales`
[R, C / 32], exponents with a bias of 127.
"""

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.quantized import QuantizedWeight, WeightFormat
from antiphon.models.names import BLOCKS_SUFFIX, SCALES_SUFFIX

SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the weight's name: DeepSeek's, and compressed-tensors' and AutoFP8's
SCALE_BLOCK = 128
MXFP4_BLOCK = 32  # numbers that share an exponent
_NUMBERS_AT_A_TIME = 1 << 22


def multiplied_out(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A new tensor [R, C] of its values, rounded once. Some rows are done at a time, which bounds what is held."""
    out = torch.empty(weight.shape, dtype=dtype)
    step = max(1, _NUMBERS_AT_A_TIME // max(1, weight.num_columns) // SCALE_BLOCK) * SCALE_BLOCK
    for first in range(0, weight.num_rows, step):
        last = min(first + step, weight.num_rows)
        out[first:last] = weight.rows(first, last).dequantize(dtype)
    return out


def scale_shapes(shape: torch.Size) -> list[list[int]]:
    """The shapes a scale of a weight of `shape` may have: for rows, for blocks, for the tensor."""
    *stacked, num_rows, num_columns = shape
    blocks = [-(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)]
    return [[*stacked, num_rows, 1], [*stacked, *blocks], [*stacked, 1, 1], [1], []]


def scaled_matrices(
    file: str, name: str, weight: Tensor, scale_name: str | None, scale: Tensor | None
) -> list[QuantizedWeight]:
    """A weight of [R, C], or stacked ones, in float8 or int8. `CheckpointError` naming `file` where no scale fits."""
    kind = "float8" if weight.dtype == torch.float8_e4m3fn else "int8"
    if scale is None:
        beside = " or ".join(name + suffix for suffix in SCALE_SUFFIXES)
        raise CheckpointError(f"{file}: tensor {name} is {kind} without {beside}: download the checkpoint again")
    if weight.ndim < 2:
        raise CheckpointError(
            f"{file}: tensor {name} is {kind} and has shape {list(weight.shape)}: only matrices may be {kind}, "
            f"download the checkpoint again"
        )
    supported = scale_shapes(weight.shape)
    if list(scale.shape) not in supported:
        raise CheckpointError(
            f"{file}: {scale_name} has shape {list(scale.shape)}, {list(weight.shape)} needs {supported[0]}, "
            f"{supported[1]} or {supported[2]}: only scales of rows, of blocks of {SCALE_BLOCK} x {SCALE_BLOCK} and of "
            f"tensors are supported"
        )
    form = _form_of(weight, scale)
    weights = weight.reshape(-1, *weight.shape[-2:])
    scales = scale.reshape(-1, *scale.shape[-2:]) if scale.ndim >= 2 else scale.reshape(1, 1, 1)
    scales = scales.expand(weights.shape[0], *scales.shape[1:])
    num_columns = weight.shape[-1]
    return [
        QuantizedWeight(format=form, num_columns=num_columns, codes=codes, scales=part)
        for codes, part in zip(weights, scales, strict=True)
    ]


def _form_of(weight: Tensor, scale: Tensor) -> WeightFormat:
    codes = "fp8" if weight.dtype == torch.float8_e4m3fn else "int8"
    shape = tuple(scale.shape[-2:]) if scale.ndim >= 2 else (1, 1)
    if shape == (weight.shape[-2], 1):
        rows, columns = 1, None
    elif shape == (1, 1):
        rows, columns = None, None
    else:
        rows, columns = SCALE_BLOCK, SCALE_BLOCK
    return WeightFormat(codes=codes, columns_per_scale=columns, rows_per_scale=rows, scale_dtype=scale.dtype)  # type: ignore[arg-type]


def blocks_shape(matrix: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blocks of a matrix of that shape; `CheckpointError` if its rows are no whole blocks."""
    rows, columns = matrix
    if columns % MXFP4_BLOCK != 0:
        raise CheckpointError(
            f"config.json: experts of width {columns} cannot be MXFP4, whose blocks are {MXFP4_BLOCK} wide: "
            f"weights and config.json are of different models, download both again"
        )
    return (rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2)


def scales_name(blocks_name: str) -> str:
    return blocks_name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX


def mxfp4_matrices(
    file: str, name: str, blocks: Tensor, scale_name: str | None, scales: Tensor | None
) -> list[QuantizedWeight]:
    """The matrices [..., R, C] of blocks [..., R, C / 32, 16] and scales [..., R, C / 32]."""
    fits = scales is not None and scales.dtype == torch.uint8 and scales.shape == blocks.shape[:-1]
    if scales is None or not fits or blocks.ndim < 3 or blocks.shape[-1] != MXFP4_BLOCK // 2:
        found = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise CheckpointError(
            f"{file}: tensor {name} has dtype U8 and shape {list(blocks.shape)}, which is MXFP4 if scales of dtype U8 "
            f"and shape {list(blocks.shape[:-1])} lie beside it; found {found}: use gpt-oss as published, or weights "
            f"in bfloat16"
        )
    num_rows, num_blocks = blocks.shape[-3:-1]
    form = WeightFormat(codes="mxfp4", columns_per_scale=MXFP4_BLOCK, scale_dtype=torch.float8_e8m0fnu)
    codes = blocks.reshape(-1, num_rows, num_blocks * MXFP4_BLOCK // 2)
    exponents = scales.reshape(-1, num_rows, num_blocks).view(torch.float8_e8m0fnu)
    return [
        QuantizedWeight(format=form, num_columns=num_blocks * MXFP4_BLOCK, codes=each, scales=part)
        for each, part in zip(codes, exponents, strict=True)
    ]
