"""What attention is made of, as pure functions of tensors, differentiable: norms, rotary positions, heads, and causal
attention over whole sequences. Statistics in float32 at least. Kernels are used where there are any, see `kernels_for`.

1. The root-mean-square norm has its own gradient: under autograd each of its steps would read and write all rows, and
   keep them. What it keeps is the input and one number a row.
2. Rotary position embedding (RoFormer, arXiv 2104.09864) pairs neighbours or halves. `heads_of` makes queries, keys and
   values from rows [q | k | v]: per-head norms, if there are any, and rotation. With kernels such a head is read and
   written once each way, and the gradients of all three go straight into their places in the gradient of the rows. What
   is kept is the rows, and one number a head, where there are norms.
3. Documents packed into one sequence do not see each other. Attention is a native kernel on CPUs, elsewhere PyTorch's
   fused attention; sinks (gpt-oss) are one more column of scores, which neither knows, so they go through plain
   products.

Letters: H a width that is normalised, B sequences, S positions, X fused width, N (query) heads, G KV heads, D head
width, V width of a value, R half the rotated width.
"""

from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import RotaryTable
from antiphon.kernels.ops import differentiable, kernels_for


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, *, native: bool = True) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis (arXiv 1910.07467), in x's dtype. `native`: as in
    `kernels_for`."""
    y: Tensor = _norm(x, weight_H, eps, kernels_for(x, "rowwise", native=native))
    return y


def _norm_forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, kernels: ModuleType | None) -> Tensor:
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


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
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


_norm = differentiable(_norm_forward, _norm_backward)


def layer_norm(x: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in x's dtype."""
    return F.layer_norm(x, weight_H.shape, weight_H.to(x.dtype), None if bias_H is None else bias_H.to(x.dtype), eps)


Heads = tuple[Tensor, Tensor, Tensor]


def rotate(x_ND: Tensor, cos_R: Tensor, sin_R: Tensor, interleaved: bool, *, native: bool = True) -> Tensor:
    """Rotate the first 2R dims of each head, in float32 at least; the rest passes unchanged.

    x [..., N, D]; cos and sin [..., R] for the same leading axes; no gradient reaches these two. `native`: as in
    `kernels_for`."""
    if cos_R.shape[-1] == 0:
        return x_ND
    cos, sin = cos_R.unsqueeze(-2), sin_R.unsqueeze(-2)
    kernels = kernels_for(x_ND, "rotary", native=native)
    turned_ND: Tensor = _rotation(x_ND, cos, sin, interleaved, kernels)
    return turned_ND


def _rotation_forward(
    ctx: Any, x_ND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kernels: ModuleType | None
) -> Tensor:
    """The gradient is the rotation back."""
    ctx.save_for_backward(cos, sin)
    ctx.interleaved, ctx.kernels = interleaved, kernels
    if kernels is not None:
        return cast(Tensor, kernels.turn(x_ND, cos.squeeze(-2), sin.squeeze(-2), interleaved))
    return _turn(x_ND, cos, sin, interleaved)


def _rotation_backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None, None]:
    cos, sin = ctx.saved_tensors
    if ctx.kernels is not None:
        turned = ctx.kernels.turn(grad_ND, cos.squeeze(-2), sin.squeeze(-2), ctx.interleaved, back=True)
    else:
        turned = _turn(grad_ND, cos, -sin, ctx.interleaved)
    return turned, None, None, None, None


_rotation = differentiable(_rotation_forward, _rotation_backward)


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
        found: Heads = _heads(
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


def _heads_forward(
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
        kernels.turn_normed(x, norm, eps, cos_BSR, sin_BSR, interleaved) for x, norm in ((q, q_norm_D), (k, k_norm_D))
    ]
    (q, q_factors), (k, k_factors) = turned
    kept = None if q_norm_D is None else qkv_BSX
    ctx.save_for_backward(kept, q_norm_D, k_norm_D, q_factors, k_factors, cos_BSR, sin_BSR)
    ctx.rest = widths, interleaved, head_dim, kernels
    return q, k, v


def _heads_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
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


_heads = differentiable(_heads_forward, _heads_backward)


def attention_mask(
    documents_BS: Tensor | None, num_positions: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys each query sees: bool [B or 1, 1, S, S], True where it does. None: all up to its own.

    `documents_BS`: the number of each position's document; None: one a sequence."""
    if documents_BS is None and (window is None or window >= num_positions):
        return None
    positions_S = torch.arange(num_positions, device=device)
    distance_SS = positions_S.unsqueeze(1) - positions_S
    mask_SS = distance_SS >= 0
    if window is not None:
        mask_SS = mask_SS & (distance_SS < window)
    if documents_BS is None:
        return mask_SS.view(1, 1, num_positions, num_positions)
    same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return (mask_SS & same_BSS).unsqueeze(1)


def first_keys(
    documents_BS: Tensor | None, num_positions: int, window: int | None, device: torch.device
) -> Tensor | None:
    """The first key that each query sees, int64 [B or 1, S], where each document is one run; None: 0 for all."""
    if documents_BS is None and (window is None or window >= num_positions):
        return None
    positions_1S = torch.arange(num_positions, device=device).unsqueeze(0)
    first_BS = torch.zeros_like(positions_1S)
    if documents_BS is not None:
        begins_BS = torch.zeros_like(documents_BS, dtype=torch.bool)
        begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        first_BS = (positions_1S * begins_BS).cummax(1).values
    return first_BS if window is None else torch.maximum(first_BS, positions_1S - window + 1)


def causal_attention(
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    mask_BSS: Tensor | None,
    scale: float,
    sinks_N: Tensor | None = None,
    first_keys_BS: Tensor | None = None,
) -> Tensor:
    """[B, S, N, V]. `mask_BSS` as `attention_mask` gives it, `first_keys_BS` the same as `first_keys` does, for kernels
    that want that. N is a multiple of G."""
    kernels = kernels_for(q_BSND, "attention")
    if kernels is not None and sinks_N is None and (mask_BSS is None or first_keys_BS is not None):
        out_BSNV: Tensor = _causal(q_BSND, k_BSGD, v_BSGV, None if mask_BSS is None else first_keys_BS, scale, kernels)
        return out_BSNV
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGV))
    if sinks_N is not None:
        out_BNSV = _with_sinks(q, k, v, mask_BSS, scale, sinks_N)
    else:
        out_BNSV = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BSS, is_causal=mask_BSS is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out_BNSV.transpose(1, 2)


def _causal_forward(
    ctx: Any,
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    first_keys_BS: Tensor | None,
    scale: float,
    kernels: ModuleType,
) -> Tensor:
    """By a kernel; kept is one number a query beside what is read and made."""
    if first_keys_BS is not None:
        first_keys_BS = first_keys_BS.expand(q_BSND.shape[:2]).contiguous()
    out, lse = kernels.causal_attention(q_BSND, k_BSGD, v_BSGV, first_keys_BS, scale)
    ctx.save_for_backward(q_BSND, k_BSGD, v_BSGV, first_keys_BS, out, lse)
    ctx.scale, ctx.kernels = scale, kernels
    return cast(Tensor, out)


def _causal_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, first_keys_BS, out, lse = ctx.saved_tensors
    return *ctx.kernels.causal_gradient(grad, q, k, v, first_keys_BS, ctx.scale, out, lse), None, None, None


_causal = differentiable(_causal_forward, _causal_backward)


def _with_sinks(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, mask: Tensor | None, scale: float, sinks_N: Tensor
) -> Tensor:
    repeats, num_positions = q_BNSD.shape[1] // k_BGSD.shape[1], q_BNSD.shape[2]
    k_BNSD, v_BNSV = (x.repeat_interleave(repeats, dim=1) for x in (k_BGSD, v_BGSV))
    if mask is None:
        mask = torch.ones((num_positions, num_positions), dtype=torch.bool, device=q_BNSD.device).tril()
    scores_BNSS = (q_BNSD @ k_BNSD.mT).to(torch.promote_types(q_BNSD.dtype, torch.float32)) * scale
    scores_BNSS = scores_BNSS.masked_fill(~mask, float("-inf"))
    sinks = sinks_N.to(scores_BNSS.dtype).view(1, -1, 1, 1).expand(*scores_BNSS.shape[:-1], 1)
    weights_BNSS = torch.cat((scores_BNSS, sinks), -1).softmax(-1)[..., :-1]
    return weights_BNSS.to(v_BNSV.dtype) @ v_BNSV
