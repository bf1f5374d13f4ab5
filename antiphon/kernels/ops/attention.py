"""Causal attention over whole sequences, differentiable; documents packed into one sequence do not see each other.

A native kernel on CPUs, elsewhere PyTorch's fused attention; sinks (gpt-oss) are one more column of scores, which
neither knows, so they go through plain products.

Letters: B sequences, S positions, N query heads, G KV heads, D head width, V width of a value.
"""

from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops import kernels_for


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
        out_BSNV: Tensor = _Causal.apply(  # type: ignore[no-untyped-call]
            q_BSND, k_BSGD, v_BSGV, None if mask_BSS is None else first_keys_BS, scale, kernels
        )
        return out_BSNV
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGV))
    if sinks_N is not None:
        out_BNSV = _with_sinks(q, k, v, mask_BSS, scale, sinks_N)
    else:
        out_BNSV = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BSS, is_causal=mask_BSS is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out_BNSV.transpose(1, 2)


class _Causal(torch.autograd.Function):
    """By a kernel; kept is one number a query beside what is read and made."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSND: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        first_keys_BS: Tensor | None,
        scale: float,
        kernels: ModuleType,
    ) -> Tensor:
        if first_keys_BS is not None:
            first_keys_BS = first_keys_BS.expand(q_BSND.shape[:2]).contiguous()
        out, lse = kernels.causal_attention(q_BSND, k_BSGD, v_BSGV, first_keys_BS, scale)
        ctx.save_for_backward(q_BSND, k_BSGD, v_BSGV, first_keys_BS, out, lse)
        ctx.scale, ctx.kernels = scale, kernels
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first_keys_BS, out, lse = ctx.saved_tensors
        return *ctx.kernels.causal_gradient(grad, q, k, v, first_keys_BS, ctx.scale, out, lse), None, None, None


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
