"""Rotary position embedding (RoFormer, arXiv 2104.09864), neighbours or halves paired, differentiable.

`heads_of` makes queries, keys and values from rows [q | k | v]: per-head norms, if there are any, and rotation. With
kernels such a head is read and written once each way, and the gradients of all three go straight into their places in
the gradient of the rows. What is kept is the rows, and one number a head, where there are norms.

Letters: B sequences, S positions, X fused width, N heads, D head width, R half the rotated width.
"""

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from antiphon.kernels.api import RotaryTable
from antiphon.kernels.ops import kernels_for
from antiphon.kernels.ops.norm import rms_norm

Heads = tuple[Tensor, Tensor, Tensor]


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


def heads_of(
    qkv_BSX: Tensor,
    widths: tuple[int, int],
    norms_D: tuple[Tensor, Tensor] | None,
    eps: float,
    angles_BSR: tuple[Tensor, Tensor],
    interleaved: bool,
    head_dim: int,
) -> Heads:
    """q, k and v [B, S, N, D]. `widths`: of q and of k, which is that of v; `norms_D`: weights of the norms of q and k;
    `angles_BSR`: cosines and sines, which no gradient reaches."""
    kernels = kernels_for(qkv_BSX, "heads")
    if kernels is not None:
        found: Heads = _Heads.apply(  # type: ignore[no-untyped-call]
            qkv_BSX, *(norms_D or (None, None)), *angles_BSR, widths, eps, interleaved, head_dim, kernels
        )
        return found
    q, k, v = _split(qkv_BSX, widths, head_dim)
    if norms_D is not None:
        q, k = rms_norm(q, norms_D[0], eps), rms_norm(k, norms_D[1], eps)
    return rotate(q, *angles_BSR, interleaved), rotate(k, *angles_BSR, interleaved), v


def _split(qkv_BSX: Tensor, widths: tuple[int, int], head_dim: int) -> list[Tensor]:
    parts = torch.split(qkv_BSX, [*widths, widths[1]], dim=-1)
    return [part.view(*part.shape[:2], -1, head_dim) for part in parts]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        widths: tuple[int, int],
        eps: float,
        interleaved: bool,
        head_dim: int,
        kernels: ModuleType,
    ) -> Heads:
        q, k, v = _split(qkv_BSX, widths, head_dim)
        turned = [
            kernels.turn_normed(x, norm, eps, cos_BSR, sin_BSR, interleaved)
            for x, norm in ((q, q_norm_D), (k, k_norm_D))
        ]
        (q, q_factors), (k, k_factors) = turned
        kept = None if q_norm_D is None else qkv_BSX
        ctx.save_for_backward(kept, q_norm_D, k_norm_D, q_factors, k_factors, cos_BSR, sin_BSR)
        ctx.rest = widths, interleaved, head_dim, kernels
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_norm, k_norm, q_factors, k_factors, cos, sin = ctx.saved_tensors
        widths, interleaved, head_dim, kernels = ctx.rest
        of_q, of_k, of_v = grads
        made = torch.empty(*of_q.shape[:2], sum(widths) + widths[1], dtype=of_q.dtype, device=of_q.device)
        places = _split(made, widths, head_dim)
        places[2].copy_(of_v)
        heads = [None, None] if qkv is None else _split(qkv, widths, head_dim)[:2]
        of_norms = [
            kernels.turn_normed_gradient(grad, x, norm, factors, cos, sin, interleaved, place)
            for grad, x, norm, factors, place in zip(
                (of_q, of_k), heads, (q_norm, k_norm), (q_factors, k_factors), places, strict=False
            )
        ]
        return made, *of_norms, *(None,) * 7
