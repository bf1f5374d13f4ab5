"""Lina by counting and by its own timelines: Table 1, eq. 1, and Figures 7 and 8 event by event.

The timelines' inputs are the paper's printed times (`antiphon.sim.lina_figure_7`); what is compared are the ends that
follow under each schedule.

Lina's models are Transformers with two-matrix experts, which no `ModelSpec` can describe. Here they have only what the
paper's figures need: parameters, bytes exchanged, FLOPs. Training uses top-2, inference top-1 (Lina section 7.1).
Rejected: an ungated feed-forward in `FeedForwardSpec`, which every engine would have to carry for models nobody serves.
"""

from dataclasses import dataclass
from functools import cache

from antiphon.base.errors import UserError
from antiphon.sim.lina_figure_7 import LAYER, figure_7, figure_8b
from antiphon.sim.schedules import Schedule
from antiphon.sim.training_step import BackwardTimeline
from antiphon.specs.catalog import DATA
from antiphon.specs.nearest import canonical, did_you_mean
from antiphon.specs.strict_table import read_toml

FEED_FORWARD_MATRICES = 2


@dataclass(frozen=True, kw_only=True)
class TwoMatrixModel:
    """`attention_matrices`: how many hidden x hidden matrices one layer's attention has."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_matrices: int
    source: str

    @property
    def expert_parameters(self) -> int:
        return FEED_FORWARD_MATRICES * self.hidden_size * self.intermediate_size

    @property
    def attention_parameters(self) -> int:
        return self.attention_matrices * self.hidden_size**2

    def parameters(self, num_experts: int, num_layers: int | None = None) -> int:
        """Matrices of all layers (by default the model's own number), without embeddings, norms and gates."""
        layers = self.num_layers if num_layers is None else num_layers
        return layers * (self.attention_parameters + num_experts * self.expert_parameters)


def lina_models() -> dict[str, TwoMatrixModel]:
    table = read_toml(DATA / "models" / "lina.toml")
    models = {}
    for name in table.names():
        entry = table.table(name)
        models[name] = TwoMatrixModel(
            name=name,
            num_layers=entry.whole("num_layers"),
            hidden_size=entry.whole("hidden_size"),
            intermediate_size=entry.whole("intermediate_size"),
            attention_matrices=entry.whole("attention_matrices"),
            source=entry.text("source"),
        )
        entry.finish()
    return models


def lina_model(name: str) -> TwoMatrixModel:
    models = lina_models()
    for known, model in models.items():
        if canonical(known) == canonical(name):
            return model
    raise UserError(f"Lina's model {name!r} is unknown: {did_you_mean(name, models)}")


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
