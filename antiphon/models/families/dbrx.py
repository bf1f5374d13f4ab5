"""DBRX: LayerNorm without bias, one fused and clipped projection for q, k and v, experts stacked by rows.

Its config nests `attn_config` and `ffn_config` and has its own names for sizes. The rotary base is
`attn_config.rope_theta` in published configs, `rope_parameters.rope_theta` in those transformers 5 writes.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import StackedLayout, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RouterSpec

NAMES = TensorNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f.weight",
    layer="transformer.blocks.{layer}.",
    input_norm="norm_attn_norm.norm_1.weight",
    post_norm="norm_attn_norm.norm_2.weight",
    qkv=("norm_attn_norm.attn.Wqkv.weight",),
    out="norm_attn_norm.attn.out_proj.weight",
    router=("ffn.router.layer.weight",),
    experts=(
        StackedLayout(kind="rows", gate_up=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"), down="ffn.experts.mlp.w2"),
    ),
)
LAYER_NORM_EPS = 1e-5
ROPE_THETA = 10_000.0


def spec_from_config(config: keys.Config) -> ModelSpec:
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    hidden = keys.required_int(config, "d_model")
    num_heads = keys.required_int(config, "n_heads")
    num_layers = keys.required_int(config, "n_layers")
    max_position = keys.required_int(config, "max_seq_len")
    head_dim = hidden // num_heads
    keys.require_absent(experts, "moe_normalize_expert_weights", 1, 1.0)  # other values are norms we do not compute
    return ModelSpec(
        family="dbrx",
        vocab_size=keys.required_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=(True,) * num_layers,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=keys.optional_int(attention, "kv_n_heads", 1),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=keys.rope(
                {"rope_theta": attention.get("rope_theta") or ROPE_THETA} | config, head_dim, max_position=max_position
            ),
            clip_qkv=keys.optional_float(attention, "clip_qkv"),
        ),
        router=RouterSpec(
            num_experts=keys.required_int(experts, "moe_num_experts"),
            top_k=keys.required_int(experts, "moe_top_k"),
            normalize=experts.get("moe_normalize_expert_weights", 1.0) is not None,
        ),
        feed_forward=FeedForwardSpec(
            activation=keys.activation(experts.get("ffn_act_fn") or {}, "name"),
            intermediate=keys.required_int(experts, "ffn_hidden_size"),
        ),
        norm="layer_no_bias",
        **keys.shared_fields(config | {"rms_norm_eps": LAYER_NORM_EPS}, max_position_key="max_seq_len"),
    )
