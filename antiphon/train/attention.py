"""Attention of one layer in training, as operators: no cache, gradients, positions and heads shared between ranks.

Grouped-query attention in the order of `models/attention`: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding. Latent attention in its expanded form, as
`models/attention` for whole prompts: keys and values of all heads are made from the latent rows.

Letters: B sequences, S positions, s those of this rank, H hidden, X fused width, N query heads, G KV heads,
D head width, L latent, C width without rotation, R rotated width, V width of a value. Heads are those of this rank.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.tile_flight import TileLinks
from antiphon.kernels.ops.attention import causal_attention
from antiphon.kernels.ops.norm import rms_norm
from antiphon.kernels.ops.rotary import rotate
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec
from antiphon.train.operators import Compute, Exchange, Here, Operator, Product
from antiphon.train.sequence_parallel import SequenceParallel
from antiphon.train.sequences import Sequences
from antiphon.train.tiled_attention import HeadsArriving, HeadsLeaving
from antiphon.train.weights import Weights

QKV = ("q", "k", "v")
QKV_A2A = ("q_a2a", "k_a2a", "v_a2a")


def attention_operators(spec: ModelSpec, *, sequence_ranks: int, links: TileLinks | None = None) -> list[Operator]:
    """From normed rows to attention's output, without the residual. `links`: who carries tiles between the sequence
    ranks, None: all-to-alls stay whole."""
    attention = spec.attention
    return [
        Exchange(
            name="tensor_gather",
            reads=("ln1_out",),
            makes=("ln1_out_ag",),
            collective=lambda here, x: here.sequences.parallel.gather(),
            dim=1,
        ),
        *_until_heads(attention, sequence_ranks, links),
        Compute(name="attention", reads=QKV_A2A, makes=("attn",), saves=(*QKV_A2A, "attn"), function=_attention),
        *(_rows() if sequence_ranks == 1 else _exchanged_rows(links)),
        Exchange(
            name="tensor_scatter",
            reads=("attn_out",),
            makes=("attn_out_rs",),
            collective=lambda here, x: here.sequences.parallel.scatter(),
            dim=1,
        ),
    ]


def reads_qkv(attention: AttentionSpec) -> bool:
    """Whether backward reads what the projection made: for norms or clipping."""
    return attention.latent is not None or attention.qk_norm is not None or attention.clip_qkv is not None


def heads_leave_in_tiles(attention: AttentionSpec) -> bool:
    """Whether what a head needs of its projection is made of its own columns: then these can leave while others are
    multiplied. Not where a norm is over all heads (OLMoE), nor where heads are made of a latent row."""
    return attention.latent is None and attention.qk_norm != "full"


def _until_heads(attention: AttentionSpec, sequence_ranks: int, links: TileLinks | None) -> list[Operator]:
    """From rows to the queries, keys and values of the heads that this rank works on, at all positions."""
    latent, normed = attention.latent, reads_qkv(attention)
    product = Product(
        name="qkv",
        reads=("ln1_out_ag",),
        makes=("qkv",),
        saves=("ln1_out_ag",),
        weight="qkv" if latent is None else "down",
        bias=_qkv_bias if latent is None else _down_bias(latent),
    )
    if sequence_ranks > 1 and links is not None and heads_leave_in_tiles(attention):
        leaving = HeadsLeaving.of(product, "qkv_a2a", links)
        rope = _rope_of("qkv_a2a", normed=normed, exchanged=True)
        return [leaving, rope, _heads(copies=not normed, exchanged=True)]
    rope = _rope_of("qkv", normed=normed)
    if sequence_ranks == 1:
        return [product, rope, _heads(copies=latent is not None or not normed)]
    return [product, rope, *_exchanged_heads()]


def _rope_of(projected: str, *, normed: bool, exchanged: bool = False) -> Operator:
    """`exchanged`: the projection is at all positions, of the heads that this rank works on."""
    return Compute(
        name="rope",
        reads=(projected,),
        makes=QKV,
        saves=(projected,) if normed else (),
        function=partial(_rope, exchanged=exchanged),
    )


def _heads(*, copies: bool, exchanged: bool = False) -> Operator:
    """Where all positions are here. `copies`: values are a part of something larger that need not be held for them."""

    def heads(here: Here, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parallel = here.sequences.parallel
        v = v.contiguous() if copies else v
        return parallel.fitted(q, k, v) if exchanged else parallel.own_heads(q, k, v)

    return Compute(name="heads", reads=QKV, makes=QKV_A2A, function=heads)


def _exchanged_heads() -> list[Operator]:
    return [
        Compute(
            name="pack_heads",
            reads=QKV,
            makes=("heads_sent",),
            function=lambda here, q, k, v: here.sequences.parallel.pack_heads(q, k, v),
        ),
        Exchange(
            name="heads_a2a",
            reads=("heads_sent",),
            makes=("heads_received",),
            collective=lambda here, packed: here.sequences.parallel.to_heads(packed),
        ),
        Compute(
            name="unpack_heads",
            reads=("heads_received",),
            makes=QKV_A2A,
            function=lambda here, received: here.sequences.parallel.unpack_heads(received),
        ),
    ]


def _out() -> Product:
    return Product(name="out", reads=("attn_a2a",), makes=("attn_out",), saves=("attn_a2a",), weight="out")


def _rows() -> list[Operator]:
    rows = Compute(name="rows", reads=("attn",), makes=("attn_a2a",), function=lambda here, out: out.flatten(2))
    return [rows, _out()]


def _exchanged_rows(links: TileLinks | None) -> list[Operator]:
    if links is not None:
        pack = Compute(
            name="pack_rows",
            reads=("attn",),
            makes=("rows_sent",),
            function=lambda here, out: here.sequences.parallel.by_rank(out.flatten(2)),
        )
        return [pack, HeadsArriving.of("rows_sent", _out(), links)]
    return [
        Compute(
            name="pack_rows",
            reads=("attn",),
            makes=("rows_sent",),
            function=lambda here, out: here.sequences.parallel.pack_rows(out),
        ),
        Exchange(
            name="rows_a2a",
            reads=("rows_sent",),
            makes=("rows_received",),
            collective=lambda here, packed: here.sequences.parallel.to_rows(packed),
        ),
        Compute(
            name="unpack_rows",
            reads=("rows_received",),
            makes=("attn_a2a",),
            function=lambda here, received: here.sequences.parallel.unpack_rows(received),
        ),
        _out(),
    ]


def _rope(here: Here, qkv_BsX: Tensor, *, exchanged: bool) -> tuple[Tensor, Tensor, Tensor]:
    spec, weights, sequences = here.spec, here.weights, here.sequences
    if spec.attention.latent is None:
        return _grouped_query(spec.attention, spec.norm_eps, weights, qkv_BsX, sequences, exchanged=exchanged)
    return _latent(spec.attention, spec.attention.latent, weights, qkv_BsX, sequences)


def _attention(here: Here, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention, sequences = here.spec.attention, here.sequences
    sinks_N = here.weights.optional("sinks")
    sinks_N = None if sinks_N is None else sinks_N[slice(*sequences.parallel.heads)]
    mask = sequences.masks[attention.window_of(here.layer)]
    return causal_attention(q, k, v, mask, attention.scale, sinks_N)


def _qkv_bias(weights: Weights) -> Tensor | None:
    return weights.optional("qkv_bias")


def _grouped_query(
    spec: AttentionSpec, eps: float, weights: Weights, qkv_BsX: Tensor, sequences: Sequences, *, exchanged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    parallel = sequences.parallel
    q_width, kv_width = (parallel.worked_on if exchanged else parallel.projected)(spec.head_dim)
    q, k, v = torch.split(qkv_BsX, [q_width, kv_width, kv_width], dim=-1)
    if spec.qk_norm == "full":
        q = _whole_norm(q, weights["q_norm"], eps, spec.num_heads * spec.head_dim, parallel)
        k = _whole_norm(k, weights["k_norm"], eps, spec.num_kv_heads * spec.head_dim, parallel)
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    q, k, v = (part.view(*part.shape[:2], -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    cos, sin = (sequences.cos_BSR, sequences.sin_BSR) if exchanged else sequences.projected_rotations
    interleaved = spec.rope.interleaved
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved), v


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


def _down_bias(latent: LatentSpec) -> Callable[[Weights], Tensor | None]:
    """The bias of the down projections; a direct query projection has none, its rows get zeros."""

    def bias(weights: Weights) -> Tensor | None:
        found = weights.optional("down_bias")
        if found is None or latent.q_lora_rank is not None:
            return found
        return torch.cat((found.new_zeros(weights["down"].shape[0] - found.shape[0]), found))

    return bias
