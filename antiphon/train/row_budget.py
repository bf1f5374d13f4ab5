"""A limit to the rows that a rank's experts hold at once, whatever the router does; and these experts as one function.

Without a limit, memory follows the router: a rank whose experts are chosen four times as often as the mean keeps four
times the rows, in every layer, until backward. The budget is a multiple of the balanced share.

1. Ranks add up how many rows each of them would get. If no rank is over budget, all goes in one piece.
2. Otherwise three quarters of a budget go first and are kept for backward. The rest goes in pieces of a quarter each:
   sent, worked on, returned, forgotten; backward sends and works on them again, one by one. So no layer keeps more than
   three quarters, and no moment adds more than one quarter.
3. Pieces are cut in order of token, so that a row still goes to a rank once, and each expert's rows are cut alike. All
   ranks have the same number of pieces.

Rejected: pieces of rows after they arrived. What arrived is as long as the skew, before any expert has seen it. Also
rejected: working on everything again as soon as one row is too many; a router is never quite balanced.

Letters: T rows of this rank, K experts a row, R rows in order of expert, E experts, H width, J = 2 * width of gate and
up, n ranks with different experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.dispatch import Dispatcher
from antiphon.comm.mesh import Mesh
from antiphon.kernels.ops import differentiable
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.ops.products import Products
from antiphon.specs.model import FeedForwardSpec
from antiphon.train.weights import DOWN, GATE_UP, Recorder


@dataclass(frozen=True)
class Experts:
    """`tensors`: their weights by purpose, in the dtype of the arithmetic. `adds_bias`: whether the second bias is
    added here; of ranks that share an expert's width one does it. `products`: how rows are multiplied by them."""

    spec: FeedForwardSpec
    adds_bias: bool
    tensors: Mapping[str, Tensor]
    products: Products = field(default_factory=Products)

    @staticmethod
    def of(spec: FeedForwardSpec, weights: Recorder, *, adds_bias: bool) -> "Experts":
        purposes = (GATE_UP, DOWN, *((GATE_UP + "_bias", DOWN + "_bias") if spec.expert_bias else ()))
        return Experts(spec, adds_bias, {purpose: weights[purpose] for purpose in purposes}, weights.products)

    def __call__(self, rows_RH: Tensor, counts_E: tuple[int, ...], weights_R: Tensor | None = None) -> Tensor:
        """[R, H]: each row through its expert; `counts_E`: rows of each expert. `weights_R`: what results count,
        multiplied before the second product (MegaScale-MoE, section 4.1)."""
        gate_up_RJ = self.products.forward(rows_RH, self.tensors[GATE_UP], counts_E)
        experts_R = torch.tensor(counts_E, device=rows_RH.device)
        if self.spec.expert_bias:
            gate_up_RJ = gate_up_RJ + self.tensors[GATE_UP + "_bias"].repeat_interleave(experts_R, dim=0)
        hidden = activate(gate_up_RJ, self.spec)
        factor_R1 = None if weights_R is None else weights_R.to(hidden.dtype).unsqueeze(1)
        weighed = hidden if factor_R1 is None else hidden * factor_R1
        down_RH = self.products.forward(weighed, self.tensors[DOWN], counts_E)
        if not self.spec.expert_bias or not self.adds_bias:
            return down_RH
        bias_RH = self.tensors[DOWN + "_bias"].repeat_interleave(experts_R, dim=0)
        return down_RH + (bias_RH if factor_R1 is None else bias_RH * factor_R1)


KEPT_PART = 0.75
WAITS = "waits in over_budget"  # of its time on the timeline, what is spent waiting for rows
Apart = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Pieces:
    """Choices, and the piece in which each goes; piece 0 is kept for backward, `num_more` follow it."""

    ids_TK: Tensor
    piece_TK: Tensor
    num_more: int

    def choices(self, piece: int) -> Tensor:
        """[T, K]: those of this piece, the others absent."""
        return torch.where(self.piece_TK == piece, self.ids_TK, -1) if self.num_more else self.ids_TK


@dataclass(frozen=True)
class RowBudget:
    """The budget of one MoE layer. `factor`: rows of a rank over its share at even use; 0: no limit."""

    mesh: Mesh
    num_experts: int
    factor: float

    @property
    def may_exceed(self) -> bool:
        """Whether there may be rows over budget: one rank has all rows, balanced or not."""
        return bool(self.factor) and (self.mesh.group("expert").size > 1 or self.factor < 1)

    def pieces(self, ids_TK: Tensor) -> Pieces:
        """How these choices go; ranks that share experts call it together."""
        group = self.mesh.group("expert")
        if not self.may_exceed:
            return Pieces(ids_TK, ids_TK, 0)
        experts = split_evenly(self.num_experts, group.size)
        rank_of = [rank for rank, (first, last) in enumerate(experts) for _ in range(last - first)]
        ranks_TK = torch.tensor([*rank_of, group.size], device=ids_TK.device)[ids_TK]  # an absent one is the last
        rows_Tn = torch.zeros(ids_TK.shape[0], group.size + 1, dtype=torch.int64, device=ids_TK.device)
        rows_Tn = rows_Tn.scatter_add_(1, ranks_TK, torch.ones_like(ranks_TK))
        own_n = rows_Tn.sum(0)
        all_n = run(AllReduce(self.mesh.group("expert_tensor"), "counts"), run(AllReduce(group, "counts"), own_n))
        present = all_n[: group.size].tolist()
        share = _even_share(sum(present) + int(all_n[-1]), experts)
        if max(present) <= self.factor * share:
            return Pieces(ids_TK, ids_TK, 0)
        kept = KEPT_PART * self.factor * share
        num_more = math.ceil((max(present) - kept) / ((1 - KEPT_PART) * self.factor * share))
        piece_Tn = _piece_of(rows_Tn, own_n, kept / all_n.clamp(min=1), num_more)
        return Pieces(ids_TK, piece_Tn.gather(1, ranks_TK), num_more)


def part_over_budget(rows_E: Sequence[int], num_ranks: int, factor: float) -> float:
    """The part of a layer's rows that does not go in piece 0. `rows_E`: how many chose each expert; `num_ranks` share
    the experts."""
    experts = split_evenly(len(rows_E), num_ranks)
    rows_n = [sum(rows_E[first:last]) for first, last in experts]
    share = _even_share(sum(rows_E), experts)
    if not factor or (num_ranks == 1 and factor >= 1) or max(rows_n) <= factor * share:
        return 0.0
    return sum(max(0.0, rows - KEPT_PART * factor * share) for rows in rows_n) / sum(rows_E)


def _even_share(num_rows: int, experts: Sequence[tuple[int, int]]) -> float:
    """Rows of the rank with the most experts, if all get as many. `experts`: of each rank, first and one past last."""
    return num_rows * max(last - first for first, last in experts) / experts[-1][1]


def _piece_of(rows_Tn: Tensor, own_n: Tensor, kept_n: Tensor, num_more: int) -> Tensor:
    """[T, n]: the piece in which a token goes to a rank; `kept_n`: the part of all rows that goes in piece 0."""
    before_Tn = rows_Tn.cumsum(0) - rows_Tn
    first_n = (own_n * kept_n.clamp(max=1)).long()
    later_Tn = 1 + (before_Tn - first_n) * num_more // (own_n - first_n).clamp(min=1)
    return torch.where(before_Tn < first_n, 0, later_Tn.clamp(max=num_more))


def pass_over_budget(
    dispatcher: Dispatcher,
    experts: Experts,
    x_TH: Tensor,
    pieces: Pieces,
    weights_TK: Tensor,
    apart: Apart = nullcontext,
) -> Tensor:
    """[T, H]: the sum over all pieces but the first; nothing is kept for backward but what is given here. Forward and
    backward run within `apart`."""
    out_TH: Tensor = _over_budget(apart, dispatcher, experts, pieces, x_TH, weights_TK, *experts.tensors.values())
    return out_TH


def _over_budget_forward(
    ctx: Any,
    apart: Apart,
    dispatcher: Dispatcher,
    experts: Experts,
    pieces: Pieces,
    x_TH: Tensor,
    weights_TK: Tensor,
    *tensors: Tensor,
) -> Tensor:
    """Gradients of weights are added up piece by piece, in order: the same bits in every run."""
    ctx.apart, ctx.dispatcher, ctx.experts, ctx.pieces = apart, dispatcher, experts, pieces
    ctx.save_for_backward(x_TH, weights_TK, *tensors)
    out_TH = torch.zeros_like(x_TH)
    with apart():
        for piece in range(1, 1 + pieces.num_more):
            out_TH += dispatcher.through(experts, x_TH, pieces.choices(piece), weights_TK)
    return out_TH


def _over_budget_backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[4:]
    leaves = [saved.detach().requires_grad_(need) for saved, need in zip(ctx.saved_tensors, needed, strict=True)]
    x_TH, weights_TK, *tensors = leaves
    experts = replace(ctx.experts, tensors=dict(zip(ctx.experts.tensors, tensors, strict=True)))
    with ctx.apart():
        for piece in range(1, 1 + ctx.pieces.num_more):
            with torch.enable_grad():
                out_TH = ctx.dispatcher.through(experts, x_TH, ctx.pieces.choices(piece), weights_TK)
            torch.autograd.backward(out_TH, grad_TH)
    return None, None, None, None, *(leaf.grad for leaf in leaves)


_over_budget = differentiable(_over_budget_forward, _over_budget_backward)
