"""ERNIE-4.5-MoE: softmax scores, a bias for the choice only, neighbours paired in the rotary embedding, shared experts.

Layers from `moe_layer_start_index` to `moe_layer_end_index` route, every `moe_layer_interval`-th of all; the others are
dense. Multi-token-prediction layers are not loaded.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import GatedNames, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames(
    shared=GatedNames(prefix="mlp.shared_experts."),
    score_bias=("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"),
    score_bias_in_one_row=True,
)
LARGEST_NORM_MIN = 1e-9  # the sum of the chosen experts' weights never is so small, so that the bound changes nothing


def spec_from_config(config: keys.Config) -> ModelSpec:
    keys.require_absent(config, "use_bias")  # no published model has biases, which its experts would have too
    norm_min = keys.optional_float(config, "moe_norm_min")
    if norm_min is not None and norm_min > LARGEST_NORM_MIN:
        raise keys.unsupported("moe_norm_min", norm_min, f"at most {LARGEST_NORM_MIN}")
    sizes = keys.sizes(config)
    width = keys.required_int(config, "moe_intermediate_size")
    return ModelSpec(
        family="ernie4_5_moe",
        **sizes,
        moe_layers=_moe_layers(config, sizes["num_layers"]),
        attention=AttentionSpec(**keys.grouped_query(config, interleaved=True)),
        router=RouterSpec(
            num_experts=keys.required_int(config, "moe_num_experts", "num_experts"),
            top_k=keys.required_int(config, "moe_k", "num_experts_per_tok"),
            has_score_bias=True,
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config),
            intermediate=width,
            shared_intermediate=width * int(config.get("moe_num_shared_experts") or 0),
            dense_intermediate=keys.required_int(config, "intermediate_size"),
        ),
        **keys.shared_fields(config),
    )


def _moe_layers(config: keys.Config, num_layers: int) -> tuple[bool, ...]:
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    first = 1 if first is None else first
    last = num_layers - 1 if last in (None, -1) else last
    interval = keys.optional_int(config, "moe_layer_interval", 1)
    return tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers))
