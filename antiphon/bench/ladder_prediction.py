"""The step that a simulation predicts for a box: operators take what they were measured to take, exchanges what their
bytes take on the links, and the schedule says what runs beside what.

1. Operators' times are those of the variant without overlap that has the same operators (`seconds_by_operator`). A part
   of an operator takes its part of the whole's time, unless it was measured itself.
2. Bytes are those of the formulas (`exchanges`), not those that were counted.
3. `train.schedule_search` goes through the layer's schedule with one processor and one wire.
4. An operator in tiles takes the longer of its work and its exchange, and a rank's part of the other one: the first
   rows are made before any can go, the last ones are worked on when all have come.
5. Rows over the budget travel inside their operator, and how many there are depends on the router. Their part of all
   rows is counted, and their bytes follow the formulas. What was measured as waiting beyond what those bytes take on
   the links, for the turns of ranks in each piece, is the same in every format.
6. What is outside of layers, and the sums of gradients, stand behind one another. Where sums run beside backward, the
   simulator of Lina's figures goes through it (`backward_s`). A layer's schedule becomes what `sim.training_step`
   knows: the combine, an all-to-all, the experts, another all-to-all, and everything else, which comes before the next
   layer's combine. A layer's gradients are ready when that is done. What is rough: gradients of the experts' weights
   stand behind the second all-to-all, though they run beside it.

Not in it: latencies. What an operator waits for inside itself (counts of rows, the norm of all ranks) counts as its
work. Rejected: other measured waiting times. They are what is to be predicted.

Bytes are those that a rank sends (`comm/ledger`); which of them pass a link between nodes follows from who is where:

    all-to-all     equal parts to every other rank of the group
    all-gather     a ring: a rank's bytes go to the next rank; an all-reduce is two of them
    reduce-scatter as an all-to-all, which it is over gloo (`comm/collectives`)

A link is busy for the bytes of all ranks of its node; the busiest one counts. Inside a node nothing takes time.

Letters: T rows of this rank, H hidden, K experts of a row.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from antiphon.comm.mesh import Sizes
from antiphon.cost.exchange import expected_distinct
from antiphon.cost.training.measured import held_parameters
from antiphon.cost.training.memory import fullest_stage
from antiphon.cost.training.setup import TrainingSetup
from antiphon.sim.schedules import Schedule
from antiphon.sim.training_step import BackwardLayer, BackwardOptions, Gradient, simulate_backward
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import CommunicationConfig
from antiphon.train.layer_plan import LayerPlan
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
    span_name,
)
from antiphon.train.memory import setup_of
from antiphon.train.operators import whole_name
from antiphon.train.row_budget import WAITS
from antiphon.train.schedule_search import ActionTimes, seconds_of
from antiphon.train.tiled import Tiled

Pattern = Literal["all_to_all", "all_gather", "reduce_scatter"]
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
WIDE_BYTES = 4  # of what stays in float32 whatever the arithmetic
_WAYS: dict[str, tuple[Pattern, Pattern]] = {  # to the experts and back
    "all_to_all": ("all_to_all", "all_to_all"),
    "gather_scatter": ("all_gather", "reduce_scatter"),
}
_REVERSE: dict[Pattern, Pattern] = {
    "all_to_all": "all_to_all",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}


# --- what a step sends, by formula, and how long a box's links need for it


@dataclass(frozen=True)
class Sent:
    """What each rank of every group over `axes` sends in one exchange, forward and backward; `pattern`: forward."""

    pattern: Pattern
    axes: tuple[str, ...]
    forward_bytes: float
    backward_bytes: float

    def seconds(self, links: "BoxLinks", sizes: Sizes, *, backward: bool) -> float:
        """Until all groups have done it. Backward, a reduce-scatter undoes an all-gather, and the other way round."""
        groups = sizes.groups(self.axes)
        if backward:
            return links.seconds(_REVERSE[self.pattern], groups, self.backward_bytes)
        return links.seconds(self.pattern, groups, self.forward_bytes)


@dataclass(frozen=True, kw_only=True)
class BoxLinks:
    """The links of a box: `bytes_per_s` of each node's link, each way."""

    nodes: int
    ranks_per_node: int
    bytes_per_s: float

    def seconds(self, pattern: Pattern, groups: Sequence[Sequence[int]], sent_bytes: float) -> float:
        """Until all groups have done it, side by side."""
        out = [0.0] * self.nodes
        for ranks in groups:
            for node, share in self._crossing(pattern, ranks):
                out[node] += share * sent_bytes
        return max(out) / self.bytes_per_s

    def _crossing(self, pattern: Pattern, ranks: Sequence[int]) -> Iterator[tuple[int, float]]:
        """(node, part of what a rank sends) for all that leaves a node."""
        for place, rank in enumerate(ranks):
            others = (
                [ranks[(place + 1) % len(ranks)]]
                if pattern == "all_gather"
                else [each for each in ranks if each != rank]
            )
            for other in others:
                if self._node(other) != self._node(rank):
                    yield self._node(rank), 1 / len(others)

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node


def exchanges(spec: ModelSpec, config: TrainConfig, sizes: Sizes) -> dict[str, Sent]:
    """By operator of a MoE layer, at even use of experts; what sends nothing is left out."""
    rows = config.tokens_per_step // config.micro_batches / (sizes.data * sizes.sequence * sizes.tensor)
    found = _attention(spec, config, sizes, rows)
    end = ""
    if sizes.expert_tensor > 1:
        found |= _way(spec, config, "gather_scatter", "expert_tensor", sizes.expert_tensor, rows, end)
        rows, end = rows * sizes.expert_tensor, "_2"
    if sizes.expert > 1:
        found |= _way(spec, config, config.parallel.dispatch, "expert", sizes.expert, rows, end)
    return found


def _attention(spec: ModelSpec, config: TrainConfig, sizes: Sizes, rows: float) -> dict[str, Sent]:
    attention, found, number = spec.attention, dict[str, Sent](), NUMBER_BYTES[config.dtype]
    if sizes.tensor > 1:
        sent = (sizes.tensor - 1) * rows * spec.hidden_size * number
        found["tensor_gather"] = Sent("all_gather", ("tensor",), sent, sent)
        found["tensor_scatter"] = Sent("reduce_scatter", ("tensor",), sent, sent)
    if sizes.sequence > 1:
        away = rows * number * (sizes.sequence - 1) / sizes.sequence
        queries = away * attention.num_heads * attention.head_dim
        kv = away * 2 * attention.num_kv_heads * attention.head_dim
        found["heads_a2a"] = Sent("all_to_all", ("sequence",), queries + kv, queries + kv)
        found["rows_a2a"] = Sent("all_to_all", ("sequence",), queries, queries)
    return found


def _way(
    spec: ModelSpec, config: TrainConfig, dispatch: str, axis: str, ranks: int, rows: float, end: str
) -> dict[str, Sent]:
    hidden, router, number = spec.hidden_size, spec.router, NUMBER_BYTES[config.dtype]
    there, back = _WAYS[dispatch]
    if there == "all_gather":
        copies = float(ranks - 1)
    elif config.parallel.deduplicate:
        copies = float(expected_distinct(router.num_experts, router.top_k, ranks)) * (ranks - 1) / ranks
    else:
        copies = router.top_k * (ranks - 1) / ranks
    narrow = config.communication.activations == "float8" or (
        config.communication.activations == "float8_permutation" and there == "all_to_all"
    )
    forward, backward = (hidden + 4.0, hidden * (1 + 4 / 128)) if narrow else (hidden * number, hidden * number)
    packed = copies * rows * 2 * router.top_k * max(number, WIDE_BYTES)
    found = {f"routing{end}": Sent(there, (axis,), packed, packed)}
    for name, pattern in (("dispatch", there), ("combine", back)):
        found[name + end] = Sent(pattern, (axis,), copies * rows * forward, copies * rows * backward)
    return found


def sums_s(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup, sizes: Sizes, links: BoxLinks) -> float:
    """Seconds of the sums of gradients behind a step, without ZeRO: all-reduces over the ranks that hold the same."""
    held = held_parameters(spec, setup, fullest_stage(spec, setup.pipeline, setup.virtual_stages))
    number = 2 if config.communication.gradients == "bfloat16" else WIDE_BYTES
    total_s = 0.0
    for count, axes in (
        (float(held.sharded), ("expert_data",)),
        (float(held.replicated), ("data", "sequence")),
    ):
        groups = sizes.groups(axes)
        size = len(groups[0])
        if size == 1:
            continue
        inside = links.ranks_per_node if config.communication.hierarchical else 1
        if inside > 1 and size > inside:
            groups = [ranks[place::inside] for ranks in groups for place in range(inside)]
            count, size = count / inside, size // inside
        first: Pattern = "all_to_all" if config.communication.gradients == "bfloat16" else "all_gather"
        half = count * number * (size - 1) / size
        total_s += links.seconds(first, groups, half) + links.seconds("all_gather", groups, half)
    return total_s


# --- the step


_EXPERTS = ("gather", "weigh", "weigh_bias", "fc2", "activation", "fc1", "scatter")
_COMBINE = ("total", "over_budget", "add")


def backward_s(
    layers: Sequence[ActionTimes], exchange_bytes: float, sums_s: float, sums_bytes: float, config: CommunicationConfig
) -> float:
    """Until the last sum is over. `layers` in the order in which backward visits them, seconds of each action on the
    processor, and of each start's exchange on the wire; `exchange_bytes`: of one of the experts' exchanges; `sums_s`,
    `sums_bytes`: of all layers' gradients, in equal parts."""
    found, before_s, gradients = list[BackwardLayer](), 0.0, tuple[Gradient, ...]()
    for number, layer in enumerate(layers):
        combine_s = _sum(layer.computing_s, _COMBINE)
        experts_s = _sum(layer.computing_s, _EXPERTS)
        exchanges_s = sum(seconds for action, seconds in layer.travelling_s.items() if action.verb == START_GRADIENT)
        found.append(
            BackwardLayer(
                gradient_s=before_s,
                gradients=gradients,
                combine_s=combine_s,
                all_to_all_s=exchanges_s / 2,
                ffn_s=experts_s,
                gate_s=0.0,
                all_to_all_bytes=round(exchange_bytes),
            )
        )
        before_s = sum(layer.computing_s.values()) - combine_s - experts_s
        size_bytes = max(1, round(sums_bytes / len(layers)))
        gradient = Gradient(
            name=str(number), size_bytes=size_bytes, all_reduce_s=sums_s / len(layers), ready_s=before_s
        )
        gradients = (gradient,) if sums_s else ()
    end = BackwardLayer(
        gradient_s=before_s, gradients=gradients, combine_s=0.0, all_to_all_s=0.0, ffn_s=0.0, gate_s=0.0
    )
    return simulate_backward([*found, end], _options(config)).end_s


def _options(config: CommunicationConfig) -> BackwardOptions:
    schedule: Schedule = "baseline"
    if config.sums == "between":
        schedule = "deferral"
    elif config.sums == "priority":
        schedule = "micro_ops" if config.partition or config.pipeline_experts else "priority"
    pipeline = config.pipeline_experts and schedule == "micro_ops"
    return BackwardOptions(schedule=schedule, chunk_bytes=config.chunk_bytes, pipeline=pipeline)


def _sum(computing_s: Mapping[Action, float], operators: Sequence[str]) -> float:
    return sum(
        seconds
        for action, seconds in computing_s.items()
        if action.verb == GRADIENT and whole_name(action.operator) in operators
    )


SUMS = "gradient sum"
_START_OF = {wait: start for start, wait in WAIT_OF.items()}
_WORKS_AT = {  # whether rows arrive: in which step a tiled operator does what its operators do in which
    True: {WAIT: RUN, START_GRADIENT: GRADIENT, WEIGHTS: WEIGHTS},
    False: {START: RUN, WAIT_GRADIENT: GRADIENT, WEIGHTS: WEIGHTS},
}


def predicted_step_s(
    spec: ModelSpec,
    config: TrainConfig,
    sizes: Sizes,
    plans: Sequence[LayerPlan],
    operator_s: Mapping[str, float],
    links: BoxLinks,
    over_budget: float = 0.0,
) -> float:
    """`plans`: of this rank's layers; `operator_s`: seconds of a step by operator, as metrics have them; `over_budget`:
    the part of all rows that is beyond the row budget."""
    costs = _Costs(spec, config, sizes, plans, operator_s, links, over_budget)
    forward_s = config.micro_batches * sum(
        seconds_of(plan.schedule.forward, costs.of(plan, backward=False)) for plan in plans
    )
    sums = sums_s(spec, config, setup_of(config, sizes), sizes, links)
    times = [(plan, costs.of(plan, backward=True)) for plan in reversed(plans)]
    orders_s = sum(seconds_of(plan.schedule.backward, each) for plan, each in times)
    if config.communication.sums == "behind":
        return costs.outside_s + forward_s + config.micro_batches * orders_s + sums
    assert config.micro_batches == 1, "sums run beside the last pass only"
    if sizes.sequence * sizes.tensor > 1:  # Lina's simulator knows no exchanges of attention
        wire_s = sums + sum(sum(each.travelling_s.values()) for _, each in times)
        return costs.outside_s + forward_s + max(orders_s, wire_s)
    layers = [each for _, each in times]
    beside_s = backward_s(layers, costs.exchange_bytes, sums, sums * links.bytes_per_s, config.communication)
    return costs.outside_s + forward_s + beside_s


@dataclass(frozen=True)
class _Costs:
    """What each action of a layer takes."""

    spec: ModelSpec
    config: TrainConfig
    sizes: Sizes
    plans: Sequence[LayerPlan]
    operator_s: Mapping[str, float]
    links: BoxLinks
    over_budget: float

    @property
    def outside_s(self) -> float:
        """The part of a step that belongs to no layer."""
        names = {
            name
            for plan in self.plans
            for backward, order in ((False, plan.schedule.forward), (True, plan.schedule.backward))
            for action in order
            for name in (_label(action, backward=backward), _label(_whole(action), backward=backward))
        }
        names |= {_label(action, backward=backward) for backward, action in _in_their_place(self.plans)}
        names |= {WAITS, f"{WAITS} backward"}
        return sum(seconds for name, seconds in self.operator_s.items() if name not in names and name != SUMS)

    @property
    def exchange_bytes(self) -> float:
        """Bytes of the largest exchange of a layer's backward."""
        return max((each.backward_bytes for each in exchanges(self.spec, self.config, self.sizes).values()), default=0)

    def of(self, plan: LayerPlan, *, backward: bool) -> ActionTimes:
        order = plan.schedule.backward if backward else plan.schedule.forward
        parts = Counter(map(whole_name, plan.graph.operators))
        sent = exchanges(self.spec, self.config, self.sizes)
        computing, travelling = dict[Action, float](), dict[Action, float]()
        for action in order:
            operator = plan.graph.operators[action.operator]
            if isinstance(operator, Tiled):
                self._in_tiles(operator, action, sent, computing, travelling, backward=backward)
                continue
            whole, count = _whole(action), parts[whole_name(action.operator)]
            if action.verb in WAIT_OF and whole.operator in sent:
                way_back = action.verb == START_GRADIENT
                exchange_s = sent[whole.operator].seconds(self.links, self.sizes, backward=way_back)
                kept = 1 - self.over_budget if sent[whole.operator].axes == ("expert",) else 1.0
                travelling[action] = exchange_s * kept / count
            if action.verb not in WAIT_OF.values():
                of_whole = self.operator_s.get(_label(whole, backward=backward), 0.0) / count
                found = self.operator_s.get(_label(action, backward=backward), of_whole)
                if whole.operator == "over_budget":
                    found += self._over_budget_s(self._holders(whole.operator), backward=backward)
                computing[action] = found / self._holders(whole.operator) / self.config.micro_batches
        return ActionTimes(computing, travelling)

    def _over_budget_s(self, layers: int, *, backward: bool) -> float:
        """What a step waits for rows over the budget. It was measured on rows as they are without compression."""
        waits_s = self.operator_s.get(f"{WAITS} backward" if backward else WAITS, 0.0)
        plain = replace(self.config, communication=replace(self.config.communication, activations="plain"))
        now_s, then_s = (
            self.over_budget * layers * self.config.micro_batches * sum(self._ways_s(config, backward=backward))
            for config in (self.config, plain)
        )
        return max(0.0, waits_s - then_s) + now_s

    def _ways_s(self, config: TrainConfig, *, backward: bool) -> Iterator[float]:
        """Seconds of each exchange of experts' rows in a layer; backward they go forward again first."""
        for each in exchanges(self.spec, config, self.sizes).values():
            if each.axes == ("expert",):
                yield each.seconds(self.links, self.sizes, backward=False)
                yield each.seconds(self.links, self.sizes, backward=True) if backward else 0.0

    def _holders(self, name: str) -> int:
        """How many layers have this operator, whole or in parts: dense layers have others than MoE layers."""
        return sum(any(whole_name(each) == name for each in plan.graph.operators) for plan in self.plans)

    def _in_tiles(
        self,
        operator: Tiled,
        action: Action,
        sent: Mapping[str, Sent],
        computing: dict[Action, float],
        travelling: dict[Action, float],
        *,
        backward: bool,
    ) -> None:
        """What a tiled step does beside its own exchange is taken off the exchange."""
        verb = _WORKS_AT[operator.arrives].get(action.verb)
        labels = [] if verb is None else [_label(Action(verb, part), backward=backward) for part in operator.parts]
        work_s = sum(self.operator_s.get(label, 0.0) for label in labels)
        work_s /= self._holders(operator.name) * self.config.micro_batches
        if action.verb not in WAIT_OF.values():
            computing[action] = work_s
        each = sent[operator.exchange.name]
        if action.verb in WAIT_OF:
            travelling[action] = each.seconds(self.links, self.sizes, backward=action.verb == START_GRADIENT)
            start = action
        else:
            start = Action(_START_OF.get(action.verb, ""), action.operator)
        if start in travelling and verb not in (None, WEIGHTS):
            beside = 1 - 1 / math.prod(self.sizes.of(axis) for axis in each.axes)
            if action.verb in WAIT_OF:
                travelling[start] -= min(travelling[start], work_s) * beside
            else:  # its work stands behind what is left of the exchange
                travelling[start] = max(travelling[start], work_s) + min(travelling[start], work_s) * (1 - beside)


def _whole(action: Action) -> Action:
    return replace(action, operator=whole_name(action.operator))


def _in_their_place(plans: Sequence[LayerPlan]) -> Iterator[tuple[bool, Action]]:
    """What tiled operators stand for."""
    for plan in plans:
        for operator in plan.graph.operators.values():
            for part in operator.parts if isinstance(operator, Tiled) else ():
                yield from ((False, Action(verb, part)) for verb in (RUN, START, WAIT))
                yield from ((True, Action(verb, part)) for verb in (GRADIENT, WEIGHTS, START_GRADIENT, WAIT_GRADIENT))


def _label(action: Action, *, backward: bool) -> str:
    return f"{span_name(action)} backward" if backward else span_name(action)
