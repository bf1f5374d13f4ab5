"""Every rank gets every row, works on those of its experts, and the sums are scattered back (MegaScale-MoE, 3.2).

All-gather of rows, choices and weights; what is behind picks what is for the experts here; reduce-scatter of the
weighted sums. The bytes do not depend on K, so it wins where a row has many experts.

Letters as in `api`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, Collective, gather_sizes
from antiphon.comm.dispatch.api import Hop
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
class _Hop:
    way: "GatherScatter"
    there: Collective
    choices: Collective
    back: Collective

    def send(self, x_TH: Tensor) -> Tensor:
        return self.way.formats.summed(x_TH)

    def total(self, y_PH: Tensor, weights_TK: Tensor) -> Tensor:
        return y_PH

    def arrived(self, packed_P2K: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = without_weights(packed_P2K)
        if self.way.experts is None:
            return ids_TK, weights_TK
        first, last = self.way.experts
        return torch.where((ids_TK >= first) & (ids_TK < last), ids_TK - first, -1), weights_TK


@dataclass(frozen=True)
class GatherScatter:
    """A `Way` over `group`. `experts`: the numbers [first, last) that are here, which what is behind knows from 0 on;
    None: it takes all choices as they are."""

    group: Group
    experts: tuple[int, int] | None = None
    formats: RowFormat = field(default_factory=RowFormat)

    @property
    def weighs_at_home(self) -> bool:
        return False

    def hop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        sizes = gather_sizes(self.group, ids_TK.shape[0], ids_TK.device)
        there = self.formats.all_gather(self.group, "dispatch", sizes)
        choices = AllGather(self.group, "routing", sizes)
        back = self.formats.reduce_scatter(self.group, "combine", sizes)
        return _Hop(self, there, choices, back), with_weights(ids_TK, weights_TK)
