"""Which rows go to which expert worker: the placement, turned into small tables the hot path can index.

`owner_of[r, e]` names the worker that serves expert e for rows of residue r; with replicas, rows take turns among
the owners by their index, so the split is even and needs no random numbers. Rows stay in order within a message.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.specs.placement import ExpertPlacement


@dataclass(frozen=True)
class Destination:
    """One worker's share of a dispatch. `row_index` None means all rows, in order."""

    row_index: Tensor | None
    ids_TK: Tensor
    weights_TK: Tensor


class RowRouter:
    """Splits a micro-batch by destination. Tables move to the rows' device at the first call."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self.num_workers = placement.num_workers
        self._num_turns = math.lcm(*(len(workers) for workers in placement.owners))
        table = [[workers[turn % len(workers)] for workers in placement.owners] for turn in range(self._num_turns)]
        self._owner_of = torch.tensor(table, dtype=torch.int32)

    def split(self, ids_TK: Tensor, weights_TK: Tensor) -> list[Destination]:
        """One `Destination` per expert worker; ids of experts served elsewhere become -1."""
        if self.num_workers == 1:
            return [Destination(None, ids_TK, weights_TK)]
        if self._owner_of.device != ids_TK.device:
            self._owner_of = self._owner_of.to(ids_TK.device)
        if self._num_turns == 1:
            owners_TK = self._owner_of[0][ids_TK]
        else:
            turn_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) % self._num_turns
            owners_TK = self._owner_of[turn_T[:, None], ids_TK]
        destinations = []
        for worker in range(self.num_workers):
            mine_TK = owners_TK == worker
            row_index = mine_TK.any(dim=1).nonzero().squeeze(1)
            mine_RK = mine_TK[row_index]
            ids_RK = torch.where(mine_RK, ids_TK[row_index], -1)
            destinations.append(Destination(row_index, ids_RK, weights_TK[row_index]))
        return destinations
