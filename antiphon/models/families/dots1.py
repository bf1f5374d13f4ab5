"""dots.llm1 (`dots1`): DeepSeek-V3's experts under Qwen3's attention."""

from antiphon.models.families import config_keys as keys
from antiphon.models.families.deepseek import moe_spec, v3_router
from antiphon.specs.model import AttentionSpec, ModelSpec


def spec_from_config(config: keys.Config) -> ModelSpec:
    num_heads = keys.required_int(config, "num_attention_heads")
    head_dim = keys.optional_int(config, "head_dim", keys.required_int(config, "hidden_size") // num_heads)
    bias = bool(config.get("attention_bias"))
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=keys.optional_int(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=keys.rope(config, head_dim, theta=10_000.0),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=keys.uniform_window(config),
    )
    return moe_spec(config, attention, v3_router(config, normalize=False))
