"""The step that a simulation predicts for a box: operators take what they were measured to take, exchanges what their
bytes take on the links, and the schedule says what runs beside what.

1. Operators' times are those of the variant without overlap that has the same operators (`seconds_by_operator`).
2. Bytes are those of the formulas (`wire`), not those that were counted.
3. `train.schedule_search` goes through the layer's schedule with one processor and one wire.
4. An operator in tiles takes the longer of its work and its exchange, and one tile of the other: the first rows are
   made before any can go, the last ones are worked on when all have come.
5. What is outside of layers, and the sums of gradients, stand behind one another.

Not in it: latencies, and exchanges of counts. Rejected: measured waiting times. They are what is to be predicted.
"""

from collections.abc import Iterator, Mapping, Sequence

from antiphon.bench.ladder.wire import Links, Sent, exchanges, sums_s
from antiphon.comm.mesh import Sizes
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.layer_plan import LayerPlan
from antiphon.train.layer_run import span_name
from antiphon.train.layer_schedule import (
    GRADIENT,
    RUN,
    START,
    START_GRADIENT,
    WAIT,
    WAIT_GRADIENT,
    WAIT_OF,
    WEIGHTS,
    Action,
)
from antiphon.train.memory_check import setup_of
from antiphon.train.schedule_search import Times, seconds_of
from antiphon.train.tiled import Arriving, Leaving, Tiled

SUMS = "gradient sum"
_WORKS_AT = {  # in which step a tiled operator does what its operators do in which
    Arriving: {WAIT: RUN, START_GRADIENT: GRADIENT, WEIGHTS: WEIGHTS},
    Leaving: {START: RUN, WAIT_GRADIENT: GRADIENT, WEIGHTS: WEIGHTS},
}


def predicted_step_s(
    spec: ModelSpec,
    config: TrainConfig,
    sizes: Sizes,
    plans: Sequence[LayerPlan],
    operator_s: Mapping[str, float],
    links: Links,
) -> float:
    """`plans`: of this rank's layers; `operator_s`: seconds of a step by operator, as metrics have them."""
    sent = exchanges(spec, config, sizes)
    names = {_label(action, backward=backward) for plan in plans for backward, action in _actions(plan)}
    names |= {_label(action, backward=backward) for backward, action in _in_their_place(plans)}
    outside_s = sum(seconds for name, seconds in operator_s.items() if name not in names and name != SUMS)
    layers_s = 0.0
    for plan in plans:
        for backward in (False, True):
            order = plan.schedule.backward if backward else plan.schedule.forward
            times = _times(plan, order, operator_s, len(plans), sizes, sent, links, backward=backward)
            layers_s += config.micro_batches * seconds_of(order, times)
    return outside_s + layers_s + sums_s(spec, config, setup_of(config, sizes), sizes, links)


def _times(
    plan: LayerPlan,
    order: Sequence[Action],
    operator_s: Mapping[str, float],
    num_layers: int,
    sizes: Sizes,
    sent: Mapping[str, Sent],
    links: Links,
    *,
    backward: bool,
) -> Times:
    """What each action of one layer takes on the processor, and each start's exchange on the wire."""
    computing, travelling = dict[Action, float](), dict[Action, float]()
    for action in order:
        operator = plan.graph.operators[action.operator]
        parts = operator.parts if isinstance(operator, Tiled) else (action.operator,)
        if action.verb in WAIT_OF and (each := next((sent[part] for part in parts if part in sent), None)):
            num_bytes = each.backward_bytes if action.verb == START_GRADIENT else each.forward_bytes
            travelling[action] = links.seconds(each.pattern, sizes.groups(each.axes), num_bytes)
        if isinstance(operator, Tiled):
            computing[action] = _work_s(operator, action, operator_s, backward=backward) / num_layers
        elif action.verb not in WAIT_OF.values():
            computing[action] = operator_s.get(_label(action, backward=backward), 0.0) / num_layers
    _overlap_tiles(plan, computing, travelling, sizes)
    return Times(computing, travelling)


def _work_s(operator: Tiled, action: Action, operator_s: Mapping[str, float], *, backward: bool) -> float:
    """Of the operators in whose place it stands, in the step in which it works on tiles."""
    verb = _WORKS_AT[type(operator)].get(action.verb)
    if verb is None:
        return 0.0
    labels = (_label(Action(verb, part), backward=backward) for part in operator.parts)
    return sum(operator_s.get(label, 0.0) for label in labels)


def _overlap_tiles(
    plan: LayerPlan, computing: dict[Action, float], travelling: dict[Action, float], sizes: Sizes
) -> None:
    """What a tiled step does beside its own exchange is taken off the exchange: all but one part in so many ranks."""
    part = 1 / max(sizes.expert, sizes.expert_tensor)
    for start in list(travelling):
        if isinstance(plan.graph.operators[start.operator], Tiled):
            wait = Action(WAIT_OF[start.verb], start.operator)
            work_s = computing.get(start, 0.0) + computing.get(wait, 0.0)
            travelling[start] -= min(travelling[start], work_s) * (1 - part)


def _actions(plan: LayerPlan) -> list[tuple[bool, Action]]:
    return [*((False, each) for each in plan.schedule.forward), *((True, each) for each in plan.schedule.backward)]


def _in_their_place(plans: Sequence[LayerPlan]) -> Iterator[tuple[bool, Action]]:
    """What tiled operators stand for."""
    for plan in plans:
        for operator in plan.graph.operators.values():
            for part in operator.parts if isinstance(operator, Tiled) else ():
                yield from ((False, Action(verb, part)) for verb in (RUN, START, WAIT))
                yield from ((True, Action(verb, part)) for verb in (GRADIENT, WEIGHTS, START_GRADIENT, WAIT_GRADIENT))


def _label(action: Action, *, backward: bool) -> str:
    return f"{span_name(action)} backward" if backward else span_name(action)
