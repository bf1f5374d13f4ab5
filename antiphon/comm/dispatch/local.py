"""All experts here: a dispatch is a permutation."""

from dataclasses import dataclass

from torch import Tensor

from antiphon.comm.collectives import Done
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


@dataclass(frozen=True)
class _Dispatched:
    rows_RH: Tensor
    weights_TK: Tensor
    rows: RowMap

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        return self.rows_RH, self.rows.counts_E

    def start_combine(self, y_RH: Tensor) -> Done:
        return Done(combine(y_RH, self.weights_TK, self.rows))


class LocalDispatcher:
    """A `Dispatcher` for experts 0 to `num_experts` - 1, all on this rank."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        rows = row_map(ids_TK, self.num_experts)
        return _Dispatched(to_experts(x_TH, rows), weights_TK, rows)
