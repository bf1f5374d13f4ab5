"""The backward pass that the simulator of Lina's Figure 7 predicts, with sums of gradients beside it.

A layer's schedule becomes what `sim.training_step` knows: the combine, an all-to-all, the experts, another all-to-all,
and everything else, which comes before the next layer's combine. A layer's gradients are ready when that is done.

What is rough: gradients of the experts' weights stand behind the second all-to-all, though they run beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.sim.schedules import Schedule
from antiphon.sim.training_step import BackwardLayer, BackwardOptions, Gradient, simulate_backward
from antiphon.train.communication_config import CommunicationConfig
from antiphon.train.layer_schedule import GRADIENT, START_GRADIENT, Action
from antiphon.train.operators import whole_name

_EXPERTS = ("gather", "weigh", "weigh_bias", "fc2", "activation", "fc1", "scatter")
_COMBINE = ("total", "over_budget", "add")


@dataclass(frozen=True)
class LayerTimes:
    """Of one layer's backward: seconds of each action on the processor, of each start's exchange on the wire, and the
    bytes of one of the experts' exchanges."""

    computing_s: Mapping[Action, float]
    travelling_s: Mapping[Action, float]
    exchange_bytes: float


def backward_s(layers: Sequence[LayerTimes], sums_s: float, sums_bytes: float, config: CommunicationConfig) -> float:
    """Until the last sum is over. `layers` in the order in which backward visits them; `sums_s`, `sums_bytes`: of all
    layers' gradients, in equal parts."""
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
                all_to_all_bytes=round(layer.exchange_bytes),
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
    if config.sums == "priority":
        schedule = "micro_ops" if config.partition or config.pipeline_experts else "priority"
    pipeline = config.pipeline_experts and schedule == "micro_ops"
    return BackwardOptions(schedule=schedule, chunk_bytes=config.chunk_bytes, pipeline=pipeline)


def _sum(computing_s: Mapping[Action, float], operators: Sequence[str]) -> float:
    return sum(
        seconds
        for action, seconds in computing_s.items()
        if action.verb == GRADIENT and whole_name(action.operator) in operators
    )
