"""Products of rows and weights in the arithmetic of a run: as they are, or as FP8 would make them (MegaScale-MoE, 7).

    plain     both factors as they are given
    float8    both rounded to E4M3 first, gradients too: "we adopt the E4M3 format for all tensors" (section 5)
    hybrid    gradients to E5M2, which reaches further with a bit less

A processor without FP8 products multiplies the rounded numbers in its own format, so the results are those of FP8
factors with wide sums; time says nothing. Rounding is that of PyTorch's casts: to nearest, ties to even, subnormal
numbers included.

A scale has to be one factor of all that is added up: so it is taken along the sum, and each product rounds for itself.

    y = x W^T        a scale for each row of x (1 x h: by token) and each row of W
    dx = g W         a scale for each row of g and each column of W
    dW = g^T x       a scale for each column of g and of x, and group of 128 rows

Scales of weights are powers of two: weights that were gathered as E4M3 (`train.bucket`) keep their numbers, those
excepted that are subnormal in E4M3 by the scale of a whole row.

Rejected: a scale for each tensor. SwiGLU widens the range of numbers so far that one large row flushes the others to
zero; the paper gave it up for this.

Letters: R rows in order of expert, E experts, I inputs, O outputs. Without `counts_E` there is one matrix [O, I].
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from antiphon.kernels.ops import differentiable
from antiphon.kernels.ops.feed_forward import (
    RowBuffers,
    grouped_input_gradient,
    grouped_product,
    grouped_weight_gradient,
    input_gradient,
    linear,
    weight_gradient,
)

Kind = Literal["plain", "float8", "hybrid"]
Counts = tuple[int, ...] | None
GROUP_ROWS = 128
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dim: int, kind: torch.dtype = _E4M3, *, by_two: bool = False) -> Tensor:
    """The numbers of `x` as `kind` with one scale along `dim` can say them, in the type of `x`. What is not finite
    stays so. `by_two`: the scale is a power of two, so numbers that are in FP8 already stay as they are."""
    largest = torch.finfo(kind).max
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().nan_to_num(0.0, 0.0, 0.0).amax(dim, keepdim=True) / largest
    scale = torch.where(scale > 0, scale.log2().ceil().exp2() if by_two else scale, torch.ones_like(scale))
    narrow = (wide / scale).to(torch.float32).clamp(-largest, largest).to(kind)
    back = narrow.to(wide.dtype) * scale
    return torch.where(wide.isfinite(), back, wide).to(x.dtype)


def rounded_by_groups(x_RI: Tensor, kind: torch.dtype = _E4M3) -> Tensor:
    """`rounded` along rows, with scales for each `GROUP_ROWS` of them."""
    if not x_RI.shape[0]:
        return x_RI
    return torch.cat([rounded(group, 0, kind) for group in torch.split(x_RI, GROUP_ROWS)])


@dataclass(frozen=True)
class Products:
    """The three products of one parameter, of rows [R, I] or [..., I]. `buffers`: where rows of experts lie behind a
    product, forward and backward; None: each in memory of its own."""

    kind: Kind = "plain"
    buffers: RowBuffers | None = field(default=None, compare=False)

    @property
    def _of_gradients(self) -> torch.dtype:
        return _E5M2 if self.kind == "hybrid" else _E4M3

    def forward(self, x: Tensor, weight: Tensor, counts_E: Counts = None) -> Tensor:
        """Each row times the matrix, or its expert's; gradients pass it."""
        if self.kind == "plain":
            return _product(x, weight, counts_E, self.buffers)
        y: Tensor = _float8_product(x, weight, counts_E, self)
        return y

    def input_gradient(self, grad: Tensor, weight: Tensor, counts_E: Counts = None) -> Tensor:
        if self.kind != "plain":
            grad, weight = rounded(grad, -1, self._of_gradients), rounded(weight, -2, by_two=True)
        if counts_E is None:
            return input_gradient(grad, weight)
        return grouped_input_gradient(grad.contiguous(), weight, counts_E, self.buffers)

    def weight_gradient(self, grad: Tensor, x: Tensor, counts_E: Counts = None) -> Tensor:
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        if self.kind != "plain":
            grad, x = rounded_by_groups(grad, self._of_gradients), rounded_by_groups(x)
        if counts_E is None:
            return weight_gradient(grad, x)
        return grouped_weight_gradient(grad.contiguous(), x, counts_E)


def _product(x: Tensor, weight: Tensor, counts_E: Counts, buffers: RowBuffers | None) -> Tensor:
    return linear(x, weight) if counts_E is None else grouped_product(x, weight, counts_E, buffers)


def _float8_product_forward(ctx: Any, x: Tensor, weight: Tensor, counts_E: Counts, products: Products) -> Tensor:
    ctx.save_for_backward(x, weight)
    ctx.counts_E, ctx.products = counts_E, products
    return _product(rounded(x, -1), rounded(weight, -1, by_two=True), counts_E, products.buffers)


def _float8_product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    of_x = ctx.products.input_gradient(grad, weight, ctx.counts_E)
    return of_x, ctx.products.weight_gradient(grad, x, ctx.counts_E), None, None


_float8_product = differentiable(_float8_product_forward, _float8_product_backward)
