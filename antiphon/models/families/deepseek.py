"""DeepSeekMoE (`deepseek`: multi-head attention), DeepSeek-V2, -V3 and -R1 (multi-head latent attention), and their
likes: Kimi-K2 (`kimi_k2`) and GLM-4.7-Flash (`glm4_moe_lite`) are DeepSeek-V3 by other names.

All have shared experts, which a checkpoint stores as one feed-forward of their summed width, and dense first layers.
- V2: softmax scores, optionally limited to groups by their best expert. Like transformers we ignore `norm_topk_prob`.
- V3: sigmoid scores plus a bias for the choice only, limited to groups by the sum of their two best.
- YaRN's `mscale_all_dim` enters the scale of the scores, squared.
Multi-token-prediction layers (beyond `num_hidden_layers`) are not loaded.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.names import GatedNames, TensorNames
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, LatentSpec, ModelSpec, RopeSpec, RouterSpec

NAMES = TensorNames(shared=GatedNames(prefix="mlp.shared_experts."))


def v1_spec_from_config(config: keys.Config) -> ModelSpec:
    bias = bool(config.get("attention_bias"))
    keys.one_of(config, "scoring_func", ("softmax",), "softmax")
    attention = AttentionSpec(
        **keys.grouped_query(config),
        qkv_bias=bias,
        out_bias=bias,
    )
    router = RouterSpec(
        num_experts=keys.required_int(config, "n_routed_experts"),
        top_k=keys.required_int(config, "num_experts_per_tok"),
        normalize=bool(config.get("norm_topk_prob")),
    )
    return moe_spec(config, attention, router)


def v2_spec_from_config(config: keys.Config) -> ModelSpec:
    keys.one_of(config, "scoring_func", ("softmax",), "softmax")
    method = keys.one_of(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    router = RouterSpec(
        num_experts=keys.required_int(config, "n_routed_experts", "num_experts"),
        top_k=keys.required_int(config, "num_experts_per_tok"),
        normalize=False,
        num_groups=keys.required_int(config, "n_group") if grouped else 1,
        top_k_groups=keys.required_int(config, "topk_group") if grouped else 1,
        group_score="max",
        scaling=float(config.get("routed_scaling_factor") or 1.0),
    )
    return moe_spec(config, _latent_attention(config, interleaved=True), router)


def v3_spec_from_config(config: keys.Config) -> ModelSpec:
    keys.one_of(config, "scoring_func", ("sigmoid",), "sigmoid")
    keys.one_of(config, "topk_method", ("noaux_tc",), "noaux_tc")
    interleaved = bool(config["rope_interleave"])
    return moe_spec(config, _latent_attention(config, interleaved=interleaved), v3_router(config))


def v3_router(config: keys.Config) -> RouterSpec:
    return RouterSpec(
        num_experts=keys.required_int(config, "n_routed_experts", "num_local_experts"),
        top_k=keys.required_int(config, "num_experts_per_tok"),
        scoring="sigmoid",
        normalize=bool(config.get("norm_topk_prob")),
        has_score_bias=True,
        num_groups=keys.optional_int(config, "n_group", 1),
        top_k_groups=keys.optional_int(config, "topk_group", 1),
        group_score="top2",
        scaling=float(config.get("routed_scaling_factor") or 1.0),
    )


def moe_spec(config: keys.Config, attention: AttentionSpec, router: RouterSpec) -> ModelSpec:
    """A model of DeepSeek's shape, whatever its attention and router: dense first layers, ungated shared experts."""
    keys.require_absent(config, "mlp_bias")
    sizes = keys.sizes(config)
    moe_layers = _moe_layers(config, sizes["num_layers"])
    width = keys.required_int(config, "moe_intermediate_size")
    return ModelSpec(
        family=str(config["model_type"]),
        **sizes,
        moe_layers=moe_layers,
        attention=attention,
        router=router,
        feed_forward=FeedForwardSpec(
            activation=keys.activation(config),
            intermediate=width,
            shared_intermediate=width * int(config.get("n_shared_experts") or 0),
            dense_intermediate=0 if all(moe_layers) else keys.required_int(config, "intermediate_size"),
        ),
        **keys.shared_fields(config),
    )


def _moe_layers(config: keys.Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers route: by `mlp_layer_types` where a config has it, else all after the dense first ones."""
    if kinds := config.get("mlp_layer_types"):
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise keys.unsupported("mlp_layer_types", kinds, f"'dense' or 'sparse' for each of its {num_layers} layers")
        return tuple(kind == "sparse" for kind in kinds)
    num_dense, every = int(config.get("first_k_dense_replace") or 0), keys.optional_int(config, "moe_layer_freq", 1)
    return tuple(layer >= num_dense and layer % every == 0 for layer in range(num_layers))


def _latent_attention(config: keys.Config, *, interleaved: bool) -> AttentionSpec:
    num_heads = keys.required_int(config, "num_attention_heads")
    rope_dim = keys.required_int(config, "qk_rope_head_dim")
    latent = LatentSpec(
        q_lora_rank=None if config.get("q_lora_rank") is None else keys.required_int(config, "q_lora_rank"),
        kv_lora_rank=keys.required_int(config, "kv_lora_rank"),
        qk_nope_head_dim=keys.required_int(config, "qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=keys.required_int(config, "v_head_dim"),
    )
    head_dim = latent.qk_nope_head_dim + rope_dim
    rope = keys.rope(config, rope_dim, interleaved=interleaved)
    bias = bool(config.get("attention_bias"))
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 * _score_magnitude(rope) ** 2,
        rope=rope,
        latent=latent,
        qkv_bias=bias,
        out_bias=bias,
    )


def _score_magnitude(rope: RopeSpec) -> float:
    all_dim, factor = rope.parameters.get("mscale_all_dim"), rope.parameters.get("factor")
    if not isinstance(all_dim, (int, float)) or not isinstance(factor, (int, float)) or not all_dim:
        return 1.0
    return keys.yarn_magnitude(factor, all_dim)
