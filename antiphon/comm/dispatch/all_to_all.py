"""Each row travels to the ranks of its experts and back (MegaScale-MoE, section 3.2, eq. 3).

`deduplicate`: a row goes to a rank once, however many of its experts are there, and one weighted sum comes back: fewer
bytes, n (1 - C(E - E/n, k) / C(E, k)) instead of k rows a token at uniform routing. Without it each choice travels by
itself, as in the papers, and the sum is made at home.

1. Rows are put in order of rank. 2. Counts are gathered. 3. Rows, with their choices and weights, travel.
4. The dispatcher inside takes them to the experts here. 5. Results return and are summed in order of choice.

Letters as in `api`; P rows that travel, n ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.collectives import AllToAll, Done, Pending, run, start
from antiphon.comm.dispatch.api import Dispatched, Dispatcher
from antiphon.comm.dispatch.gather_scatter import with_weights, without_weights
from antiphon.comm.float8 import RowFormat
from antiphon.comm.mesh import Group
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


@dataclass(frozen=True)
class _Combined:
    results_PH: Pending | Done
    weights: Tensor
    rows: RowMap
    dtype: torch.dtype

    def wait(self) -> Tensor:
        return combine(self.results_PH.wait(), self.weights, self.rows).to(self.dtype)


class _Dispatched:
    def __init__(self, dispatcher: "AllToAllDispatcher", x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        group, self._inside_dispatcher = dispatcher.group, dispatcher.inside
        formats, self._dtype = dispatcher.formats, x_TH.dtype
        ranks_TK = dispatcher.ranks_of(ids_TK)
        if dispatcher.deduplicate:
            chosen_Tn = torch.zeros(x_TH.shape[0], group.size + 1, dtype=torch.bool, device=x_TH.device)
            chosen_Tn = chosen_Tn.scatter_(1, ranks_TK % (group.size + 1), True)[:, : group.size]
            numbers_n = torch.arange(group.size, device=x_TH.device)
            self._map = row_map(torch.where(chosen_Tn, numbers_n, -1), group.size)
            self._weights = torch.ones_like(chosen_Tn, dtype=weights_TK.dtype)
            rank_P = self._map.order_R % group.size
            token_P = self._map.order_R // group.size
            here_PK = ranks_TK[token_P] == rank_P.unsqueeze(1)
            ids_PK = torch.where(here_PK, ids_TK[token_P] - dispatcher.firsts(rank_P).unsqueeze(1), -1)
            weights_PK = to_experts(weights_TK, self._map) * here_PK
        else:
            self._map = row_map(ranks_TK, group.size)
            self._weights = weights_TK
            rank_P = ranks_TK.flatten()[self._map.order_R]
            ids_PK = (ids_TK.flatten()[self._map.order_R] - dispatcher.firsts(rank_P)).unsqueeze(1)
            weights_PK = torch.ones_like(ids_PK, dtype=weights_TK.dtype)
            if dispatcher.weights_inside:
                weights_PK = weights_TK.flatten().index_select(0, self._map.order_R).unsqueeze(1)
                self._weights = torch.ones_like(weights_TK)
        send = self._map.counts_E
        receive = _received(group, send, x_TH.device)
        self._back = formats.all_to_all(group, "combine", receive, send)
        rows_PH = to_experts(formats.summed(x_TH), self._map)
        self._rows = start(formats.all_to_all(group, "dispatch", send, receive), rows_PH)
        self._packed = start(AllToAll(group, "routing", send, receive), with_weights(ids_PK, weights_PK))
        self._inside: Dispatched | None = None

    def wait(self) -> tuple[Tensor, tuple[int, ...]]:
        ids_PK, weights_PK = without_weights(self._packed.wait())
        self._inside = self._inside_dispatcher.start_dispatch(self._rows.wait().to(self._dtype), ids_PK, weights_PK)
        return self._inside.wait()

    @property
    def weights_R(self) -> Tensor | None:
        assert self._inside is not None, "wait for the dispatch first"
        return self._inside.weights_R

    def start_combine(self, y_RH: Tensor) -> _Combined:
        assert self._inside is not None, "wait for the dispatch first"
        sums_PH = self._inside.start_combine(y_RH).wait()
        return _Combined(start(self._back, sums_PH), self._weights, self._map, self._dtype)


class AllToAllDispatcher:
    """A `Dispatcher` over `group`; `experts[i]` are the numbers [first, last) on rank i, in order, which its `inside`
    knows from 0 on. `weights_inside`: `inside` weights results, never this rank."""

    def __init__(
        self,
        group: Group,
        inside: Dispatcher,
        experts: Sequence[tuple[int, int]],
        *,
        deduplicate: bool,
        formats: RowFormat = RowFormat(),
        weights_inside: bool = False,
    ) -> None:
        self.group = group
        self.inside = inside
        self.deduplicate = deduplicate
        self.formats = formats
        self.weights_inside = weights_inside
        self._firsts = torch.tensor([first for first, _ in experts])
        ranks = [rank for rank, (first, last) in enumerate(experts) for _ in range(last - first)]
        self._rank_of = torch.tensor([*ranks, -1])  # the last one is where -1 points

    def ranks_of(self, ids_TK: Tensor) -> Tensor:
        """The rank of each choice, -1 for an absent one."""
        return self._rank_of.to(ids_TK.device)[ids_TK]

    def firsts(self, ranks_P: Tensor) -> Tensor:
        """The first expert of each of these ranks."""
        return self._firsts.to(ranks_P.device)[ranks_P]

    def start_dispatch(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Dispatched:
        return _Dispatched(self, x_TH, ids_TK, weights_TK)


def _received(group: Group, send: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """How many rows come from each rank."""
    own = torch.tensor(send, dtype=torch.int64, device=device)
    counts = run(AllToAll(group, "counts", (1,) * group.size, (1,) * group.size), own)
    return tuple(counts.tolist())
