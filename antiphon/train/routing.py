"""What the gates of a micro-batch did, on all ranks of a stage: losses that follow, choices that are dropped.

The balance losses are products of how often experts are chosen (counts, no gradient) and how probable they are. Counts
are those of the whole micro-batch, on all ranks, so a loss does not depend on how the micro-batch is cut. Their sum
over ranks travels while the layer goes on. Backward is the first to need it: the gradient of a rank's probabilities is
a constant that the counts decide. So the losses enter by their gradients, once, whatever is recomputed.

    layer   E * sum_e f_e P_e of each layer, mean over layers       (Switch Transformer, eq. 4)
    model   the same of f and P averaged over layers first, times K (as transformers has it)
    device  sum_g f_g P_g over groups of experts on one device      (DeepSeek-V2, section 2.2.3; MegaScale-MoE, 3.2)
    z       mean squared log-sum-exp of the logits                  (ST-MoE, eq. 5)

f_e: share of all choices; P_e: mean probability, scores divided by their sum. Rejected: a balance loss of each rank's
own rows. Its mean over ranks is another, stricter loss for every number of ranks.

Capacity: what is too much for an expert, or for the experts of one device, is dropped (MegaScale-MoE, section 3.2). A
limit counts the rows of the whole micro-batch on all ranks, so that which choices are dropped does not depend on how it
is cut.

1. Each choice is one number: expert, weight (the largest first), place in the micro-batch. Ranks gather these numbers.
2. Sorted, each expert's choices lie together, the heaviest first; those behind the limit are dropped. Then the same for
   groups of experts, among what is left.
3. A dropped choice is absent: it goes nowhere and adds nothing. Weights of the others stay as they are: what was
   dropped has no part in the sum, and the row's residual stream passes the layer with less added.

Weights are compared in steps of 1/65536 and equal ones by place, so that rounding in another order of sums decides
nothing. Rejected: the first rows stay (as GShard has it). The order of rows says nothing of what is worth keeping.

Letters: T rows of this rank, K experts a row, N choices of all ranks, E experts, H hidden, L MoE layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.collectives import AllGather, AllReduce, Pending, gather_sizes, run, start
from antiphon.comm.mesh import Group
from antiphon.kernels.ops import differentiable
from antiphon.specs.model import RouterSpec
from antiphon.train.config_tables import LossConfig

_STEPS = 1 << 16
_WEIGHT_BITS, _PLACE_BITS = 20, 31
_LEAST_WEIGHT = (1 << _WEIGHT_BITS) - 1  # the heaviest choice is number 0, to come first


def row_numbers(
    first_sequence: int, num_sequences: int, positions: tuple[int, int], length: int, device: torch.device
) -> Tensor:
    """[T]: the place of this rank's rows in the micro-batch: sequences from `first_sequence` on, each with these
    positions [start, stop) of `length`."""
    sequences = first_sequence + torch.arange(num_sequences, device=device)
    return (sequences.unsqueeze(1) * length + torch.arange(*positions, device=device)).flatten()


def _keys(ids_TK: Tensor, weights_TK: Tensor, numbers_T: Tensor) -> Tensor:
    """[T * K]: in order, the choices of an expert by weight."""
    num_choices = ids_TK.shape[1]
    places_TK = numbers_T.unsqueeze(1) * num_choices
    places_TK = places_TK + torch.arange(num_choices, device=ids_TK.device)
    assert not places_TK.numel() or int(places_TK[-1, -1]) < 1 << _PLACE_BITS, "more choices than have a number"
    steps_TK = (weights_TK.detach() * _STEPS).round().long().clamp(0, _LEAST_WEIGHT)
    weight_first_TK = (ids_TK.long() << _WEIGHT_BITS) + (_LEAST_WEIGHT - steps_TK)
    return ((weight_first_TK << _PLACE_BITS) + places_TK).flatten()


def _within(bins_N: Tensor, keys_N: Tensor, stays_N: Tensor, limits: Tensor) -> Tensor:
    """Those that stay: of each bin the first ones, as many as its limit."""
    num_bins = limits.shape[0]
    bins_N = bins_N.where(stays_N, num_bins)
    lower_bits = (1 << (_WEIGHT_BITS + _PLACE_BITS)) - 1
    order_N = ((bins_N << (_WEIGHT_BITS + _PLACE_BITS)) + (keys_N & lower_bits)).argsort()
    counts = torch.bincount(bins_N, minlength=num_bins + 1)
    starts = counts.cumsum(0) - counts
    sorted_N = bins_N[order_N]
    place_N = torch.arange(keys_N.shape[0], device=keys_N.device) - starts[sorted_N]
    stays = torch.empty_like(stays_N)
    stays[order_N] = place_N < torch.cat((limits, limits.new_zeros(1)))[sorted_N]
    return stays


@dataclass(frozen=True)
class LayerFacts:
    """Sums over all ranks of the stage: choices of each expert, probabilities, squared log-sum-exps, rows."""

    counts_E: Tensor
    probabilities_E: Tensor
    z: Tensor
    rows: Tensor


class Routing:
    """One micro-batch, which is `share` of a step, in one stage, on the ranks of `group`. The whole model has
    `num_layers` MoE layers."""

    def __init__(
        self, router: RouterSpec, losses: LossConfig, group: Group, *, num_layers: int, share: float = 1.0
    ) -> None:
        self._router = router
        self._losses = losses
        self._group = group
        self._num_layers = num_layers
        self._num_used = num_layers  # whose use the balance over the "model" looks at
        self._share = share
        self._devices = split_evenly(router.num_experts, losses.device_groups)
        self._numbers: Callable[[], Tensor] | None = None
        self.dropped: list[int] = []  # choices of each layer, on all ranks
        self.use_before_E: Tensor | None = None  # of the layers in the stages before, see `use_so_far`
        self.use_of_all_E: Tensor | None = None  # of all layers: what `balance_over` "model" needs for gradients
        self._pending: list[Pending] = []
        self._facts: dict[int, LayerFacts] = {}

    def apart(self) -> "Routing":
        """For one more layer with the same rows, which is not among those that are counted here."""
        other = Routing(self._router, self._losses, self._group, num_layers=self._num_layers, share=self._share)
        other._numbers, other._num_used = self._numbers, 1
        return other

    def attach(self, x_TH: Tensor, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """`x_TH` as it is; its backward gives the logits the gradients of the losses. Call it once a layer."""
        scores_TE = logits_TE.sigmoid() if self._router.scoring == "sigmoid" else logits_TE.softmax(-1)
        if self._router.scoring == "sigmoid":
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        probabilities_E, z = scores_TE.sum(0), logits_TE.logsumexp(-1).square().sum()
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self._router.num_experts)
        rows = counts_E.new_tensor([x_TH.shape[0]])
        mine = torch.cat((counts_E.double(), probabilities_E.detach().double(), z.detach().double().view(1), rows))
        with torch.no_grad():
            self._pending.append(start(AllReduce(self._group, "balance"), mine))
        attached: Tensor = _attach(x_TH, probabilities_E, z, self, len(self._pending) - 1)
        return attached

    def number_rows(self, numbers: Callable[[], Tensor]) -> None:
        """Which rows of the micro-batch are here (`row_numbers`): to be set before the first layer."""
        self._numbers = numbers

    def limit(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The choices that experts have room for, -1 for the others. Call it once a layer, after `attach`, which counts
        what the router wanted."""
        if not self._losses.drops:
            self.dropped.append(0)
            return ids_TK
        assert self._numbers is not None, "rows have no numbers yet"
        own, num_experts = _keys(ids_TK, weights_TK, self._numbers()), self._router.num_experts
        sizes = gather_sizes(self._group, own.shape[0], own.device)
        keys_N = run(AllGather(self._group, "capacity", sizes), own)
        experts_N = keys_N >> (_WEIGHT_BITS + _PLACE_BITS)
        mean, stays_N = keys_N.shape[0] / num_experts, torch.ones_like(keys_N, dtype=torch.bool)
        if self._losses.capacity:
            limits = torch.full((num_experts,), int(self._losses.capacity * mean), device=own.device)
            stays_N = _within(experts_N, keys_N, stays_N, limits)
        if self._losses.device_capacity:
            sizes_G = torch.tensor([last - first for first, last in self._devices], device=own.device)
            group_of_E = torch.arange(len(self._devices), device=own.device).repeat_interleave(sizes_G)
            limits = (self._losses.device_capacity * mean * sizes_G).long()
            stays_N = _within(group_of_E[experts_N], keys_N, stays_N, limits)
        begin = sum(sizes[: self._group.index])
        stays_TK = stays_N[begin : begin + own.shape[0]].view(ids_TK.shape)
        self.dropped.append(int((~stays_N).sum()))
        return ids_TK.where(stays_TK, -1)

    def facts(self, index: int) -> LayerFacts:
        """The facts of the MoE layer with this number in its stage. Waits for the other ranks when first asked."""
        if index not in self._facts:
            sums, num_experts = self._pending[index].wait(), self._router.num_experts
            counts_E, probabilities_E, rest = torch.split(sums, [num_experts, num_experts, 2])
            self._facts[index] = LayerFacts(counts_E, probabilities_E, *rest)
        return self._facts[index]

    def all_facts(self) -> list[LayerFacts]:
        return [self.facts(index) for index in range(len(self._pending))]

    def use_so_far(self) -> Tensor:
        """[E]: each expert's share of the choices, summed over the layers of this stage and of those before."""
        shares = [facts.counts_E / facts.counts_E.sum() for facts in self.all_facts()]
        before = [] if self.use_before_E is None else [self.use_before_E]
        return torch.stack([*before, *shares]).sum(0)

    def gradients(self, index: int) -> tuple[Tensor, Tensor]:
        """Gradients of this micro-batch's losses with respect to the layer's sums of probabilities [E] and of
        squared log-sum-exps."""
        losses, facts, num_experts = self._losses, self.facts(index), self._router.num_experts
        part = self._share / self._num_layers / facts.rows
        shares_E = facts.counts_E / facts.counts_E.sum()
        if losses.balance_over == "model":
            use_E = self.use_so_far() if self.use_of_all_E is None else self.use_of_all_E
            balance_E = self._router.top_k * use_E / self._num_used
        else:
            balance_E = shares_E
        gradient_E = losses.balance * num_experts * balance_E + losses.device_balance * self._device_shares(shares_E)
        return gradient_E * part, losses.z * part

    def _device_shares(self, shares_E: Tensor) -> Tensor:
        """[E]: for each expert the mean use of its device's experts, 1 when all are used evenly."""
        means = [shares_E[first:last].mean().expand(last - first) for first, last in self._devices]
        return torch.cat(means) * self._router.num_experts


def balance_of(facts: LayerFacts) -> Tensor:
    """The layer's balance loss by itself: 1 when experts are used evenly."""
    shares_E = facts.counts_E / facts.counts_E.sum()
    return facts.counts_E.shape[0] * (shares_E * facts.probabilities_E / facts.rows).sum()


def _attach_forward(ctx: Any, x_TH: Tensor, probabilities_E: Tensor, z: Tensor, routing: Routing, index: int) -> Tensor:
    ctx.routing, ctx.index, ctx.dtype = routing, index, probabilities_E.dtype
    return x_TH.view_as(x_TH)


def _attach_backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    gradient_E, z = ctx.routing.gradients(ctx.index)
    return grad_TH, gradient_E.to(ctx.dtype), z.to(ctx.dtype), None, None


_attach = differentiable(_attach_forward, _attach_backward)
