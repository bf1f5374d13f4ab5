"""Attention of one layer in training: no cache, gradients, positions and heads shared between ranks.

Grouped-query attention in the order of `models/attention`: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding. Latent attention in its expanded form, as
`models/latent_attention` for whole prompts: keys and values of all heads are made from the latent rows.

Letters: B sequences, S positions, s those of this rank, H hidden, X fused width, N query heads, G KV heads,
D head width, L latent, C width without rotation, R rotated width, V width of a value. Heads are those of this rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops.attention import attention_mask, causal_attention
from antiphon.kernels.ops.norm import rms_norm
from antiphon.kernels.ops.rotary import rotate
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec
from antiphon.train.sequence_parallel import SequenceParallel
from antiphon.train.weights import Weights


@dataclass(frozen=True)
class Sequences:
    """What all layers know of a micro-batch. Rotations are those of the positions that this rank projects; `masks`: by
    sliding window, over all positions, see `attention_mask`."""

    parallel: SequenceParallel
    cos_BsR: Tensor
    sin_BsR: Tensor
    masks: dict[int | None, Tensor | None]

    @staticmethod
    def of(
        spec: ModelSpec,
        parallel: SequenceParallel,
        cos_PR: Tensor,
        sin_PR: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor | None,
    ) -> "Sequences":
        """`positions_BS` count within documents; `documents_BS` None: one document a sequence."""
        windows = {spec.attention.window_of(layer) for layer in range(spec.num_layers)}
        masks = {
            window: attention_mask(documents_BS, positions_BS.shape[1], window, positions_BS.device)
            for window in windows
        }
        positions_Bs = positions_BS[:, slice(*parallel.gathered)]
        return Sequences(parallel, cos_PR[positions_Bs], sin_PR[positions_Bs], masks)


def attend(spec: ModelSpec, layer: int, weights: Weights, y_BsH: Tensor, sequences: Sequences) -> Tensor:
    """[B, s, H]: attention of normed rows, without the residual."""
    attention, parallel = spec.attention, sequences.parallel
    y_BsH = parallel.gather(y_BsH)
    if attention.latent is None:
        q, k, v = _grouped_query(attention, spec.norm_eps, weights, y_BsH, sequences)
    else:
        q, k, v = _latent(attention, attention.latent, weights, y_BsH, sequences)
    q, k, v = parallel.to_heads(q, k, v)
    sinks_N = weights.optional("sinks")
    sinks_N = None if sinks_N is None else sinks_N[slice(*parallel.heads)]
    out_BSNV = causal_attention(q, k, v, sequences.masks[attention.window_of(layer)], attention.scale, sinks_N)
    out_BsNV = parallel.to_rows(out_BSNV)
    out_BsH = parallel.scatter(F.linear(out_BsNV.flatten(2), weights["out"]))
    bias = weights.optional("out_bias")
    return out_BsH if bias is None else out_BsH + bias


def _grouped_query(
    spec: AttentionSpec, eps: float, weights: Weights, y_BsH: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    qkv_BsX = F.linear(y_BsH, weights["qkv"], weights.optional("qkv_bias"))
    q_width, kv_width = sequences.parallel.projected(spec.head_dim)
    q, k, v = torch.split(qkv_BsX, [q_width, kv_width, kv_width], dim=-1)
    if spec.qk_norm == "full":
        q = _whole_norm(q, weights["q_norm"], eps, spec.num_heads * spec.head_dim, sequences.parallel)
        k = _whole_norm(k, weights["k_norm"], eps, spec.num_kv_heads * spec.head_dim, sequences.parallel)
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    q, k, v = (part.view(*part.shape[:2], -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    cos, sin, interleaved = sequences.cos_BsR, sequences.sin_BsR, spec.rope.interleaved
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved), v


def _whole_norm(x: Tensor, weight: Tensor, eps: float, width: int, parallel: SequenceParallel) -> Tensor:
    """The norm over all heads (OLMoE), of which a tensor rank has some."""
    if x.shape[-1] == width:
        return rms_norm(x, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = parallel.sum_over_heads(wide.square().sum(-1, keepdim=True)) / width
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


def _latent(
    spec: AttentionSpec, latent: LatentSpec, weights: Weights, y_BsH: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    down = F.linear(y_BsH, weights["down"], _latent_bias(latent, weights))
    first = down.shape[-1] - latent.key_dim
    q, latent_BsL, k_rope_BsR = torch.split(down, [first, latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1)
    if latent.q_lora_rank is not None:
        q = F.linear(rms_norm(q, weights["q_down_norm"], latent.norm_eps), weights["q_up"])
    latent_BsL = rms_norm(latent_BsL, weights["kv_down_norm"], latent.norm_eps)
    q_BsND = q.view(*q.shape[:2], -1, spec.head_dim)
    up_BsNU = F.linear(latent_BsL, weights["kv_up"]).view(*q_BsND.shape[:3], -1)
    k_nope_BsNC, v_BsNV = torch.split(up_BsNU, [latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
    q_nope, q_rope = torch.split(q_BsND, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
    cos, sin, interleaved = sequences.cos_BsR, sequences.sin_BsR, spec.rope.interleaved
    k_rope = rotate(k_rope_BsR.unsqueeze(2), cos, sin, interleaved).expand(-1, -1, q_BsND.shape[2], -1)
    q = torch.cat((q_nope, rotate(q_rope, cos, sin, interleaved)), dim=-1)
    return q, torch.cat((k_nope_BsNC, k_rope), dim=-1), v_BsNV


def _latent_bias(latent: LatentSpec, weights: Weights) -> Tensor | None:
    """The bias of the down projections; a direct query projection has none, its rows get zeros."""
    bias = weights.optional("down_bias")
    if bias is None or latent.q_lora_rank is not None:
        return bias
    return torch.cat((bias.new_zeros(weights["down"].shape[0] - bias.shape[0]), bias))
