"""Qwen3-MoE: grouped-query attention with per-head norms of queries and keys; no shared expert.

transformers 5.23 writes `num_local_experts` where published configs have `num_experts`.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames()


def spec_from_config(config: keys.Config) -> ModelSpec:
    sizes = keys.sizes(config)
    bias = bool(config.get("attention_bias"))
    return ModelSpec(
        family="qwen3_moe",
        **sizes,
        moe_layers=keys.sparse_layers(config, sizes["num_layers"]),
        attention=AttentionSpec(
            **keys.grouped_query(config),
            qk_norm="head",
            qkv_bias=bias,
            out_bias=bias,
            sliding_window=keys.sliding_window(config) if config.get("use_sliding_window") else None,
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_experts", "num_local_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
            normalize=bool(config.get("norm_topk_prob")),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config),
            intermediate=keys.required_int(config, "moe_intermediate_size"),
            dense_intermediate=keys.required_int(config, "intermediate_size"),
        ),
        **keys.shared_fields(config),
    )
