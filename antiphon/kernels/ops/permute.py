"""Rows into order of expert and back, without atomic additions: both ways, and both gradients, only gather.

Letters: T tokens, K experts a token, R = T * K routed rows, E experts, H width.
"""

from dataclasses import dataclass
from typing import Any

import torch
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
    y_TKH = _Gather.apply(y_RH, rows.place_R, rows.order_R)  # type: ignore[no-untyped-call]
    y_TKH = y_TKH.view(*weights_TK.shape, -1)
    out_TH: Tensor = (y_TKH * weights_TK.unsqueeze(-1).to(y_TKH.dtype)).sum(1)
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
        return grad_RH.index_select(0, place_R).view(-1, ctx.top_k, grad_RH.shape[1]).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    """Row i of the result is row places[i]; the gradient gathers by the inverse."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, places_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RH.index_select(0, places_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        return grad_RH.index_select(0, ctx.saved_tensors[0]), None, None
