"""Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434, section 2.1), residual included.

Under tensor parallelism these are the heads of one rank, and every rank makes and caches all latent rows.

The cache holds per token one row [latent | rotated key shared by all heads]. Two ways lead to the same numbers:
- absorbed (decode, and chunks with cached context): queries go through the key up-projection, so that attention runs
  on the cached rows themselves, as one KV head of width latent + rope;
- expanded (a whole prompt in one call): keys and values of all heads are made from the latent rows at hand, and
  attention is 3 times cheaper per pair of tokens.
Rejected: expanding cached context, which would need the cache's layout, the back-end's own.

Letters as in `antiphon.kernels.api`; L latent (kv_lora_rank), C width without rotation, R rotated width, U = C + V.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import AttentionBatch, KernelBackend, KVCache, PackedLinear, RotaryTable
from antiphon.kernels.ops.rotary import look_up, rotate
from antiphon.models.batch import select_sequences
from antiphon.models.rotary import unrotated
from antiphon.specs.model import AttentionSpec, LatentSpec


@dataclass(kw_only=True)
class LatentWeights:
    """`down` makes [query latent, or queries | latent | rotated key] in one product; `up_NUL` is kv_b_proj by head."""

    down: PackedLinear
    q_down_norm: Tensor | None
    q_up: PackedLinear | None
    kv_down_norm: Tensor
    up_NUL: Tensor
    out: PackedLinear


class LatentAttention:
    def __init__(
        self,
        spec: AttentionSpec,
        latent: LatentSpec,
        backend: KernelBackend,
        weights: LatentWeights,
        rotary: RotaryTable,
    ) -> None:
        self.spec = spec
        self.latent = latent
        self.backend = backend
        self.weights = weights
        self.rotary = rotary
        self.no_rotary = unrotated(rotary)

    def __call__(self, layer: int, y_TH: Tensor, x_TH: Tensor | None, cache: KVCache, batch: AttentionBatch) -> Tensor:
        q_nope_TNC, q_rope_TNR, latent_TL, k_rope_TR = self._project(y_TH, batch)
        self._store(torch.cat((latent_TL, k_rope_TR), dim=1), layer, cache, batch)
        pairs = list(zip(batch.query_lens, batch.context_lens, strict=True))
        whole = [s for s, (queries, context) in enumerate(pairs) if 1 < queries == context]
        if not whole:
            out_TNV = self._absorbed(q_nope_TNC, q_rope_TNR, layer, cache, batch)
        else:
            out_TNV = self._expanded(q_nope_TNC, q_rope_TNR, latent_TL, k_rope_TR, batch, whole)
            if others := [s for s, (queries, context) in enumerate(pairs) if not 1 < queries == context]:
                rows_T, own_batch = select_sequences(batch, others)
                q_nope_TNC, q_rope_TNR = (q.index_select(0, rows_T) for q in (q_nope_TNC, q_rope_TNR))
                own_TNV = self._absorbed(q_nope_TNC, q_rope_TNR, layer, cache, own_batch)
                out_TNV.index_copy_(0, rows_T.long(), own_TNV)
        return self.backend.linear(out_TNV.flatten(1), self.weights.out, residual_TO=x_TH)

    def _store(self, key_TD: Tensor, layer: int, cache: KVCache, batch: AttentionBatch) -> None:
        """Rows with no query heads, already rotated: only the write to the cache remains."""
        self.backend.rotate_and_store(
            key_TD,
            cache,
            layer,
            batch,
            self.no_rotary,
            num_heads=0,
            q_norm_D=None,
            k_norm_D=None,
            eps=self.latent.norm_eps,
        )

    def _project(self, y_TH: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries without rotation, rotated queries, normed latent rows, rotated shared key)."""
        spec, latent, weights, backend = self.spec, self.latent, self.weights, self.backend
        down = backend.linear(y_TH, weights.down)
        widths = [down.shape[1] - latent.key_dim, latent.kv_lora_rank, latent.qk_rope_head_dim]
        q, latent_TL, k_rope_TR = torch.split(down, widths, dim=1)
        if weights.q_up is not None:
            assert weights.q_down_norm is not None
            q = backend.linear(backend.rms_norm(q.contiguous(), weights.q_down_norm, latent.norm_eps), weights.q_up)
        latent_TL = backend.rms_norm(latent_TL.contiguous(), weights.kv_down_norm, latent.norm_eps)
        q_TND = q.reshape(-1, spec.num_heads, spec.head_dim)
        q_nope_TNC, q_rope_TNR = torch.split(q_TND, [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=-1)
        cos, sin = look_up(self.rotary, batch.positions_T)
        k_rope_TR = rotate(k_rope_TR.unsqueeze(1), cos, sin, self.rotary.interleaved).squeeze(1)
        return q_nope_TNC, rotate(q_rope_TNR, cos, sin, self.rotary.interleaved), latent_TL, k_rope_TR

    def _absorbed(
        self, q_nope_TNC: Tensor, q_rope_TNR: Tensor, layer: int, cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """Queries through the key up-projection, attention over the cached latent rows, values up-projected."""
        up_NCL, up_NVL = torch.split(self.weights.up_NUL, [self.latent.qk_nope_head_dim, self.latent.v_head_dim], dim=1)
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
        latent_TL: Tensor,
        k_rope_TR: Tensor,
        batch: AttentionBatch,
        sequences: list[int],
    ) -> Tensor:
        """Causal attention of whole prompts on keys and values of all heads; rows of other sequences are left unset."""
        num_heads, latent = self.spec.num_heads, self.latent
        out_TNV = q_nope_TNC.new_empty((q_nope_TNC.shape[0], num_heads, latent.v_head_dim))
        starts = [0]
        for queries in batch.query_lens:
            starts.append(starts[-1] + queries)
        for sequence in sequences:
            rows, queries = slice(starts[sequence], starts[sequence + 1]), batch.query_lens[sequence]
            up = F.linear(latent_TL[rows], self.weights.up_NUL.flatten(0, 1)).view(queries, num_heads, -1)
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
