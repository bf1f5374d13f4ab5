"""act(gate) * up and its gradient, for rows [gate | up]. The grouped product uses the same formulas on its sums.

Letters: R rows, I width of the hidden layer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.triton.launch import launch, power_of_two
from antiphon.specs.model import FeedForwardSpec


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """ "silu", "gelu" or "swiglu_oai", as `FeedForwardSpec` has them."""
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return y


@triton.jit
def _derivatives(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Of `activated`: by gate, by up."""
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
    _run(_activate, widths, y, x.contiguous(), y)
    return y


def activate_gradient(grad: Tensor, x: Tensor, widths: FeedForwardSpec | ExpertShape) -> Tensor:
    """The gradient of the rows [gate | up]."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(_activate_gradient, widths, grad, grad.contiguous(), x.contiguous(), grad_x)
    return grad_x


def _run(kernel: Any, widths: FeedForwardSpec | ExpertShape, y: Tensor, *given: Tensor) -> None:
    """One program a row and block of columns of `y`."""
    width, alpha, limit, name = y.shape[-1], widths.alpha, widths.limit, widths.activation
    block = min(1024, power_of_two(width))
    grid = (y.numel() // max(1, width), -(-width // block))
    launch(kernel, grid, *given, width, alpha, limit, ACTIVATION=name, BLOCK=block)
