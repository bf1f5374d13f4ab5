"""GLM-4.5 and -4.6 (`glm4_moe`) and Solar-Open (`solar_open`): DeepSeek-V3's experts under grouped-query attention.

Attention: biases on q, k and v only, per-head norms where `use_qk_norm`, half of each head rotated (Solar-Open: all of
it). Multi-token-prediction layers (beyond `num_hidden_layers`) are not loaded.
"""

from antiphon.models.families import config_keys as keys
from antiphon.models.families.deepseek import moe_spec, v3_router
from antiphon.specs.model import AttentionSpec, ModelSpec


def spec_from_config(config: keys.Config) -> ModelSpec:
    attention = AttentionSpec(
        **keys.grouped_query(config),
        qk_norm="head" if config.get("use_qk_norm") else "none",
        qkv_bias=bool(config.get("attention_bias")),
    )
    return moe_spec(config, attention, v3_router(config))
