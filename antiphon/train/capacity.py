"""Capacity of experts: what is too much for an expert, or for the experts of one device, is dropped.

MegaScale-MoE, section 3.2: computational capacity by device rather than by expert; both are here. A limit counts the
rows of the whole micro-batch on all ranks, so that which choices are dropped does not depend on how it is cut.

1. Each choice is one number: expert, weight (the largest first), place in the micro-batch. Ranks gather these numbers.
2. Sorted, each expert's choices lie together, the heaviest first; those behind the limit are dropped. Then the same for
   groups of experts, among what is left.
3. A dropped choice is absent: it goes nowhere and adds nothing. Weights of the others stay as they are: what was
   dropped has no part in the sum, and the row's residual stream passes the layer with less added.

Weights are compared in steps of 1/65536 and equal ones by place, so that rounding in another order of sums decides
nothing. Rejected: the first rows stay (as GShard has it). The order of rows says nothing of what is worth keeping.

Letters: T rows of this rank, K experts a row, N choices of all ranks, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, gather_sizes, run
from antiphon.comm.mesh import Group

_STEPS = 1 << 16
_WEIGHT_BITS, _PLACE_BITS = 20, 31
_LEAST_WEIGHT = (1 << _WEIGHT_BITS) - 1  # the heaviest choice is number 0, to come first


@dataclass(frozen=True)
class RowNumbers:
    """Where the rows of this rank stand in the micro-batch: sequences from `first_sequence` on, each with these
    positions [start, stop) of `length`."""

    first_sequence: int
    num_sequences: int
    positions: tuple[int, int]
    length: int

    def of_rows(self, device: torch.device) -> Tensor:
        """[T]"""
        sequences = self.first_sequence + torch.arange(self.num_sequences, device=device)
        return (sequences.unsqueeze(1) * self.length + torch.arange(*self.positions, device=device)).flatten()


@dataclass(frozen=True)
class Capacity:
    """Limits over the mean use: `of_expert` for each of `num_experts`, `of_group` for each range of `groups`; 0: no
    limit. `ranks` share the micro-batch."""

    of_expert: float
    of_group: float
    num_experts: int
    groups: Sequence[tuple[int, int]]
    ranks: Group

    def keep(self, ids_TK: Tensor, weights_TK: Tensor, numbers: RowNumbers) -> tuple[Tensor, int]:
        """Choices with -1 for those that are dropped, and how many those are on all ranks."""
        if not self.of_expert and not self.of_group:
            return ids_TK, 0
        own = _keys(ids_TK, weights_TK, numbers)
        sizes = gather_sizes(self.ranks, own.shape[0], own.device)
        keys_N = run(AllGather(self.ranks, "capacity", sizes), own)
        experts_N = keys_N >> (_WEIGHT_BITS + _PLACE_BITS)
        mean, stays_N = keys_N.shape[0] / self.num_experts, torch.ones_like(keys_N, dtype=torch.bool)
        if self.of_expert:
            limits = torch.full((self.num_experts,), int(self.of_expert * mean), device=own.device)
            stays_N = _within(experts_N, keys_N, stays_N, limits)
        if self.of_group:
            sizes_G = torch.tensor([last - first for first, last in self.groups], device=own.device)
            group_of_E = torch.arange(len(self.groups), device=own.device).repeat_interleave(sizes_G)
            limits = (self.of_group * mean * sizes_G).long()
            stays_N = _within(group_of_E[experts_N], keys_N, stays_N, limits)
        begin = sum(sizes[: self.ranks.index])
        stays_TK = stays_N[begin : begin + own.shape[0]].view(ids_TK.shape)
        return ids_TK.where(stays_TK, -1), int((~stays_N).sum())


def _keys(ids_TK: Tensor, weights_TK: Tensor, numbers: RowNumbers) -> Tensor:
    """[T * K]: in order, the choices of an expert by weight."""
    num_choices = ids_TK.shape[1]
    places_TK = numbers.of_rows(ids_TK.device).unsqueeze(1) * num_choices
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
