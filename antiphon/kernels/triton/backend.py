"""The back-end for GPUs: Triton's kernels where they serve, PyTorch's operators for the rest.

Weights, cache and signatures are the reference back-end's, whose operations these replace. Products of experts and
attention of single rows go by other packages' kernels where `antiphon tune` found those quicker (`kernels.choices`).

Letters as in `antiphon.kernels.api`.
"""

from functools import partial

import torch
from torch import Tensor

from antiphon.kernels import packages
from antiphon.kernels.api import (
    AttentionBatch,
    ExpertFormats,
    ExpertShape,
    HeadRows,
    KVCache,
    PackedExperts,
    PackedLinear,
    own,
)
from antiphon.kernels.choices import OWN, Key, choice_of, process_choices, process_table
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.quantized import AnyWeight
from antiphon.kernels.reference import FLOATS, ReferenceBackend
from antiphon.kernels.reference_attention import AttentionPlans, ReferenceCache, attend_prefills
from antiphon.kernels.stacked import TritonExperts, TritonLinear
from antiphon.kernels.triton.attention import attend_rows, plan_rows
from antiphon.kernels.triton.grouped import expert_products, key_of, key_of_gpu, linear
from antiphon.kernels.triton.rotary import rotate_and_store
from antiphon.kernels.triton.rows import gate
from antiphon.kernels.triton.rowwise import norm
from antiphon.specs.model import RouterSpec


class TritonBackend(ReferenceBackend):
    """`KernelBackend` in Triton. `dtype` is that of weights, activations and cache."""

    name = "triton"
    orders_columns = False

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._row_plans = AttentionPlans(plan_rows)
        self._chosen: dict[object, str] = {}
        process_table()
        process_choices()
        self._counted: tuple[Tensor, Tensor] | None = None  # choices of the last gate, and what it counted

    def pack_linear(self, weight: AnyWeight, bias: Tensor | None = None) -> TritonLinear:
        return TritonLinear(weight, bias, self.device, self.dtype)

    def linear(
        self,
        x_TI: Tensor,
        weight: PackedLinear,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        weight = own(weight, TritonLinear, self.dtype)
        return linear(x_TI, weight, residual_TO, out_dtype or x_TI.dtype)

    def weight_rows(self, weight: PackedLinear, ids_T: Tensor) -> Tensor:
        weight = own(weight, TritonLinear, self.dtype)
        assert weight.format is None
        return weight.codes[0, 0].index_select(0, ids_T)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps)[1]

    def add_rms_norm(self, x_TH: Tensor, delta_TH: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm(x_TH, weight, eps, delta_TH)[:2]

    def rotate_and_store(
        self, qkv_TX: Tensor, cache: KVCache, layer: int, batch: AttentionBatch, heads: HeadRows
    ) -> Tensor:
        cache = own(cache, ReferenceCache, self.dtype)
        return rotate_and_store(qkv_TX, cache, layer, batch, heads)

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
        cache = own(cache, ReferenceCache, self.dtype)
        plan = self._row_plans.of(batch, cache.spec, sliding_window)
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], cache.spec.value_dim))
        attend_prefills(q_TND, out_TNV, cache, layer, plan.prefills, scale, sinks_N)
        asked = cache.spec, q_TND.shape[1], sinks_N is not None
        if len(plan.contexts_S) and asked not in self._chosen:
            why_not = partial(packages.why_no_attention, spec=cache.spec, dtype=self.dtype, has_sinks=asked[2])
            self._chosen[asked] = choice_of(attention_key(cache, q_TND.shape[1]), why_not)
        if (name := self._chosen.get(asked, OWN)) == OWN:
            attend_rows(q_TND, out_TNV, cache, layer, plan, scale=scale, sinks_N=sinks_N)
            return out_TNV
        rows_S = plan.rows_S[: len(plan.contexts_S)].long()
        given = q_TND.index_select(0, rows_S), cache, layer, plan.tables_SB, plan.contexts_S
        return out_TNV.index_copy_(0, rows_S, packages.attend(name, *given, scale=scale, window=sliding_window))

    def gate(
        self, x_TH: Tensor, weight: PackedLinear, bias_E: Tensor | None, router: RouterSpec
    ) -> tuple[Tensor, Tensor]:
        logits_TE = self.linear(x_TH, weight, out_dtype=torch.float32)
        if router.scoring == "sparsemixer":
            return choose_experts(logits_TE, bias_E, router)
        ids_TK, weights_TK, counts_BE = gate(logits_TE, bias_E, router)
        self._counted = ids_TK, counts_BE
        return ids_TK, weights_TK

    def new_experts(self, shape: ExpertShape, formats: ExpertFormats | None = None) -> TritonExperts:
        return TritonExperts(shape, formats or FLOATS, self.device, self.dtype)

    def grouped_ffn(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> Tensor:
        experts = own(experts, TritonExperts, self.dtype)
        asked = experts.shape, experts.formats
        if asked not in self._chosen:
            self._chosen[asked] = choice_of(experts_key(experts), partial(packages.why_no_products, experts=experts))
        if (name := self._chosen[asked]) != OWN:
            return packages.products(name, x_TH, ids_TK, weights_TK, experts)
        counted, self._counted = self._counted, None
        counts_BE = None
        if counted is not None and counted[0] is ids_TK and counted[1].shape[1] == experts.shape.num_experts:
            counts_BE = counted[1]
        return expert_products(x_TH, ids_TK, weights_TK, experts, counts_BE)


def experts_key(experts: TritonExperts) -> Key:
    """What a choice of the product of experts is for."""
    return ("experts", *key_of(experts.gate_up, experts.gate_up.codes.device))


def attention_key(cache: ReferenceCache, num_heads: int) -> Key:
    """What a choice of the attention of single rows is for."""
    spec, keys = cache.spec, cache.keys[0]
    kind = str(cache.dtype).removeprefix("torch.")
    return (
        "attention", *key_of_gpu(keys.device), num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim,
        spec.block_size, f"{spec.storage} in {kind}",
    )  # fmt: skip
