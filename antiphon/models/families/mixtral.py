"""Mixtral: grouped-query attention, top-2 of few wide experts, weights normalised over the chosen ones.

Published checkpoints call the block `block_sparse_moe` and its matrices w1 (gate), w3 (up), w2 (down).
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import STACKED, GatedNames, PerExpertLayout, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

PUBLISHED_EXPERTS = PerExpertLayout(
    names=GatedNames(prefix="block_sparse_moe.experts.{expert}.", gate="w1.weight", up="w3.weight", down="w2.weight")
)
NAMES = TensorNames(router=("block_sparse_moe.gate.weight", "mlp.gate.weight"), experts=(PUBLISHED_EXPERTS, STACKED))


def spec_from_config(config: keys.Config) -> ModelSpec:
    hidden = keys.required_int(config, "hidden_size")
    num_heads = keys.required_int(config, "num_attention_heads")
    num_layers = keys.required_int(config, "num_hidden_layers")
    head_dim = keys.optional_int(config, "head_dim", hidden // num_heads)
    return ModelSpec(
        family="mixtral",
        vocab_size=keys.required_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=(True,) * num_layers,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=keys.optional_int(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=keys.rope(config, head_dim, theta=1_000_000.0),
            sliding_window=keys.sliding_window(config),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config), intermediate=keys.required_int(config, "intermediate_size")
        ),
        **keys.shared_fields(config, norm_eps=1e-5),
    )
