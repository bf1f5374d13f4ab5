"""Attention of one layer over the back-end's kernels, residual included: grouped-query, and multi-head latent.

Grouped-query attention, in order of its optional steps: projection with bias, norm over the whole of q and of k
(OLMoE), clipping (DBRX, OLMoE), per-head norms (Qwen3), rotary embedding.

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds per token one row [latent | rotated key
shared by all heads]. Two ways lead to the same numbers:
- absorbed (decode, and chunks with cached context): queries go through the key up-projection, so that attention runs
  on the cached rows themselves, as one KV head of width latent + rope;
- expanded (a whole prompt in one call): keys and values of all heads are made from the latent rows at hand, as the
  cache has them, and attention is 3 times cheaper per pair of tokens.
Rejected: expanding cached context, which would need the cache's layout, the back-end's own.

Under tensor parallelism these are the heads of one rank (`models/shares`): what comes out is its part of a sum over the
ranks, without the residual. Every rank makes and caches all latent rows.

Letters as in `antiphon.kernels.api`; X the fused width (N + 2G) * D; L latent (kv_lora_rank), C width without rotation,
R rotated width, U = C + V.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.rank_group import RankGroup
from antiphon.kernels.api import AttentionBatch, HeadRows, KernelBackend, KVCache, PackedLinear, RotaryTable
from antiphon.kernels.ops.attention import look_up, rotate
from antiphon.kernels.reference_attention import as_cached
from antiphon.models.batch import select_sequences
from antiphon.models.rotary import unrotated
from antiphon.models.shares import add_over_ranks
from antiphon.specs.model import AttentionSpec, LatentSpec


@dataclass(frozen=True, kw_only=True)
class WholeNorms:
    """What the norms of all of q and all of k need where each rank has some heads: the widths of both, and which KV
    heads this rank counts, because another may have them too."""

    ranks: RankGroup
    q_width: int
    k_width: int
    counted_kv_heads: tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class GroupedQueryAttention:
    """`q_norm` and `k_norm` are [D] for per-head norms, [N * D] and [G * D] for norms of the whole projection; `norms`:
    for those, where other ranks have heads too. `sinks_N` is float32."""

    spec: AttentionSpec
    eps: float
    backend: KernelBackend
    rotary: RotaryTable
    qkv: PackedLinear
    out: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks_N: Tensor | None
    residual_multiplier: float = 1.0
    norms: WholeNorms | None = None

    def __post_init__(self) -> None:
        per_head = self.spec.qk_norm == "head"
        self._heads = HeadRows(
            num_heads=self.spec.num_heads,
            rotary=self.rotary,
            q_norm_D=self.q_norm if per_head else None,
            k_norm_D=self.k_norm if per_head else None,
            eps=self.eps,
        )

    def heads(self, layer: int, y_TH: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """[T, heads * their width]: what the heads made of the rows y. Writes the rows' keys and values to the cache
        first."""
        spec, backend = self.spec, self.backend
        qkv_TX = backend.linear(y_TH, self.qkv)
        if spec.qk_norm == "full":
            self._norm_whole(qkv_TX)
        if spec.clip_qkv is not None:
            qkv_TX.clamp_(-spec.clip_qkv, spec.clip_qkv)
        q_TND = backend.rotate_and_store(qkv_TX, cache, layer, batch, self._heads)
        return backend.paged_attention(
            q_TND,
            cache,
            layer,
            batch,
            scale=spec.scale,
            sliding_window=spec.window_of(layer),
            sinks_N=self.sinks_N,
        ).flatten(1)

    def project(self, heads_TV: Tensor, x_TH: Tensor | None) -> Tensor:
        """x + attention(y), the second times the model's residual multiplier, from what the heads made; attention(y)
        alone if x is None. Row by row."""
        backend = self.backend
        if self.residual_multiplier != 1.0:  # two exact steps: a fused a + m * b would round by the row's place
            delta_TH = backend.linear(heads_TV, self.out).mul_(self.residual_multiplier)
            return delta_TH if x_TH is None else delta_TH.add_(x_TH)
        return backend.linear(heads_TV, self.out, residual_TO=x_TH)

    def _norm_whole(self, qkv_TX: Tensor) -> None:
        """Norms of all of q and of all of k, in place."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q_end = self.spec.num_heads * self.spec.head_dim
        q_TX, k_TX = qkv_TX[:, :q_end], qkv_TX[:, q_end : q_end + self.spec.num_kv_heads * self.spec.head_dim]
        if self.norms is not None:
            self._norm_over_ranks(q_TX, k_TX, self.norms)
            return
        for part, weight in ((q_TX, self.q_norm), (k_TX, self.k_norm)):
            self.backend.rms_norm_(part, weight, self.eps)

    def _norm_over_ranks(self, q_TX: Tensor, k_TX: Tensor, norms: WholeNorms) -> None:
        """The same where the ranks have some heads each: their sums of squares are added first."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        heads_TGD = k_TX.view(-1, self.spec.num_kv_heads, self.spec.head_dim)
        counted_TX = heads_TGD[:, list(norms.counted_kv_heads)].flatten(1)
        squares_T2 = torch.stack([part.float().square().sum(1) for part in (q_TX, counted_TX)], dim=1)
        squares_T2 = add_over_ranks(norms.ranks, squares_T2)
        factors_T2 = (squares_T2 / squares_T2.new_tensor([norms.q_width, norms.k_width])).add_(self.eps).rsqrt_()
        for column, (part, weight) in enumerate(((q_TX, self.q_norm), (k_TX, self.k_norm))):
            part.copy_((part.float() * factors_T2[:, column : column + 1]).mul_(weight))


@dataclass(kw_only=True, eq=False)
class LatentAttention:
    """The same calls. `down` makes [query latent, or queries | latent | rotated key] in one product; `up_NUL` is
    kv_b_proj by head."""

    spec: AttentionSpec
    latent: LatentSpec
    backend: KernelBackend
    rotary: RotaryTable
    down: PackedLinear
    q_down_norm: Tensor | None
    q_up: PackedLinear | None
    kv_down_norm: Tensor
    up_NUL: Tensor
    out: PackedLinear

    def __post_init__(self) -> None:
        self._stored = HeadRows(num_heads=0, rotary=unrotated(self.rotary))  # rows are rotated here, and only written

    def heads(self, layer: int, y_TH: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        q_nope_TNC, q_rope_TNR, latent_TL, k_rope_TR = self._project(y_TH, batch)
        rows_TX = torch.cat((latent_TL, k_rope_TR), dim=1)
        self.backend.rotate_and_store(rows_TX, cache, layer, batch, self._stored)
        pairs = list(zip(batch.query_lens, batch.context_lens, strict=True))
        whole = [s for s, (queries, context) in enumerate(pairs) if 1 < queries == context]
        if not whole:
            out_TNV = self._absorbed(q_nope_TNC, q_rope_TNR, layer, cache, batch)
        else:
            rows_TX = as_cached(rows_TX, cache.spec.storage)  # text does not depend on how a prompt is cut
            out_TNV = self._expanded(q_nope_TNC, q_rope_TNR, rows_TX, batch, whole)
            if others := [s for s, (queries, context) in enumerate(pairs) if not 1 < queries == context]:
                rows_T, own_batch = select_sequences(batch, others)
                q_nope_TNC, q_rope_TNR = (q.index_select(0, rows_T) for q in (q_nope_TNC, q_rope_TNR))
                own_TNV = self._absorbed(q_nope_TNC, q_rope_TNR, layer, cache, own_batch)
                out_TNV.index_copy_(0, rows_T.long(), own_TNV)
        return out_TNV.flatten(1)

    def project(self, heads_TV: Tensor, x_TH: Tensor | None) -> Tensor:
        return self.backend.linear(heads_TV, self.out, residual_TO=x_TH)

    def _project(self, y_TH: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries without rotation, rotated queries, normed latent rows, rotated shared key)."""
        spec, latent, backend = self.spec, self.latent, self.backend
        down = backend.linear(y_TH, self.down)
        widths = [down.shape[1] - latent.key_dim, latent.kv_lora_rank, latent.qk_rope_head_dim]
        q, latent_TL, k_rope_TR = torch.split(down, widths, dim=1)
        if self.q_up is not None:
            assert self.q_down_norm is not None
            q = backend.linear(backend.rms_norm(q.contiguous(), self.q_down_norm, latent.norm_eps), self.q_up)
        latent_TL = backend.rms_norm(latent_TL.contiguous(), self.kv_down_norm, latent.norm_eps)
        q_TND = q.reshape(-1, spec.num_heads, spec.head_dim)
        q_nope_TNC, q_rope_TNR = torch.split(q_TND, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
        cos, sin = look_up(self.rotary, batch.positions_T)
        k_rope_TR = rotate(k_rope_TR.unsqueeze(1), cos, sin, self.rotary.interleaved).squeeze(1)
        return q_nope_TNC, rotate(q_rope_TNR, cos, sin, self.rotary.interleaved), latent_TL, k_rope_TR

    def _absorbed(
        self, q_nope_TNC: Tensor, q_rope_TNR: Tensor, layer: int, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Queries through the key up-projection, attention over the cached latent rows, values up-projected."""
        up_NCL, up_NVL = torch.split(self.up_NUL, [self.latent.qk_nope_head_dim, self.latent.v_head_dim], dim=1)
        q_latent_TNL = torch.matmul(q_nope_TNC.transpose(0, 1), up_NCL).transpose(0, 1)
        out_TNL = self.backend.paged_attention(
            torch.cat((q_latent_TNL, q_rope_TNR), dim=-1),
            cache,
            layer,
            batch,
            scale=self.spec.scale,
            sliding_window=None,
        )
        return torch.matmul(out_TNL.transpose(0, 1), up_NVL.transpose(1, 2)).transpose(0, 1)

    def _expanded(
        self,
        q_nope_TNC: Tensor,
        q_rope_TNR: Tensor,
        rows_TX: Tensor,
        batch: AttentionBatch,
        sequences: list[int],
    ) -> Tensor:
        """Causal attention of whole prompts on keys and values of all heads; rows of other sequences are left unset."""
        num_heads, latent = self.spec.num_heads, self.latent
        latent_TL, k_rope_TR = torch.split(rows_TX, [latent.kv_lora_rank, latent.qk_rope_head_dim], dim=1)
        out_TNV = q_nope_TNC.new_empty((q_nope_TNC.shape[0], num_heads, latent.v_head_dim))
        starts = [0]
        for queries in batch.query_lens:
            starts.append(starts[-1] + queries)
        for sequence in sequences:
            rows, queries = slice(starts[sequence], starts[sequence + 1]), batch.query_lens[sequence]
            up = F.linear(latent_TL[rows], self.up_NUL.flatten(0, 1)).view(queries, num_heads, -1)
            k_nope, values = torch.split(up, [latent.qk_nope_head_dim, latent.v_head_dim], dim=-1)
            keys = torch.cat((k_nope, k_rope_TR[rows].unsqueeze(1).expand(-1, num_heads, -1)), dim=-1)
            queries_TND = torch.cat((q_nope_TNC[rows], q_rope_TNR[rows]), dim=-1)
            attended = F.scaled_dot_product_attention(
                queries_TND.transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                is_causal=True,
                scale=self.spec.scale,
            )
            out_TNV[rows] = attended[0].transpose(0, 1)
        return out_TNV


Attention = GroupedQueryAttention | LatentAttention
