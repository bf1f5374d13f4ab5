"""The seam between a MoE layer and how its rows reach their experts (MegaScale-MoE, section 3.2).

    dispatched = dispatcher.start_dispatch(x_TH, ids_TK, weights_TK)
    ...                                        # work that does not need the experts' rows
    rows_RH, counts_E = dispatched.wait()      # in order of the experts held here
    y_RH = experts(rows_RH, counts_E)
    out_TH = dispatched.start_combine(y_RH).wait()

Everything is differentiable; the backward of a dispatch is a combine and the reverse. A choice of -1 is absent.

`local` has all experts here. The others bring rows here, hand them to another dispatcher and bring sums back, so they
can be put around each other: `all_to_all` or `gather_scatter` over ranks with different experts, `gather_scatter`
around it over ranks that each hold a slice of the same experts.

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

    @property
    def weights_R(self) -> Tensor | None:
        """What each row's result counts, once rows are there, if the experts multiply by it; None: the combine does."""

    def start_combine(self, y_RH: Tensor) -> Combined:
        """Send results back; `y_RH` in the order that `wait` gave."""


class Dispatcher(Protocol):
    """One MoE layer's way to its experts."""

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send each row to its experts. `weights_TK`: what their results count in the sum."""
