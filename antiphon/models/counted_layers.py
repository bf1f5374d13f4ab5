"""Keys of any MoE `config.json` by the names that families give them, and which of its layers are of which kind.

A value that is missing is named with all its spellings and the option that gives it. Rejected: guessing a size from the
others. A wrong guess makes a plan that looks right.

Families say which layers have experts, a window, or a state in place of keys and values by a list of kinds, by every
n-th layer with an offset, or by numbers of layers. Each rule here is one such way; the first whose keys are there
counts.

The widths of layers with a state follow from the keys that tell which kind they are. They are counted from the papers
and the published configs: Mamba (arXiv 2312.00752), Mamba-2 (2405.21060), gated delta rule (2412.06464, Qwen3-Next),
Kimi delta attention (2510.26692), lightning attention (2401.04658, MiniMax-01), and LFM2's short convolutions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief
from antiphon.models.families.config_values import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_TOKENS, MAX_WIDTH, whole
from antiphon.specs.model import StateSpec

SPELLINGS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "kv heads": ("num_key_value_heads", "num_attention_groups", "kv_n_heads", "multi_query_group_num"),
    "head width": ("head_dim", "attention_head_dim", "kv_channels"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    "experts per token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
        *("top_k_experts", "moe_router_topk"),
    ),
    "expert width": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_dim"),
    "dense width": ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"),
    "shared width": (
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"),
        "shared_intermediate_size",
    ),
    "shared experts": (
        *("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
        *("num_expert_shared", "n_shared_expert"),
    ),
    "dense first layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "groups": ("n_group", "num_expert_group", "n_expert_groups"),
    "groups per token": ("topk_group", "num_limited_groups"),
    "positions": ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions"),
}
LARGEST = {
    "layers": MAX_LAYERS,
    "vocabulary": MAX_TOKENS,
    "positions": MAX_POSITIONS,
    **dict.fromkeys(("experts", "experts per token", "shared experts", "groups", "groups per token"), MAX_EXPERTS),
}
MAY_BE_ZERO = ("shared width", "shared experts", "dense first layers", "groups", "groups per token")


class Keys:
    """One config and what was asked of it. `known`: keys that were looked at, be they there or not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.known: set[str] = set()

    def raw(self, key: str) -> Any:
        self.known.add(key)
        return self.config.get(key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_WIDTH) -> int:
        """The number under one key; of a list, one value for each layer, the most frequent."""
        value = self.raw(key)
        if value is None:
            if default is not None:
                return default
            raise CheckpointError(
                f"config.json: {key} is missing: copy it from the model's publisher, or give --model-set {key}=N"
            )
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            value = max(set(value), key=lambda each: (value.count(each), each))
        if wrong := whole(least=least, most=most).wrong(value):
            raise CheckpointError(
                f"config.json: {key} = {brief(value)}: {wrong}: correct it, or give --model-set {key}=N"
            )
        return int(value)

    def optional(self, key: str, *, least: int = 1, most: int = MAX_WIDTH) -> int | None:
        """The number under one key; None where it is not there."""
        return None if self.raw(key) is None else self.whole(key, least=least, most=most)

    def has(self, what: str) -> bool:
        return self._spelled(what) is not None

    def get(self, what: str, default: int | None = None) -> int:
        """The number that `what` names in `SPELLINGS`."""
        key = self._spelled(what)
        if key is None:
            if default is not None:
                return default
            names = SPELLINGS[what]
            raise CheckpointError(
                f"config.json: none of {', '.join(names)} is there: the {what} of this model are unknown: "
                f"give --model-set {names[0]}=N"
            )
        return self.whole(key, least=0 if what in MAY_BE_ZERO else 1, most=LARGEST.get(what, MAX_WIDTH))

    def _spelled(self, what: str) -> str | None:
        self.known.update(SPELLINGS[what])
        return next((key for key in SPELLINGS[what] if self.config.get(key) is not None), None)


Flags = tuple[bool, ...]
STATE_KINDS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "kda", "linear")
WINDOW_KINDS = ("sliding_attention", "chunked_attention", "sliding_window", "local_attention")


def moe_layers(keys: Keys, num_layers: int) -> Flags:
    """Which layers route to experts; all but the dense first ones, where nothing else is said."""
    for rule in (_by_kind, _by_name, _by_period):
        found = rule(keys, num_layers)
        if found is not None:
            return found
    first = keys.get("dense first layers", 0)
    dense = set(_numbers(keys, "mlp_only_layers") or ())
    return tuple(layer >= first and layer not in dense for layer in range(num_layers))


def _by_kind(keys: Keys, num_layers: int) -> Flags | None:
    kinds = keys.raw("mlp_layer_types")
    if kinds is None:
        flags = keys.raw("moe_layer_freq")
        kinds = ["sparse" if flag else "dense" for flag in flags] if isinstance(flags, list) else None
    return None if kinds is None else _flags("mlp_layer_types", kinds, num_layers, lambda kind: kind != "dense")


def _by_name(keys: Keys, num_layers: int) -> Flags | None:
    """Numbers of the layers that route: Llama-4's list, Step-3's text with commas."""
    for name in ("moe_layers", "moe_layers_enum"):
        listed = _numbers(keys, name)
        if listed is not None:
            return tuple(layer in set(listed) for layer in range(num_layers))
    return None


def _by_period(keys: Keys, num_layers: int) -> Flags | None:
    """Every n-th layer, from an offset on: Qwen's, Llama-4's, Jamba's, DeepSeek's and ERNIE's names for it."""
    first = keys.get("dense first layers", 0)
    last = keys.whole("moe_layer_end_index", num_layers - 1, least=-1, most=MAX_LAYERS)
    dense = set(_numbers(keys, "mlp_only_layers") or ())
    for name, offset_name, offset in (
        ("decoder_sparse_step", "", -1),
        ("interleave_moe_layer_step", "", -1),
        ("expert_layer_period", "expert_layer_offset", 0),
        ("moe_layer_interval", "", -1),
        ("moe_layer_freq", "", 0),
        ("moe_every_n_layers", "", -1),
    ):
        if keys.raw(name) is None:
            continue
        every = keys.whole(name, most=MAX_LAYERS)
        start = keys.whole(offset_name, offset, least=0, most=MAX_LAYERS) if offset_name else offset
        within = range(first, (num_layers if last < 0 else last + 1))
        return tuple(
            layer in within and layer not in dense and (layer - start) % every == 0 for layer in range(num_layers)
        )
    return None


def state_layers(keys: Keys, num_layers: int) -> Flags:
    """Which layers have a state in place of keys and values."""
    kinds = layer_types(keys)
    if kinds is not None:
        return _flags("layer_types", kinds, num_layers, lambda kind: kind in STATE_KINDS)
    listed = keys.raw("attn_type_list")  # MiniMax-M1 and MiniMax-Text-01: 0 is linear
    if listed is not None:
        return _flags("attn_type_list", listed, num_layers, lambda kind: kind == 0)
    linear = keys.raw("linear_attn_config")  # Kimi-Linear: layers counted from 1
    if isinstance(linear, dict) and isinstance(linear.get("kda_layers"), list):
        return tuple(layer + 1 in linear["kda_layers"] for layer in range(num_layers))
    if keys.raw("attn_layer_period") is not None:
        every = keys.whole("attn_layer_period", most=MAX_LAYERS)
        offset = keys.whole("attn_layer_offset", 0, least=0, most=MAX_LAYERS)
        return tuple(layer % every != offset for layer in range(num_layers))
    if keys.raw("full_attention_interval") is not None:
        every = keys.whole("full_attention_interval", most=MAX_LAYERS)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    return (False,) * num_layers


def windowed_layers(keys: Keys, num_layers: int) -> Flags:
    """Which layers see a window only; all where the config does not distinguish layers."""
    kinds = layer_types(keys)
    if kinds is not None:
        return _flags("layer_types", kinds, num_layers, lambda kind: kind in WINDOW_KINDS)
    if keys.raw("no_rope_layers") is not None:  # Llama-4: the layers without rotation see everything
        return _flags("no_rope_layers", keys.raw("no_rope_layers"), num_layers, bool)
    if keys.raw("sliding_window_pattern") is not None:
        every = keys.whole("sliding_window_pattern", most=MAX_LAYERS)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    return ()


def layer_types(keys: Keys) -> Sequence[object] | None:
    for name in ("layer_types", "layers_block_type"):
        kinds = keys.raw(name)
        if isinstance(kinds, (list, tuple)):
            return kinds
    return None


def _numbers(keys: Keys, name: str) -> list[int] | None:
    value = keys.raw(name)
    if isinstance(value, str):
        value = [int(part) if part.strip().isdecimal() else part for part in value.split(",")]
    if value is None or value == []:
        return None if name != "mlp_only_layers" else []
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise CheckpointError(f"config.json: {name} = {brief(value)}: numbers of layers are needed: correct it")
    return value


def _flags(name: str, kinds: object, num_layers: int, holds: Callable[[object], bool]) -> Flags:
    """One flag a layer; lists that also name layers for predicting several tokens are longer, and cut."""
    if not isinstance(kinds, (list, tuple)) or len(kinds) < num_layers:
        raise CheckpointError(
            f"config.json: {name} = {brief(kinds)}: a list with one entry for each of {num_layers} layers is needed: "
            f"correct it, or num_hidden_layers"
        )
    return tuple(holds(kind) for kind in kinds[:num_layers])


def state_spec(keys: Keys, layers: tuple[bool, ...], hidden: int, heads: int, head_dim: int) -> StateSpec | None:
    """None where no layer has a state."""
    if not any(layers):
        return None
    for key, kind in (
        ("mamba_n_heads", _mamba2),
        ("mamba_d_state", _mamba),
        ("linear_num_value_heads", _gated_delta),
        ("linear_attn_config", _kimi_delta),
        ("conv_L_cache", _short_convolution),
    ):
        if keys.raw(key) is not None:
            return kind(keys, layers, hidden)
    if keys.raw("attn_type_list") is None and keys.raw("linear_attn_alpha_factor") is None:
        raise CheckpointError(
            f"config.json: {sum(layers)} layers have no keys and values, and no known key says what they have: "
            f"give --model-set mamba_n_heads=N (and mamba_d_head, mamba_d_state), or linear_num_value_heads=N (and "
            f"linear_num_key_heads, linear_key_head_dim, linear_value_head_dim)"
        )
    width = heads * head_dim  # lightning attention: queries, keys, values and a gate as wide as all heads
    return StateSpec(layers=layers, in_width=4 * width, out_width=width, elements=width * head_dim, rest=width)


def _mamba(keys: Keys, layers: tuple[bool, ...], hidden: int) -> StateSpec:
    inner = keys.whole("mamba_expand", 2) * hidden
    size, taps = keys.whole("mamba_d_state"), keys.whole("mamba_d_conv", 4)
    rank = -(-hidden // 16) if keys.raw("mamba_dt_rank") == "auto" else keys.whole("mamba_dt_rank", -(-hidden // 16))
    inside = inner * (rank + 2 * size) + rank * inner  # from the inner width to step, input and output, and back
    rest = inside + inner * (taps + size + 3) + rank + 2 * size
    return StateSpec(layers=layers, in_width=2 * inner, out_width=inner, elements=inner * (size + taps), rest=rest)


def _mamba2(keys: Keys, layers: tuple[bool, ...], hidden: int) -> StateSpec:
    heads, size, taps = keys.whole("mamba_n_heads"), keys.whole("mamba_d_state"), keys.whole("mamba_d_conv", 4)
    inner = keys.whole("mamba_expand", 2) * hidden
    if keys.raw("mamba_d_head") not in (None, "auto"):
        inner = heads * keys.whole("mamba_d_head")
    mixed = inner + 2 * keys.whole("mamba_n_groups", 1) * size
    rest = mixed * (taps + 1) + 3 * heads + inner
    elements = inner * size + mixed * taps
    return StateSpec(layers=layers, in_width=inner + mixed + heads, out_width=inner, elements=elements, rest=rest)


def _gated_delta(keys: Keys, layers: tuple[bool, ...], hidden: int) -> StateSpec:
    heads, width = keys.whole("linear_num_value_heads"), keys.whole("linear_value_head_dim")
    key_dim, taps = keys.whole("linear_key_head_dim"), keys.whole("linear_conv_kernel_dim", 4)
    mixed = 2 * keys.whole("linear_num_key_heads") * key_dim + heads * width
    return StateSpec(
        layers=layers,
        in_width=mixed + heads * width + 2 * heads,
        out_width=heads * width,
        elements=heads * key_dim * width + mixed * taps,
        rest=mixed * taps + 2 * heads + width,
    )


def _kimi_delta(keys: Keys, layers: tuple[bool, ...], hidden: int) -> StateSpec:
    own = Keys(keys.raw("linear_attn_config"))
    heads, width, taps = own.whole("num_heads"), own.whole("head_dim"), own.whole("short_conv_kernel_size", 4)
    inner = heads * width
    low_rank = 2 * width * inner  # decay and gate, each through a row as narrow as a head
    return StateSpec(
        layers=layers,
        in_width=3 * inner + heads + 2 * width,
        out_width=inner,
        elements=inner * width + 3 * inner * taps,
        rest=low_rank + 3 * inner * taps + inner + heads + width,
    )


def _short_convolution(keys: Keys, layers: tuple[bool, ...], hidden: int) -> StateSpec:
    taps = keys.whole("conv_L_cache")
    return StateSpec(layers=layers, in_width=3 * hidden, out_width=hidden, elements=hidden * taps, rest=hidden * taps)
