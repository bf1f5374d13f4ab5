"""Granite-3 MoE (`granitemoe`) and with a shared expert (`granitemoeshared`): Mixtral with four multipliers.

A softmax over the logits of the chosen experts weighs them. `embedding_multiplier`, `attention_multiplier` (the scale
of the scores), `residual_multiplier` and `logits_scaling` (a divisor) apply where transformers applies them, at run
time. Rejected: multiplying them into the weights at load, which would round every weight stored in bfloat16 again.
"""

from dataclasses import replace

from antiphon.models.families import config_keys as keys
from antiphon.models.names import GatedNames, StackedLayout, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

_BLOCK = "block_sparse_moe."
_PUBLISHED = StackedLayout(
    kind="fused", gate_up=(_BLOCK + "input_linear.weight",), down=_BLOCK + "output_linear.weight"
)
_STACKED = StackedLayout(kind="fused", gate_up=(_BLOCK + "experts.gate_up_proj",), down=_BLOCK + "experts.down_proj")
NAMES = TensorNames(
    router=(_BLOCK + "router.layer.weight", _BLOCK + "router.weight"),
    experts=(_PUBLISHED, _STACKED),
    shared=GatedNames(prefix="shared_mlp.", gate="input_linear.weight", up=None, down="output_linear.weight"),
)


def spec_from_config(config: keys.Config) -> ModelSpec:
    sizes = keys.sizes(config)
    bias = bool(config.get("attention_bias"))
    residual_multiplier = _multiplier(config, "residual_multiplier")
    return ModelSpec(
        family=str(config["model_type"]),
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=replace(
            AttentionSpec(**keys.grouped_query(config), qkv_bias=bias, out_bias=bias),
            scale=_multiplier(config, "attention_multiplier"),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
            normalize=False,
            softmax_after_top_k=True,
            scaling=residual_multiplier,
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config),
            intermediate=keys.required_int(config, "intermediate_size"),
            shared_intermediate=int(config.get("shared_intermediate_size") or 0),
        ),
        embedding_multiplier=_multiplier(config, "embedding_multiplier"),
        residual_multiplier=residual_multiplier,
        logits_divisor=_multiplier(config, "logits_scaling"),
        **keys.shared_fields(config),
    )


def _multiplier(config: keys.Config, key: str) -> float:
    value = keys.optional_float(config, key)
    return 1.0 if value is None else value
