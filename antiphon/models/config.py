"""From a checkpoint's `config.json` to a `ModelSpec`, by the family that knows its keys."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.families import config_keys, dbrx, deepseek, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe
from antiphon.models.names import TensorNames
from antiphon.specs.model import ModelSpec


@dataclass(frozen=True)
class Family:
    """What one family file provides: how to read its config and how it names its tensors."""

    spec_from_config: Callable[[Mapping[str, Any]], ModelSpec]
    names: TensorNames


FAMILIES = {
    "dbrx": Family(dbrx.spec_from_config, dbrx.NAMES),
    "deepseek": Family(deepseek.v1_spec_from_config, deepseek.NAMES),
    "deepseek_v2": Family(deepseek.v2_spec_from_config, deepseek.NAMES),
    "deepseek_v3": Family(deepseek.v3_spec_from_config, deepseek.NAMES),
    "mixtral": Family(mixtral.spec_from_config, mixtral.NAMES),
    "olmoe": Family(olmoe.spec_from_config, olmoe.NAMES),
    "phimoe": Family(phimoe.spec_from_config, phimoe.NAMES),
    "qwen2_moe": Family(qwen2_moe.spec_from_config, qwen2_moe.NAMES),
    "qwen3_moe": Family(qwen3_moe.spec_from_config, qwen3_moe.NAMES),
}


def load_model_spec(path: str | Path) -> ModelSpec:
    """Read a checkpoint folder's `config.json`, or that file itself. `CheckpointError` for anything unsupported.

    `generation_config.json` beside it, if there, knows better which tokens end a text (Qwen lists two).
    """
    spec = model_spec(read_json(config_file(path)))
    generation_file = config_file(path).with_name("generation_config.json")
    if not generation_file.exists():
        return spec
    endings = config_keys.tokens(read_json(generation_file), "eos_token_id")
    return replace(spec, eos_token_ids=endings) if endings else spec


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a parsed `config.json` describes."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type = {model_type!r} is not supported: use one of {', '.join(sorted(FAMILIES))}"
        )
    _check_quantization(config)
    return FAMILIES[model_type].spec_from_config(config)


def config_file(path: str | Path) -> Path:
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"{file} is missing: give a checkpoint folder in Hugging Face format")
    return file


def read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: holds a {type(config).__name__}, not an object: download it again")
    return config


def tensor_names(spec: ModelSpec) -> TensorNames:
    return FAMILIES[spec.family].names


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Block-scaled float8 is multiplied out at load; every other quantisation is refused."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method")
    block = list(quantization.get("weight_block_size") or [])
    if method != "fp8" or block != [128, 128]:
        raise CheckpointError(
            f"config.json: quant_method = {method!r} with weight_block_size = {block} is not supported: "
            f"use a checkpoint in bfloat16, float16, float32, or fp8 with [128, 128]"
        )
