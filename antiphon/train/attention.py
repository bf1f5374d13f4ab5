"""Attention of one layer in training, as operators: no cache, gradients, positions and heads shared between ranks.

Grouped-query attention in the order of `models/attention`: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding. Latent attention in its expanded form, as
`models/attention` for whole prompts: keys and values of all heads are made from the latent rows.

A projection and the exchange beside it may be one operator in tiles (MegaScale-MoE, 4.2). With ranks that share
positions (Ulysses), `TiledHeads`:

    heads leave      the projection to queries, keys and values, then the all-to-all to those who work on their heads:
                     columns for other ranks are multiplied first and sent tile by tile, the own ones last
    heads arrive     the all-to-all of attention's output, then the output projection: own columns are multiplied first,
                     then each tile that has come, and the products are added

With ranks that share heads (tensor parallelism), `TiledRows`, whole:

    rows arrive      the all-gather of rows, then the first projection: own rows are multiplied first, then as they come
    rows leave       the output projection, then the reduce-scatter: rows for other ranks are multiplied and sent first

The backward of each is the other one's forward, so either pair is one class. A tile is some rows: with the columns of
one rank, or whole. Products that are added to the same rows take turns (`comm/tile_flight`) or are added in order of
rank, so sums have the same bits however tiles arrive.

Per-head norms, clipping and rotation then come behind the all-to-all, at all positions of the heads of this rank: each
needs its own head alone. Rejected: in each tile. Backward would need an autograd graph a tile.

Letters: B sequences, S positions, s those of this rank, T rows, of this rank or of all, H hidden, X fused width,
N query heads, G KV heads, D head width, L latent, C width without rotation, R rotated width, V width of a value, I and
O inputs and outputs of a product, W columns of all heads, w those of the heads of one rank, P rows of all positions in
order of rank. Heads are those of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.collectives import Collective
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.tile_flight import TileFlight, launch_in_tiles, rows_of
from antiphon.kernels.ops.attention import causal_attention, heads_of, rms_norm, rotate
from antiphon.models.shares import Ranges, pick
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec
from antiphon.train.operators import LayerContext, Operator, RowExchange, WeightProduct, compute, exchange, product
from antiphon.train.sequence_parallel import SequenceParallel, Sequences
from antiphon.train.tiled import Tiled, TiledRun, tiled_fields
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
        found[:2] = [TiledRows(**tiled_fields(gather, project, tensor_links, arrives=True))]
    if isinstance(out, WeightProduct):
        found[-2:] = [TiledRows(**tiled_fields(scatter, out, tensor_links, arrives=False))]
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


def heads_leaving(product: WeightProduct, links: TileLinks) -> "TiledHeads":
    """Makes the projection of this rank's heads, [B, S, w]."""
    a2a = exchange(
        "heads_a2a",
        f"{product.reads[0]} -> qkv_a2a",
        lambda here, x_BsH: here.sequences.parallel.rows_to_heads(x_BsH.shape[0]),
    )
    return TiledHeads(**tiled_fields(a2a, product, links, "pack_heads", arrives=False))


def heads_arriving(product: WeightProduct, links: TileLinks) -> "TiledHeads":
    """Reads attention's output of this rank's heads, [P, w]."""
    a2a = exchange(
        "rows_a2a",
        f"rows_sent -> {product.reads[0]}",
        lambda here, x_Pw: here.sequences.parallel.heads_to_rows(x_Pw.shape[0]),
    )
    return TiledHeads(**tiled_fields(a2a, product, links, "unpack_rows", arrives=True))


@dataclass(frozen=True, kw_only=True)
class TiledHeads(Tiled):
    """A row travels with the heads of one rank."""

    def _columns(self, here: LayerContext) -> list[Ranges]:
        """For each rank, what it makes, or works on, of the W columns of all heads."""
        parallel = here.sequences.parallel
        return parallel.output_columns if self.arrives else parallel.projected_columns

    def _weight_WH(self, here: LayerContext) -> Tensor:
        weight = here.weights[self.product.weight]
        return weight.mT if self.arrives else weight

    def launch(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        rows_PW = x if self.arrives else run.here.sequences.parallel.by_rank(x)
        return launch_in_tiles(collective, self.links, rows_PW, [_width(each) for each in self._columns(run.here)])

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Sends each rank its columns of the product of all rows."""
        columns, weight_WH, rows_TH = self._columns(run.here), self._weight_WH(run.here), x.flatten(0, 1)
        flight = TileFlight(collective, self.links, _width(columns[collective.group.index]), x.dtype)
        bias_W = None if self.arrives else self.product.bias(run.here.weights)
        matrices = [pick(weight_WH, 0, ranges).mT for ranges in columns]
        biases = None if bias_W is None else [pick(bias_W, 0, ranges) for ranges in columns]
        for tile in flight.to_send:
            product = rows_TH[tile.first : tile.last] @ matrices[tile.rank]
            flight.send(tile, product if biases is None else product + biases[tile.rank])
        return flight

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        """[B, s, W] and [B, s, H]. What came for the same columns is added: a key-value head that several ranks have.
        Products are added in float32 at least."""
        columns, weight_WH = self._columns(run.here), self._weight_WH(run.here)
        num_rows, dtype = flight.routes.receive[0], weight_WH.dtype
        came_TW = weight_WH.new_zeros(num_rows, weight_WH.shape[0])
        wide = torch.promote_types(dtype, torch.float32)
        total_TH = weight_WH.new_zeros(num_rows, weight_WH.shape[1], dtype=wide)
        matrices = [pick(weight_WH, 0, ranges) for ranges in columns]
        for tile in flight.arrivals_in_turns():
            part = slice(tile.first, tile.last)
            came_Tw = flight.received_from[tile.rank][part]
            pieces = torch.split(came_Tw, [last - first for first, last in columns[tile.rank]], dim=1)
            for (first_column, last_column), piece in zip(columns[tile.rank], pieces, strict=True):
                came_TW[part, first_column:last_column] += piece
            if multiplies:
                total_TH[part] += came_Tw @ matrices[tile.rank]
        made = [came_TW, total_TH.to(dtype)] if multiplies else [came_TW]
        return [each.view(-1, run.here.sequences.parallel.num_rows, each.shape[1]) for each in made]

    def land(self, run: TiledRun, flight: TileFlight) -> Tensor:
        found = flight.land()
        return found if self.arrives else run.here.sequences.parallel.by_position(found)


@dataclass(frozen=True, kw_only=True)
class TiledRows(Tiled):
    """A row travels whole. Rows have positions first here, so that those of each rank are one run."""

    def collective(self, run: TiledRun) -> Collective:
        return run.here.sequences.parallel.in_rows(super().collective(run), run.values[self.reads[0]])

    def launch(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        return launch_in_tiles(collective, self.links, _positions_first(x))

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Sends each rank the products of its rows."""
        weight, rows_TI = run.here.weights[self.product.weight], _positions_first(x)
        weight_IO = weight if self.arrives else weight.mT
        flight = TileFlight(collective, self.links, weight_IO.shape[1], x.dtype)
        for tile in flight.to_send:
            flight.send(tile, rows_TI[rows_of(tile, flight.routes.send)] @ weight_IO)
        return flight

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        """[B, S, I] and [B, S, O], of all rows that came."""
        weights, out_TO, weight_IO = run.here.weights, None, None
        if multiplies:
            weight = weights[self.product.weight]
            weight_IO = weight.mT if self.arrives else weight
            out_TO = weight_IO.new_empty(flight.received.shape[0], weight_IO.shape[1])
        for tile in flight.arrivals():
            rows = rows_of(tile, flight.routes.receive)
            if weight_IO is not None and out_TO is not None:
                torch.mm(flight.received[rows].to(weights.dtype), weight_IO, out=out_TO[rows])
        came = _sequences(run, flight.received.to(weights.dtype))
        if out_TO is None:
            return [came]
        bias_O = self.product.bias(weights) if self.arrives else None
        return [came, _sequences(run, out_TO if bias_O is None else out_TO + bias_O)]

    def land(self, run: TiledRun, flight: TileFlight) -> Tensor:
        return _sequences(run, flight.land().to(run.here.weights.dtype))


def _positions_first(x_BSH: Tensor) -> Tensor:
    """[T, H], positions first."""
    return x_BSH.transpose(0, 1).flatten(0, 1)


def _sequences(run: TiledRun, x_TH: Tensor) -> Tensor:
    """[B, S, H] of rows with positions first."""
    num_sequences = run.here.sequences.cos_BSR.shape[0]
    return x_TH.view(-1, num_sequences, x_TH.shape[1]).transpose(0, 1).contiguous()


def _width(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)
