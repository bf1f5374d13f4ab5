"""How a MoE layer's rows reach their experts and come back (MegaScale-MoE, section 3.2).

    out_TH = dispatcher.through(experts, x_TH, ids_TK, weights_TK)

A `Way` brings rows over one group of ranks and sums back. A `Dispatcher` is a list of ways, and behind them the experts
that are here. A `Hop` is a way with its decisions made: the layer's operators (`train/operators`) are made of hops, so
that rows can travel again without deciding again.

`AllToAllWay`, over ranks with different experts: each row travels to the ranks of its experts and back (eq. 3).

1. Rows are put in order of rank. 2. Counts are gathered. 3. Rows, with their choices and weights, travel.
4. The next way, or the dispatcher, takes them to the experts here. 5. Results return and are summed in order of choice.

`deduplicate`: a row goes to a rank once, however many of its experts are there, and one weighted sum comes back: fewer
bytes, n (1 - C(E - E/n, k) / C(E, k)) instead of k rows a token at uniform routing. Without it each choice travels by
itself, as in the papers, and the sum is made at home.

`GatherScatter`, over any ranks: all-gather of rows, choices and weights; each rank picks what is for its experts;
reduce-scatter of the weighted sums. The bytes do not depend on K, so it wins where a row has many experts.

`two_level_ways`, where ranks of a node have a faster link: a row travels once to each node that has one of its experts,
to the rank at the same place, and from there once to each rank that has. Two `AllToAllWay`s, one behind the other; sums
are made on the way back at both (MixServe, section III-C, without its tensor parallelism).

Everything is differentiable; the backward of a dispatch is a combine and the reverse. A choice of -1 is absent.

Letters: T rows of this rank, K experts a row, P rows that travel, R rows received here, E experts held here, H width,
n ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from antiphon.comm.collectives import (
    AllGather,
    AllToAll,
    Collective,
    MovesRows,
    Pending,
    gather_sizes,
    run,
    start,
)
from antiphon.comm.float8 import RowFormat
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Group
from antiphon.kernels.ops.route import RowMap, combine, row_map, to_experts


def with_weights(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, 2K]: weights and choices in one tensor of floats, so that they travel together. Gradients pass the former."""
    return torch.cat((weights_TK, ids_TK.to(weights_TK.dtype)), dim=1)


def without_weights(packed_T2K: Tensor) -> tuple[Tensor, Tensor]:
    """(choices, weights) from `with_weights`."""
    weights_TK, ids_TK = packed_T2K.chunk(2, dim=1)
    return ids_TK.detach().long(), weights_TK


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A way with its decisions made. `there` and `back`: the collectives of rows and of their results; `choices`: that
    of what `hop` packed. `rows`: in which order rows leave, None: as they are. `ones_Tn`: where a row counts once a
    rank, as the ranks have weighted its results; None: weights do it here. `experts`: of choices that came, the numbers
    [first, last) are here; None: all are."""

    there: MovesRows
    choices: Collective
    back: MovesRows
    formats: RowFormat
    rows: RowMap | None = None
    ones_Tn: Tensor | None = None
    experts: tuple[int, int] | None = None

    def send(self, x_TH: Tensor) -> Tensor:
        """[P, H]: rows as they leave."""
        x_TH = self.formats.summed(x_TH)
        return x_TH if self.rows is None else to_experts(x_TH, self.rows)

    def total(self, y_PH: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]: for each row the sum of the results that came back."""
        if self.rows is None:
            return y_PH
        return combine(y_PH, weights_TK if self.ones_Tn is None else self.ones_Tn, self.rows)

    def arrived(self, packed_P2K: Tensor) -> tuple[Tensor, Tensor]:
        """(choices, weights) of the rows that came, from what was packed: choices as what is behind this way knows
        them, -1 for those that are elsewhere."""
        ids_TK, weights_TK = without_weights(packed_P2K)
        if self.experts is None:
            return ids_TK, weights_TK
        first, last = self.experts
        return torch.where((ids_TK >= first) & (ids_TK < last), ids_TK - first, -1), weights_TK


@dataclass(frozen=True)
class GatherScatter:
    """A `Way` over `group`. `experts`: the numbers [first, last) that are here, which what is behind knows from 0 on;
    None: it takes all choices as they are."""

    group: Group
    experts: tuple[int, int] | None = None
    formats: RowFormat = field(default_factory=RowFormat)

    weighs_at_home: ClassVar[bool] = False

    def hop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        """As of `AllToAllWay`."""
        sizes = gather_sizes(self.group, ids_TK.shape[0], ids_TK.device)
        there = self.formats.all_gather(self.group, "dispatch", sizes)
        choices = AllGather(self.group, "routing", sizes)
        back = self.formats.reduce_scatter(self.group, "combine", sizes)
        hop = Hop(there=there, choices=choices, back=back, formats=self.formats, experts=self.experts)
        return hop, with_weights(ids_TK, weights_TK)


class AllToAllWay:
    """A `Way` over `group`; `experts[i]` are the numbers [first, last) on rank i, in order, which what is behind knows
    from 0 on. `weights_inside`: the experts weight results, never this rank. `level`: ends its names in the ledger."""

    def __init__(
        self,
        group: Group,
        experts: Sequence[tuple[int, int]],
        *,
        deduplicate: bool,
        formats: RowFormat = RowFormat(),
        weights_inside: bool = False,
        level: str = "",
    ) -> None:
        self.group = group
        self.level = level
        self.deduplicate = deduplicate
        self.formats = formats
        self.weights_inside = weights_inside
        self._firsts = torch.tensor([first for first, _ in experts])
        ranks = [rank for rank, (first, last) in enumerate(experts) for _ in range(last - first)]
        self._rank_of = torch.tensor([*ranks, -1])  # the last one is where -1 points

    @property
    def weighs_at_home(self) -> bool:
        """Whether results are weighted when they are back: then weights travel only as ones."""
        return not self.deduplicate and not self.weights_inside

    def hop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        """How rows with these choices go, and choices with weights as they leave. May wait for other ranks."""
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
        there = self.formats.all_to_all(self.group, f"dispatch{self.level}", send, receive)
        choices = AllToAll(self.group, f"routing{self.level}", send, receive)
        back = self.formats.all_to_all(self.group, f"combine{self.level}", receive, send)
        hop = Hop(there=there, choices=choices, back=back, formats=self.formats, rows=rows, ones_Tn=ones_Tn)
        return hop, with_weights(ids_PK, weights_PK)


Way = GatherScatter | AllToAllWay
# [R, H] from [R, H]: rows in order of the experts held here, how many each has, and what each row's result counts, if
# the experts multiply by it.
ThroughExperts = Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor]


@dataclass(frozen=True)
class Dispatcher:
    """The way to all experts: through `ways`, in order, to experts 0 to `num_experts` - 1 here. `early_weights`: the
    experts weight their results. `links`: where the last way's rows pass the experts in tiles, who carries these; what
    is over a row budget passes in whole."""

    num_experts: int
    ways: tuple[Way, ...] = ()
    early_weights: bool = False
    links: TileLinks | None = None

    def through(self, experts: ThroughExperts, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]: each row to its experts, through those that are here, and the sum of its results back. `weights_TK`:
        what results count in the sum. Rows are in the format of `x_TH` wherever they are not on their way."""
        dtype, hops = x_TH.dtype, list[tuple[Hop, Tensor]]()
        rows = Pending(x_TH)
        for way in self.ways:
            hop, packed_P2K = way.hop(ids_TK, weights_TK)
            hops.append((hop, weights_TK))
            rows = start(hop.there, hop.send(rows.wait().to(dtype)))
            ids_TK, weights_TK = hop.arrived(run(hop.choices, packed_P2K))
        here = row_map(ids_TK, self.num_experts)
        rows_RH = to_experts(rows.wait().to(dtype), here)
        early_R = weights_of_rows(weights_TK, here) if self.early_weights else None
        out_TH = experts(rows_RH, here.counts_E, early_R)
        out_TH = combine(out_TH, torch.ones_like(weights_TK) if self.early_weights else weights_TK, here)
        for hop, of_hop_TK in reversed(hops):
            out_TH = hop.total(run(hop.back, out_TH), of_hop_TK).to(dtype)
        return out_TH.to(dtype)


def weights_of_rows(weights_TK: Tensor, rows: RowMap) -> Tensor:
    """[R]: the weight of each row that is in order of expert."""
    return weights_TK.flatten().index_select(0, rows.order_R)


def two_level_ways(
    inside: Group, across: Group, experts: Sequence[tuple[int, int]], formats: RowFormat, *, weights_inside: bool
) -> list[Way]:
    """The ways over nodes and then inside one. `experts[i]`: the numbers [first, last) on the i-th rank of all nodes,
    those of a node next to each other; `across`: the ranks at this place of every node."""
    nodes = [experts[first : first + inside.size] for first in range(0, len(experts), inside.size)]
    first = nodes[across.index][0][0]
    here = [(begin - first, end - first) for begin, end in nodes[across.index]]
    of_nodes = [(node[0][0], node[-1][1]) for node in nodes]
    return [
        AllToAllWay(group, of, deduplicate=True, formats=formats, weights_inside=weights_inside, level=level)
        for group, of, level in ((across, of_nodes, "_across"), (inside, here, "_inside"))
    ]


def _received(group: Group, send: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """How many rows come from each rank."""
    own = torch.tensor(send, dtype=torch.int64, device=device)
    counts = run(AllToAll(group, "counts", (1,) * group.size, (1,) * group.size), own)
    return tuple(counts.tolist())
