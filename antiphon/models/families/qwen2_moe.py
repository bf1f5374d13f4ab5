"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biased q, k and v; a shared expert behind a sigmoid gate."""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames()


def spec_from_config(config: keys.Config) -> ModelSpec:
    keys.require_absent(config, "use_sliding_window")  # alternates by layer, which no published model uses
    sizes = keys.sizes(config)
    return ModelSpec(
        family="qwen2_moe",
        **sizes,
        moe_layers=keys.sparse_layers(config, sizes["num_layers"]),
        attention=AttentionSpec(
            **keys.grouped_query(config),
            qkv_bias=bool(config["qkv_bias"]),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_experts", "num_local_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
            normalize=bool(config.get("norm_topk_prob")),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config),
            intermediate=keys.required_int(config, "moe_intermediate_size"),
            shared_intermediate=keys.required_int(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            dense_intermediate=keys.required_int(config, "intermediate_size"),
        ),
        **keys.shared_fields(config),
    )
