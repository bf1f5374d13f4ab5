"""How rows reach the experts and come back, as operators, in whole or in parts.

Rows go over the dispatcher's ways: none, one, or two (the names of the second end in "_2"). How they go is decided
once; rows may then travel a second time, in backward, by the same decisions.

In parts, a part is worked on while the next ones travel (Lina, section 4.2, Figure 8b). What lies between the dispatch
and the combine of the last way is repeated for each part; "fc1" becomes "fc1/1", "fc1/2" and so on, and so do the
tensors in between. Routing stays whole, because a part needs its choices before its rows.

    send                    makes the rows of every part
    choices                 cuts choices and weights
    dispatch/i … combine/i  one part
    total                   joins what came back

A schedule for whole operators becomes one for parts: where lines of parts follow each other, all lines of the first
part come first, so that its results leave while the second is worked on.

Rejected: one operator for the whole pipeline, with its own backward. Schedules, rematerialization and the count of
bytes know operators and tensors by name, and would not see into it.

Letters: T rows of this rank, K experts a row, P rows that travel, R rows in order of expert, H hidden.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective, joined, part_of, taken
from antiphon.comm.dispatch import Dispatcher, Hop, Way
from antiphon.kernels.ops.route import RowMap, combine, row_map, to_experts
from antiphon.train.layer_schedule import GRADIENT, START_GRADIENT, WAIT_OF, Action, Schedule
from antiphon.train.operators import (
    Compute,
    LayerContext,
    Operator,
    RowExchange,
    compute,
    exchange,
    part_name,
    whole_name,
)


def exchange_operators(
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
    gathered = f"fc2_out row_map {weights if has_weights else ''}"
    saves = f"fc2_out {weights}" if has_weights and needs_rows else ""
    sort = compute("sort", f"{ids} -> row_map", _sort, facts="row_map", once=True)
    return (
        [*there, sort, compute("scatter", f"{rows} row_map -> ffn_in", _scatter)],
        weights,
        [compute("gather", f"{gathered} -> {total}", _gather, saves=saves), *back],
    )


def end_of(number: int) -> str:
    """The end of the names of way `number`'s operators; the first is 0."""
    return "" if number == 0 else f"_{number + 1}"


def _way_there(way: Way, end: str, rows: str, ids: str, weights: str) -> list[Operator]:
    def hop(here: LayerContext, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Hop, Tensor]:
        return way.hop(ids_TK, weights_TK)

    return [
        compute(f"hop{end}", f"{ids} {weights} -> hop{end} packed{end}", hop, facts=f"hop{end}", once=True),
        exchange(
            f"routing{end}", f"packed{end} hop{end} -> routed{end}", lambda here, packed, hop: hop.choices, once=True
        ),
        compute(f"send{end}", f"{rows} hop{end} -> sent{end}", lambda here, x, hop: hop.send(x.to(here.weights.dtype))),
        exchange(f"dispatch{end}", f"sent{end} hop{end} -> received{end}", lambda here, sent, hop: hop.there),
        compute(
            f"arrive{end}",
            f"routed{end} hop{end} -> ids{end}_there weights{end}_there",
            lambda here, routed, hop: hop.arrived(routed),
            facts=f"ids{end}_there",
            once=True,
        ),
    ]


def _way_back(way: Way, end: str, weights: str, total: str) -> list[Operator]:
    return [
        exchange(f"combine{end}", f"sums{end} hop{end} -> returned{end}", lambda here, sums, hop: hop.back),
        compute(
            f"total{end}",
            f"returned{end} {weights} hop{end} -> {total}",
            lambda here, y, weights, hop: hop.total(y, weights).to(here.weights.dtype),
            saves=f"returned{end}" if way.weighs_at_home else "",
            leads_to=f"combine{end}",
        ),
    ]


def _sort(here: LayerContext, ids_TK: Tensor) -> RowMap:
    return row_map(ids_TK, here.dispatcher.num_experts)


def _scatter(here: LayerContext, x_TH: Tensor, rows: RowMap) -> Tensor:
    return to_experts(x_TH.to(here.weights.dtype), rows)


def _gather(here: LayerContext, y_RH: Tensor, rows: RowMap, *weights_TK: Tensor) -> Tensor:
    ones_TK = torch.ones_like(rows.place_TK, dtype=y_RH.dtype)
    return combine(y_RH, weights_TK[0] if weights_TK else ones_TK, rows)


CHOICES = "choices"


def in_parts(operators: Sequence[Operator], count: int, end: str) -> list[Operator]:
    """`operators` of a MoE layer whose last way has names that end in `end`, the experts' in `count` parts."""
    names = [each.name for each in operators]
    first, last = names.index(f"dispatch{end}"), names.index(f"combine{end}")
    hop, ids, weights = f"hop{end}", f"ids{end}_there", f"weights{end}_there"
    inner = [
        each
        for each in operators[first : last + 1]
        if each.name != f"arrive{end}" and not each.name.startswith("shared")
    ]
    cut = {f"sent{end}", ids, weights, *(name for each in inner for name in each.makes)}
    arrive = operators[names.index(f"arrive{end}")]
    found = list[Operator]()
    for each in operators:
        if each.name == f"send{end}":
            found.append(_send(each, hop, count))
        elif each is arrive:
            found += [each, _choices(f"{CHOICES}{end}", ids, weights, hop, count)]
        elif each.name == f"combine{end}":
            found += [_part(of_part, number, count, cut) for number in range(count) for of_part in inner]
        elif each.name == f"total{end}":
            found.append(_total(each, hop, f"returned{end}", count))
        elif each not in inner:
            found.append(each)
    return found


def _part(operator: Operator, number: int, count: int, cut: set[str]) -> Operator:
    def named(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(part_name(name, number) if name in cut else name for name in names)

    part = replace(
        operator,
        name=part_name(operator.name, number),
        reads=named(operator.reads),
        makes=named(operator.makes),
        saves=named(operator.saves),
        facts=named(operator.facts),
    )
    if not isinstance(part, RowExchange):
        return part
    whole = part.collective

    def collective(here: LayerContext, *values: Any) -> Collective:
        return part_of(whole(here, *values), number, count)

    return replace(part, collective=collective, part=(number, count))


def _send(send: Operator, hop: str, count: int) -> Compute:
    assert isinstance(send, Compute)
    whole: Callable[..., Tensor] = send.function

    def function(here: LayerContext, x: Tensor, hop: Hop) -> tuple[Tensor, ...]:
        sent = whole(here, x, hop)
        return tuple(taken(sent, hop.there.sent, number, count) for number in range(count))

    return replace(send, makes=_all(send.makes[0], count), function=function)


def _choices(name: str, ids: str, weights: str, hop: str, count: int) -> Compute:
    def function(here: LayerContext, ids_PK: Tensor, weights_PK: Tensor, hop: Hop) -> tuple[Tensor, ...]:
        runs = hop.there.received
        return tuple(taken(each, runs, number, count) for each in (ids_PK, weights_PK) for number in range(count))

    return Compute(
        name=name,
        reads=(ids, weights, hop),
        makes=(*_all(ids, count), *_all(weights, count)),
        facts=_all(ids, count),
        function=function,
        once=True,
    )


def _total(total: Operator, hop: str, returned: str, count: int) -> Compute:
    assert isinstance(total, Compute)
    whole: Callable[..., Tensor] = total.function

    def function(here: LayerContext, *values: Any) -> Tensor:
        *parts, weights, hop = values
        return whole(here, joined(parts, hop.there.sent), weights, hop)

    return replace(
        total,
        reads=(*_all(returned, count), *total.reads[1:]),
        saves=_all(returned, count) if total.saves else (),
        leads_to=part_name(total.leads_to, 0),
        function=function,
    )


def _all(name: str, count: int) -> tuple[str, ...]:
    return tuple(part_name(name, number) for number in range(count))


def schedule_in_parts(schedule: Schedule, operators: Collection[str]) -> Schedule:
    """`schedule`, written for whole operators, for these, some of which are parts. Lines of others are left out."""
    parts = [name for name in operators if whole_name(name) != name]
    counts = Counter(map(whole_name, parts))
    if not counts:
        return schedule
    known = {*map(whole_name, operators)}
    forward, backward = (
        [action for action in actions if action.operator in known] for actions in (schedule.forward, schedule.backward)
    )
    dispatch = next(name for name in counts if name.startswith("dispatch"))
    early = Action(START_GRADIENT, dispatch)  # for the whole it waits for a smaller exchange
    backward.remove(early)
    backward.insert(backward.index(Action(GRADIENT, "scatter")) + 1, early)
    return Schedule(tuple(_by_part(forward, counts)), tuple(_by_part(backward, counts)))


def _by_part(actions: Iterable[Action], counts: Mapping[str, int]) -> Iterable[Action]:
    together = list[Action]()

    def flush() -> Iterable[Action]:
        for number in range(max((counts[each.operator] for each in together), default=0)):
            yield from (Action(each.verb, part_name(each.operator, number)) for each in together)
        together.clear()

    for action in actions:
        is_part = action.operator in counts
        started = [Action(WAIT_OF[each.verb], each.operator) for each in together if each.verb in WAIT_OF]
        if not is_part or action in started:  # a wait right behind its start would leave no time to travel
            yield from flush()
        if is_part:
            together.append(action)
        else:
            yield action
    yield from flush()
