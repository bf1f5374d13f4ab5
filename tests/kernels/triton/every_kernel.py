"""Every kernel, once for each type and format it knows, at a model's widths: what is compiled where no GPU is.

Tensors are empty memory that is never touched, because within `compiling` nothing runs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.bench.tile_search import CompiledLaunch, compiling
from antiphon.kernels.api import AttentionBatch, ExpertShape, HeadRows, KVCacheSpec, RotaryTable
from antiphon.kernels.quantized import WeightFormat
from antiphon.kernels.reference_attention import ReferenceCache
from antiphon.kernels.stacked import StackedWeight
from antiphon.kernels.triton import attention, grouped, rotary, rows, rowwise
from antiphon.specs.model import KVStorage, RouterSpec

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, WIDTH, HEAD, TOKENS, EXPERTS, CHOICES = 2048, 768, 128, 64, 16, 8
FORMATS = (
    None,
    WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128),
    WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.bfloat16),
    WeightFormat(codes="int4", columns_per_scale=128, scale_dtype=torch.bfloat16, offset="zeros"),
    WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
)
_GROUPED = KVCacheSpec(num_layers=1, num_blocks=8, block_size=16, num_kv_heads=4, key_dim=HEAD, value_dim=HEAD)
_LATENT = KVCacheSpec(
    num_layers=1, num_blocks=8, block_size=16, num_kv_heads=1, key_dim=576, value_dim=512, values_in_keys=True
)
ROUTERS = (
    RouterSpec(num_experts=128, top_k=8),
    RouterSpec(num_experts=32, top_k=4, softmax_after_top_k=True, normalize=False),
    RouterSpec(
        num_experts=256, top_k=8, scoring="sigmoid", has_score_bias=True, num_groups=8, top_k_groups=4,
        group_score="top2", scaling=2.5,
    ),
    RouterSpec(num_experts=160, top_k=6, num_groups=8, top_k_groups=3, normalize=False, scaling=16.0),
)  # fmt: skip


def compile_every_kernel(capability: int) -> list[CompiledLaunch]:
    """What each launch needs of a GPU of this compute capability (80 or 90)."""
    with compiling(capability) as found:
        _launch_all()
    return list(found.values())


def _launch_all() -> None:
    for router in ROUTERS:
        for tokens in (TOKENS, 4096):
            _routing(router, tokens)
    for dtype in FLOATS:
        _operators(dtype)
        _attention(dtype, _GROUPED, "auto", heads=32)
        for form in FORMATS if dtype == torch.bfloat16 else FORMATS[:1]:
            for tokens in (4, 4096) if dtype == torch.bfloat16 else (4,):
                _experts(dtype, form, tokens)

    for storage in ("auto", "int8", "fp8"):
        _attention(torch.bfloat16, _LATENT, storage, heads=128)
        _attention(torch.bfloat16, _GROUPED, storage, heads=32)


def _routing(router: RouterSpec, tokens: int) -> None:
    logits_TE = torch.empty(tokens, router.num_experts)
    bias_E = torch.empty(router.num_experts) if router.has_score_bias else None
    ids_TK, _, counts_BE = rows.gate(logits_TE, bias_E, router)
    rows.count(ids_TK, router.num_experts)
    rows.place(ids_TK, counts_BE)


def _attention(dtype: torch.dtype, spec: KVCacheSpec, storage: KVStorage, heads: int) -> None:
    """Rows of sequences over a cache; with a window and sinks where heads are grouped."""
    cpu, spec = torch.device("cpu"), replace(spec, storage=storage)
    cache, is_grouped = ReferenceCache(spec, cpu, dtype), not spec.values_in_keys
    numbers_T = torch.zeros(TOKENS, dtype=torch.int32)
    batch = AttentionBatch(
        positions_T=numbers_T, slots_T=numbers_T, query_starts=torch.zeros(TOKENS + 1, dtype=torch.int32),
        context_lens_S=numbers_T, block_tables_SB=torch.zeros((TOKENS, 64), dtype=torch.int32),
        query_lens=(1,) * TOKENS, context_lens=(1,) * TOKENS,
    )  # fmt: skip
    table = torch.empty(4096, 64)
    norm_D = torch.empty(spec.key_dim, dtype=dtype) if is_grouped else None
    rotary_table = RotaryTable(cos=table, sin=table, interleaved=not is_grouped)
    head_rows = HeadRows(num_heads=heads, rotary=rotary_table, q_norm_D=norm_D, k_norm_D=norm_D)
    width = (heads + spec.num_kv_heads) * spec.key_dim + spec.num_kv_heads * spec.value_dim * is_grouped
    q_TND = rotary.rotate_and_store(torch.empty((TOKENS, width), dtype=dtype), cache, 0, batch, head_rows)
    out_TNV = torch.empty((TOKENS, heads, spec.value_dim), dtype=dtype)
    sinks_N = torch.empty(heads) if is_grouped else None
    for blocks in (64, 80):  # contexts of other lengths take the same code
        tables_SB = torch.zeros((TOKENS, blocks), dtype=torch.int32)
        plan = attention.plan_rows(replace(batch, block_tables_SB=tables_SB), spec, 128 if is_grouped else None)
        attention.attend_rows(q_TND, out_TNV, cache, 0, plan, scale=1.0, sinks_N=sinks_N)


def _experts(dtype: torch.dtype, form: WeightFormat | None, tokens: int) -> None:
    cpu, shape = torch.device("cpu"), ExpertShape(EXPERTS, HIDDEN, WIDTH, "silu")
    gate_up = StackedWeight((EXPERTS, 2, WIDTH, HIDDEN), form, cpu, dtype, has_bias=False)
    down = StackedWeight((EXPERTS, 1, HIDDEN, WIDTH), form, cpu, dtype, has_bias=False)
    places_R = torch.empty(tokens * CHOICES, dtype=torch.int32)
    weights_TK = torch.empty(tokens, CHOICES)
    chosen = grouped.GroupedRows(starts_E1=places_R, order_R=places_R, weights_TK=weights_TK)
    x_TH = torch.empty((tokens, HIDDEN), dtype=dtype)
    hidden_RI = grouped.gated_product(x_TH, gate_up, shape, chosen)
    grouped.weighed_product(hidden_RI, down, chosen)
    dense = StackedWeight((1, 1, HIDDEN, HIDDEN), form, cpu, dtype, has_bias=True)
    grouped.linear(x_TH, dense, x_TH, torch.float32)


def _operators(dtype: torch.dtype) -> None:
    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x_TH, weight_H = room(TOKENS, HIDDEN), room(HIDDEN)
    _, _, factors_T = rowwise.norm(x_TH, weight_H, 1e-6)
    rowwise.norm(x_TH, weight_H, 1e-6, x_TH)
    rowwise.norm(room(TOKENS, HEAD), room(HEAD), 1e-6)
    rowwise.norm_gradient(x_TH, x_TH, weight_H, factors_T)
    for name in ("silu", "gelu", "swiglu_oai"):
        shape = ExpertShape(1, HIDDEN, WIDTH, name)
        y_TI = rowwise.activate(room(TOKENS, 2 * WIDTH), shape)
        rowwise.activate_gradient(y_TI, room(TOKENS, 2 * WIDTH), shape)
    targets_T = torch.empty(TOKENS, dtype=torch.int64)
    rowwise.loss_and_gradient(room(TOKENS, 4 * HIDDEN), room(4 * HIDDEN), targets_T, 1.0)
    places_TK = torch.empty((TOKENS, 8), dtype=torch.int32)
    rows.sum_rows(x_TH, places_TK, None, ascending=True)
    rows.sum_rows(x_TH, places_TK, room(TOKENS, 8))
    rotary.turn(room(TOKENS, 32, HEAD), torch.empty(TOKENS, 32), torch.empty(TOKENS, 32), False)
    order_R = torch.empty(TOKENS * 8, dtype=torch.int64)
    rows.combine_gradient(x_TH, room(TOKENS * 8, HIDDEN), room(TOKENS, 8), order_R)
