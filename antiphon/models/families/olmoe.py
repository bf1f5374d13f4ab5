"""OLMoE: RMS norms over the whole of q and of k, optional clipping of q, k and v after them."""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames()


def spec_from_config(config: keys.Config) -> ModelSpec:
    sizes = keys.sizes(config)
    bias = bool(config.get("attention_bias"))
    return ModelSpec(
        family="olmoe",
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=AttentionSpec(
            **keys.grouped_query(config),
            qk_norm="full",
            qkv_bias=bias,
            out_bias=bias,
            clip_qkv=keys.optional_float(config, "clip_qkv"),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_experts", "num_local_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
            normalize=bool(config.get("norm_topk_prob")),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config), intermediate=keys.required_int(config, "intermediate_size")
        ),
        **keys.shared_fields(config),
    )
