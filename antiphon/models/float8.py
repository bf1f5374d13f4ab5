"""Float8 weights multiplied out at load. A scale beside a weight of [..., R, C] says by its shape what it covers:

    [R, 1]                      one row: compressed-tensors "channel"
    [ceil(R/128), ceil(C/128)]  a block of 128 x 128: DeepSeek-V3, section 3.3, and compressed-tensors "block"
    [] or [1] or [1, 1]         the whole tensor

with the axes before R, those of stacked experts, in front. Rejected: asking `config.json` which of them it is, where
one strategy stands for a group of modules named by regular expressions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
