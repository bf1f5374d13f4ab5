"""Phi-3.5-MoE: LayerNorm with bias, biases everywhere in attention and head, SparseMixer's two-pass top-2, LongRoPE.

transformers 5 applies the short LongRoPE factors at every length (only the magnitude changes past the trained length);
the published remote code switches to the long factors. We follow transformers, so that logits agree with it.
"""

from dataclasses import replace

from antiphon.models.families import config_keys as keys
from antiphon.models.families.mixtral import PUBLISHED_EXPERTS
from antiphon.models.names import STACKED, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec

NAMES = TensorNames(router=("block_sparse_moe.gate.weight", "mlp.router.weight"), experts=(PUBLISHED_EXPERTS, STACKED))


def spec_from_config(config: keys.Config) -> ModelSpec:
    sizes = keys.sizes(config)
    bias = bool(config.get("attention_bias"))
    attention = AttentionSpec(
        **keys.grouped_query(config),
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=keys.sliding_window(config),
    )
    if config.get("num_experts_per_tok", 2) != 2:
        raise keys.unsupported("num_experts_per_tok", config["num_experts_per_tok"], "2, as SparseMixer chooses two")
    return ModelSpec(
        family="phimoe",
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=replace(attention, rope=_short_factors_only(attention.rope)),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=2,
            scoring="sparsemixer",
            normalize=False,
            jitter=float(config["router_jitter_noise"]),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config), intermediate=keys.required_int(config, "intermediate_size")
        ),
        norm="layer",
        lm_head_bias=bool(config.get("lm_head_bias")),
        **keys.shared_fields(config),
    )


def _short_factors_only(rope: RopeSpec) -> RopeSpec:
    if rope.scaling != "longrope":
        return rope
    return replace(rope, parameters=rope.parameters | {"long_factor": rope.parameters["short_factor"]})
