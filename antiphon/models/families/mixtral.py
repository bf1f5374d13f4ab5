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
    sizes = keys.sizes(config)
    return ModelSpec(
        family="mixtral",
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=AttentionSpec(
            **keys.grouped_query(config),
            sliding_window=keys.sliding_window(config),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config), intermediate=keys.required_int(config, "intermediate_size")
        ),
        **keys.shared_fields(config),
    )
