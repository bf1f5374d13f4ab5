"""What each key of `config.json` may hold: its type and its bounds, checked before a family reads the first of them.

A family allocates by what it reads (one flag a layer), divides by it, and takes powers of it. So values are checked
here, once for all families, by a table from key to rule; whether values fit together is known only when all are read
(`models/config`). Keys that are not in the table are not looked at, and null is the same as absent.
A family that reads a new key adds its rule here; `tests/models/test_config_fuzz.py` finds one that was forgotten.
Rejected: a check wherever a key is read. It was forgotten for some keys in each family, and a missing one shows only
when somebody's file has the wrong value.

What a key means that `config.json` lacks: each family's own default, as its class in transformers has it.

transformers leaves keys out of the files it writes where they have the default of a class, and published files leave
out more. So a missing key is not a missing answer. `completed` adds the answers before a family reads its first key.
1. Two spellings of one key count as one; two values for it are refused.
2. A key that is there with null keeps it where null has a meaning of its own: no window, no low-rank queries.
3. Rotation given by kind of layer is taken where all kinds agree.
`tests/models/test_defaults.py` holds every family and key against the installed transformers.
Rejected: asking transformers at run time. Its classes move between versions, and planning loads without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief

MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_WIDTH = 2**20  # of rows, heads and feed-forwards
MAX_TOKENS = 2**24  # in the vocabulary
MAX_POSITIONS = 2**30
COPY = "copy the file from the model's publisher"
Evidence = Callable[[], str]


@dataclass(frozen=True)
class Rule:
    """What a value may be. `wrong`: what is wrong with one, empty: nothing."""

    kind: Literal["whole", "real", "type", "list"]
    wrong: Callable[[object], str]


def whole(*, least: int = 1, most: int) -> Rule:
    """A whole number, `least` to `most`."""

    def wrong(value: object) -> str:
        if type(value) is not int or value < least:
            return f"a whole number of at least {least} is needed"
        return f"at most {most:,} is supported" if value > most else ""

    return Rule("whole", wrong)


def real(*, above: float | None = None, least: float = 0.0, most: float = 1e9) -> Rule:
    """A number above `above`, or of at least `least`, and at most `most`."""
    low = f"above {above:g}" if above is not None else f"from {least:g}"
    needed = f"a number {low} up to {most:g} is needed"

    def wrong(value: object) -> str:
        if type(value) is not float and type(value) is not int:
            return needed
        holds = value > above if above is not None else value >= least
        return "" if holds and value <= most else needed  # NaN compares false

    return Rule("real", wrong)


def of_type(kind: type, needed: str) -> Rule:
    """A value of a type of JSON, whatever it is."""
    return Rule("type", lambda value: "" if isinstance(value, kind) else f"{needed} is needed")


def one_or_more(each: Rule, *, alone: bool = False) -> Rule:
    """A list of what `each` allows; `alone`: or one such value without a list."""

    def wrong(value: object) -> str:
        if alone and not isinstance(value, (list, tuple)):
            return each.wrong(value)
        if not isinstance(value, (list, tuple)):
            return "a list is needed"
        return next((f"in a list, {found}" for found in map(each.wrong, value) if found), "")

    return Rule("list", wrong)


TEXT = of_type(str, "a text")
FLAG = of_type(bool, "true or false")  # a text "false" would count as true
SECTION = of_type(Mapping, "an object")  # with keys of its own
_LAYERS = whole(most=MAX_LAYERS)
_EXPERTS = whole(most=MAX_EXPERTS)
_WIDTH = whole(most=MAX_WIDTH)
_POSITIONS = whole(most=MAX_POSITIONS)
_POSITIVE = real(above=0.0)
_TOKENS = one_or_more(whole(least=0, most=MAX_TOKENS), alone=True)
RULES: dict[str, Rule] = {
    # how many
    **dict.fromkeys(("num_hidden_layers", "n_layers"), _LAYERS),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"), _LAYERS),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), whole(least=-1, most=MAX_LAYERS)),
    "max_window_layers": whole(least=0, most=MAX_LAYERS),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), one_or_more(TEXT)),
    "attn_type_list": one_or_more(whole(least=0, most=MAX_LAYERS)),
    "first_k_dense_replace": whole(least=0, most=MAX_LAYERS),
    "mlp_only_layers": one_or_more(whole(least=0, most=MAX_LAYERS)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), whole(least=0, most=MAX_EXPERTS)),
    **dict.fromkeys(("n_group", "topk_group"), whole(least=0, most=MAX_EXPERTS)),
    "vocab_size": whole(most=MAX_TOKENS),
    # how wide
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_hidden_size", "rotary_dim"), _WIDTH),
    "shared_intermediate_size": whole(least=0, most=MAX_WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "kv_n_heads", "head_dim"), _WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), _WIDTH),
    # how far
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "original_max_position_embeddings"), _POSITIONS),
    "sliding_window": whole(least=0, most=MAX_POSITIONS),
    "rope_theta": real(above=1.0, most=1e15),
    "partial_rotary_factor": real(above=0.0, most=1.0),
    # numbers
    "rms_norm_eps": real(most=1.0),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier"), _POSITIVE),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "swiglu_alpha", "swiglu_limit"), _POSITIVE),
    "moe_norm_min": real(most=1.0),
    "router_jitter_noise": real(most=1.0),
    "clip_qkv": _POSITIVE,
    "moe_normalize_expert_weights": _POSITIVE,
    # switches
    **dict.fromkeys(("attention_bias", "qkv_bias", "lm_head_bias", "tie_word_embeddings"), FLAG),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave", "use_sliding_window", "use_qk_norm"), FLAG),
    "use_bias": FLAG,
    # tokens
    "eos_token_id": _TOKENS,
    "bos_token_id": _TOKENS,
}
ROPE_RULES: dict[str, Rule] = {
    **{key: RULES[key] for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")},
    **dict.fromkeys(("factor", "attention_factor", "short_mscale", "long_mscale"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), real(most=1e3)),
    **dict.fromkeys(("short_factor", "long_factor"), one_or_more(_POSITIVE)),
    "truncate": FLAG,
}
SECTIONS: dict[str, dict[str, Rule]] = {
    "rope_scaling": ROPE_RULES,
    "rope_parameters": ROPE_RULES,
    "attn_config": RULES,
    "ffn_config": RULES | {"ffn_act_fn": SECTION},
    "quantization_config": {},
    "compression_config": {},
}


def check_values(config: Mapping[str, Any], evidence: Evidence = str) -> None:
    """`CheckpointError` for the first value of a wrong type or out of bounds, naming key, value and bound.

    `evidence` may add what the weights say; it is asked only when a number is too large."""
    for name, rules in SECTIONS.items():
        section = config.get(name)
        if section is not None:
            check_value(f"config.json: {name}", section, SECTION)
            _check_section(f"config.json: {name}.", section, rules, evidence)
    _check_section("config.json: ", config, RULES, evidence)
    _check_head_width(config)


def _check_section(prefix: str, section: Mapping[str, Any], rules: Mapping[str, Rule], evidence: Evidence) -> None:
    for key, rule in rules.items():
        if section.get(key) is not None:
            check_value(prefix + key, section[key], rule, evidence)


def check_value(where: str, value: object, rule: Rule, evidence: Evidence = str) -> None:
    """`CheckpointError` if `value` breaks the rule. `where`: file and key."""
    if not (wrong := rule.wrong(value)):
        return
    if wrong.startswith("at most") and (found := evidence()):
        wrong += f", {found}"
    raise CheckpointError(f"{where} = {brief(value)}: {wrong}: {COPY}")


def _check_head_width(config: Mapping[str, Any]) -> None:
    """Families take hidden size / heads for the width of a head where config.json states no width of any kind."""
    if config.get("head_dim") is not None:
        return
    for hidden_key, heads_key in (("hidden_size", "num_attention_heads"), ("d_model", "n_heads")):
        hidden, heads = config.get(hidden_key), config.get(heads_key)
        if hidden is None or heads is None or hidden % heads == 0:
            continue
        if hidden < heads or config.get("qk_nope_head_dim") is None:
            raise CheckpointError(
                f"config.json: {hidden_key} = {hidden} is not a multiple of {heads_key} = {heads}: "
                f"correct one of them, or state head_dim"
            )


Config = Mapping[str, Any]

_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
_SIZES: dict[str, tuple[int | None, ...]] = {
    "deepseek": (102_400, 4096, 30, 32, 32, 2048),
    "deepseek_v2": (102_400, 4096, 32, 32, None, 2048),
    "deepseek_v3": (129_280, 7168, 61, 128, 128, 4096),
    "dots1": (152_064, 4608, 62, 32, 32, 2048),
    "ernie4_5_moe": (103_424, 2560, 28, 20, 4, 131_072),
    "glm4_moe": (151_552, 4096, 46, 96, 8, 131_072),
    "glm4_moe_lite": (154_880, 2048, 47, 20, 20, 202_752),
    "gpt_oss": (201_088, 2880, 36, 64, 8, 131_072),
    "granitemoe": (32_000, 4096, 32, 32, None, 2048),
    "minimax_m2": (200_064, 3072, 62, 48, 8, 196_608),
    "mixtral": (32_000, 4096, 32, 32, 8, 131_072),
    "olmoe": (50_304, 2048, 16, 16, None, 4096),
    "phimoe": (32_064, 4096, 32, 32, 8, 131_072),
    "qwen2_moe": (151_936, 2048, 24, 16, 16, 32_768),
    "qwen3_moe": (151_936, 2048, 24, 32, 4, 32_768),
    "solar_open": (196_608, 4096, 48, 64, 8, 131_072),
}
_EXPERT_KEYS = ("intermediate_size", "moe_intermediate_size", "rms_norm_eps", "rope_theta")
_WIDTHS: dict[str, tuple[float | None, ...]] = {
    "deepseek": (11_008, 1407, 1e-6, 1e4),
    "deepseek_v2": (11_008, 1407, 1e-6, 1e4),
    "deepseek_v3": (18_432, 2048, 1e-6, 1e4),
    "dots1": (10_944, 1408, 1e-6, 1e4),
    "ernie4_5_moe": (12_288, 1536, 1e-5, 5e5),
    "glm4_moe": (10_944, 1408, 1e-5, 1e4),
    "glm4_moe_lite": (10_240, 1536, 1e-5, 1e4),
    "gpt_oss": (2880, None, 1e-5, 1.5e5),
    "granitemoe": (11_008, None, 1e-6, 1e4),
    "minimax_m2": (1536, None, 1e-6, 5e6),
    "mixtral": (14_336, None, 1e-5, 1e6),
    "olmoe": (2048, None, 1e-5, 1e4),
    "phimoe": (6400, None, 1e-5, 1e6),
    "qwen2_moe": (5632, 1408, 1e-6, 1e4),
    "qwen3_moe": (6144, 768, 1e-6, 1e4),
    "solar_open": (None, 1280, 1e-5, 1e6),
}
_SHARED_ONE: dict[str, Any] = {"n_shared_experts": 1, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": True}
_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek": {"first_k_dense_replace": 0, "bos_token_id": 100_000, "eos_token_id": 100_001},
    "deepseek_v2": _LATENT
    | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2}
    | {"topk_method": "greedy", "bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v3": _LATENT
    | _SHARED_ONE
    | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256}
    | {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
    | {"first_k_dense_replace": 3, "bos_token_id": 0, "eos_token_id": 1},
    "dots1": {"sliding_window": 4096, "max_window_layers": 62},
    "ernie4_5_moe": {"tie_word_embeddings": True, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2}
    | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "glm4_moe": _SHARED_ONE
    | {"num_experts_per_tok": 8, "n_routed_experts": 128, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": _LATENT
    | _SHARED_ONE
    | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64}
    | {"num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
    | {"bos_token_id": 0, "eos_token_id": 1},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "swiglu_alpha": 1.702}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rope_parameters": _GPT_OSS_ROPE},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
    "minimax_m2": {"num_local_experts": 256, "num_experts_per_tok": 8, "head_dim": 128}
    | {"bos_token_id": 200_034, "eos_token_id": 200_020},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8, "eos_token_id": 50_279},
    "phimoe": {"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "qwen2_moe": {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
    | {"qkv_bias": True, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "sliding_window": 4096, "decoder_sparse_step": 1},
    "solar_open": _SHARED_ONE | {"n_routed_experts": 128, "num_experts_per_tok": 8, "head_dim": 128},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    family: {
        key: value
        for key, value in (*zip(_SIZE_KEYS, _SIZES[family], strict=True), *zip(_EXPERT_KEYS, widths, strict=True))
        if value is not None
    }
    | _OWN[family]
    for family, widths in _WIDTHS.items()
}
DEFAULTS["kimi_k2"] = DEFAULTS["deepseek_v3"]
DEFAULTS["granitemoeshared"] = DEFAULTS["granitemoe"] | {"shared_intermediate_size": 0}
DEFAULTS["dbrx"] = {"vocab_size": 32_000, "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048} | {
    "attn_config": {"kv_n_heads": 1},
    "ffn_config": {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "moe_normalize_expert_weights": 1.0},
}
SPELLINGS = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "experts_per_token", "moe_k"),
    ("d_model", "hidden_size"),
    ("n_heads", "num_attention_heads"),
    ("n_layers", "num_hidden_layers"),
    ("max_seq_len", "max_position_embeddings"),
)
_NO_SIZES = ("sliding_window", "max_window_layers")  # published files leave them out where nothing is windowed
_NULL_COUNTS = ("norm_topk_prob", "rope_interleave", "moe_normalize_expert_weights")


def completed(config: Config) -> dict[str, Any]:
    """`config` with the defaults of its family. `CheckpointError` for two values of one key."""
    result = _as_whole(config, RULES)
    for name, rules in SECTIONS.items():
        if isinstance(section := result.get(name), Mapping):
            result[name] = _as_whole(_one_kind(name, section) if rules is ROPE_RULES else section, rules)
    defaults = DEFAULTS[config["model_type"]]
    _fill(result, defaults)
    for key in ("bos_token_id", "eos_token_id"):  # those of a family are no tokens of a smaller vocabulary
        if key not in config and type(vocab := result.get("vocab_size")) is int and defaults.get(key, 0) >= vocab:
            result[key] = None
    return result


def assumed(config: Config) -> tuple[str, ...]:
    """The sizes that `config` does not state and its family has a default for, by their keys."""
    stated = _as_whole(config, RULES)
    return tuple(
        key
        for key in DEFAULTS.get(str(config.get("model_type")), {})
        if _is_whole(RULES, key) and key not in _NO_SIZES and not any(name in stated for name in _spellings(key))
    )


def _fill(section: dict[str, Any], defaults: Config) -> None:
    for key, default in defaults.items():
        value = _stated(section, key)
        if isinstance(default, Mapping) and isinstance(value, Mapping) and key in ("attn_config", "ffn_config"):
            section[key] = dict(value)
            _fill(section[key], default)
        elif value is not None:
            section[key] = value
        elif key not in section or not _means_something(key):
            section[key] = dict(default) if isinstance(default, Mapping) else default


def _means_something(key: str) -> bool:
    """Whether null is a value of its own, in place of the default."""
    return key in _NULL_COUNTS or (key in RULES and RULES[key].kind in ("whole", "list"))


def _spellings(key: str) -> tuple[str, ...]:
    return next(((key, *(name for name in names if name != key)) for names in SPELLINGS if key in names), (key,))


def _stated(config: Config, key: str) -> Any:
    """The value under any spelling of the key; None if none has one."""
    stated = [(name, config[name]) for name in _spellings(key) if config.get(name) is not None]
    if not stated:
        return None
    name, value = stated[0]
    for other, theirs in stated[1:]:
        if theirs != value:
            raise CheckpointError(
                f"config.json: {name} = {brief(value)}, but {other} = {brief(theirs)}, which means the same: "
                f"remove the wrong one"
            )
    return value


def _as_whole(section: Config, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """With 4096 for 4096.0, which some writers of JSON make of it."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() and _is_whole(rules, key) else value
        for key, value in section.items()
    }


def _is_whole(rules: Mapping[str, Rule], key: str) -> bool:
    """Whether the rule of this key, if it has one, is for a whole number."""
    return key in rules and rules[key].kind == "whole"


def _one_kind(name: str, section: Config) -> Config:
    """The rotation of all layers where it is given by kind of layer, as transformers 5 may write it."""
    kinds = {key: dict(value) for key, value in section.items() if isinstance(value, Mapping)}
    if not kinds:
        return section
    first, *others = kinds.values()
    if any(other != first for other in others):
        raise CheckpointError(
            f"config.json: {name} = {brief(section)} is not supported: use a model with one rotary embedding for all "
            f"layers"
        )
    return first
