"""Norms as pure functions of tensors, differentiable. Statistics in float32 at least.

Letters: H the width that is normalised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (arXiv 1910.07467), in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight_H).to(x.dtype)


def layer_norm(x: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in x's dtype."""
    return F.layer_norm(x, weight_H.shape, weight_H.to(x.dtype), None if bias_H is None else bias_H.to(x.dtype), eps)
