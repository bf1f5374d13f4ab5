"""The step that a simulation predicts for a box: operators take what they were measured to take, exchanges what their
bytes take on the links, and the schedule says what runs beside what.

1. Operators' times are those of the variant without overlap that has the same operators (`seconds_by_operator`). A part
   of an operator takes its part of the whole's time, unless it was measured itself.
2. Bytes are those of the formulas (`wire`), not those that were counted.
3. `train.schedule_search` goes through the layer's schedule with one processor and one wire.
4. What is outside of layers, and the sums of gradients, stand behind one another. Where sums run beside backward, the
   simulator of Lina's figures goes through it (`beside`).

Not in it: latencies, and exchanges of counts. Rejected: measured waiting times. They are what is to be predicted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from antiphon.bench.ladder.beside import LayerTimes, backward_s
from antiphon.bench.ladder.wire import Links, exchanges, sums_s
from antiphon.comm.mesh import Sizes
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.layer_plan import LayerPlan
from antiphon.train.layer_run import span_name
from antiphon.train.layer_schedule import START_GRADIENT, WAIT_OF, Action
from antiphon.train.memory_check import setup_of
from antiphon.train.operators import whole_name
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
    costs = _Costs(spec, config, sizes, plans, operator_s, links)
    forward_s = config.micro_batches * sum(
        seconds_of(plan.schedule.forward, costs.of(plan, backward=False)) for plan in plans
    )
    sums = sums_s(spec, config, setup_of(config, sizes), sizes, links)
    times = [(plan, costs.of(plan, backward=True)) for plan in reversed(plans)]
    if config.communication.sums == "behind":
        orders_s = sum(seconds_of(plan.schedule.backward, each) for plan, each in times)
        return costs.outside_s + forward_s + config.micro_batches * orders_s + sums
    assert config.micro_batches == 1, "sums run beside the last pass only"
    layers = [LayerTimes(each.computing_s, each.travelling_s, costs.exchange_bytes) for _, each in times]
    beside_s = backward_s(layers, sums, sums * links.bytes_per_s, config.communication)
    return costs.outside_s + forward_s + beside_s


@dataclass(frozen=True)
class _Costs:
    """What each action of a layer takes."""

    spec: ModelSpec
    config: TrainConfig
    sizes: Sizes
    plans: Sequence[LayerPlan]
    operator_s: Mapping[str, float]
    links: Links

    @property
    def outside_s(self) -> float:
        """Of a step, what is no layer's."""
        names = {
            name
            for plan in self.plans
            for backward, order in ((False, plan.schedule.forward), (True, plan.schedule.backward))
            for action in order
            for name in (_label(action, backward=backward), _label(_whole(action), backward=backward))
        }
        return sum(seconds for name, seconds in self.operator_s.items() if name not in names and name != SUMS)

    @property
    def exchange_bytes(self) -> float:
        """Of the largest exchange of a layer's backward."""
        return max((each.backward_bytes for each in exchanges(self.spec, self.config, self.sizes).values()), default=0)

    def of(self, plan: LayerPlan, *, backward: bool) -> Times:
        order = plan.schedule.backward if backward else plan.schedule.forward
        parts = Counter(map(whole_name, plan.graph.operators))
        sent, computing, travelling = exchanges(self.spec, self.config, self.sizes), dict[Action, float](), {}
        for action in order:
            whole, count = _whole(action), parts[whole_name(action.operator)]
            if action.verb in WAIT_OF and whole.operator in sent:
                each = sent[whole.operator]
                num_bytes = each.backward_bytes if action.verb == START_GRADIENT else each.forward_bytes
                travelling[action] = self.links.seconds(each.pattern, self.sizes.groups(each.axes), num_bytes) / count
            if action.verb not in WAIT_OF.values():
                of_whole = self.operator_s.get(_label(whole, backward=backward), 0.0) / count
                found = self.operator_s.get(_label(action, backward=backward), of_whole)
                computing[action] = found / len(self.plans)
        return Times(computing, travelling)


def _whole(action: Action) -> Action:
    return replace(action, operator=whole_name(action.operator))


def _label(action: Action, *, backward: bool) -> str:
    return f"{span_name(action)} backward" if backward else span_name(action)
