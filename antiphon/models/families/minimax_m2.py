"""MiniMax-M2: RMS norms over the whole of q and of k, half of each head rotated, sigmoid scores with a bias.

Published configs give the rotated width as `rotary_dim`. Multi-token-prediction modules are not loaded.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.families.mixtral import PUBLISHED_EXPERTS
from antiphon.models.names import STACKED, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames(
    router=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    score_bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
    experts=(PUBLISHED_EXPERTS, STACKED),
)


def spec_from_config(config: keys.Config) -> ModelSpec:
    _refuse_what_transformers_ignores(config)
    sizes = keys.sizes(config)
    return ModelSpec(
        family="minimax_m2",
        **sizes,
        moe_layers=(True,) * sizes["num_layers"],
        attention=AttentionSpec(
            **keys.grouped_query(config, rotary_dim_key="rotary_dim"),
            qk_norm="full",
        ),
        router=RouterSpec(
            num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
            top_k=keys.required_int(config, "num_experts_per_tok"),
            scoring="sigmoid",
            has_score_bias=True,
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config), intermediate=keys.required_int(config, "intermediate_size")
        ),
        **keys.shared_fields(config),
    )


def _refuse_what_transformers_ignores(config: keys.Config) -> None:
    """Keys of published configs that could switch on what neither transformers nor we compute."""
    keys.one_of(config, "scoring_func", ("sigmoid",), "sigmoid")
    keys.one_of(config, "qk_norm_type", ("per_layer",), "per_layer")
    keys.require_absent(config, "shared_intermediate_size", 0)
    if set(config.get("attn_type_list") or ()) - {1}:
        raise keys.unsupported("attn_type_list", config["attn_type_list"], "full attention (1) in every layer")
