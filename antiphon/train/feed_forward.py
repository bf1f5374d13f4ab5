"""The feed-forward of a layer as operators: the one that all rows pass, and the routed experts, which rows reach and
leave by the operators of `way_operators`.

Letters: T rows of this rank, K experts a row, R rows in order of expert, E experts, H hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.dispatch import Dispatcher, weights_of_rows
from antiphon.comm.tile_flight import TileLinks
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.ops.permute import RowMap
from antiphon.specs.model import ModelSpec
from antiphon.train.expert_parts import in_parts
from antiphon.train.experts import Experts
from antiphon.train.operators import Compute, Exchange, Here, Operator, Product
from antiphon.train.row_budget import WAITS, Pieces, RowBudget, pass_over_budget
from antiphon.train.tiled import Arriving, Leaving
from antiphon.train.way_operators import end_of, way_operators
from antiphon.train.weights import DOWN, GATE_UP, Weights

_Kind = TypeVar("_Kind", bound=Operator)


def dense_operators() -> list[Operator]:
    """The operators of a layer without experts: from normed rows to the next layer's."""
    add = Compute(name="add", reads=("ln2_in", "dense_out"), makes=("hidden_next",), function=_add_dense)
    return [*_gated("dense"), add]


def expert_operators(
    spec: ModelSpec, dispatcher: Dispatcher, budget: RowBudget, *, adds_bias: bool, weighs_early: bool, parts: int = 1
) -> list[Operator]:
    """The operators of a MoE layer: from normed rows to the next layer's, in `parts` where rows travel. `weighs_early`:
    the router's weights multiply before the second product where that costs nothing (MegaScale-MoE, section 4.1), so
    that backward does not need its result: not where that product has a bias, nor where they stay at home, unless the
    dispatcher wants it."""
    has_shared, bounded = bool(spec.feed_forward.shared_intermediate), budget.may_exceed
    weighs_here = not dispatcher.ways or not dispatcher.ways[-1].weighs_at_home
    has_bias = spec.feed_forward.expert_bias and adds_bias
    early = dispatcher.early_weights or (weighs_early and weighs_here and not spec.feed_forward.expert_bias)
    there, weights, back = way_operators(dispatcher, has_weights=not early, needs_rows=weighs_here)
    experts = [
        *there,
        *(_shared(spec) if has_shared else ()),
        *_experts(spec, weights if early else None, has_bias=has_bias),
        *back,
    ]
    if parts > 1 and dispatcher.ways:
        experts = in_parts(experts, parts, end_of(len(dispatcher.ways) - 1))
    if dispatcher.links is not None:
        experts = _in_tiles(experts, dispatcher.links, end_of(len(dispatcher.ways) - 1))
    return [
        Compute(name="widen", reads=("ln2_out",), makes=("gate_in",), function=_widen),
        Compute(
            name="gate",
            reads=("gate_in",),
            makes=("weights", "choices"),
            saves=("gate_in",),
            facts=("choices",),
            function=_gate,
            once=True,
        ),
        Compute(
            name="route",
            reads=("choices", "weights"),
            makes=("pieces", "ids"),
            facts=("pieces", "ids"),
            function=_route,
            once=True,
            has_gradient=False,
        ),
        *experts,
        *(_over_budget() if bounded else ()),
        Compute(
            name="add",
            reads=("ln2_in", "all_out" if bounded else "ffn_out", *(("shared_out",) if has_shared else ())),
            makes=("hidden_next",),
            function=_add_experts,
        ),
    ]


def _in_tiles(operators: Sequence[Operator], links: TileLinks, end: str) -> list[Operator]:
    """`operators` of a MoE layer, with those on both sides of its exchange with the experts here made into tiled ones.
    Where something stands between the second product and the sums (a bias that is weighted), these stay as they are."""
    by_name = {each.name: each for each in operators}

    def find(name: str, kind: type[_Kind]) -> _Kind:
        found = by_name[name]
        assert isinstance(found, kind)
        return found

    arriving = find(f"dispatch{end}", Exchange), find("scatter", Compute), find("fc1", Product)
    leaving = find("fc2", Product), find("gather", Compute), find(f"combine{end}", Exchange)
    takes_place: dict[str, Operator] = {"fc1": Arriving.of(*arriving, links)}
    gone = {each.name for each in arriving}
    if leaving[0].makes[0] == leaving[1].reads[0]:
        takes_place[leaving[2].name] = Leaving.of(*leaving, links)
        gone |= {each.name for each in leaving}
    return [takes_place.get(each.name, each) for each in operators if each.name in takes_place or each.name not in gone]


def _experts(spec: ModelSpec, weights: str | None, *, has_bias: bool) -> list[Operator]:
    """`weights`: the name of those that multiply before the second product, and so its bias too; None: none do."""
    activated, product, weighed, weighed_bias = "fc2_in", "fc2_out", list[Operator](), list[Operator]()
    if weights is not None:
        activated = "act_out"
        weighed = [_weigh("weigh", activated, weights, "fc2_in", _weighed)]
    if weights is not None and has_bias:
        product = "fc2_product"
        weighed_bias = [_weigh("weigh_bias", product, weights, "fc2_out", _add_weighed_bias)]
    return [
        Product(
            name="fc1",
            reads=("ffn_in", "row_map"),
            makes=("fc1_out",),
            saves=("ffn_in", "row_map"),
            weight=GATE_UP,
            bias=_bias(GATE_UP, spec.feed_forward.expert_bias),
            grouped=True,
        ),
        Compute(name="activation", reads=("fc1_out",), makes=(activated,), saves=("fc1_out",), function=_activate),
        *weighed,
        Product(
            name="fc2",
            reads=("fc2_in", "row_map"),
            makes=(product,),
            saves=("fc2_in", "row_map"),
            weight=DOWN,
            bias=_bias(DOWN, has_bias and weights is None),
            grouped=True,
        ),
        *weighed_bias,
    ]


def _weigh(name: str, rows: str, weights: str, makes: str, function: Callable[..., Tensor]) -> Operator:
    reads = (rows, weights, "row_map")
    return Compute(name=name, reads=reads, makes=(makes,), saves=(rows, weights), function=function)


def _weighed(here: Here, x: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    return x * weights_of_rows(weights_TK, rows).to(x.dtype).unsqueeze(1)


def _add_weighed_bias(here: Here, y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    counts_E = torch.tensor(rows.counts_E, device=y_RH.device)
    bias_RH = here.weights[f"{DOWN}_bias"].repeat_interleave(counts_E, dim=0)
    return y_RH + _weighed(here, bias_RH, weights_TK, rows)


def _bias(purpose: str, exists: bool) -> Callable[[Weights], Tensor | None]:
    return lambda weights: weights[f"{purpose}_bias"] if exists else None


def _gated(kind: str, out: str = "") -> list[Operator]:
    """The feed-forward that all rows pass: "dense" or "shared"."""
    fc1_out, fc2_in = f"{kind}_fc1_out", f"{kind}_fc2_in"
    fc1 = Product(
        name=f"{kind}_fc1", reads=("ln2_out",), makes=(fc1_out,), saves=("ln2_out",), weight=f"{kind}.gate_up"
    )
    return [
        fc1,
        Compute(name=f"{kind}_activation", reads=(fc1_out,), makes=(fc2_in,), saves=(fc1_out,), function=_activate),
        Product(
            name=f"{kind}_fc2",
            reads=(fc2_in,),
            makes=(out or f"{kind}_out",),
            saves=(fc2_in,),
            weight=f"{kind}.down",
        ),
    ]


def _shared(spec: ModelSpec) -> list[Operator]:
    if not spec.feed_forward.shared_gate:
        return _gated("shared")
    names = ("ln2_out", "shared_fc2_out")
    gate = Compute(name="shared_gate", reads=names, makes=("shared_out",), saves=names, function=_shared_gate)
    return [*_gated("shared", "shared_fc2_out"), gate]


def _over_budget() -> list[Operator]:
    return [
        Compute(
            name="over_budget",
            reads=("ffn_out", "ln2_out", "weights", "pieces"),
            makes=("all_out",),
            saves=("ln2_out",),
            function=_pass_over_budget,
        )
    ]


def _widen(here: Here, y_BSH: Tensor) -> Tensor:
    """The gate works on rows, in float32 at least."""
    return y_BSH.to(here.wide)


def _gate(here: Here, y_TH: Tensor) -> tuple[Tensor, Tensor]:
    logits_TE, ids_TK, weights_TK = here.gate(here.weights, y_TH)
    return here.routing.attach(weights_TK, logits_TE, ids_TK), ids_TK


def _route(here: Here, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Pieces, Tensor]:
    pieces = here.budget.pieces(here.routing.limit(ids_TK, weights_TK))
    return pieces, pieces.choices(0)


def _activate(here: Here, x: Tensor) -> Tensor:
    return activate(x, here.spec.feed_forward)


def _shared_gate(here: Here, y_TH: Tensor, out_TH: Tensor) -> Tensor:
    return out_TH * F.linear(y_TH, here.weights["shared_gate"]).sigmoid()


def _pass_over_budget(here: Here, out_TH: Tensor, y_TH: Tensor, weights_TK: Tensor, pieces: Pieces) -> Tensor:
    if not pieces.num_more:
        return out_TH
    experts = Experts.of(here.spec.feed_forward, here.weights, adds_bias=here.adds_bias)

    def apart() -> AbstractContextManager[None]:
        return here.spans.apart(WAITS, lambda: here.budget.mesh.ledger.all_waited_s)

    return out_TH + pass_over_budget(here.dispatcher, experts, y_TH, pieces, weights_TK, apart)


def _add_dense(here: Here, x_BSH: Tensor, dense_TH: Tensor) -> Tensor:
    return x_BSH + scaled(dense_TH, here.spec.residual_multiplier).view_as(x_BSH)


def _add_experts(here: Here, x_BSH: Tensor, out_TH: Tensor, *shared_TH: Tensor) -> Tensor:
    for each in shared_TH:
        out_TH = out_TH + scaled(each, here.spec.residual_multiplier)
    return x_BSH + out_TH.view_as(x_BSH)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
