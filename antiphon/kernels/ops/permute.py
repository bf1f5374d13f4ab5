"""Rows into order of expert and back, without atomic additions: both ways, and both gradients, only gather.

Letters: T tokens, K experts a token, R = T * K routed rows, E experts, H width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowMap:
    """Where each routed row lies. `order_R`: of the row at each place in order of expert, its number t * K + k.
    `place_R`: the inverse. `counts_E`: rows of each expert. Computed once a layer, used forward and backward."""

    order_R: Tensor
    place_R: Tensor
    counts_E: tuple[int, ...]


def row_map(ids_TK: Tensor, num_experts: int) -> RowMap:
    """The map for these choices; rows of an expert keep the order of their tokens. Asks the device for the counts."""
    flat_R = ids_TK.flatten().long()
    order_R = flat_R.argsort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    return RowMap(order_R, place_R, tuple(torch.bincount(flat_R, minlength=num_experts).tolist()))


def to_experts(x_TH: Tensor, rows: RowMap, top_k: int) -> Tensor:
    """[R, H]: a copy of each token's row for each of its experts, in order of expert."""
    rows_RH: Tensor = _ToExperts.apply(x_TH, rows.order_R, rows.place_R, top_k)  # type: ignore[no-untyped-call]
    return rows_RH


def combine(y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    """[T, H]: the weighted sum of each token's experts, in the order of its choices."""
    weights_TK = weights_TK.to(y_RH.dtype)
    out_TH: Tensor = _Combine.apply(y_RH, weights_TK, rows.order_R, rows.place_R)  # type: ignore[no-untyped-call]
    return out_TH


class _ToExperts(torch.autograd.Function):
    """The gradient of a token is the sum over its K rows, found by the inverse order and added in order of choice."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_R: Tensor, place_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.top_k = top_k
        return x_TH.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        return _sum_rows(grad_RH, place_R.view(-1, ctx.top_k), None), None, None, None


class _Combine(torch.autograd.Function):
    """Kept are the experts' rows as they lie, not a second copy in order of token."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_TK: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(y_RH, weights_TK, order_R, place_R)
        return _sum_rows(y_RH, place_R.view(weights_TK.shape), weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        y_RH, weights_TK, order_R, place_R = ctx.saved_tensors
        grad_RH = grad_TH.index_select(0, order_R // weights_TK.shape[1])
        grad_weights_TK = None
        if ctx.needs_input_grad[1]:
            grad_weights_TK = (grad_RH * y_RH).sum(1).index_select(0, place_R).view_as(weights_TK)
        grad_RH.mul_(weights_TK.flatten().index_select(0, order_R).unsqueeze(1))
        return grad_RH, grad_weights_TK, None, None


def _sum_rows(x_RH: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, H]: the sum over k of row `places_TK[t, k]`, times its weight, without holding the T * K rows."""
    if not places_TK.numel():
        return x_RH.new_zeros(places_TK.shape[0], x_RH.shape[1])
    return F.embedding_bag(places_TK, x_RH, per_sample_weights=weights_TK, mode="sum")
