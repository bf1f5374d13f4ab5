"""Grouped-query attention of one layer over the back-end's kernels, residual included.

Order of the optional steps: projection with bias, norm over the whole of q and of k (OLMoE), clipping (DBRX, OLMoE),
per-head norms (Qwen3), rotary embedding.

Letters as in `antiphon.kernels.api`; X the fused width (N + 2G) * D.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from antiphon.kernels.api import AttentionBatch, KernelBackend, KVCache, PackedLinear, RotaryTable
from antiphon.specs.model import AttentionSpec


class Attention(Protocol):
    def __call__(self, layer: int, y_TH: Tensor, x_TH: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
        """x + attention(y), the second times the model's residual multiplier. Writes the rows' keys and values to the
        cache first."""


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
    ) -> None:
        self.spec = spec
        self.eps = eps
        self.backend = backend
        self.weights = weights
        self.rotary = rotary
        self.residual_multiplier = residual_multiplier

    def __call__(self, layer: int, y_TH: Tensor, x_TH: Tensor, cache: KVCache, batch: AttentionBatch) -> Tensor:
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
            return backend.linear(out_TND.flatten(1), weights.out).mul_(self.residual_multiplier).add_(x_TH)
        return backend.linear(out_TND.flatten(1), weights.out, residual_TO=x_TH)

    def _norm_whole(self, qkv_TX: Tensor) -> None:
        """Norms of all of q and of all of k, in place."""
        assert self.weights.q_norm is not None
        assert self.weights.k_norm is not None
        q_end = self.spec.num_heads * self.spec.head_dim
        k_end = q_end + self.spec.num_kv_heads * self.spec.head_dim
        for start, stop, weight in ((0, q_end, self.weights.q_norm), (q_end, k_end, self.weights.k_norm)):
            part = qkv_TX[:, start:stop]
            part.copy_(self.backend.rms_norm(part.contiguous(), weight, self.eps))
