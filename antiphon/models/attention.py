"""Grouped-query attention of one layer over the back-end's kernels, residual included.

Order of the optional steps: projection with bias, norm over the whole of q and of k (OLMoE), clipping (DBRX, OLMoE),
per-head norms (Qwen3), rotary embedding. Under tensor parallelism these are the heads of one rank (`models/shares`):
what comes out is its part of a sum over the ranks, without the residual.

Letters as in `antiphon.kernels.api`; X the fused width (N + 2G) * D.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from antiphon.comm.rank_group import RankGroup
from antiphon.kernels.api import AttentionBatch, KernelBackend, KVCache, PackedLinear, RotaryTable
from antiphon.models.shares import add_over_ranks
from antiphon.specs.model import AttentionSpec


class Attention(Protocol):
    def __call__(self, layer: int, y_TH: Tensor, x_TH: Tensor | None, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """x + attention(y), the second times the model's residual multiplier; attention(y) alone if x is None. Writes
        the rows' keys and values to the cache first."""


@dataclass(frozen=True, kw_only=True)
class WholeNorms:
    """What the norms of all of q and all of k need where each rank has some heads: the widths of both, and which KV
    heads this rank counts, because another may have them too."""

    ranks: RankGroup
    q_width: int
    k_width: int
    counted_kv_heads: tuple[int, ...]


@dataclass(kw_only=True)
class GroupedQueryWeights:
    """`q_norm` and `k_norm` are [D] for per-head norms, [N * D] and [G * D] for norms of the whole projection.
    `sinks_N` is float32."""

    qkv: PackedLinear
    out: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks_N: Tensor | None


class GroupedQueryAttention:
    def __init__(
        self,
        spec: AttentionSpec,
        eps: float,
        backend: KernelBackend,
        weights: GroupedQueryWeights,
        rotary: RotaryTable,
        residual_multiplier: float = 1.0,
        norms: WholeNorms | None = None,
    ) -> None:
        """`norms`: for norms of the whole projection, where other ranks have heads too."""
        self.spec = spec
        self.eps = eps
        self.backend = backend
        self.weights = weights
        self.rotary = rotary
        self.residual_multiplier = residual_multiplier
        self.norms = norms

    def __call__(self, layer: int, y_TH: Tensor, x_TH: Tensor | None, cache: KVCache, batch: AttentionBatch) -> Tensor:
        spec, weights, backend = self.spec, self.weights, self.backend
        qkv_TX = backend.linear(y_TH, weights.qkv)
        if spec.qk_norm == "full":
            self._norm_whole(qkv_TX)
        if spec.clip_qkv is not None:
            qkv_TX.clamp_(-spec.clip_qkv, spec.clip_qkv)
        per_head = spec.qk_norm == "head"
        q_TND = backend.rotate_and_store(
            qkv_TX,
            cache,
            layer,
            batch,
            self.rotary,
            num_heads=spec.num_heads,
            q_norm_D=weights.q_norm if per_head else None,
            k_norm_D=weights.k_norm if per_head else None,
            eps=self.eps,
        )
        out_TND = backend.paged_attention(
            q_TND,
            cache,
            layer,
            batch,
            scale=spec.scale,
            sliding_window=spec.window_of(layer),
            sinks_N=weights.sinks_N,
        )
        if self.residual_multiplier != 1.0:  # two exact steps: a fused a + m * b would round by the row's place
            delta_TH = backend.linear(out_TND.flatten(1), weights.out).mul_(self.residual_multiplier)
            return delta_TH if x_TH is None else delta_TH.add_(x_TH)
        return backend.linear(out_TND.flatten(1), weights.out, residual_TO=x_TH)

    def _norm_whole(self, qkv_TX: Tensor) -> None:
        """Norms of all of q and of all of k, in place."""
        assert self.weights.q_norm is not None
        assert self.weights.k_norm is not None
        q_end = self.spec.num_heads * self.spec.head_dim
        q_TX, k_TX = qkv_TX[:, :q_end], qkv_TX[:, q_end : q_end + self.spec.num_kv_heads * self.spec.head_dim]
        if self.norms is not None:
            self._norm_over_ranks(q_TX, k_TX, self.norms)
            return
        for part, weight in ((q_TX, self.weights.q_norm), (k_TX, self.weights.k_norm)):
            part.copy_(self.backend.rms_norm(part.contiguous(), weight, self.eps))

    def _norm_over_ranks(self, q_TX: Tensor, k_TX: Tensor, norms: WholeNorms) -> None:
        """The same where the ranks have some heads each: their sums of squares are added first."""
        assert self.weights.q_norm is not None
        assert self.weights.k_norm is not None
        heads_TGD = k_TX.view(-1, self.spec.num_kv_heads, self.spec.head_dim)
        counted_TX = heads_TGD[:, list(norms.counted_kv_heads)].flatten(1)
        squares_T2 = torch.stack([part.float().square().sum(1) for part in (q_TX, counted_TX)], dim=1)
        squares_T2 = add_over_ranks(norms.ranks, squares_T2)
        factors_T2 = (squares_T2 / squares_T2.new_tensor([norms.q_width, norms.k_width])).add_(self.eps).rsqrt_()
        for column, (part, weight) in enumerate(((q_TX, self.weights.q_norm), (k_TX, self.weights.k_norm))):
            part.copy_((part.float() * factors_T2[:, column : column + 1]).mul_(weight))
