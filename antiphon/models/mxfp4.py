"""MXFP4 weights, multiplied out: blocks of 32 four-bit numbers that share an exponent (OCP Microscaling Formats 1.0).

A matrix [R, C] is stored as bytes `<stem>_blocks` [R, C / 32, 16], two numbers a byte, the low half first, and
`<stem>_scales` [R, C / 32], exponents with a bias of 127. A number has a sign, two bits of exponent and one of
mantissa (E2M1). Every product is a float32, and a bfloat16 unless its exponent is far below any in use, so nothing is
lost. Some rows are done at a time: beyond the result, no more than `NUMBERS_AT_A_TIME` are held.

Rejected: keeping weights in four bits and multiplying out in the kernels, which would need a second set of kernels;
so a model takes as much memory here as it would in bfloat16.
"""

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.models.names import BLOCKS_SUFFIX, SCALES_SUFFIX

BLOCK = 32  # numbers that share an exponent
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127
NOT_A_NUMBER = 255  # as an exponent
NUMBERS_AT_A_TIME = 1 << 18


def blocks_shape(matrix: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the blocks of a matrix of that shape; `CheckpointError` if its rows are no whole blocks."""
    rows, columns = matrix
    if columns % BLOCK != 0:
        raise CheckpointError(
            f"config.json: experts of width {columns} cannot be MXFP4, whose blocks are {BLOCK} wide: "
            f"weights and config.json are of different models, download both again"
        )
    return (rows, columns // BLOCK, BLOCK // 2)


def scales_name(blocks_name: str) -> str:
    return blocks_name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices [..., R, C] of blocks [..., R, C / 32, 16] and scales [..., R, C / 32], as a new tensor."""
    pairs, factors = _byte_values(), _scale_values()
    num_blocks = scales.numel()
    flat_blocks, flat_scales = blocks.reshape(num_blocks, BLOCK // 2), scales.reshape(num_blocks)
    out = torch.empty((num_blocks, BLOCK), dtype=dtype)
    step = NUMBERS_AT_A_TIME // BLOCK
    for first in range(0, num_blocks, step):
        part = slice(first, first + step)
        numbers = pairs.index_select(0, flat_blocks[part].flatten().int()).view(-1, BLOCK)
        out[part] = numbers.mul_(factors.index_select(0, flat_scales[part].int()).unsqueeze(1))
    return out.view(*scales.shape[:-1], scales.shape[-1] * BLOCK)


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
