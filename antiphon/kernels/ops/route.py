"""The router in PyTorch, from gate logits to the chosen experts and their weights, for training and the reference; and
rows into order of expert and back, without atomic additions: both ways, and both gradients, only gather.

Serving has its own router: `csrc/kernels/gate.h` on CPUs, `kernels/triton/rows.py` on GPUs. A new kind of router goes
into all three; "sparsemixer" is here for all.

A choice of -1 is absent: its row goes nowhere and adds nothing.

Letters: T tokens, K choices a token, R rows that go somewhere (T * K if none is absent), E experts, H width.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops import differentiable, kernels_for
from antiphon.specs.model import RouterSpec


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, K], weights float32 [T, K]) from float32 logits, best first."""
    if router.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, router.jitter)
    scores = logits_TE.sigmoid() if router.scoring == "sigmoid" else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    if router.num_groups > 1:
        choice = _keep_best_groups(choice, router)
    ids = choice.topk(router.top_k, dim=-1).indices
    if router.softmax_after_top_k:
        weights = logits_TE.gather(1, ids).softmax(-1)
    else:
        weights = scores.gather(1, ids)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * router.scaling


def _keep_best_groups(choice_TE: Tensor, router: RouterSpec) -> Tensor:
    """-inf for every expert outside the `top_k_groups` best groups (DeepSeek-V2 section 2.2.2, -V3 section 2.1.2)."""
    grouped = choice_TE.view(choice_TE.shape[0], router.num_groups, router.num_experts // router.num_groups)
    if router.group_score == "max":
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    best = group_scores.topk(router.top_k_groups, dim=-1).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)


def _sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two passes of top-1 (GRIN MoE, arXiv 2409.12136, inference form): each pass weighs its winner by a softmax over
    the experts within 2 * jitter of it, relative to the larger of |score| and the winner's score; the second pass no
    longer sees the first winner."""
    chosen, weights = [], []
    candidates = logits_TE
    for _ in range(2):
        best, index = candidates.max(-1, keepdim=True)
        distance = (best - logits_TE) / torch.maximum(logits_TE.abs(), best)
        masked = candidates.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(masked.softmax(-1).gather(1, index))
        chosen.append(index)
        candidates = candidates.scatter(1, index, float("-inf"))
    return torch.cat(chosen, 1).int(), torch.cat(weights, 1)


@dataclass(frozen=True)
class RowMap:
    """Where each chosen row lies. `order_R`: of the row at each place in order of expert, its number t * K + k.
    `place_TK`: the place of each choice, 0 for an absent one; `present_TK`: which are not absent, None: all.
    `counts_E`: rows of each expert. Computed once a layer, used forward and backward."""

    order_R: Tensor
    place_TK: Tensor
    present_TK: Tensor | None
    counts_E: tuple[int, ...]

    @property
    def token_R(self) -> Tensor:
        """The token of each place."""
        return self.order_R // self.place_TK.shape[1]

    def without_absent(self, weights_TK: Tensor) -> Tensor:
        """0 for absent choices."""
        return weights_TK if self.present_TK is None else weights_TK.masked_fill(~self.present_TK, 0)


def row_map(ids_TK: Tensor, num_experts: int) -> RowMap:
    """The map for these choices; rows of an expert keep the order of their tokens. Asks the device for the counts."""
    flat = ids_TK.flatten().long()
    absent, *counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    if len(counts) > num_experts:
        raise ValueError(f"a row chose expert {len(counts) - 1} of {num_experts}")
    order_R = flat.argsort(stable=True)[absent:]
    place = torch.zeros_like(flat)
    place[order_R] = torch.arange(order_R.shape[0], device=flat.device)
    return RowMap(order_R, place.view(ids_TK.shape), ids_TK >= 0 if absent else None, tuple(counts))


def to_experts(x_TH: Tensor, rows: RowMap) -> Tensor:
    """[R, H]: a copy of each token's row for each of its experts, in order of expert."""
    rows_RH: Tensor = _to_experts(x_TH, rows)
    return rows_RH


def combine(y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    """[T, H]: the weighted sum of each token's experts, in the order of its choices."""
    out_TH: Tensor = _combine(y_RH, weights_TK.to(y_RH.dtype), rows)
    return out_TH


def _to_experts_forward(ctx: Any, x_TH: Tensor, rows: RowMap) -> Tensor:
    """The gradient of a token is the sum over its rows, found by the inverse order and added in order of choice."""
    ctx.rows = rows
    return x_TH.index_select(0, rows.token_R)


def _to_experts_backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
    rows: RowMap = ctx.rows
    present = None if rows.present_TK is None else rows.present_TK.to(grad_RH.dtype)
    return sum_rows(grad_RH, rows.place_TK, present), None


_to_experts = differentiable(_to_experts_forward, _to_experts_backward)


def _combine_forward(ctx: Any, y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    """Kept are the experts' rows as they lie, no second copy in order of token, and only for the weights' gradient."""
    ctx.save_for_backward(y_RH if ctx.needs_input_grad[1] else None, weights_TK)
    ctx.rows = rows
    return sum_rows(y_RH, rows.place_TK, rows.without_absent(weights_TK))


def _combine_backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
    y_RH, weights_TK = ctx.saved_tensors
    rows: RowMap = ctx.rows
    if (kernels := kernels_for(grad_TH, "rows")) is not None:
        return *kernels.combine_gradient(grad_TH, y_RH, weights_TK, rows.order_R), None
    grad_RH = grad_TH.index_select(0, rows.token_R)
    grad_weights_TK = None
    if y_RH is not None:
        grad_weights = torch.zeros_like(weights_TK).flatten()
        grad_weights[rows.order_R] = (grad_RH * y_RH).sum(1)
        grad_weights_TK = grad_weights.view_as(weights_TK)
    grad_RH.mul_(weights_TK.flatten().index_select(0, rows.order_R).unsqueeze(1))
    return grad_RH, grad_weights_TK, None


_combine = differentiable(_combine_forward, _combine_backward)


def sum_rows(x_RH: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, H]: the sum over k of row `places_TK[t, k]`, times its weight, without holding the T * K rows."""
    if not places_TK.numel() or not x_RH.shape[0]:
        return x_RH.new_zeros(places_TK.shape[0], x_RH.shape[1])
    if (kernels := kernels_for(x_RH, "rows")) is not None:
        return cast(Tensor, kernels.sum_rows(x_RH.contiguous(), places_TK, weights_TK))
    return F.embedding_bag(places_TK, x_RH, per_sample_weights=weights_TK, mode="sum")
