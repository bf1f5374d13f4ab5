"""The root-mean-square norm, alone or behind the addition of a residual, and its gradient.

One program a row, statistics in float32. The gradient of the weight is summed over a fixed number of rows a program,
then over programs: no atomic addition, so the same rows give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import launch, power_of_two, rows_of

_ROWS_A_PROGRAM = 32  # of the gradient


@triton.jit
def _norm(x_ptr, delta_ptr, weight_ptr, added_ptr, y_ptr, factor_ptr, width, eps, ADDS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(x_ptr + places, inside, 0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(delta_ptr + places, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(added_ptr + places, x, inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    y = wide * factor * tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), inside)
    tl.store(factor_ptr + row, factor)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_gradient(grad_ptr, x_ptr, weight_ptr, factor_ptr, grad_x_ptr, parts_ptr, num_rows, width,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """With n = x * factor: the weight's is the sum of grad * n, the row's factor * (g - n * mean(g * n)), g = grad *
    weight."""
    first, columns = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for offset in range(ROWS):
        row = first + offset
        here = inside & (row < num_rows)
        places = row * width + columns
        grad = tl.load(grad_ptr + places, here, 0.0).to(tl.float32)
        factor = tl.load(factor_ptr + row, row < num_rows, 0.0)
        normed = tl.load(x_ptr + places, here, 0.0).to(tl.float32) * factor
        sums += grad * normed
        grad_x = factor * (grad * weight - normed * (tl.sum(grad * normed * weight) / width))
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), here)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * width + columns, sums, inside)


def norm(x: Tensor, weight_H: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta rounded to its type, its norm, the factor of each row in float32)."""
    rows_TH = rows_of(x)
    y_TH = torch.empty_like(rows_TH)
    added_TH = rows_TH if delta is None else torch.empty_like(rows_TH)
    factors_T = torch.empty(rows_TH.shape[0], dtype=torch.float32, device=x.device)
    width = x.shape[-1]
    block = power_of_two(width)
    launch(
        _norm, (rows_TH.shape[0],), rows_TH, None if delta is None else rows_of(delta), weight_H, added_TH, y_TH,
        factors_T, width, eps, ADDS=delta is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return added_TH.view(x.shape), y_TH.view(x.shape), factors_T


def norm_gradient(grad: Tensor, x: Tensor, weight_H: Tensor, factors_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weight."""
    grad_TH, x_TH, width = rows_of(grad), rows_of(x), x.shape[-1]
    grad_x_TH = torch.empty_like(x_TH)
    num_programs = -(-x_TH.shape[0] // _ROWS_A_PROGRAM)
    parts_PH = torch.empty((num_programs, width), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    launch(
        _norm_gradient, (num_programs,), grad_TH, x_TH, weight_H, factors_T, grad_x_TH, parts_PH, x_TH.shape[0], width,
        ROWS=_ROWS_A_PROGRAM, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return grad_x_TH.view(x.shape), parts_PH.sum(0).to(weight_H.dtype)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
