"""dots.llm1 (`dots1`): DeepSeek-V3's experts under Qwen3's attention."""

from antiphon.models.families import config_keys as keys
from antiphon.models.families.deepseek import moe_spec, v3_router
from antiphon.specs.model import AttentionSpec, ModelSpec


def spec_from_config(config: keys.Config) -> ModelSpec:
    bias = bool(config.get("attention_bias"))
    attention = AttentionSpec(
        **keys.grouped_query(config, theta=10_000.0),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=keys.uniform_window(config),
    )
    return moe_spec(config, attention, v3_router(config, normalize=False))
