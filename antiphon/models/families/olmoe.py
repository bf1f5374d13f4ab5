"""OLMoE: RMS norms over the whole of q and of k, optional clipping of q, k and v after them."""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames()


def spec_from_config(config: keys.Config) -> ModelSpec:
    hidden = keys.required_int(config, "hidden_size")
    num_heads = keys.required_int(config, "num_attention_heads")
    num_layers = keys.required_int(config, "num_hidden_layers")
    head_dim = keys.optional_int(config, "head_dim", hidden // num_heads)
    bias = bool(config.get("attention_bias"))
    return ModelSpec(
        family="olmoe",
        vocab_size=keys.required_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=(True,) * num_layers,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=keys.optional_int(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=keys.rope(config, head_dim, theta=10_000.0),
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
        **keys.shared_fields(config, norm_eps=1e-5),
    )
