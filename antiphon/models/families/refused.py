"""Models that people bring and that do not run: what each has that we lack, and which model to use instead.

A wrapper is a text model with vision or audio around it. Rejected: running its text part alone, which would answer a
request with a picture as if there were none.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.files import brief

LACKING = {
    "afmoe": ("windows in some layers and gated attention", "Qwen3-30B-A3B"),
    "bailing_hybrid": ("linear attention in some layers", "Qwen3-30B-A3B"),
    "deepseek_v32": ("sparse attention, whose indexer picks the tokens to look at", "DeepSeek-V3.1"),
    "deepseek_v4": ("compressed and sparse attention", "DeepSeek-V3.1"),
    "exaone_moe": ("windows in some layers", "Qwen3-235B-A22B"),
    "flex_olmo": ("norms after attention and experts instead of before", "OLMoE-1B-7B"),
    "glm_moe_dsa": ("sparse attention, whose indexer picks the tokens to look at", "GLM-4.6"),
    "granitemoehybrid": ("Mamba layers", "granite-3.1-3b-a800m"),
    "hunyuan_v1_moe": ("norms of queries and keys after their rotation", "Qwen3-30B-A3B"),
    "jamba": ("Mamba layers", "Mixtral-8x7B"),
    "kimi_linear": ("linear attention in most layers", "Kimi-K2"),
    "llama4_text": ("chunked attention and experts whose inputs are scaled", "Mixtral-8x7B"),
    "longcat_flash": ("experts that compute nothing and two attentions a layer", "DeepSeek-V3"),
    "mimo_v2_flash": ("attention sinks and windows in some layers", "MiniMax-M2"),
    "minimax": ("linear attention in most layers", "MiniMax-M2"),
    "nemotron_h": ("Mamba layers", "Qwen3-30B-A3B"),
    "qwen3_next": ("linear attention in most layers", "Qwen3-30B-A3B"),
    "qwen3_5_moe_text": ("linear attention in most layers", "Qwen3-30B-A3B"),
}
TEXT_MODELS = {
    "ernie4_5_vl_moe": "ERNIE-4.5-21B-A3B-PT",
    "glm4v_moe": "GLM-4.5-Air",
    "kimi_k25": "Kimi-K2-Instruct",
    "qwen3_omni_moe": "Qwen3-30B-A3B",
    "qwen3_vl_moe": "Qwen3-30B-A3B",
}
TEXT_KEYS = ("text_config", "thinker_config", "language_config", "llm_config")
OTHER_PARTS = {"vision": "vision", "audio": "audio", "talker": "speech"}


def refusal(config: Mapping[str, Any], supported: list[str]) -> CheckpointError:
    """Why a model of a type that is not among `supported` does not run, and what does."""
    name = config.get("model_type")
    if isinstance(name, str) and name in LACKING:
        what, instead = LACKING[name]
        return CheckpointError(f"config.json: model_type = {name!r} is not supported, it has {what}: use {instead}")
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), None)
    if text is not None:
        return _wrapper(config, brief(name), text)
    known = ", ".join(supported)
    known = ", ".join(supported)
    return CheckpointError(f"config.json: model_type = {brief(name)} is not supported: use one of {known}")


def _wrapper(config: Mapping[str, Any], name: str, text: Mapping[str, Any]) -> CheckpointError:
    parts = [part for key, part in OTHER_PARTS.items() if any(key in other for other in config)]
    instead = TEXT_MODELS.get(name.strip("'"), "a text-only model, whose config.json has no text_config")
    return CheckpointError(
        f"config.json: model_type = {name} is not supported, it is a text model "
        f"({text.get('model_type', 'unknown')}) with {' and '.join(parts) or 'other parts'} around it and only text "
        f"models run: use {instead}"
    )
