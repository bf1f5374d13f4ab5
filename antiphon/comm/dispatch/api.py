"""How a MoE layer's rows reach their experts and come back (MegaScale-MoE, section 3.2).

    dispatched = dispatcher.start_dispatch(x_TH, ids_TK, weights_TK)
    ...                                        # work that does not need the experts' rows
    rows_RH, counts_E = dispatched.wait()      # in order of the experts held here
    y_RH = experts(rows_RH, counts_E)
    out_TH = dispatched.start_combine(y_RH).wait()

A `Way` brings rows over one group of ranks and sums back: `all_to_all` or `gather_scatter` over ranks with different
experts, `gather_scatter` over ranks that each hold a slice of the same experts. A `Dispatcher` is a list of ways, and
behind them the experts that are here. A `Hop` is a way with its decisions made: what the layer's operators
(`train/operators`) are made of, so that rows can travel again without deciding again.

Everything is differentiable; the backward of a dispatch is a combine and the reverse. A choice of -1 is absent.

Letters: T rows of this rank, K experts a row, P rows that travel, R rows received here, E experts held here, H width.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective, Done, Pending, run, start
from antiphon.comm.tile_flight import TileLinks
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


class Hop(Protocol):
    """`there` and `back`: the collectives of rows and of their results; `choices`: that of what `Way.hop` packed."""

    @property
    def there(self) -> Collective: ...

    @property
    def choices(self) -> Collective: ...

    @property
    def back(self) -> Collective: ...

    def send(self, x_TH: Tensor) -> Tensor:
        """[P, H]: rows as they leave."""

    def total(self, y_PH: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]: for each row the sum of the results that came back."""

    def arrived(self, packed_P2K: Tensor) -> tuple[Tensor, Tensor]:
        """(choices, weights) of the rows that came, from what was packed: choices as what is behind this way knows
        them, -1 for those that are elsewhere."""


class Way(Protocol):
    """Rows over one group and back."""

    @property
    def weighs_at_home(self) -> bool:
        """Whether results are weighted when they are back: then weights travel only as ones."""

    def hop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        """How rows with these choices go, and choices with weights as they leave. May wait for other ranks."""


@dataclass(frozen=True)
class Dispatcher:
    """The way to all experts: through `ways`, in order, to experts 0 to `num_experts` - 1 here. `early_weights`: the
    experts weight their results. `links`: where the last way's rows pass the experts in tiles, who carries these; what
    is over a row budget passes in whole."""

    num_experts: int
    ways: tuple[Way, ...] = ()
    early_weights: bool = False
    links: TileLinks | None = None

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> "Dispatched":
        """Send each row to its experts. `weights_TK`: what their results count in the sum."""
        return Dispatched(self, x_TH, ids_TK, weights_TK)


@dataclass(frozen=True)
class Combined:
    """Results on their way back over the first way, which need `total` there."""

    pending: Pending | Done
    hop: Hop | None
    weights_TK: Tensor
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """[T, H]: for each row the weighted sum of its experts' results."""
        out_TH = self.pending.wait()
        return (out_TH if self.hop is None else self.hop.total(out_TH, self.weights_TK)).to(self.dtype)


class Dispatched:
    """Rows under way."""

    def __init__(self, dispatcher: Dispatcher, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self._dispatcher, self._dtype = dispatcher, x_TH.dtype
        self._hops: list[tuple[Hop, Tensor]] = []
        self._rows: Pending | Done = Done(x_TH)
        self._packed: Pending | Done
        self._ids_TK, self._weights_TK = ids_TK, weights_TK
        self._map: RowMap
        if dispatcher.ways:
            self._start(dispatcher.ways[0])

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        """Rows [R, H] in order of the experts held here, and how many each has."""
        for way in (*self._dispatcher.ways[1:], None)[: len(self._dispatcher.ways)]:
            self._ids_TK, self._weights_TK = self._hops[-1][0].arrived(self._packed.wait())
            if way is not None:
                self._start(way)
        self._map = row_map(self._ids_TK, self._dispatcher.num_experts)
        return to_experts(self._arrived(), self._map), self._map.counts_E

    @property
    def weights_R(self) -> Tensor | None:
        """What each row's result counts, once rows are there, if the experts multiply by it; None: the combine does."""
        return weights_of_rows(self._weights_TK, self._map) if self._dispatcher.early_weights else None

    def start_combine(self, y_RH: Tensor) -> Combined:
        """Send results back; `y_RH` in the order that `wait` gave."""
        early = self._dispatcher.early_weights
        out = combine(y_RH, torch.ones_like(self._weights_TK) if early else self._weights_TK, self._map)
        if not self._hops:
            return Combined(Done(out), None, self._weights_TK, self._dtype)
        first, *others = self._hops
        for hop, weights_TK in reversed(others):
            out = hop.total(run(hop.back, out), weights_TK).to(self._dtype)
        return Combined(start(first[0].back, out), *first, self._dtype)

    def _arrived(self) -> Tensor:
        """Rows in the format of the arithmetic, whatever they travelled in."""
        return self._rows.wait().to(self._dtype)

    def _start(self, way: Way) -> None:
        hop, packed_P2K = way.hop(self._ids_TK, self._weights_TK)
        self._hops.append((hop, self._weights_TK))
        self._rows = start(hop.there, hop.send(self._arrived()))
        self._packed = start(hop.choices, packed_P2K)


def weights_of_rows(weights_TK: Tensor, rows: RowMap) -> Tensor:
    """[R]: the weight of each row that is in order of expert."""
    return weights_TK.flatten().index_select(0, rows.order_R)
