"""The reference back-end: every kernel in plain PyTorch, on any device, in float32, bfloat16 or float16.

It is what the other back-ends are tested against, and what runs where no native kernel exists. Results of a row agree
with those it would have alone to rounding, not bit for bit: PyTorch picks matrix kernels by the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import AttentionBatch, KVCache, KVCacheSpec, PackedExperts, PackedLinear, RotaryTable
from antiphon.kernels.ops.norm import rms_norm
from antiphon.kernels.ops.rotary import look_up, rotate
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.reference import attention, grouped_ffn
from antiphon.kernels.reference.cache import ReferenceCache
from antiphon.kernels.reference.weights import ReferenceExperts, ReferenceLinear, own_copy
from antiphon.specs.model import RouterSpec

WIDE_LINEAR_ROWS = 4096


class ReferenceBackend:
    """`KernelBackend` in plain PyTorch. `dtype` is that of weights, activations and cache."""

    name = "reference"

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._plans = attention.AttentionPlans()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        kept_bias = None if bias is None else own_copy(bias, self.device, self.dtype)
        return ReferenceLinear(own_copy(weight, self.device, self.dtype), kept_bias)

    def linear(
        self,
        x_TI: Tensor,
        weight: PackedLinear,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        if out_dtype is not None and out_dtype != x_TI.dtype:
            y = _float32_linear(x_TI, weight)
            return (y if residual_TO is None else y + residual_TO).to(out_dtype)
        if residual_TO is None:
            return F.linear(x_TI, weight.weight_OI, weight.bias_O)
        if weight.bias_O is not None:
            residual_TO = residual_TO + weight.bias_O
        return torch.addmm(residual_TO, x_TI, weight.weight_OI.t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH = x_TH + delta_TH
        return x_TH, self.rms_norm(x_TH, weight, eps)

    def new_kv_cache(self, spec: KVCacheSpec) -> ReferenceCache:
        return ReferenceCache(spec, self.device, self.dtype)

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        rotary: RotaryTable,
        *,
        num_heads: int,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
    ) -> Tensor:
        assert isinstance(cache, ReferenceCache)
        spec, num_rows = cache.spec, qkv_TX.shape[0]
        q_end = num_heads * spec.key_dim
        k_end = q_end + spec.num_kv_heads * spec.key_dim
        q = qkv_TX[:, :q_end].reshape(num_rows, num_heads, spec.key_dim)
        k = qkv_TX[:, q_end:k_end].reshape(num_rows, spec.num_kv_heads, spec.key_dim)
        v = None if spec.values_in_keys else qkv_TX[:, k_end:].view(num_rows, spec.num_kv_heads, spec.value_dim)
        if q_norm_D is not None:
            q = self.rms_norm(q, q_norm_D, eps)
        if k_norm_D is not None:
            k = self.rms_norm(k, k_norm_D, eps)
        cos, sin = look_up(rotary, batch.positions_T)
        cache.store(layer, batch.slots_T, rotate(k, cos, sin, rotary.interleaved), v)
        return rotate(q, cos, sin, rotary.interleaved)

    def paged_attention(
        self,
        q_TND: Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(cache, ReferenceCache)
        plan = self._plans.of(batch, cache.spec, sliding_window)
        return attention.paged_attention(q_TND, cache, layer, plan, scale, sinks_N)

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        return choose_experts(self.linear(x_TH, weight, out_dtype=torch.float32), bias_E, router)

    def new_experts(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: str,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        has_bias: bool = False,
    ) -> ReferenceExperts:
        gate_up = torch.empty((num_experts, 2 * intermediate, hidden), dtype=self.dtype, device=self.device)
        down = torch.empty((num_experts, hidden, intermediate), dtype=self.dtype, device=self.device)
        return ReferenceExperts(gate_up, down, activation, alpha, limit, has_bias)

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        assert isinstance(experts, ReferenceExperts)
        if self.device.type == "cuda" and grouped_ffn.has_grouped_mm(experts):
            return grouped_ffn.grouped_products(x_TH, ids_TK, weights_TK, experts)
        return grouped_ffn.loop_over_experts(x_TH, ids_TK, weights_TK, experts)


def _float32_linear(x_TI: Tensor, weight: ReferenceLinear) -> Tensor:
    """x @ weight.T + bias with float32 results, widening a slice of the weight at a time."""
    wide = x_TI.float()
    parts = [wide @ rows.float().t() for rows in torch.split(weight.weight_OI, WIDE_LINEAR_ROWS)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return y if weight.bias_O is None else y + weight.bias_O
