"""Rotary position embedding (RoFormer, arXiv 2104.09864), neighbours or halves paired, differentiable.

Letters: N heads, D head width, R half the rotated width; the leading axes are any.
"""

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from antiphon.kernels.api import RotaryTable
from antiphon.kernels.ops.choice import kernels_for


def rotate(x_ND: Tensor, cos_R: Tensor, sin_R: Tensor, interleaved: bool, *, native: bool = True) -> Tensor:
    """Rotate the first 2R dims of each head, in float32 at least; the rest passes unchanged.

    x [..., N, D]; cos and sin [..., R] for the same leading axes; no gradient reaches these two. `native`: as in
    `kernels_for`."""
    if cos_R.shape[-1] == 0:
        return x_ND
    cos, sin = cos_R.unsqueeze(-2), sin_R.unsqueeze(-2)
    kernels = kernels_for(x_ND, "rotary", native=native)
    turned_ND: Tensor = _Rotate.apply(x_ND, cos, sin, interleaved, kernels)  # type: ignore[no-untyped-call]
    return turned_ND


class _Rotate(torch.autograd.Function):
    """The gradient is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kernels: ModuleType | None
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels = interleaved, kernels
        if kernels is not None:
            return cast(Tensor, kernels.turn(x_ND, cos.squeeze(-2), sin.squeeze(-2), interleaved))
        return _turn(x_ND, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        if ctx.kernels is not None:
            turned = ctx.kernels.turn(grad_ND, cos.squeeze(-2), sin.squeeze(-2), ctx.interleaved, back=True)
        else:
            turned = _turn(grad_ND, cos, -sin, ctx.interleaved)
        return turned, None, None, None, None


def _turn(x_ND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    out_ND = torch.empty(x_ND.shape, dtype=wide, device=x_ND.device)
    a, b = _pairs(x_ND[..., :width].to(wide), interleaved)
    out_a, out_b = _pairs(out_ND[..., :width], interleaved)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    out_ND[..., width:] = x_ND[..., width:]
    return out_ND.to(x_ND.dtype)


def _pairs(x_ND: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second of each pair."""
    if interleaved:
        return x_ND[..., 0::2], x_ND[..., 1::2]
    half = x_ND.shape[-1] // 2
    return x_ND[..., :half], x_ND[..., half:]


def look_up(rotary: RotaryTable, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] of these positions."""
    return rotary.cos.index_select(0, positions_T), rotary.sin.index_select(0, positions_T)
