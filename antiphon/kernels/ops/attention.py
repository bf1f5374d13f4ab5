"""Causal attention over whole sequences, differentiable; documents packed into one sequence do not see each other.

PyTorch's fused attention where it can say what is wanted; sinks (gpt-oss) are one more column of scores, which it
does not know, so they go through plain products.

Letters: B sequences, S positions, N query heads, G KV heads, D head width, V width of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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


def causal_attention(
    q_BSND: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, mask_BSS: Tensor | None, scale: float, sinks_N: Tensor | None = None
) -> Tensor:
    """[B, S, N, V]. `mask_BSS` as `attention_mask` gives it. N is a multiple of G."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGV))
    if sinks_N is not None:
        out_BNSV = _with_sinks(q, k, v, mask_BSS, scale, sinks_N)
    else:
        out_BNSV = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_BSS, is_causal=mask_BSS is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out_BNSV.transpose(1, 2)


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
