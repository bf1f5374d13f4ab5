"""All experts here: a dispatch is a permutation."""

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


@dataclass(frozen=True)
class _Combined:
    out_TH: Tensor

    def wait(self) -> Tensor:
        return self.out_TH


@dataclass(frozen=True)
class _Dispatched:
    rows_RH: Tensor
    weights_TK: Tensor
    rows: RowMap

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        return self.rows_RH, self.rows.counts_E

    def start_combine(self, y_RH: Tensor) -> _Combined:
        return _Combined(combine(y_RH, self.weights_TK, self.rows))


class LocalDispatcher:
    """A `Dispatcher` for experts that are all on this rank."""

    def __init__(self, num_experts: int) -> None:
        self.num_local = num_experts
        self.first_expert = 0

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        rows = row_map(ids_TK, self.num_local)
        return _Dispatched(to_experts(x_TH, rows, ids_TK.shape[1]), weights_TK, rows)
