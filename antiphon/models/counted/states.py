"""The widths of layers with a state in place of keys and values, by the keys that tell which kind they are.

Counted from the papers and the published configs: Mamba (arXiv 2312.00752), Mamba-2 (2405.21060), gated delta rule
(2412.06464, Qwen3-Next), Kimi delta attention (2510.26692), lightning attention (2401.04658, MiniMax-01), and LFM2's
short convolutions.
"""

from antiphon.base.errors import CheckpointError
from antiphon.models.counted.keys import Keys
from antiphon.specs.model import StateSpec


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
