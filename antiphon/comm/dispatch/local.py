"""All experts here: a dispatch is a permutation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.collectives import Done
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


@dataclass(frozen=True)
class _Dispatched:
    rows_RH: Tensor
    weights_TK: Tensor
    rows: RowMap
    weights_R: Tensor | None

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        return self.rows_RH, self.rows.counts_E

    def start_combine(self, y_RH: Tensor) -> Done:
        return Done(combine(y_RH, self.weights_TK, self.rows))


class LocalDispatcher:
    """A `Dispatcher` for experts 0 to `num_experts` - 1, all on this rank. `early_weights`: the experts weight their
    results."""

    def __init__(self, num_experts: int, *, early_weights: bool = False) -> None:
        self.num_experts = num_experts
        self.early_weights = early_weights

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        rows = row_map(ids_TK, self.num_experts)
        rows_RH = to_experts(x_TH, rows)
        if not self.early_weights:
            return _Dispatched(rows_RH, weights_TK, rows, None)
        weights_R = weights_TK.flatten().index_select(0, rows.order_R)
        return _Dispatched(rows_RH, torch.ones_like(weights_TK), rows, weights_R)
