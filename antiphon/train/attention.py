"""Attention of one layer in training, as operators: no cache, gradients, positions and heads shared between ranks.

Grouped-query attention in the order of `models/attention`: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding. Latent attention in its expanded form, as
`models/attention` for whole prompts: keys and values of all heads are made from the latent rows.

Letters: B sequences, S positions, s those of this rank, H hidden, X fused width, N query heads, G KV heads,
D head width, L latent, C width without rotation, R rotated width, V width of a value. Heads are those of this rank.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.tile_flight import TileLinks
from antiphon.kernels.ops.attention import causal_attention
from antiphon.kernels.ops.norm import rms_norm
from antiphon.kernels.ops.rotary import heads_of, rotate
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec
from antiphon.train.operators import LayerContext, Operator, RowExchange, WeightProduct, compute, exchange, product
from antiphon.train.sequence_parallel import SequenceParallel, Sequences
from antiphon.train.tiled_attention import heads_arriving, heads_leaving, rows_arriving, rows_leaving
from antiphon.train.weights import Weights


def attention_operators(
    spec: ModelSpec, *, sequence_ranks: int, links: TileLinks | None = None, tensor_links: TileLinks | None = None
) -> list[Operator]:
    """The operators from normed rows to attention's output, without the residual. `links`: who carries tiles between
    the sequence ranks, `tensor_links`: between the tensor ranks; None: their exchanges stay whole. A projection is in
    tiles with one exchange: where ranks share positions, with that between them."""
    found = [
        exchange("tensor_gather", "ln1_out -> ln1_out_ag", lambda here, x: here.sequences.parallel.gather(x), dim=1),
        *_until_heads(spec.attention, sequence_ranks, links),
        compute("attention", "q_a2a k_a2a v_a2a -> attn", attend, saves="q_a2a k_a2a v_a2a attn"),
        *_rows(sequence_ranks, links),
        exchange(
            "tensor_scatter", "attn_out -> attn_out_rs", lambda here, x: here.sequences.parallel.scatter(x), dim=1
        ),
    ]
    if tensor_links is None:
        return found
    (gather, project), (out, scatter) = found[:2], found[-2:]
    assert isinstance(gather, RowExchange)
    assert isinstance(scatter, RowExchange)
    if isinstance(project, WeightProduct):
        found[:2] = [rows_arriving(gather, project, tensor_links)]
    if isinstance(out, WeightProduct):
        found[-2:] = [rows_leaving(out, scatter, tensor_links)]
    return found


def reads_qkv(attention: AttentionSpec) -> bool:
    """Whether backward reads what the projection made: for norms or clipping."""
    return attention.latent is not None or attention.qk_norm != "none" or attention.clip_qkv is not None


def heads_leave_in_tiles(attention: AttentionSpec) -> bool:
    """Whether what a head needs of its projection is made of its own columns: then these can leave while others are
    multiplied. Not where a norm is over all heads (OLMoE), nor where heads are made of a latent row."""
    return attention.latent is None and attention.qk_norm != "full"


def _until_heads(attention: AttentionSpec, sequence_ranks: int, links: TileLinks | None) -> list[Operator]:
    """The operators from rows to queries, keys and values of this rank's heads, at all positions."""
    normed, weight, bias = reads_qkv(attention), projection_weight(attention), partial(projection_bias, attention)
    projection = product("qkv", "ln1_out_ag -> qkv", weight, bias, saves="ln1_out_ag")
    rope = compute("rope", "qkv -> q k v", rope_heads, saves="qkv" if normed else "")
    if sequence_ranks == 1:
        return [projection, rope, _heads(copies=attention.latent is not None or not normed)]
    if links is None or not heads_leave_in_tiles(attention):
        return [projection, rope, *_exchanged_heads()]
    leaving = heads_leaving(projection, links)
    rope_all = partial(rope_heads, exchanged=True)
    (received,) = leaving.makes
    rope = compute("rope", f"{received} -> q k v", rope_all, saves=received if normed else "")
    return [leaving, rope, _heads(copies=not normed, exchanged=True)]


def _heads(*, copies: bool, exchanged: bool = False) -> Operator:
    """The last step where all positions are here. `copies`: values are a part of something larger that need not be held
    for them. `exchanged`: they are of the heads that this rank works on, and no others."""

    def heads(here: LayerContext, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parallel = here.sequences.parallel
        v = v.contiguous() if copies else v
        return parallel.fitted(q, k, v) if exchanged else parallel.own_heads(q, k, v)

    return compute("heads", "q k v -> q_a2a k_a2a v_a2a", heads)


def _exchanged_heads() -> list[Operator]:
    return [
        compute("pack_heads", "q k v -> heads_sent", lambda here, q, k, v: here.sequences.parallel.pack_heads(q, k, v)),
        exchange(
            "heads_a2a", "heads_sent -> heads_received", lambda here, sent: here.sequences.parallel.to_heads(sent)
        ),
        compute(
            "unpack_heads",
            "heads_received -> q_a2a k_a2a v_a2a",
            lambda here, received: here.sequences.parallel.unpack_heads(received),
        ),
    ]


def _rows(sequence_ranks: int, links: TileLinks | None) -> list[Operator]:
    """The operators from attention's output to this rank's rows, times the output projection."""
    out = product("out", "attn_a2a -> attn_out", "out", saves="attn_a2a")
    if sequence_ranks == 1:
        return [compute("rows", "attn -> attn_a2a", lambda here, out: out.flatten(2)), out]
    if links is not None:
        arriving = heads_arriving(out, links)
        flow = f"attn -> {' '.join(arriving.reads)}"
        return [compute("pack_rows", flow, lambda here, x: here.sequences.parallel.by_rank(x.flatten(2))), arriving]
    return [
        compute("pack_rows", "attn -> rows_sent", lambda here, out: here.sequences.parallel.pack_rows(out)),
        exchange("rows_a2a", "rows_sent -> rows_received", lambda here, sent: here.sequences.parallel.to_rows(sent)),
        compute(
            "unpack_rows",
            "rows_received -> attn_a2a",
            lambda here, received: here.sequences.parallel.unpack_rows(received),
        ),
        out,
    ]


def rope_heads(here: LayerContext, qkv_BsX: Tensor, *, exchanged: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with their norms and rotations. `exchanged`: the projection is at
    all positions, of the heads that this rank works on."""
    spec, weights, sequences = here.spec, here.weights, here.sequences
    if spec.attention.latent is None:
        return _grouped_query(spec.attention, spec.norm_eps, weights, qkv_BsX, sequences, exchanged=exchanged)
    return _latent(spec.attention, spec.attention.latent, weights, qkv_BsX, sequences)


def attend(here: LayerContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the heads that this rank works on, at all positions."""
    attention, sequences = here.spec.attention, here.sequences
    sinks_N = here.weights.optional("sinks")
    sinks_N = None if sinks_N is None else sinks_N[slice(*sequences.parallel.heads)]
    window = attention.window_of(here.layer)
    return causal_attention(q, k, v, sequences.masks[window], attention.scale, sinks_N, sequences.first_keys[window])


def projection_weight(attention: AttentionSpec) -> str:
    """The purpose of the first projection: to queries, keys and values, or down to the latent rows."""
    return "qkv" if attention.latent is None else "down"


def projection_bias(attention: AttentionSpec, weights: Weights) -> Tensor | None:
    """Its bias. A direct query projection beside latent rows has none: its rows get zeros."""
    found = weights.optional(f"{projection_weight(attention)}_bias")
    if found is None or attention.latent is None or attention.latent.q_lora_rank is not None:
        return found
    return torch.cat((found.new_zeros(weights["down"].shape[0] - found.shape[0]), found))


def _grouped_query(
    spec: AttentionSpec, eps: float, weights: Weights, qkv_BsX: Tensor, sequences: Sequences, *, exchanged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    parallel, interleaved = sequences.parallel, spec.rope.interleaved
    q_width, kv_width = (parallel.worked_on if exchanged else parallel.projected)(spec.head_dim)
    angles = (sequences.cos_BSR, sequences.sin_BSR) if exchanged else sequences.projected_rotations
    if spec.qk_norm != "full" and spec.clip_qkv is None:
        norms = (weights["q_norm"], weights["k_norm"]) if spec.qk_norm == "head" else None
        return heads_of(qkv_BsX, (q_width, kv_width), norms, eps, angles, interleaved, spec.head_dim)
    q, k, v = torch.split(qkv_BsX, [q_width, kv_width, kv_width], dim=-1)
    if spec.qk_norm == "full":
        q = _whole_norm(q, weights["q_norm"], eps, spec.num_heads * spec.head_dim, parallel)
        k = _whole_norm(k, weights["k_norm"], eps, spec.num_kv_heads * spec.head_dim, parallel)
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    q, k, v = (part.view(*part.shape[:2], -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    return rotate(q, *angles, interleaved), rotate(k, *angles, interleaved), v


def _whole_norm(x: Tensor, weight: Tensor, eps: float, width: int, parallel: SequenceParallel) -> Tensor:
    """The norm over all heads (OLMoE), of which a tensor rank has some."""
    if x.shape[-1] == width:
        return rms_norm(x, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = parallel.sum_over_heads(wide.square().sum(-1, keepdim=True)) / width
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


def _latent(
    spec: AttentionSpec, latent: LatentSpec, weights: Weights, down: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    first = down.shape[-1] - latent.key_dim
    q, latent_BsL, k_rope_BsR = torch.split(down, [first, latent.kv_lora_rank, latent.qk_rope_head_dim], dim=-1)
    if latent.q_lora_rank is not None:
        q = F.linear(rms_norm(q, weights["q_down_norm"], latent.norm_eps), weights["q_up"])
    latent_BsL = rms_norm(latent_BsL, weights["kv_down_norm"], latent.norm_eps)
    q_BsND = q.view(*q.shape[:2], -1, spec.head_dim)
    up_BsNU = F.linear(latent_BsL, weights["kv_up"]).view(*q_BsND.shape[:3], -1)
    k_nope_BsNC, v_BsNV = torch.split(up_BsNU, [latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
    q_nope, q_rope = torch.split(q_BsND, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
    (cos, sin), interleaved = sequences.projected_rotations, spec.rope.interleaved
    k_rope = rotate(k_rope_BsR.unsqueeze(2), cos, sin, interleaved).expand(-1, -1, q_BsND.shape[2], -1)
    q = torch.cat((q_nope, rotate(q_rope, cos, sin, interleaved)), dim=-1)
    return q, torch.cat((k_nope_BsNC, k_rope), dim=-1), v_BsNV
