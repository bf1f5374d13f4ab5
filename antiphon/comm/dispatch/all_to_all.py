"""Each row travels to the ranks of its experts and back (MegaScale-MoE, section 3.2, eq. 3).

`deduplicate`: a row goes to a rank once, however many of its experts are there, and one weighted sum comes back: fewer
bytes, n (1 - C(E - E/n, k) / C(E, k)) instead of k rows a token at uniform routing. Without it each choice travels by
itself, as in the papers, and the sum is made at home.

1. Rows are put in order of rank. 2. Counts are gathered. 3. Rows, with their choices and weights, travel.
4. What is behind takes them to the experts here. 5. Results return and are summed in order of choice.

Letters as in `api`; n ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.collectives import AllToAll, Collective, run
from antiphon.comm.dispatch.api import Hop
from antiphon.comm.dispatch.gather_scatter import with_weights, without_weights
from antiphon.comm.float8 import RowFormat
from antiphon.comm.mesh import Group
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts


@dataclass(frozen=True)
class _Hop:
    """`ones_Tn`: where a row counts once a rank, as the ranks have weighted its results; None: weights do it here."""

    there: Collective
    choices: Collective
    back: Collective
    rows: RowMap
    ones_Tn: Tensor | None
    formats: RowFormat

    def send(self, x_TH: Tensor) -> Tensor:
        return to_experts(self.formats.summed(x_TH), self.rows)

    def total(self, y_PH: Tensor, weights_TK: Tensor) -> Tensor:
        return combine(y_PH, weights_TK if self.ones_Tn is None else self.ones_Tn, self.rows)

    def arrived(self, packed_P2K: Tensor) -> tuple[Tensor, Tensor]:
        return without_weights(packed_P2K)


class AllToAllWay:
    """A `Way` over `group`; `experts[i]` are the numbers [first, last) on rank i, in order, which what is behind knows
    from 0 on. `weights_inside`: the experts weight results, never this rank."""

    def __init__(
        self,
        group: Group,
        experts: Sequence[tuple[int, int]],
        *,
        deduplicate: bool,
        formats: RowFormat = RowFormat(),
        weights_inside: bool = False,
    ) -> None:
        self.group = group
        self.deduplicate = deduplicate
        self.formats = formats
        self.weights_inside = weights_inside
        self._firsts = torch.tensor([first for first, _ in experts])
        ranks = [rank for rank, (first, last) in enumerate(experts) for _ in range(last - first)]
        self._rank_of = torch.tensor([*ranks, -1])  # the last one is where -1 points

    @property
    def weighs_at_home(self) -> bool:
        return not self.deduplicate and not self.weights_inside

    def hop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        size, ranks_TK = self.group.size, self._rank_of.to(ids_TK.device)[ids_TK]
        firsts, ones_Tn = self._firsts.to(ids_TK.device), None
        if self.deduplicate:
            chosen_Tn = torch.zeros(ids_TK.shape[0], size + 1, dtype=torch.bool, device=ids_TK.device)
            chosen_Tn = chosen_Tn.scatter_(1, ranks_TK % (size + 1), True)[:, :size]
            rows = row_map(torch.where(chosen_Tn, torch.arange(size, device=ids_TK.device), -1), size)
            ones_Tn = torch.ones_like(chosen_Tn, dtype=weights_TK.dtype)
            rank_P, token_P = rows.order_R % size, rows.order_R // size
            here_PK = ranks_TK[token_P] == rank_P.unsqueeze(1)
            ids_PK = torch.where(here_PK, ids_TK[token_P] - firsts[rank_P].unsqueeze(1), -1)
            weights_PK = to_experts(weights_TK, rows) * here_PK
        else:
            rows = row_map(ranks_TK, size)
            rank_P = ranks_TK.flatten()[rows.order_R]
            ids_PK = (ids_TK.flatten()[rows.order_R] - firsts[rank_P]).unsqueeze(1)
            weights_PK = torch.ones_like(ids_PK, dtype=weights_TK.dtype)
            if self.weights_inside:
                weights_PK = weights_TK.flatten().index_select(0, rows.order_R).unsqueeze(1)
                ones_Tn = torch.ones_like(weights_TK)
        send = rows.counts_E
        receive = _received(self.group, send, ids_TK.device)
        there = self.formats.all_to_all(self.group, "dispatch", send, receive)
        choices = AllToAll(self.group, "routing", send, receive)
        back = self.formats.all_to_all(self.group, "combine", receive, send)
        return _Hop(there, choices, back, rows, ones_Tn, self.formats), with_weights(ids_PK, weights_PK)


def _received(group: Group, send: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """How many rows come from each rank."""
    own = torch.tensor(send, dtype=torch.int64, device=device)
    counts = run(AllToAll(group, "counts", (1,) * group.size, (1,) * group.size), own)
    return tuple(counts.tolist())
