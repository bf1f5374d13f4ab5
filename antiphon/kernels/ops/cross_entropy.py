"""Cross-entropy of an output head without ever holding all logits.

Rows go through the head some at a time; each chunk's gradients are made at once, in forward, where its logits are at
hand. What is kept for backward is the gradient of the rows and of the head, not the logits: T x V numbers fewer.

Letters: T rows, H width, V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor

from antiphon.kernels.ops import differentiable, kernels_for

IGNORED = -100
_CHUNK_ELEMENTS = 1 << 20  # logits at once: 4 MiB in float32, which caches hold
_LEAST_ROWS = 256  # at once, however wide the vocabulary: fewer leave the products waiting for the head's weights


def linear_cross_entropy(
    x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor, num_targets: Tensor, divisor: float = 1.0
) -> Tensor:
    """Sum over rows of -log softmax((x W' + b) / divisor)[target], divided by `num_targets`; a scalar.

    Rows whose target is `IGNORED` count for nothing. `num_targets` is a scalar tensor and may count rows elsewhere."""
    loss: Tensor = _cross_entropy(x_TH, weight_VH, bias_V, targets_T, num_targets, divisor)
    return loss


def _cross_entropy_forward(
    ctx: Any,
    x_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    num_targets: Tensor,
    divisor: float,
) -> Tensor:
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x_TH.device)
    grad_x_TH = torch.empty_like(x_TH)
    grad_weight_VH: Tensor | None = None
    grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
    counted_T1 = (targets_T != IGNORED).to(wide).unsqueeze(1)
    scale_T1 = counted_T1 / (num_targets.to(wide) * divisor)
    kernels = kernels_for(x_TH, "rowwise")
    step = max(_LEAST_ROWS, _CHUNK_ELEMENTS // weight_VH.shape[0])
    for first in range(0, x_TH.shape[0], step):
        rows = slice(first, first + step)
        x, scale = x_TH[rows], scale_T1[rows]
        logits, targets = _product(x, weight_VH.t()), targets_T[rows]
        if kernels is not None:
            losses = kernels.loss_and_gradient(logits, bias_V, targets, divisor)
        else:
            losses, logits = _losses_and_gradient(logits.to(wide), bias_V, targets.clamp(min=0), divisor)
        total += (losses * counted_T1[rows, 0]).sum()
        narrow = logits.to(x.dtype)  # the gradient by now
        _product(narrow, weight_VH, grad_x_TH[rows]).mul_(scale)  # the factor is cheaper on the narrow side
        grad_weight_VH = _plus_product(grad_weight_VH, narrow.t(), (x * scale).to(x.dtype), wide)
        if grad_bias_V is not None:
            grad_bias_V.addmv_(logits.to(wide).t(), scale.squeeze(1))
    if grad_weight_VH is None:  # no rows
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide)
    ctx.save_for_backward(grad_x_TH, grad_weight_VH, grad_bias_V)
    return total / num_targets.to(wide)


def _cross_entropy_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
    grad_x_TH, grad_weight_VH, grad_bias_V = ctx.saved_tensors
    narrow = grad_x_TH.dtype
    if grad.is_cpu and float(grad) == 1.0:  # the end of a graph: no pass over all of them
        return grad_x_TH, grad_weight_VH.to(narrow), grad_bias_V, None, None, None
    bias = None if grad_bias_V is None else grad_bias_V * grad
    return grad_x_TH * grad.to(narrow), (grad_weight_VH * grad).to(narrow), bias, None, None, None


_cross_entropy = differentiable(_cross_entropy_forward, _cross_entropy_backward)


def _losses_and_gradient(
    logits: Tensor, bias_V: Tensor | None, targets: Tensor, divisor: float
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and its gradient in the place of the logits."""
    if bias_V is not None:
        logits += bias_V
    if divisor != 1.0:
        logits /= divisor
    logs, targets = torch.log_softmax(logits, 1), targets.unsqueeze(1)
    losses = -logs.gather(1, targets).squeeze(1)
    grad = torch.exp(logs, out=logits)
    return losses, grad.scatter_add_(1, targets, torch.full_like(targets, -1.0, dtype=grad.dtype))


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if (kernels := kernels_for(left, "products")) is not None:
        return cast(Tensor, kernels.matrix_product(left, right, out))
    return torch.mm(left, right, out=out)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """total + left @ right in `wide`, in the place of `total`; None: zero."""
    if (kernels := kernels_for(left, "products")) is not None:
        shape = left.shape[0], right.shape[1]
        out = torch.empty(shape, dtype=wide, device=left.device) if total is None else total
        return cast(Tensor, kernels.matrix_product(left, right, out, adds=total is not None))
    if total is None:
        return (left @ right).to(wide)
    return total.addmm_(left, right) if left.dtype == wide else total.add_(left @ right)
