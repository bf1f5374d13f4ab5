"""Every kernel, once for each type and format it knows, at a model's widths: what is compiled where no GPU is.

Tensors are empty memory that is never touched, because within `compiling` nothing runs.
"""

import torch
from torch import Tensor

from antiphon.kernels.triton import gate, norm, rows
from antiphon.kernels.triton.launch import CompiledLaunch, compiling
from antiphon.specs.model import RouterSpec

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, HEAD, TOKENS = 2048, 128, 64
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


def _routing(router: RouterSpec, tokens: int) -> None:
    logits_TE = torch.empty(tokens, router.num_experts)
    bias_E = torch.empty(router.num_experts) if router.has_score_bias else None
    ids_TK, _, counts_BE = gate.gate(logits_TE, bias_E, router)
    rows.count(ids_TK, router.num_experts)
    rows.place(ids_TK, counts_BE)


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
