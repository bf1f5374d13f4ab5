"""Norms as pure functions of tensors, differentiable. Statistics in float32 at least.

The root-mean-square norm has its own gradient: under autograd each of its steps would read and write all rows, and keep
them. What it keeps is the input and one number a row. Kernels compute it in one pass, see `kernels_for`.

Letters: H the width that is normalised.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops import kernels_for


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, *, native: bool = True) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (arXiv 1910.07467), in x's dtype. `native`: as in
    `kernels_for`."""
    y: Tensor = _RmsNorm.apply(x, weight_H, eps, kernels_for(x, "norm", native=native))  # type: ignore[no-untyped-call]
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, kernels: ModuleType | None) -> Tensor:
        ctx.kernels = kernels
        if kernels is not None:
            y: Tensor
            _, y, factors = kernels.norm(x, weight_H, eps)
            ctx.save_for_backward(x, weight_H, factors)
            return y
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factor = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, factor)
        return (wide * factor).mul_(weight_H).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """With n = x * factor: the weight's is the sum of grad * n, the input's factor * (g - n * mean(g * n)) for
        g = grad * weight."""
        x, weight_H, factor = ctx.saved_tensors
        if ctx.kernels is not None:
            return *ctx.kernels.norm_gradient(grad, x, weight_H, factor), None, None
        grad = grad.to(factor.dtype)
        normed = x * factor
        product = grad * normed
        grad_weight_H = product.flatten(0, -2).sum(0).to(weight_H.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight_H, None, None
        mean = (product @ weight_H.to(product.dtype)).unsqueeze(-1).div_(x.shape[-1])
        grad_x = torch.mul(grad, weight_H, out=product).addcmul_(normed, mean, value=-1).mul_(factor)
        return grad_x.to(x.dtype), grad_weight_H, None, None


def layer_norm(x: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in x's dtype."""
    return F.layer_norm(x, weight_H.shape, weight_H.to(x.dtype), None if bias_H is None else bias_H.to(x.dtype), eps)
