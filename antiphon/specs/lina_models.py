"""Sizes of the models Lina was evaluated with: Transformers with two-matrix experts, which no `ModelSpec` can describe.

Only what its figures need: parameters, bytes exchanged, FLOPs. Training uses top-2, inference top-1 (Lina section 7.1).
Rejected: an ungated feed-forward in `FeedForwardSpec`, which every engine would have to carry for models nobody serves.
"""

from dataclasses import dataclass

from antiphon.base.errors import UserError
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
