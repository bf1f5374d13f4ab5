"""The families that run: how each reads its `config.json`. Its tensors' names are in `models/tensor_names`.

A reader calls `_decoder` with what the family has of its own; the rest is read from the keys that most families share
(`config_keys`). Defaults have been filled in before, and values bounded (`config_values`).
Rejected: a file a family. A family is some lines, and nearly all of them were the same.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from antiphon.models.families import config_keys as keys
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, LatentSpec, ModelSpec, RopeSpec, RouterSpec

# --- what most families share ---


def _decoder(
    config: keys.Config,
    attention: AttentionSpec,
    router: RouterSpec,
    feed_forward: FeedForwardSpec | None = None,
    moe_layers: tuple[bool, ...] = (),
    **own: Any,
) -> ModelSpec:
    """Experts as wide as `intermediate_size`, in all layers, where nothing else is given. `own`: further fields."""
    sizes = keys.sizes(config)
    fields: dict[str, Any] = {**keys.shared_fields(config), **own}
    return ModelSpec(
        family=str(config["model_type"]),
        **sizes,
        moe_layers=moe_layers or (True,) * sizes["num_layers"],
        attention=attention,
        router=router,
        feed_forward=feed_forward or _experts(config, "intermediate_size"),
        **fields,
    )


def _attention(
    config: keys.Config, *, bias: bool = False, interleaved: bool = False, rotary_dim_key: str = "", **own: Any
) -> AttentionSpec:
    """Grouped-query attention. `bias`: all its projections have one; the others as in `grouped_query`."""
    shared = keys.grouped_query(config, interleaved=interleaved, rotary_dim_key=rotary_dim_key)
    fields: dict[str, Any] = {**shared, "qkv_bias": bias, "out_bias": bias, **own}
    return AttentionSpec(**fields)


def _router(
    config: keys.Config, *experts: str, top_k: tuple[str, ...] = ("num_experts_per_tok",), **own: Any
) -> RouterSpec:
    """`experts`, `top_k`: the spellings of both numbers."""
    counts = keys.required_int(config, *(experts or ("num_local_experts", "num_experts")))
    return RouterSpec(num_experts=counts, top_k=keys.required_int(config, *top_k), **own)


def _experts(config: keys.Config, width_key: str, **own: Any) -> FeedForwardSpec:
    fields: dict[str, Any] = {"activation": keys.activation(config), **own}
    return FeedForwardSpec(intermediate=keys.required_int(config, width_key), **fields)


def _bias(config: keys.Config) -> bool:
    return bool(config.get("attention_bias"))


def _normalize(config: keys.Config) -> bool:
    return bool(config.get("norm_topk_prob"))


# --- Mixtral and its likes ---


def _mixtral(config: keys.Config) -> ModelSpec:
    """Grouped-query attention, top-2 of few wide experts, weights normalised over the chosen ones. Published
    checkpoints call the block `block_sparse_moe` and its matrices w1 (gate), w3 (up), w2 (down)."""
    return _decoder(config, _attention(config, sliding_window=keys.sliding_window(config)), _router(config))


def _minimax_m2(config: keys.Config) -> ModelSpec:
    """RMS norms over the whole of q and of k, half of each head rotated, sigmoid scores with a bias. Published configs
    give the rotated width as `rotary_dim`. Multi-token-prediction modules are not loaded.

    Refused are keys of published configs that could switch on what neither transformers nor we compute."""
    keys.one_of(config, "scoring_func", ("sigmoid",), "sigmoid")
    keys.one_of(config, "qk_norm_type", ("per_layer",), "per_layer")
    keys.require_absent(config, "shared_intermediate_size", 0)
    if set(config.get("attn_type_list") or ()) - {1}:
        raise keys.unsupported("attn_type_list", config["attn_type_list"], "full attention (1) in every layer")
    attention = _attention(config, rotary_dim_key="rotary_dim", qk_norm="full")
    return _decoder(config, attention, _router(config, scoring="sigmoid", has_score_bias=True))


def _olmoe(config: keys.Config) -> ModelSpec:
    """RMS norms over the whole of q and of k, optional clipping of q, k and v after them."""
    clip = keys.optional_float(config, "clip_qkv")
    attention = _attention(config, bias=_bias(config), qk_norm="full", clip_qkv=clip)
    return _decoder(
        config, attention, _router(config, "num_experts", "num_local_experts", normalize=_normalize(config))
    )


def _phimoe(config: keys.Config) -> ModelSpec:
    """LayerNorm with bias, biases everywhere in attention and head, SparseMixer's two-pass top-2, LongRoPE.

    transformers 5 applies the short LongRoPE factors at every length (only the magnitude changes past the trained
    length); the published remote code switches to the long factors. We follow transformers, so that logits agree."""
    attention = _attention(config, bias=_bias(config), sliding_window=keys.sliding_window(config))
    if config.get("num_experts_per_tok", 2) != 2:
        raise keys.unsupported("num_experts_per_tok", config["num_experts_per_tok"], "2, as SparseMixer chooses two")
    rope = attention.rope
    if rope.scaling == "longrope":
        rope = replace(rope, parameters=rope.parameters | {"long_factor": rope.parameters["short_factor"]})
    router = RouterSpec(
        num_experts=keys.required_int(config, "num_local_experts", "num_experts"),
        top_k=2,
        scoring="sparsemixer",
        normalize=False,
        jitter=float(config["router_jitter_noise"]),
    )
    head_bias = bool(config.get("lm_head_bias"))
    return _decoder(config, replace(attention, rope=rope), router, norm="layer", lm_head_bias=head_bias)


def _granitemoe(config: keys.Config) -> ModelSpec:
    """Granite-3 MoE (`granitemoe`) and with a shared expert (`granitemoeshared`): Mixtral with four multipliers.

    A softmax over the logits of the chosen experts weighs them. `embedding_multiplier`, `attention_multiplier` (the
    scale of the scores), `residual_multiplier` and `logits_scaling` (a divisor) apply where transformers applies them,
    at run time. Rejected: multiplying them into the weights at load, which would round every weight stored in bfloat16
    again."""

    def multiplier(key: str) -> float:
        value = keys.optional_float(config, key)
        return 1.0 if value is None else value

    residual = multiplier("residual_multiplier")
    shared = int(config.get("shared_intermediate_size") or 0)
    return _decoder(
        config,
        _attention(config, bias=_bias(config), scale=multiplier("attention_multiplier")),
        _router(config, normalize=False, softmax_after_top_k=True, scaling=residual),
        _experts(config, "intermediate_size", shared_intermediate=shared),
        embedding_multiplier=multiplier("embedding_multiplier"),
        residual_multiplier=residual,
        logits_divisor=multiplier("logits_scaling"),
    )


# --- Qwen ---


def _qwen2_moe(config: keys.Config) -> ModelSpec:
    """Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B: biased q, k and v; a shared expert behind a sigmoid gate."""
    keys.require_absent(config, "use_sliding_window")  # alternates by layer, which no published model uses
    return _decoder(
        config,
        _attention(config, qkv_bias=bool(config["qkv_bias"])),
        _router(config, "num_experts", "num_local_experts", normalize=_normalize(config)),
        _experts(
            config,
            "moe_intermediate_size",
            shared_intermediate=keys.required_int(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            dense_intermediate=keys.required_int(config, "intermediate_size"),
        ),
        keys.sparse_layers(config, keys.sizes(config)["num_layers"]),
    )


def _qwen3_moe(config: keys.Config) -> ModelSpec:
    """Grouped-query attention with per-head norms of queries and keys; no shared expert. transformers 5.23 writes
    `num_local_experts` where published configs have `num_experts`."""
    window = keys.sliding_window(config) if config.get("use_sliding_window") else None
    return _decoder(
        config,
        _attention(config, bias=_bias(config), qk_norm="head", sliding_window=window),
        _router(config, "num_experts", "num_local_experts", normalize=_normalize(config)),
        _experts(config, "moe_intermediate_size", dense_intermediate=keys.required_int(config, "intermediate_size")),
        keys.sparse_layers(config, keys.sizes(config)["num_layers"]),
    )


# --- DeepSeek and its likes ---


def _deepseek(config: keys.Config, attention: AttentionSpec, router: RouterSpec) -> ModelSpec:
    """A model of DeepSeek's shape, whatever its attention and router: dense first layers, and ungated shared experts,
    which a checkpoint stores as one feed-forward of their summed width. Multi-token-prediction layers (beyond
    `num_hidden_layers`) are not loaded."""
    keys.require_absent(config, "mlp_bias")
    num_layers = keys.sizes(config)["num_layers"]
    if kinds := config.get("mlp_layer_types"):
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise keys.unsupported("mlp_layer_types", kinds, f"'dense' or 'sparse' for each of its {num_layers} layers")
        moe_layers = tuple(kind == "sparse" for kind in kinds)
    else:
        num_dense = int(config.get("first_k_dense_replace") or 0)
        every = keys.optional_int(config, "moe_layer_freq", 1)
        moe_layers = tuple(layer >= num_dense and layer % every == 0 for layer in range(num_layers))
    width = keys.required_int(config, "moe_intermediate_size")
    feed_forward = _experts(
        config,
        "moe_intermediate_size",
        shared_intermediate=width * int(config.get("n_shared_experts") or 0),
        dense_intermediate=0 if all(moe_layers) else keys.required_int(config, "intermediate_size"),
    )
    return _decoder(config, attention, router, feed_forward, moe_layers)


def _deepseek_v1(config: keys.Config) -> ModelSpec:
    """DeepSeekMoE: multi-head attention, softmax scores."""
    keys.one_of(config, "scoring_func", ("softmax",), "softmax")
    attention = _attention(config, bias=_bias(config))
    return _deepseek(config, attention, _router(config, "n_routed_experts", normalize=_normalize(config)))


def _deepseek_v2(config: keys.Config) -> ModelSpec:
    """Multi-head latent attention; softmax scores, optionally limited to groups by their best expert. Like
    transformers we ignore `norm_topk_prob`."""
    keys.one_of(config, "scoring_func", ("softmax",), "softmax")
    method = keys.one_of(config, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    router = _router(
        config,
        *("n_routed_experts", "num_experts"),
        normalize=False,
        num_groups=keys.required_int(config, "n_group") if grouped else 1,
        top_k_groups=keys.required_int(config, "topk_group") if grouped else 1,
        group_score="max",
        scaling=float(config.get("routed_scaling_factor") or 1.0),
    )
    return _deepseek(config, _latent_attention(config, interleaved=True), router)


def _deepseek_v3(config: keys.Config) -> ModelSpec:
    """DeepSeek-V3 and -R1; Kimi-K2 (`kimi_k2`) and GLM-4.7-Flash (`glm4_moe_lite`) are the same by other names."""
    keys.one_of(config, "scoring_func", ("sigmoid",), "sigmoid")
    keys.one_of(config, "topk_method", ("noaux_tc",), "noaux_tc")
    interleaved = bool(config["rope_interleave"])
    return _deepseek(config, _latent_attention(config, interleaved=interleaved), _v3_router(config))


def _v3_router(config: keys.Config) -> RouterSpec:
    """Sigmoid scores plus a bias for the choice only, limited to groups by the sum of their two best."""
    return _router(
        config,
        *("n_routed_experts", "num_local_experts"),
        scoring="sigmoid",
        normalize=_normalize(config),
        has_score_bias=True,
        num_groups=keys.optional_int(config, "n_group", 1),
        top_k_groups=keys.optional_int(config, "topk_group", 1),
        group_score="top2",
        scaling=float(config.get("routed_scaling_factor") or 1.0),
    )


def _latent_attention(config: keys.Config, *, interleaved: bool) -> AttentionSpec:
    """YaRN's `mscale_all_dim` enters the scale of the scores, squared."""
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
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 * _score_magnitude(rope) ** 2,
        rope=rope,
        latent=latent,
        qkv_bias=_bias(config),
        out_bias=_bias(config),
    )


def _score_magnitude(rope: RopeSpec) -> float:
    all_dim, factor = rope.parameters.get("mscale_all_dim"), rope.parameters.get("factor")
    if not isinstance(all_dim, (int, float)) or not isinstance(factor, (int, float)) or not all_dim:
        return 1.0
    return keys.yarn_magnitude(factor, all_dim)


def _dots1(config: keys.Config) -> ModelSpec:
    """dots.llm1: DeepSeek-V3's experts under Qwen3's attention. Without `layer_types`, layers from `max_window_layers`
    on see a window, if there is one."""
    shared = keys.grouped_query(config)
    kinds = config.get("layer_types")
    if not kinds:
        num_layers = int(config["num_hidden_layers"])
        full = num_layers if keys.sliding_window(config) is None else config.get("max_window_layers") or 0
        kinds = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    bias, window = _bias(config), keys.uniform_window(config | {"layer_types": list(kinds)})
    attention = AttentionSpec(**shared, qk_norm="head", qkv_bias=bias, out_bias=bias, sliding_window=window)
    return _deepseek(config, attention, _v3_router(config))


def _glm4_moe(config: keys.Config) -> ModelSpec:
    """GLM-4.5 and -4.6 (`glm4_moe`) and Solar-Open (`solar_open`): DeepSeek-V3's experts under grouped-query attention,
    with biases on q, k and v only, per-head norms where `use_qk_norm`, half of each head rotated (Solar-Open: all)."""
    norm = "head" if config.get("use_qk_norm") else "none"
    return _deepseek(config, _attention(config, qk_norm=norm, qkv_bias=_bias(config)), _v3_router(config))


# --- ERNIE, gpt-oss, DBRX ---

_LARGEST_NORM_MIN = 1e-9  # the sum of the chosen experts' weights is never so small, so the bound changes nothing


def _ernie4_5_moe(config: keys.Config) -> ModelSpec:
    """Softmax scores, a bias for the choice only, neighbours paired in the rotary embedding, shared experts.

    Layers from `moe_layer_start_index` to `moe_layer_end_index` route, every `moe_layer_interval`-th of all; the others
    are dense. Multi-token-prediction layers are not loaded."""
    keys.require_absent(config, "use_bias")  # no published model has biases, which its experts would have too
    norm_min = keys.optional_float(config, "moe_norm_min")
    if norm_min is not None and norm_min > _LARGEST_NORM_MIN:
        raise keys.unsupported("moe_norm_min", norm_min, f"at most {_LARGEST_NORM_MIN}")
    num_layers = keys.sizes(config)["num_layers"]
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    first = 1 if first is None else first
    last = num_layers - 1 if last in (None, -1) else last
    every = keys.optional_int(config, "moe_layer_interval", 1)
    width = keys.required_int(config, "moe_intermediate_size")
    return _decoder(
        config,
        _attention(config, interleaved=True),
        _router(config, "moe_num_experts", "num_experts", top_k=("moe_k", "num_experts_per_tok"), has_score_bias=True),
        _experts(
            config,
            "moe_intermediate_size",
            shared_intermediate=width * int(config.get("moe_num_shared_experts") or 0),
            dense_intermediate=keys.required_int(config, "intermediate_size"),
        ),
        tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(num_layers)),
    )


def _gpt_oss(config: keys.Config) -> ModelSpec:
    """Attention sinks, windowed and full layers in turns, biases everywhere, clamped SwiGLU, MXFP4 experts.

    Published checkpoints hold the experts as MXFP4 blocks and scales, those that transformers 5 writes as matrices
    stored transposed; both keep gate and up in turns. The router is a plain linear layer with a bias, and a softmax
    over the chosen logits. Published configs state no dtype: what is not MXFP4 is bfloat16. Without `layer_types`
    every other layer has the window, the first one included."""
    num_layers, kinds = keys.sizes(config)["num_layers"], config.get("layer_types")
    keys.one_of(config, "hidden_act", ("silu",), "silu")
    if kinds is None:
        kinds = [keys.LAYER_TYPES[layer % 2] for layer in range(num_layers)]
    attention = _attention(
        config,
        bias=bool(config["attention_bias"]),
        sliding_window=keys.sliding_window(config),
        windowed_layers=tuple(kind == "sliding_attention" for kind in kinds),
        sinks=True,
    )
    router = _router(
        config,
        top_k=("num_experts_per_tok", "experts_per_token"),
        softmax_after_top_k=True,
        normalize=False,
        has_logit_bias=True,
    )
    alpha, limit = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    clamped: dict[str, Any] = {"activation": "swiglu_oai", "alpha": alpha, "limit": limit, "expert_bias": True}
    dtype = keys.stated_dtype(config) or "bfloat16"
    return _decoder(config | {"dtype": dtype}, attention, router, _experts(config, "intermediate_size", **clamped))


_DBRX_EPS, _DBRX_ROPE_THETA = 1e-5, 10_000.0


def _dbrx(config: keys.Config) -> ModelSpec:
    """LayerNorm without bias, one fused and clipped projection for q, k and v, experts stacked by rows.

    The config nests `attn_config` and `ffn_config` and has its own names for sizes. The rotary base is
    `attn_config.rope_theta` in published configs, `rope_parameters.rope_theta` in those transformers 5 writes."""
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    hidden, num_heads, num_layers, max_position = (
        keys.required_int(config, key) for key in ("d_model", "n_heads", "n_layers", "max_seq_len")
    )
    head_dim = hidden // num_heads
    keys.require_absent(experts, "moe_normalize_expert_weights", 1, 1.0)  # other values are norms we do not compute
    theta = attention.get("rope_theta") or _DBRX_ROPE_THETA
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
            rope=keys.rope({"rope_theta": theta} | config, head_dim, max_position=max_position),
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
        **keys.shared_fields(config | {"rms_norm_eps": _DBRX_EPS}, max_position_key="max_seq_len"),
    )


FAMILIES: dict[str, Callable[[keys.Config], ModelSpec]] = {
    "dbrx": _dbrx,
    "deepseek": _deepseek_v1,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "kimi_k2": _deepseek_v3,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "solar_open": _glm4_moe,
}
