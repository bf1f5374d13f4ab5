"""Kernels of other packages behind the signatures of our own: products of experts, and attention of single rows.

    grouped_mm    PyTorch's product of groups (`reference.grouped_products`); bfloat16
    deep_gemm     DeepGEMM's product of groups in float8, of rows that it needs in blocks of 128 an expert
    varlen_attn   PyTorch's FlashAttention over a paged cache, keys in one piece
    flashinfer    FlashInfer's decode attention over a paged cache

None is required. `why_no_products` and `why_no_attention` say what keeps one from these weights or this cache, without
a GPU; what only running shows (a card too old, a compiler that is missing) `choices.choose` finds. Nothing here asks
the host for a value, so that steps can be recorded.

Letters as in `antiphon.kernels.api`; B places of rows in blocks of 128, J both widths of gate and up.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from antiphon.kernels.api import KVCacheSpec
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.reference import grouped_products, has_grouped_mm
from antiphon.kernels.reference_attention import ReferenceCache

PRODUCTS = ("grouped_mm", "deep_gemm")
ATTENTIONS = ("varlen_attn", "flashinfer")
_ALIGNMENT = 128  # rows of one expert, and columns of one scale
_FP8_LIMIT = 448.0
_WORKSPACE_BYTES = 128 << 20


def _missing(package: str) -> str:
    return "" if importlib.util.find_spec(package) is not None else f"{package} is not installed"


def why_no_products(name: str, experts: Any) -> str:
    """Why this product cannot take these experts (`TritonExperts`); empty: it can be tried."""
    if name == "grouped_mm":
        return "" if has_grouped_mm(experts) else "takes bfloat16 experts with widths in multiples of 8"
    form, shape = experts.formats.gate_up, experts.shape
    blocks = form is not None and form.codes == "fp8" and form.rows_per_scale == form.columns_per_scale == _ALIGNMENT
    if not blocks or experts.formats.down != form or form.scale_dtype != torch.float32:
        return "takes float8 experts with float32 scales of 128 x 128"
    if shape.has_bias or shape.hidden % _ALIGNMENT or shape.intermediate % _ALIGNMENT:
        return "takes experts without biases and with widths in multiples of 128"
    return _missing(name)


def why_no_attention(name: str, spec: KVCacheSpec, dtype: torch.dtype, *, has_sinks: bool) -> str:
    """Why this attention cannot read such a cache; empty: it can be tried."""
    if spec.storage != "auto" or spec.values_in_keys or spec.key_dim != spec.value_dim or has_sinks:
        return "takes caches of numbers with keys as wide as values, without sinks"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 or float16"
    return _missing("torch.nn.attention.varlen" if name == "varlen_attn" else name)


def products(name: str, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Any) -> Tensor:
    """As `KernelBackend.grouped_ffn`, by the product of that name."""
    if name == "grouped_mm":
        return grouped_products(x_TH, ids_TK, weights_TK, experts)
    return _deep_gemm(x_TH, ids_TK, weights_TK, experts)


def attend(
    name: str,
    q_SND: Tensor,
    cache: ReferenceCache,
    layer: int,
    tables_SB: Tensor,
    contexts_S: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """[S, N, V]: each row over its keys."""
    spec = cache.spec
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.key_dim)
    keys, values = cache.keys[layer].view(shape), cache.values[layer].view(shape)
    longest, left = tables_SB.shape[1] * spec.block_size, -1 if window is None else window - 1
    if name == "varlen_attn":
        starts = torch.arange(len(q_SND) + 1, dtype=torch.int32, device=q_SND.device)
        found: Tensor = _module("torch.nn.attention.varlen").varlen_attn(
            q_SND, keys, values, starts, None, 1, longest, scale=scale, window_size=(left, 0 if window else -1),
            enable_gqa=True, seqused_k=contexts_S, block_table=tables_SB, num_splits=1,
        )  # fmt: skip
        return found
    decoded: Tensor = _module("flashinfer.decode").trtllm_batch_decode_with_kv_cache(
        q_SND.contiguous(), (keys, values), _workspace(q_SND.device), tables_SB, contexts_S, longest,
        bmm1_scale=scale, bmm2_scale=1.0, window_left=left, kv_layout="NHD",
    )  # fmt: skip
    return decoded


def _deep_gemm(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Any) -> Tensor:
    multiply = _module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
    (num_tokens, top_k), num_experts, shape = ids_TK.shape, experts.shape.num_experts, experts.shape
    # 1. Slots in order of expert, "not held here" last, each expert's at a multiple of 128.
    keys_R, order_R = torch.where(ids_TK < 0, num_experts, ids_TK).flatten().long().sort(stable=True)
    ends_E = torch.searchsorted(keys_R, torch.arange(num_experts, device=keys_R.device), right=True)
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    blocks_E = (ends_E - starts_E + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    last_E = blocks_E.cumsum(0)
    expert_R = keys_R.clamp(max=num_experts - 1)
    places_R = torch.arange(len(keys_R), device=keys_R.device) - starts_E[expert_R] + (last_E - blocks_E)[expert_R]
    most = -(-len(keys_R) // _ALIGNMENT) * _ALIGNMENT + min(num_experts, len(keys_R)) * _ALIGNMENT
    held_R = keys_R < num_experts
    places_R = torch.where(held_R, places_R, most)  # one more place, which is thrown away
    # 2. Which expert each place is of; -1: of none.
    owners_B = torch.searchsorted(last_E, torch.arange(most, device=keys_R.device), right=True)
    owners_B = torch.where(owners_B < num_experts, owners_B, -1).int()
    # 3. Both products on rows in float8.
    rows_BH = x_TH.new_zeros(most + 1, shape.hidden).index_copy_(0, places_R, x_TH[order_R // top_k])[:most]
    gate_up_BJ = x_TH.new_empty(most, 2 * shape.intermediate)
    multiply(_coded(rows_BH), _weight(experts.gate_up), gate_up_BJ, owners_B)
    hidden_BI = activate(gate_up_BJ, shape)
    y_BH = x_TH.new_empty(most + 1, shape.hidden)
    multiply(_coded(hidden_BI), _weight(experts.down), y_BH[:most], owners_B)
    # 4. Back to rows of tokens, summed in the order of experts.
    weighed_RH = y_BH[places_R].float() * weights_TK.flatten()[order_R, None].float()
    weighed_RH = torch.where(held_R[:, None], weighed_RH, 0.0)
    ranks_TK = order_R.argsort().view(num_tokens, top_k).sort(dim=1).values
    sums_TH = x_TH.new_zeros(num_tokens, shape.hidden, dtype=torch.float32)
    for slot in range(top_k):
        sums_TH += weighed_RH[ranks_TK[:, slot]]
    return sums_TH.to(x_TH.dtype)


def _coded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8 and a scale for each 128 columns of each."""
    parts = rows.float().view(len(rows), rows.shape[1] // _ALIGNMENT, _ALIGNMENT)
    scales = parts.abs().amax(-1).clamp(min=1e-4) / _FP8_LIMIT
    return (parts / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(rows.shape), scales


def _weight(stacked: Any) -> tuple[Tensor, Tensor]:
    """[E, outputs, inputs] in float8 and [E, outputs / 128, inputs / 128]."""
    return stacked.codes.view(torch.float8_e4m3fn).flatten(1, 2), stacked.scales.flatten(1, 2)


@cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
