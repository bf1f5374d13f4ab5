"""The feed-forward of a layer as operators: the one that all rows pass, and the routed experts, which rows reach and
leave by the operators of `expert_exchange`.

Letters: T rows of this rank, K experts a row, R rows in order of expert, E experts, H hidden.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.comm.dispatch import Dispatcher, weights_of_rows
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.kernels.ops.feed_forward import activate
from antiphon.kernels.ops.route import RowMap, choose_experts
from antiphon.specs.model import ModelSpec
from antiphon.train.expert_exchange import end_of, exchange_operators, in_parts
from antiphon.train.operators import (
    Bias,
    Compute,
    LayerContext,
    Operator,
    RowExchange,
    WeightProduct,
    compute,
    product,
)
from antiphon.train.row_budget import WAITS, Experts, Pieces, RowBudget, pass_over_budget
from antiphon.train.tiled import Arriving, Leaving
from antiphon.train.weights import DOWN, GATE_UP

_Kind = TypeVar("_Kind", bound=Operator)


def dense_operators() -> list[Operator]:
    """The operators of a layer without experts: from normed rows to the next layer's."""
    return [*_gated("dense"), compute("add", "ln2_in dense_out -> hidden_next", _add_dense)]


def expert_operators(
    spec: ModelSpec, dispatcher: Dispatcher, budget: RowBudget, *, adds_bias: bool, weighs_early: bool, parts: int
) -> list[Operator]:
    """The operators of a MoE layer: from normed rows to the next layer's, in `parts` where rows travel. `weighs_early`:
    the router's weights multiply before the second product where that costs nothing (MegaScale-MoE, section 4.1), so
    that backward does not need its result: not where that product has a bias, nor where they stay at home, unless the
    dispatcher wants it."""
    has_shared, bounded = bool(spec.feed_forward.shared_intermediate), budget.may_exceed
    weighs_here = not dispatcher.ways or not dispatcher.ways[-1].weighs_at_home
    has_bias = spec.feed_forward.expert_bias and adds_bias
    early = dispatcher.early_weights or (weighs_early and weighs_here and not spec.feed_forward.expert_bias)
    there, weights, back = exchange_operators(dispatcher, has_weights=not early, needs_rows=weighs_here)
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
    added = f"{'all_out' if bounded else 'ffn_out'}{' shared_out' if has_shared else ''}"
    over_budget = compute("over_budget", "ffn_out ln2_out weights pieces -> all_out", add_over_budget, saves="ln2_out")
    return [
        compute("widen", "ln2_out -> gate_in", _widen),
        compute("gate", "gate_in -> weights choices", gate_rows, saves="gate_in", facts="choices", once=True),
        compute("route", "choices weights -> pieces ids", route_rows, facts="pieces ids", once=True),
        *experts,
        *((over_budget,) if bounded else ()),
        compute("add", f"ln2_in {added} -> hidden_next", _add_experts),
    ]


def _in_tiles(operators: Sequence[Operator], links: TileLinks, end: str) -> list[Operator]:
    """`operators` of a MoE layer, with those on both sides of its exchange with the experts here made into tiled ones.
    Where something stands between the second product and the sums (a bias that is weighted), these stay as they are."""
    by_name = {each.name: each for each in operators}

    def find(name: str, kind: type[_Kind]) -> _Kind:
        found = by_name[name]
        assert isinstance(found, kind)
        return found

    arriving = find(f"dispatch{end}", RowExchange), find("scatter", Compute), find("fc1", WeightProduct)
    leaving = find("fc2", WeightProduct), find("gather", Compute), find(f"combine{end}", RowExchange)
    takes_place: dict[str, Operator] = {"fc1": Arriving.of(*arriving, links)}
    gone = {each.name for each in arriving}
    if leaving[0].makes[0] == leaving[1].reads[0]:
        takes_place[leaving[2].name] = Leaving.of(*leaving, links)
        gone |= {each.name for each in leaving}
    return [takes_place.get(each.name, each) for each in operators if each.name in takes_place or each.name not in gone]


def _experts(spec: ModelSpec, weights: str | None, *, has_bias: bool) -> list[Operator]:
    """`weights`: the name of those that multiply before the second product, and so its bias too; None: none do."""
    early, late_bias = weights is not None, weights is not None and has_bias
    activated, multiplied = "act_out" if early else "fc2_in", "fc2_product" if late_bias else "fc2_out"
    fc1_bias, fc2_bias = _bias(GATE_UP, spec.feed_forward.expert_bias), _bias(DOWN, has_bias and not early)
    found: list[Operator] = [
        product("fc1", "ffn_in row_map -> fc1_out", GATE_UP, fc1_bias, saves="ffn_in row_map", grouped=True),
        compute("activation", f"fc1_out -> {activated}", _activate, saves="fc1_out"),
    ]
    if early:
        found.append(compute("weigh", f"act_out {weights} row_map -> fc2_in", _weighed, saves=f"act_out {weights}"))
    found.append(
        product("fc2", f"fc2_in row_map -> {multiplied}", DOWN, fc2_bias, saves="fc2_in row_map", grouped=True)
    )
    if late_bias:
        flow, saves = f"fc2_product {weights} row_map -> fc2_out", f"fc2_product {weights}"
        found.append(compute("weigh_bias", flow, _add_weighed_bias, saves=saves))
    return found


def _weighed(here: LayerContext, x: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    return x * weights_of_rows(weights_TK, rows).to(x.dtype).unsqueeze(1)


def _add_weighed_bias(here: LayerContext, y_RH: Tensor, weights_TK: Tensor, rows: RowMap) -> Tensor:
    counts_E = torch.tensor(rows.counts_E, device=y_RH.device)
    bias_RH = here.weights[f"{DOWN}_bias"].repeat_interleave(counts_E, dim=0)
    return y_RH + _weighed(here, bias_RH, weights_TK, rows)


def _bias(purpose: str, exists: bool) -> Bias:
    return lambda weights: weights[f"{purpose}_bias"] if exists else None


def _gated(kind: str, out: str = "") -> list[Operator]:
    """The feed-forward that all rows pass: "dense" or "shared"."""
    fc1_out, fc2_in = f"{kind}_fc1_out", f"{kind}_fc2_in"
    return [
        product(f"{kind}_fc1", f"ln2_out -> {fc1_out}", f"{kind}.gate_up", saves="ln2_out"),
        compute(f"{kind}_activation", f"{fc1_out} -> {fc2_in}", _activate, saves=fc1_out),
        product(f"{kind}_fc2", f"{fc2_in} -> {out or f'{kind}_out'}", f"{kind}.down", saves=fc2_in),
    ]


def _shared(spec: ModelSpec) -> list[Operator]:
    if not spec.feed_forward.shared_gate:
        return _gated("shared")
    read = "ln2_out shared_fc2_out"
    return [
        *_gated("shared", "shared_fc2_out"),
        compute("shared_gate", f"{read} -> shared_out", _shared_gate, saves=read),
    ]


def _widen(here: LayerContext, y_BSH: Tensor) -> Tensor:
    """The gate works on rows, in float32 at least."""
    return y_BSH.to(here.wide)


def gate_rows(here: LayerContext, y_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's weights and choices, from `y_TH` in float32 at least; `here.routing` learns of them."""
    router, weights = here.spec.router, here.weights
    bias_E = weights.stored("router_bias").to(y_TH.dtype) if router.has_logit_bias else None
    logits_TE = F.linear(y_TH, weights.stored("router").to(y_TH.dtype), bias_E)
    score_bias_E = weights.stored("score_bias").to(y_TH.dtype) if router.has_score_bias else None
    ids_TK, weights_TK = choose_experts(logits_TE, score_bias_E, router)
    return here.routing.attach(weights_TK, logits_TE, ids_TK), ids_TK


def route_rows(here: LayerContext, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Pieces, Tensor]:
    """The choices that experts have room for, and those of the first piece."""
    pieces = here.budget.pieces(here.routing.limit(ids_TK, weights_TK))
    return pieces, pieces.choices(0)


def _activate(here: LayerContext, x: Tensor) -> Tensor:
    return activate(x, here.spec.feed_forward)


def _shared_gate(here: LayerContext, y_TH: Tensor, out_TH: Tensor) -> Tensor:
    return out_TH * F.linear(y_TH, here.weights["shared_gate"]).sigmoid()


def add_over_budget(here: LayerContext, out_TH: Tensor, y_TH: Tensor, weights_TK: Tensor, pieces: Pieces) -> Tensor:
    """`out_TH` with what the other pieces add, if there are any."""
    if not pieces.num_more:
        return out_TH
    experts = Experts.of(here.spec.feed_forward, here.weights, adds_bias=here.adds_bias)

    def apart() -> AbstractContextManager[None]:
        return here.spans.apart(WAITS, lambda: here.budget.mesh.ledger.all_waited_s)

    return out_TH + pass_over_budget(here.dispatcher, experts, y_TH, pieces, weights_TK, apart)


def _add_dense(here: LayerContext, x_BSH: Tensor, dense_TH: Tensor) -> Tensor:
    return x_BSH + scaled(dense_TH, here.spec.residual_multiplier).view_as(x_BSH)


def _add_experts(here: LayerContext, x_BSH: Tensor, out_TH: Tensor, *shared_TH: Tensor) -> Tensor:
    for each in shared_TH:
        out_TH = out_TH + scaled(each, here.spec.residual_multiplier)
    return x_BSH + out_TH.view_as(x_BSH)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
