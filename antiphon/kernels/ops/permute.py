"""Rows into order of expert and back, without atomic additions: both ways, and both gradients, only gather.

A choice of -1 is absent: its row goes nowhere and adds nothing.

Letters: T tokens, K choices a token, R rows that go somewhere (T * K if none is absent), E experts, H width.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.ops import kernels_for


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
    order_R = flat.argsort(stable=True)[absent:]
    place = torch.zeros_like(flat)
    place[order_R] = torch.arange(order_R.shape[0], device=flat.device)
    return RowMap(order_R, place.view(ids_TK.shape), ids_TK >= 0 if absent else None, tuple(counts))


def to_experts(x_TH: Tensor, rows: RowMap) -> Tensor:
    """[R, H]: a copy of each token's row for each of its experts, in order of expert."""
    rows_RH: Tensor = _ToExperts.apply(x_TH, rows)  # type: ignore[no-untyped-call]
    return rows_RH


def combine(y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    """[T, H]: the weighted sum of each token's experts, in the order of its choices."""
    out_TH: Tensor = _Combine.apply(y_RH, weights_TK.to(y_RH.dtype), rows)  # type: ignore[no-untyped-call]
    return out_TH


class _ToExperts(torch.autograd.Function):
    """The gradient of a token is the sum over its rows, found by the inverse order and added in order of choice."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows
        return x_TH.index_select(0, rows.token_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
        rows: RowMap = ctx.rows
        present = None if rows.present_TK is None else rows.present_TK.to(grad_RH.dtype)
        return sum_rows(grad_RH, rows.place_TK, present), None


class _Combine(torch.autograd.Function):
    """Kept are the experts' rows as they lie, no second copy in order of token, and only for the weights' gradient."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
        ctx.save_for_backward(y_RH if ctx.needs_input_grad[1] else None, weights_TK)
        ctx.rows = rows
        return sum_rows(y_RH, rows.place_TK, rows.without_absent(weights_TK))

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
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


def sum_rows(x_RH: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, H]: the sum over k of row `places_TK[t, k]`, times its weight, without holding the T * K rows."""
    if not places_TK.numel() or not x_RH.shape[0]:
        return x_RH.new_zeros(places_TK.shape[0], x_RH.shape[1])
    if (kernels := kernels_for(x_RH, "rows")) is not None:
        return cast(Tensor, kernels.sum_rows(x_RH.contiguous(), places_TK, weights_TK))
    return F.embedding_bag(places_TK, x_RH, per_sample_weights=weights_TK, mode="sum")
