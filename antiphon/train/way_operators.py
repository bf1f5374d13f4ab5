"""How rows reach the experts and come back, as operators.

Rows go over the dispatcher's ways: none, one, or two (the names of the second end in "_2"). How they go is decided
once; rows may then travel a second time, in backward, by the same decisions.

Letters: T rows of this rank, K experts a row, P rows that travel, R rows in order of expert, H hidden.
"""

import torch
from torch import Tensor

from antiphon.comm.dispatch import Dispatcher, Hop, Way
from antiphon.kernels.ops.permute import RowMap, combine, row_map, to_experts
from antiphon.train.operators import Compute, Exchange, Here, Operator


def way_operators(
    dispatcher: Dispatcher, *, has_weights: bool, needs_rows: bool
) -> tuple[list[Operator], str, list[Operator]]:
    """The operators that bring rows over each way, the name of the weights that came, and the operators that bring sums
    back. `has_weights`: the sum of an expert's rows is weighted; `needs_rows`: the weights' gradient reads the rows."""
    there, back, rows, ids, weights, total = list[Operator](), list[Operator](), "ln2_out", "ids", "weights", "ffn_out"
    for number, way in enumerate(dispatcher.ways):
        end = end_of(number)
        there += _way_there(way, end, rows, ids, weights)
        back = [*_way_back(way, end, weights, total), *back]
        rows, ids, weights, total = f"received{end}", f"ids{end}_there", f"weights{end}_there", f"sums{end}"
    there.append(
        Compute(
            name="sort",
            reads=(ids,),
            makes=("row_map",),
            facts=("row_map",),
            function=_sort,
            once=True,
            has_gradient=False,
        )
    )
    scatter = Compute(
        name="scatter",
        reads=(rows, "row_map"),
        makes=("ffn_in",),
        function=lambda here, x, rows: to_experts(x.to(here.weights.dtype), rows),
    )
    gather = Compute(
        name="gather",
        reads=("fc2_out", "row_map", *((weights,) if has_weights else ())),
        makes=(total,),
        saves=("fc2_out", weights) if has_weights and needs_rows else (),
        function=_gather,
    )
    return [*there, scatter], weights, [gather, *back]


def end_of(number: int) -> str:
    """The end of the names of way `number`'s operators; the first is 0."""
    return "" if number == 0 else f"_{number + 1}"


def _way_there(way: Way, end: str, rows: str, ids: str, weights: str) -> list[Operator]:
    def hop(here: Here, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        return way.hop(ids_TK, weights_TK)

    return [
        Compute(
            name=f"hop{end}",
            reads=(ids, weights),
            makes=(f"hop{end}", f"packed{end}"),
            facts=(f"hop{end}",),
            function=hop,
            once=True,
        ),
        Exchange(
            name=f"routing{end}",
            reads=(f"packed{end}", f"hop{end}"),
            makes=(f"routed{end}",),
            collective=lambda here, packed, hop: hop.choices,
            once=True,
        ),
        Compute(
            name=f"send{end}",
            reads=(rows, f"hop{end}"),
            makes=(f"sent{end}",),
            function=lambda here, x, hop: hop.send(x.to(here.weights.dtype)),
        ),
        Exchange(
            name=f"dispatch{end}",
            reads=(f"sent{end}", f"hop{end}"),
            makes=(f"received{end}",),
            collective=lambda here, sent, hop: hop.there,
        ),
        Compute(
            name=f"arrive{end}",
            reads=(f"routed{end}", f"hop{end}"),
            makes=(f"ids{end}_there", f"weights{end}_there"),
            facts=(f"ids{end}_there",),
            function=lambda here, routed, hop: hop.arrived(routed),
            once=True,
        ),
    ]


def _way_back(way: Way, end: str, weights: str, total: str) -> list[Operator]:
    return [
        Exchange(
            name=f"combine{end}",
            reads=(f"sums{end}", f"hop{end}"),
            makes=(f"returned{end}",),
            collective=lambda here, sums, hop: hop.back,
        ),
        Compute(
            name=f"total{end}",
            reads=(f"returned{end}", weights, f"hop{end}"),
            makes=(total,),
            saves=(f"returned{end}",) if way.weighs_at_home else (),
            leads_to=f"combine{end}",
            function=lambda here, y, weights, hop: hop.total(y, weights).to(here.weights.dtype),
        ),
    ]


def _sort(here: Here, ids_TK: Tensor) -> RowMap:
    return row_map(ids_TK, here.dispatcher.num_experts)


def _gather(here: Here, y_RH: Tensor, rows: RowMap, *weights_TK: Tensor) -> Tensor:
    ones_TK = torch.ones_like(rows.place_TK, dtype=y_RH.dtype)
    return combine(y_RH, weights_TK[0] if weights_TK else ones_TK, rows)
