"""Attention of one layer in training: whole sequences, no cache, gradients.

Grouped-query attention in the order of `models/attention`: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding. Latent attention in its expanded form, as
`models/latent_attention` for whole prompts: keys and values of all heads are made from the latent rows.

Letters: B sequences, S positions, H hidden, X fused width, N query heads, G KV heads, D head width, L latent,
C width without rotation, R rotated width, V width of a value.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops.attention import attention_mask, causal_attention
from antiphon.kernels.ops.norm import rms_norm
from antiphon.kernels.ops.rotary import rotate
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec
from antiphon.train.weights import Weights


@dataclass(frozen=True)
class Sequences:
    """What all layers know of a micro-batch. `masks`: by sliding window, see `attention_mask`."""

    cos_BSR: Tensor
    sin_BSR: Tensor
    masks: dict[int | None, Tensor | None]

    @staticmethod
    def of(
        spec: ModelSpec, cos_PR: Tensor, sin_PR: Tensor, positions_BS: Tensor, documents_BS: Tensor | None
    ) -> "Sequences":
        """`positions_BS` count within documents; `documents_BS` None: one document a sequence."""
        windows = {spec.attention.window_of(layer) for layer in range(spec.num_layers)}
        masks = {
            window: attention_mask(documents_BS, positions_BS.shape[1], window, positions_BS.device)
            for window in windows
        }
        return Sequences(cos_PR[positions_BS], sin_PR[positions_BS], masks)


def attend(spec: ModelSpec, layer: int, weights: Weights, y_BSH: Tensor, sequences: Sequences) -> Tensor:
    """[B, S, H]: attention of normed rows, without the residual."""
    attention = spec.attention
    if attention.latent is None:
        q, k, v = _grouped_query(attention, spec.norm_eps, weights, y_BSH, sequences)
    else:
        q, k, v = _latent(attention, attention.latent, weights, y_BSH, sequences)
    mask = sequences.masks[attention.window_of(layer)]
    out_BSNV = causal_attention(q, k, v, mask, attention.scale, weights.optional("sinks"))
    return F.linear(out_BSNV.flatten(2), weights["out"], weights.optional("out_bias"))


def _grouped_query(
    spec: AttentionSpec, eps: float, weights: Weights, y_BSH: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    kv_width = spec.num_kv_heads * spec.head_dim
    qkv_BSX = F.linear(y_BSH, weights["qkv"], weights.optional("qkv_bias"))
    q, k, v = torch.split(qkv_BSX, [spec.num_heads * spec.head_dim, kv_width, kv_width], dim=-1)
    if spec.qk_norm == "full":
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    q, k, v = (part.view(*part.shape[:2], -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    cos, sin, interleaved = sequences.cos_BSR, sequences.sin_BSR, spec.rope.interleaved
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved), v


def _latent(
    spec: AttentionSpec, latent: LatentSpec, weights: Weights, y_BSH: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    down = F.linear(y_BSH, weights["down"], _latent_bias(spec, latent, weights))
    first = down.shape[-1] - latent.key_dim
    q, latent_BSL, k_rope_BSR = torch.split(down, [first, latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1)
    if latent.q_lora_rank is not None:
        q = F.linear(rms_norm(q, weights["q_down_norm"], latent.norm_eps), weights["q_up"])
    latent_BSL = rms_norm(latent_BSL, weights["kv_down_norm"], latent.norm_eps)
    q_BSND = q.view(*q.shape[:2], spec.num_heads, spec.head_dim)
    up_BSNU = F.linear(latent_BSL, weights["kv_up"]).view(*latent_BSL.shape[:2], spec.num_heads, -1)
    k_nope_BSNC, v_BSNV = torch.split(up_BSNU, [latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
    q_nope, q_rope = torch.split(q_BSND, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
    cos, sin, interleaved = sequences.cos_BSR, sequences.sin_BSR, spec.rope.interleaved
    k_rope = rotate(k_rope_BSR.unsqueeze(2), cos, sin, interleaved).expand(-1, -1, spec.num_heads, -1)
    q = torch.cat((q_nope, rotate(q_rope, cos, sin, interleaved)), dim=-1)
    return q, torch.cat((k_nope_BSNC, k_rope), dim=-1), v_BSNV


def _latent_bias(spec: AttentionSpec, latent: LatentSpec, weights: Weights) -> Tensor | None:
    """The bias of the down projections; a direct query projection has none, its rows get zeros."""
    bias = weights.optional("down_bias")
    if bias is None or latent.q_lora_rank is not None:
        return bias
    return torch.cat((bias.new_zeros(spec.num_heads * spec.head_dim), bias))
