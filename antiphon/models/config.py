"""From a checkpoint's `config.json` to a `ModelSpec`, by the family that knows its keys."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.models.checkpoint_folder import instead_of_config
from antiphon.models.families import (
    config_keys,
    dbrx,
    deepseek,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from antiphon.models.families.config_values import RULES, check_value, check_values
from antiphon.models.families.defaults import completed
from antiphon.models.families.refused import refusal
from antiphon.models.files import read_json
from antiphon.models.names import TensorNames
from antiphon.models.quantization import check_quantization, refuse_gguf
from antiphon.models.rope_scaling import with_rope_scaling
from antiphon.models.shard_index import evidence_of, stored_dtype
from antiphon.models.spec_checks import check_spec, check_tokens
from antiphon.specs.model import ModelSpec


@dataclass(frozen=True)
class Family:
    """What one family file provides: how to read its config and how it names its tensors."""

    spec_from_config: Callable[[dict[str, Any]], ModelSpec]
    names: TensorNames


FAMILIES = {
    "dbrx": Family(dbrx.spec_from_config, dbrx.NAMES),
    "deepseek": Family(deepseek.v1_spec_from_config, deepseek.NAMES),
    "deepseek_v2": Family(deepseek.v2_spec_from_config, deepseek.NAMES),
    "deepseek_v3": Family(deepseek.v3_spec_from_config, deepseek.NAMES),
    "dots1": Family(dots1.spec_from_config, deepseek.NAMES),
    "ernie4_5_moe": Family(ernie4_5_moe.spec_from_config, ernie4_5_moe.NAMES),
    "glm4_moe": Family(glm4_moe.spec_from_config, deepseek.NAMES),
    "glm4_moe_lite": Family(deepseek.v3_spec_from_config, deepseek.NAMES),
    "gpt_oss": Family(gpt_oss.spec_from_config, gpt_oss.NAMES),
    "granitemoe": Family(granitemoe.spec_from_config, granitemoe.NAMES),
    "granitemoeshared": Family(granitemoe.spec_from_config, granitemoe.NAMES),
    "kimi_k2": Family(deepseek.v3_spec_from_config, deepseek.NAMES),
    "minimax_m2": Family(minimax_m2.spec_from_config, minimax_m2.NAMES),
    "mixtral": Family(mixtral.spec_from_config, mixtral.NAMES),
    "olmoe": Family(olmoe.spec_from_config, olmoe.NAMES),
    "phimoe": Family(phimoe.spec_from_config, phimoe.NAMES),
    "qwen2_moe": Family(qwen2_moe.spec_from_config, qwen2_moe.NAMES),
    "qwen3_moe": Family(qwen3_moe.spec_from_config, qwen3_moe.NAMES),
    "solar_open": Family(glm4_moe.spec_from_config, deepseek.NAMES),
}


def load_model_spec(path: str | Path, rope_scaling: str = "") -> ModelSpec:
    """Read a checkpoint folder's `config.json`, or that file itself. `CheckpointError` for anything unsupported.
    `rope_scaling`: JSON in place of the file's own (`models/rope_scaling`).

    `generation_config.json` beside it, if there, adds tokens that end a text (Qwen lists two). Weights are looked at
    for their dtype where no key says it, and to say what they hold where a size is beyond all bounds.
    """
    file = config_file(path)
    config = with_rope_scaling(read_config(path), rope_scaling)
    if config_keys.stated_dtype(config) is None and (stored := stored_dtype(file.parent)) is not None:
        config = config | {"dtype": stored}
    spec = model_spec(config, lambda names: evidence_of(file.parent, names))
    endings = stated_endings(config, file.parent)
    check_tokens("generation_config.json: eos_token_id", endings, spec.vocab_size)
    return replace(spec, eos_token_ids=endings) if endings else spec


def stated_endings(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The tokens that end a text by `generation_config.json` and by this `config.json`, in this order."""
    file = folder / "generation_config.json"
    generation = read_json(file) if os.path.lexists(file) else {}
    if generation.get("eos_token_id") is not None:
        check_value(f"{file.name}: eos_token_id", generation["eos_token_id"], RULES["eos_token_id"])
    endings = (*config_keys.tokens(generation, "eos_token_id"), *config_keys.tokens(config, "eos_token_id"))
    return tuple(dict.fromkeys(endings))


def model_spec(config: Mapping[str, Any], evidence: Callable[[TensorNames], str] = lambda _: "") -> ModelSpec:
    """The model that a parsed `config.json` describes. `CheckpointError` for anything unsupported or impossible.

    `evidence` tells what the weights say of a size that is beyond all bounds; it is asked for nothing else."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise refusal(config, sorted(FAMILIES))
    family = FAMILIES[model_type]
    config = completed(config)
    check_values(config, lambda: evidence(family.names))
    check_quantization(config)
    spec = family.spec_from_config(config)
    check_spec(spec)
    return spec


def refuse_other_model(config: Mapping[str, Any], spec: ModelSpec, what: str) -> None:
    """`UserError` if `config`, from `what`, is of a model with other sizes than `spec`."""
    theirs = model_spec(config)
    for name in ("num_layers", "hidden_size", "vocab_size", "moe_layers", "router", "feed_forward", "attention"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{what} is of another model, with another {name}: measure this one with antiphon profile")


def config_file(path: str | Path) -> Path:
    path = Path(path)
    try:
        file = path / "config.json" if path.is_dir() else path
        if file.suffix == ".gguf" or not os.path.lexists(file):
            refuse_gguf(path)
    except OSError:  # reading it says what is wrong
        return path
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a checkpoint folder's `config.json`, or of that file itself. `CheckpointError` if it is damaged."""
    file = config_file(path)
    return read_json(file, instead_of_config(file.parent if file != Path(path) else file))


def tensor_names(spec: ModelSpec) -> TensorNames:
    return FAMILIES[spec.family].names
