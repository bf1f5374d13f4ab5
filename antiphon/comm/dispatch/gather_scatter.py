"""Every rank gets every row, works on those of its experts, and the sums are scattered back (MegaScale-MoE, 3.2).

All-gather of rows, choices and weights; the dispatcher inside picks what is for the experts here; reduce-scatter of the
weighted sums. The bytes do not depend on K, so it wins where a row has many experts.

Letters as in `api`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, Done, Pending, gather_sizes, start
from antiphon.comm.dispatch.api import Dispatched, Dispatcher
from antiphon.comm.float8 import RowFormat
from antiphon.comm.mesh import Group


def with_weights(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, 2K]: weights and choices in one tensor of floats, so that they travel together. Gradients pass the former."""
    return torch.cat((weights_TK, ids_TK.to(weights_TK.dtype)), dim=1)


def without_weights(packed_T2K: Tensor) -> tuple[Tensor, Tensor]:
    """(choices, weights) from `with_weights`."""
    weights_TK, ids_TK = packed_T2K.chunk(2, dim=1)
    return ids_TK.detach().long(), weights_TK


@dataclass(frozen=True)
class _Combined:
    sums_TH: Pending | Done
    dtype: torch.dtype

    def wait(self) -> Tensor:
        return self.sums_TH.wait().to(self.dtype)


class _Dispatched:
    def __init__(self, dispatcher: "GatherScatter", x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        group = dispatcher.group
        self._dispatcher = dispatcher
        self._sizes = gather_sizes(group, x_TH.shape[0], x_TH.device)
        self._dtype, formats = x_TH.dtype, dispatcher.formats
        self._rows = start(formats.all_gather(group, "dispatch", self._sizes), formats.summed(x_TH))
        self._packed = start(AllGather(group, "routing", self._sizes), with_weights(ids_TK, weights_TK))
        self._inside: Dispatched | None = None

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        ids_TK, weights_TK = without_weights(self._packed.wait())
        ids_TK = self._dispatcher.local_ids(ids_TK)
        self._inside = self._dispatcher.inside.start_dispatch(self._rows.wait().to(self._dtype), ids_TK, weights_TK)
        return self._inside.wait()

    @property
    def weights_R(self) -> Tensor | None:
        assert self._inside is not None, "wait for the dispatch first"
        return self._inside.weights_R

    def start_combine(self, y_RH: Tensor) -> _Combined:
        assert self._inside is not None, "wait for the dispatch first"
        sums_TH = self._inside.start_combine(y_RH).wait()
        back = self._dispatcher.formats.reduce_scatter(self._dispatcher.group, "combine", self._sizes)
        return _Combined(start(back, sums_TH), self._dtype)


@dataclass(frozen=True)
class GatherScatter:
    """A `Dispatcher` over `group`. `experts`: the numbers [first, last) that are here, which `inside` knows from 0 on;
    None: `inside` takes all choices as they are."""

    group: Group
    inside: Dispatcher
    experts: tuple[int, int] | None = None
    formats: RowFormat = field(default_factory=RowFormat)

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        return _Dispatched(self, x_TH, ids_TK, weights_TK)

    def local_ids(self, ids_TK: Tensor) -> Tensor:
        """Choices as `inside` knows them, -1 for experts elsewhere."""
        if self.experts is None:
            return ids_TK
        first, last = self.experts
        return torch.where((ids_TK >= first) & (ids_TK < last), ids_TK - first, -1)
