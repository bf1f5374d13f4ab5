"""Kernels of single rows, each with its gradient: the root-mean-square norm, act(gate) * up, and cross-entropy.

The norm, alone or behind the addition of a residual: one program a row, statistics in float32. The gradient of the
weight is summed over a fixed number of rows a program, then over programs: no atomic addition, so the same rows give
the same bits. The grouped product uses the formulas of the activation on its sums. Cross-entropy: one program a row,
twice through its logits, once for the largest and the sum of exponentials, once for softmax minus one at the target,
which takes the place of the logits. No copy of the logits in float32 is made.

Letters: T rows, H width that is normalised, I width of the hidden layer, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.triton.launch import launch, power_of_two, rows_of
from antiphon.specs.model import FeedForwardSpec

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


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """ "silu", "gelu" or "swiglu_oai", as `FeedForwardSpec` has them."""
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return y


@triton.jit
def _derivatives(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The derivatives of `activated`: by gate, by up."""
    if ACTIVATION == "silu":
        open_share = 1.0 / (1.0 + tl.exp(-gate))
        by_up = gate * open_share
        by_gate = up * open_share * (1.0 + gate * (1.0 - open_share))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        by_up = gate * below
        by_gate = up * (below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate))
    else:
        low, mid = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        open_share = 1.0 / (1.0 + tl.exp(-alpha * low))
        by_up = tl.where((up >= -limit) & (up <= limit), low * open_share, 0.0)
        by_gate = (mid + 1.0) * open_share * (1.0 + alpha * low * (1.0 - open_share))
        by_gate = tl.where(gate <= limit, by_gate, 0.0)
    return by_gate, by_up


@triton.jit
def _activate(x_ptr, y_ptr, width, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, inside, 0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + columns, inside, 0.0).to(tl.float32)
    y = activated(gate, up, alpha, limit, ACTIVATION)
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _activate_gradient(grad_ptr, x_ptr, grad_x_ptr, width, alpha, limit, ACTIVATION: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates, ups = row * 2 * width + columns, (row * 2 + 1) * width + columns
    gate, up = tl.load(x_ptr + gates, inside, 0.0).to(tl.float32), tl.load(x_ptr + ups, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + columns, inside, 0.0).to(tl.float32)
    by_gate, by_up = _derivatives(gate, up, alpha, limit, ACTIVATION)
    tl.store(grad_x_ptr + gates, (grad * by_gate).to(grad_x_ptr.dtype.element_ty), inside)
    tl.store(grad_x_ptr + ups, (grad * by_up).to(grad_x_ptr.dtype.element_ty), inside)


def activate(x: Tensor, widths: FeedForwardSpec | ExpertShape) -> Tensor:
    """[..., I] from rows [gate | up] [..., 2 I]."""
    y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    _activation(_activate, widths, y, x.contiguous(), y)
    return y


def activate_gradient(grad: Tensor, x: Tensor, widths: FeedForwardSpec | ExpertShape) -> Tensor:
    """The gradient of the rows [gate | up]."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _activation(_activate_gradient, widths, grad, grad.contiguous(), x.contiguous(), grad_x)
    return grad_x


def _activation(kernel: Any, widths: FeedForwardSpec | ExpertShape, y: Tensor, *given: Tensor) -> None:
    """One program a row and block of columns of `y`."""
    width, alpha, limit, name = y.shape[-1], widths.alpha, widths.limit, widths.activation
    block = min(1024, power_of_two(width))
    grid = (y.numel() // max(1, width), -(-width // block))
    launch(kernel, grid, *given, width, alpha, limit, ACTIVATION=name, BLOCK=block)


@triton.jit
def _loss(logits_ptr, bias_ptr, targets_ptr, losses_ptr, vocabulary, inverse, HAS_BIAS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits = logits_ptr + row * vocabulary
    top, total, chosen = -float("inf"), 0.0, 0.0
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits + columns, inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
        x *= inverse
        chosen += tl.sum(tl.where(columns == target, x, 0.0))
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
        top = higher
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(logits + columns, inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
        grad = tl.exp(x * inverse - top) / total - tl.where(columns == target, 1.0, 0.0)
        tl.store(logits + columns, grad.to(logits_ptr.dtype.element_ty), inside)
    tl.store(losses_ptr + row, tl.log(total) + top - chosen)


def loss_and_gradient(logits_TV: Tensor, bias_V: Tensor | None, targets_T: Tensor, divisor: float) -> Tensor:
    """The loss -log softmax((logits + bias) / divisor)[target] of each row, float32 [T]. `logits_TV`, contiguous,
    becomes its gradient times `divisor`. A target below 0 counts as 0."""
    losses_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    vocabulary, targets_T = logits_TV.shape[1], targets_T.clamp(min=0)
    launch(
        _loss, (logits_TV.shape[0],), logits_TV, bias_V, targets_T, losses_T, vocabulary,
        1.0 / divisor, HAS_BIAS=bias_V is not None, BLOCK=min(4096, power_of_two(vocabulary)), num_warps=8,
    )  # fmt: skip
    return losses_T
