"""The step that a simulation predicts for a box: operators take what they were measured to take, exchanges what their
bytes take on the links, and the schedule says what runs beside what.

1. Operators' times are those of the variant without overlap that has the same operators (`seconds_by_operator`).
2. Bytes are those of the formulas (`wire`), not those that were counted.
3. `train.schedule_search` goes through the layer's schedule with one processor and one wire.
4. What is outside of layers, and the sums of gradients, stand behind one another.

Not in it: latencies, and exchanges of counts. Rejected: measured waiting times. They are what is to be predicted.
"""

from collections.abc import Mapping, Sequence

from antiphon.bench.ladder.wire import Links, exchanges, sums_s
from antiphon.comm.mesh import Sizes
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.layer_plan import LayerPlan
from antiphon.train.layer_run import span_name
from antiphon.train.layer_schedule import WAIT_OF, Action
from antiphon.train.memory_check import setup_of
from antiphon.train.schedule_search import Times, seconds_of

SUMS = "gradient sum"


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
    outside_s = sum(seconds for name, seconds in operator_s.items() if name not in names and name != SUMS)
    layers_s = 0.0
    for plan in plans:
        for backward in (False, True):
            order = plan.schedule.backward if backward else plan.schedule.forward
            computing, travelling = dict[Action, float](), dict[Action, float]()
            for action in order:
                if action.verb in WAIT_OF and action.operator in sent:
                    each = sent[action.operator]
                    reverse = action.verb == "start gradient"
                    num_bytes = each.backward_bytes if reverse else each.forward_bytes
                    travelling[action] = links.seconds(each.pattern, sizes.groups(each.axes), num_bytes)
                if action.verb not in WAIT_OF.values():
                    computing[action] = operator_s.get(_label(action, backward=backward), 0.0) / len(plans)
            layers_s += config.micro_batches * seconds_of(order, Times(computing, travelling))
    return outside_s + layers_s + sums_s(spec, config, setup_of(config, sizes), sizes, links)


def _actions(plan: LayerPlan) -> list[tuple[bool, Action]]:
    return [*((False, each) for each in plan.schedule.forward), *((True, each) for each in plan.schedule.backward)]


def _label(action: Action, *, backward: bool) -> str:
    return f"{span_name(action)} backward" if backward else span_name(action)
