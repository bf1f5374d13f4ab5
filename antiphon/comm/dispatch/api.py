"""The seam between a MoE layer and how its rows reach their experts (MegaScale-MoE, section 3.2).

    dispatched = dispatcher.start_dispatch(x_TH, ids_TK, weights_TK)
    ...                                        # work that does not need the experts' rows
    rows_RH, counts_E = dispatched.wait()      # in order of the experts held here
    y_RH = experts(rows_RH, counts_E)
    out_TH = dispatched.start_combine(y_RH).wait()

Everything is differentiable; the backward of a dispatch is a combine and the reverse.

Letters: T rows of this rank, K experts a row, R rows received here, E experts held here, H width.
"""

from typing import Protocol

from torch import Tensor


class Combined(Protocol):
    def wait(self) -> Tensor:
        """[T, H]: for each row the weighted sum of its experts' results."""


class Dispatched(Protocol):
    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        """Rows [R, H] in order of the experts held here, and how many each has."""

    def start_combine(self, y_RH: Tensor) -> Combined:
        """Send results back; `y_RH` in the order that `wait` gave."""


class Dispatcher(Protocol):
    """One MoE layer's way to its experts. `num_local`: experts held here, the first is number `first_expert`."""

    num_local: int
    first_expert: int

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send each row to its experts. `ids_TK` are global; `weights_TK` are kept for the combine."""
