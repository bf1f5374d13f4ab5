"""gpt-oss: attention sinks, windowed and full layers in turns, biases everywhere, clamped SwiGLU, MXFP4 experts.

Published checkpoints hold the experts as MXFP4 blocks and scales, those that transformers 5 writes as matrices stored
transposed; both keep gate and up in turns. The router is a plain linear layer with a bias, and a softmax over the
chosen logits. Published configs state no dtype: what is not MXFP4 is bfloat16.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import StackedLayout, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

GATE_UP, DOWN = ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"
NAMES = TensorNames(
    router=("mlp.router.weight",),
    experts=(
        StackedLayout(kind="mxfp4", gate_up=GATE_UP, down=DOWN),
        StackedLayout(kind="columns", gate_up=GATE_UP, down=DOWN),
    ),
)
LAYER_TYPES = ("sliding_attention", "full_attention")


def spec_from_config(config: keys.Config) -> ModelSpec:
    sizes = keys.sizes(config)
    bias = bool(config["attention_bias"])
    keys.one_of(config, "hidden_act", ("silu",), "silu")
    return ModelSpec(
        family="gpt_oss",
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=AttentionSpec(
            **keys.grouped_query(config),
            qkv_bias=bias,
            out_bias=bias,
            sliding_window=keys.sliding_window(config),
            windowed_layers=_windowed_layers(config, sizes["num_layers"]),
            sinks=True,
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok", "experts_per_token"),
            softmax_after_top_k=True,
            normalize=False,
            has_logit_bias=True,
        ),
        feed_forward=FeedForwardSpec(
            activation="swiglu_oai",
            alpha=float(config["swiglu_alpha"]),
            limit=float(config["swiglu_limit"]),
            expert_bias=True,
            intermediate=keys.required_int(config, "intermediate_size"),
        ),
        **keys.shared_fields(config | {"dtype": keys.stated_dtype(config) or "bfloat16"}),
    )


def _windowed_layers(config: keys.Config, num_layers: int) -> tuple[bool, ...]:
    """From `layer_types`; without it every other layer, the first one included."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(layer % 2 == 0 for layer in range(num_layers))
    if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES):
        raise keys.unsupported("layer_types", kinds, f"one of {', '.join(LAYER_TYPES)} for each of {num_layers} layers")
    return tuple(kind == "sliding_attention" for kind in kinds)
