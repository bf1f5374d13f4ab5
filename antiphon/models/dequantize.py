"""Float8 and MXFP4 weights, multiplied out at load.

Float8: a scale beside a weight of [..., R, C] says by its shape what it covers:

    [R, 1]                      one row: compressed-tensors "channel"
    [ceil(R/128), ceil(C/128)]  a block of 128 x 128: DeepSeek-V3, section 3.3, and compressed-tensors "block"
    [] or [1] or [1, 1]         the whole tensor

with the axes before R, those of stacked experts, in front. Rejected: asking `config.json` which of them it is, where
one strategy stands for a group of modules named by regular expressions.

MXFP4: blocks of 32 four-bit numbers that share an exponent (OCP Microscaling Formats 1.0). A matrix [R, C] is stored as
bytes `<stem>_blocks` [R, C / 32, 16], two numbers a byte, the low half first, and `<stem>_scales` [R, C / 32],
exponents with a bias of 127. A number has a sign, two bits of exponent and one of mantissa (E2M1). Every product is a
float32, and a bfloat16 unless its exponent is far below any in use, so nothing is lost. Some rows are done at a time:
beyond the result, no more than `NUMBERS_AT_A_TIME` are held. Rejected: keeping weights in four bits and multiplying out
in the kernels, which would need a second set of kernels; so a model takes as much memory here as it would in bfloat16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.models.names import BLOCKS_SUFFIX, SCALES_SUFFIX

SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the weight's name: DeepSeek's, and compressed-tensors' and AutoFP8's
SCALE_BLOCK = 128


def scale_shapes(shape: torch.Size) -> list[list[int]]:
    """The shapes a scale of a weight of `shape` may have: for rows, for blocks, for the tensor."""
    *stacked, num_rows, num_columns = shape
    blocks = [-(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)]
    return [[*stacked, num_rows, 1], [*stacked, *blocks], [*stacked, 1, 1], [1], []]


def multiply_out(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, cuts: Sequence[tuple[int, int, int]] = ()
) -> Tensor:
    """A new tensor, weight * scale, 128 rows at a time. `scale` has one of `scale_shapes`. `cuts`: the (axis, start,
    stop) of the weight that are wanted; of the rest no more is read than what shares a block with them."""
    scale = scale.float() if scale.ndim >= 2 else scale.float().reshape(1, 1)
    by_row, by_tensor = scale.shape[-2:] == (weight.shape[-2], 1), scale.shape[-2:] == (1, 1)
    wanted: list[tuple[int, int, int]] = []
    for axis, start, stop in cuts:
        in_matrix = axis >= weight.ndim - 2
        by_block = in_matrix and not (by_row or by_tensor)
        first = start // SCALE_BLOCK * SCALE_BLOCK if by_block else start
        last = min(-(-stop // SCALE_BLOCK) * SCALE_BLOCK, weight.shape[axis]) if by_block else stop
        wanted.append((axis, start - first, stop - first))
        scale_axis = axis - weight.ndim + scale.ndim
        if by_block:
            scale = scale.narrow(scale_axis, first // SCALE_BLOCK, -(-last // SCALE_BLOCK) - first // SCALE_BLOCK)
        elif by_row and axis == weight.ndim - 2:
            scale = scale.narrow(scale_axis, first, last - first)
        weight = weight.narrow(axis, first, last - first)
    num_rows, num_columns = weight.shape[-2:]
    out = torch.empty(weight.shape, dtype=dtype)
    for block, first in enumerate(range(0, num_rows, SCALE_BLOCK)):
        rows = slice(first, min(first + SCALE_BLOCK, num_rows))
        if by_row or by_tensor:
            factors = scale if by_tensor else scale[..., rows, :]
        else:
            factors = scale[..., block, None, :].repeat_interleave(SCALE_BLOCK, dim=-1)[..., :num_columns]
        out[..., rows, :] = weight[..., rows, :].float() * factors
    for axis, start, stop in wanted:
        out = out.narrow(axis, start, stop - start)
    return out


MXFP4_BLOCK = 32  # numbers that share an exponent
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127
NOT_A_NUMBER = 255  # as an exponent
NUMBERS_AT_A_TIME = 1 << 18


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


def expand_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices [..., R, C] of blocks [..., R, C / 32, 16] and scales [..., R, C / 32], as a new tensor."""
    pairs, factors = _byte_values(), _scale_values()
    num_blocks = scales.numel()
    flat_blocks, flat_scales = blocks.reshape(num_blocks, MXFP4_BLOCK // 2), scales.reshape(num_blocks)
    out = torch.empty((num_blocks, MXFP4_BLOCK), dtype=dtype)
    step = NUMBERS_AT_A_TIME // MXFP4_BLOCK
    for first in range(0, num_blocks, step):
        part = slice(first, first + step)
        numbers = pairs.index_select(0, flat_blocks[part].flatten().int()).view(-1, MXFP4_BLOCK)
        out[part] = numbers.mul_(factors.index_select(0, flat_scales[part].int()).unsqueeze(1))
    return out.view(*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK)


def _byte_values() -> Tensor:
    """The two numbers of every byte, float32 [256, 2]."""
    numbers = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack((numbers[byte % 16], numbers[byte // 16]), dim=1)


def _scale_values() -> Tensor:
    """2^(exponent - 127) of every byte, float32 [256]."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - EXPONENT_BIAS)
    values[NOT_A_NUMBER] = torch.nan
    return values.float()
