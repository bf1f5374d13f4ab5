"""Every kernel, once for each type and format it knows, at a model's widths: what is compiled where no GPU is.

Tensors are empty memory that is never touched, because within `compiling` nothing runs.
"""

import torch
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.quantized import WeightFormat
from antiphon.kernels.triton import gate, grouped, norm, rows
from antiphon.kernels.triton.launch import CompiledLaunch, compiling
from antiphon.kernels.triton.weights import StackedWeight
from antiphon.specs.model import RouterSpec

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, WIDTH, HEAD, TOKENS, EXPERTS, CHOICES = 2048, 768, 128, 64, 16, 8
FORMATS = (
    None,
    WeightFormat(codes="fp8", columns_per_scale=128, rows_per_scale=128),
    WeightFormat(codes="int8", columns_per_scale=32, scale_dtype=torch.bfloat16),
    WeightFormat(codes="int4", columns_per_scale=128, scale_dtype=torch.bfloat16, offset="zeros"),
    WeightFormat(codes="mxfp4", columns_per_scale=32, scale_dtype=torch.float8_e8m0fnu),
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
        for form in FORMATS if dtype == torch.bfloat16 else FORMATS[:1]:
            for tokens in (4, 4096) if dtype == torch.bfloat16 else (4,):
                _experts(dtype, form, tokens)


def _routing(router: RouterSpec, tokens: int) -> None:
    logits_TE = torch.empty(tokens, router.num_experts)
    bias_E = torch.empty(router.num_experts) if router.has_score_bias else None
    ids_TK, _, counts_BE = gate.gate(logits_TE, bias_E, router)
    rows.count(ids_TK, router.num_experts)
    rows.place(ids_TK, counts_BE)


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
    _, _, factors_T = norm.norm(x_TH, weight_H, 1e-6)
    norm.norm(x_TH, weight_H, 1e-6, x_TH)
    norm.norm(room(TOKENS, HEAD), room(HEAD), 1e-6)
    norm.norm_gradient(x_TH, x_TH, weight_H, factors_T)
    places_TK = torch.empty((TOKENS, 8), dtype=torch.int32)
    rows.sum_rows(x_TH, places_TK, None, ascending=True)
    rows.sum_rows(x_TH, places_TK, room(TOKENS, 8))
    order_R = torch.empty(TOKENS * 8, dtype=torch.int64)
    rows.combine_gradient(x_TH, room(TOKENS * 8, HIDDEN), room(TOKENS, 8), order_R)
