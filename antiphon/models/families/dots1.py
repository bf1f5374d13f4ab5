"""dots.llm1 (`dots1`): DeepSeek-V3's experts under Qwen3's attention.

Without `layer_types`, layers from `max_window_layers` on see a window, if there is one."""

from antiphon.models.families import config_keys as keys
from antiphon.models.families.deepseek import moe_spec, v3_router
from antiphon.specs.model import AttentionSpec, ModelSpec


def spec_from_config(config: keys.Config) -> ModelSpec:
    bias = bool(config.get("attention_bias"))
    attention = AttentionSpec(
        **keys.grouped_query(config),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=keys.uniform_window(config | {"layer_types": _layer_types(config)}),
    )
    return moe_spec(config, attention, v3_router(config))


def _layer_types(config: keys.Config) -> list[str]:
    if kinds := config.get("layer_types"):
        return list(kinds)
    full = config["num_hidden_layers"] if keys.sliding_window(config) is None else config.get("max_window_layers") or 0
    return [
        "full_attention" if layer < full else "sliding_attention" for layer in range(int(config["num_hidden_layers"]))
    ]
