"""Lina by counting and by its own timelines: Table 1, eq. 1, and Figures 7 and 8 event by event.

The timelines' inputs are the paper's printed times (`antiphon.sim.lina_figure_7`); what is compared are the ends that
follow under each schedule.
"""

from functools import cache

from antiphon.sim.lina_figure_7 import LAYER, figure_7, figure_8b
from antiphon.sim.schedules import Schedule
from antiphon.sim.training_step import BackwardTimeline
from antiphon.specs.lina_models import lina_model

# Table 1, all-to-all's share of the step: of 4 and of 16 experts, by layers, in training and in inference.
SHARES = (0.367, 0.274, 0.354, 0.262, 0.382, 0.283, 0.395, 0.325, 0.376, 0.317, 0.368, 0.274)
PATHS = [(0.5, 0.25, 0.25, 0.0)] * 3 + [(0.0, 0.5, 0.0, 0.5)]  # of four tokens: expert popularity on their two paths


def _transformer_xl(num_experts: int, num_layers: int) -> float:
    model = lina_model("transformer-xl")
    biases = num_experts * (model.intermediate_size + model.hidden_size)
    gate = num_experts * model.hidden_size
    return float(model.parameters(num_experts, num_layers) + num_layers * (biases + gate))


@cache
def _timelines() -> dict[Schedule, BackwardTimeline]:
    return figure_7()


def _end_ms(schedule: Schedule, part: str) -> float:
    return _end_of(_timelines()[schedule], part)


def _end_of(timeline: BackwardTimeline, part: str) -> float:
    return 1e3 * (timeline.compute_end_s if part == "compute" else timeline.all_reduce_end_s)


OURS = {
    "parameters": _transformer_xl,
    "mean share": lambda: sum(SHARES) / len(SHARES),
    "devices of expert": lambda expert: 16 * sum(path[expert] for path in PATHS) / len(PATHS),  # eq. 1
    "end": _end_ms,
    "end of Figure 8(b)": lambda part: _end_of(figure_8b(), part),
    "slowdown": lambda: _timelines()["baseline"].all_to_all_s()[0] / LAYER.all_to_all_s,
    "earlier": lambda: 1 - _end_ms("micro_ops", "all-reduce") / _end_ms("deferral", "all-reduce"),
}
