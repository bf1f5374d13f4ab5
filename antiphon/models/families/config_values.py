"""What each key of `config.json` may hold: its type and its bounds, checked before a family reads the first of them.

A family allocates by what it reads (one flag a layer), divides by it, and takes powers of it. So values are checked
here, once for all families, by a table from key to rule; whether values fit together is known only when all are read
(`models/config`). Keys that are not in the table are not looked at, and null is the same as absent.
A family that reads a new key adds its rule here; `tests/models/test_config_fuzz.py` finds one that was forgotten.
Rejected: a check wherever a key is read. It was forgotten for some keys in each family, and a missing one shows only
when somebody's file has the wrong value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief

MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_WIDTH = 2**20  # of rows, heads and feed-forwards
MAX_TOKENS = 2**24  # in the vocabulary
MAX_POSITIONS = 2**30
COPY = "copy the file from the model's publisher"
Evidence = Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole number, `least` to `most`."""

    least: int = 1
    most: int

    def wrong(self, value: object) -> str:
        if type(value) is not int or value < self.least:
            return f"a whole number of at least {self.least} is needed"
        return f"at most {self.most:,} is supported" if value > self.most else ""


@dataclass(frozen=True, kw_only=True)
class Real:
    """A number above `above`, or of at least `least`, and at most `most`."""

    above: float | None = None
    least: float = 0.0
    most: float = 1e9

    def wrong(self, value: object) -> str:
        low = f"above {self.above:g}" if self.above is not None else f"from {self.least:g}"
        needed = f"a number {low} up to {self.most:g} is needed"
        if type(value) is not float and type(value) is not int:
            return needed
        holds = value > self.above if self.above is not None else value >= self.least
        return "" if holds and value <= self.most else needed  # NaN compares false


@dataclass(frozen=True)
class JsonType:
    """A value of a type of JSON, whatever it is."""

    type: type
    needed: str

    def wrong(self, value: object) -> str:
        return "" if isinstance(value, self.type) else f"{self.needed} is needed"


TEXT = JsonType(str, "a text")
FLAG = JsonType(bool, "true or false")  # a text "false" would count as true
SECTION = JsonType(Mapping, "an object")  # with keys of its own


@dataclass(frozen=True, kw_only=True)
class OneOrMore:
    """A list of what `each` allows; `alone`: or one such value without a list."""

    each: Whole | Real | JsonType
    alone: bool = False

    def wrong(self, value: object) -> str:
        if self.alone and not isinstance(value, (list, tuple)):
            return self.each.wrong(value)
        if not isinstance(value, (list, tuple)):
            return "a list is needed"
        return next((f"in a list, {wrong}" for wrong in map(self.each.wrong, value) if wrong), "")


Rule = Whole | Real | OneOrMore | JsonType

_LAYERS = Whole(most=MAX_LAYERS)
_EXPERTS = Whole(most=MAX_EXPERTS)
_WIDTH = Whole(most=MAX_WIDTH)
_POSITIONS = Whole(most=MAX_POSITIONS)
_POSITIVE = Real(above=0.0)
_TOKENS = OneOrMore(each=Whole(least=0, most=MAX_TOKENS), alone=True)
RULES: dict[str, Rule] = {
    # how many
    **dict.fromkeys(("num_hidden_layers", "n_layers"), _LAYERS),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"), _LAYERS),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), Whole(least=-1, most=MAX_LAYERS)),
    "max_window_layers": Whole(least=0, most=MAX_LAYERS),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), OneOrMore(each=TEXT)),
    "attn_type_list": OneOrMore(each=Whole(least=0, most=MAX_LAYERS)),
    "first_k_dense_replace": Whole(least=0, most=MAX_LAYERS),
    "mlp_only_layers": OneOrMore(each=Whole(least=0, most=MAX_LAYERS)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), Whole(least=0, most=MAX_EXPERTS)),
    **dict.fromkeys(("n_group", "topk_group"), Whole(least=0, most=MAX_EXPERTS)),
    "vocab_size": Whole(most=MAX_TOKENS),
    # how wide
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_hidden_size", "rotary_dim"), _WIDTH),
    "shared_intermediate_size": Whole(least=0, most=MAX_WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "kv_n_heads", "head_dim"), _WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), _WIDTH),
    # how far
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "original_max_position_embeddings"), _POSITIONS),
    "sliding_window": Whole(least=0, most=MAX_POSITIONS),
    "rope_theta": Real(above=1.0, most=1e15),
    "partial_rotary_factor": Real(above=0.0, most=1.0),
    # numbers
    "rms_norm_eps": Real(most=1.0),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier"), _POSITIVE),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "swiglu_alpha", "swiglu_limit"), _POSITIVE),
    "moe_norm_min": Real(most=1.0),
    "router_jitter_noise": Real(most=1.0),
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
    **dict.fromkeys(("mscale", "mscale_all_dim"), Real(most=1e3)),
    **dict.fromkeys(("short_factor", "long_factor"), OneOrMore(each=_POSITIVE)),
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
