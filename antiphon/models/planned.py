"""The model of a plan: what runs is read by its family, everything else by the generic reader of sizes.

`--model-set key=value` gives or replaces keys of `config.json`, before it is read; a dotted key goes into a
section. The config that a plan keeps has them. A model with pictures or sound around it is planned as its text part.
Rejected: planning only what runs. A planner needs counts, not weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError, UserError
from antiphon.models.config import TEXT_KEYS, load_model_spec, model_spec, read_config
from antiphon.models.counted import counted_model
from antiphon.models.families.defaults import assumed
from antiphon.models.families.readers import FAMILIES
from antiphon.models.files import brief
from antiphon.models.spec_checks import check_spec
from antiphon.specs.model import ModelSpec

QUANTIZED = ("quantization_config", "compression_config")
_NOT_SIZES = {"eos_token_ids", "bos_token_id", "dtype", "max_position"}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model to plan with. `config`: what it was read from; `notes`: what a reader of the plan has to know of it."""

    spec: ModelSpec
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def load_planned_model(path: str | Path, changes: Sequence[str] = ()) -> PlannedModel:
    """From a checkpoint folder or its `config.json`; `changes` are texts of the form ``key=value``."""
    config = read_config(path)
    if not changes and _family(config) in FAMILIES and not any(config.get(key) for key in QUANTIZED):
        return PlannedModel(spec=load_model_spec(path), config=config, notes=_assumed(config))
    return planned_model(changed(config, changes))


def planned_model(config: Mapping[str, Any]) -> PlannedModel:
    """`CheckpointError` where a size is unknown or impossible."""
    config, notes = _text_part(config)
    notes += _stored(config)
    plain = {key: value for key, value in config.items() if key not in QUANTIZED}
    if _family(config) in FAMILIES:
        return PlannedModel(spec=model_spec(plain), config=dict(config), notes=notes + _assumed(config))
    spec, unread = counted_model(plain)
    check_spec(spec)
    name = brief(config.get("model_type"))
    notes += (f"model_type = {name} does not run here: its sizes were counted from config.json, to be planned",)
    if unread:
        notes += (f"of config.json not counted, because nobody knows here what it is: {', '.join(unread)}",)
    return PlannedModel(spec=spec, config=dict(config), notes=notes)


def check_planned_for(spec: ModelSpec, config: Mapping[str, Any], name: str, file: Path) -> None:
    """`UserError` if the plan in `file`, made for the model `name` of this `config`, is not one for `spec`."""
    if not config:
        raise UserError(f"{file} does not say which config.json it was made for: make it anew with antiphon plan")
    try:
        planned = model_spec(config)
    except UserError as error:
        raise UserError(f"{file} holds a model_config that cannot be read: {error}") from error
    if found := _first_difference(planned, spec, ""):
        where, theirs, ours = found
        raise UserError(
            f"{file} is for {name} with {where} {theirs}, this model has {ours}: use that model, or plan for this one"
        )


def _first_difference(planned: Any, actual: Any, path: str) -> tuple[str, Any, Any] | None:
    """(name, planned value, this model's) of the first field that decides sizes and differs."""
    for field in fields(planned):
        if field.name in _NOT_SIZES:
            continue
        theirs, ours = getattr(planned, field.name), getattr(actual, field.name)
        if theirs == ours:
            continue
        if hasattr(theirs, "__dataclass_fields__") and type(theirs) is type(ours):
            if (found := _first_difference(theirs, ours, f"{path}{field.name}.")) is not None:
                return found
            continue
        return f"{path}{field.name}", theirs, ours
    return None


def changed(config: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """`config` with each ``key=value``; values are written as in JSON, and what is not JSON is a text."""
    result = json.loads(json.dumps(dict(config)))
    for text in changes:
        key, equals, written = text.partition("=")
        if not (key.strip() and equals and written.strip()):
            raise UserError(f"--model-set {text!r}: write a key and a value, for example num_experts=128")
        *sections, last = key.strip().split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"--model-set {text!r}: {section} is {brief(place)}, not a section with keys")
        try:
            place[last] = json.loads(written)
        except ValueError:
            place[last] = written.strip()
    return dict(result)


def _family(config: Mapping[str, Any]) -> str:
    """The `model_type`; empty where there is none, or it is no text."""
    name = config.get("model_type")
    return name if isinstance(name, str) else ""


def _assumed(config: Mapping[str, Any]) -> tuple[str, ...]:
    keys = assumed(config)
    return (
        (f"config.json does not say {', '.join(keys)}: taken from the defaults of {_family(config)}",) if keys else ()
    )


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    for key in TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and _family(config) not in FAMILIES:
            shared = ("tie_word_embeddings", "torch_dtype", *QUANTIZED)
            outer = {name: config[name] for name in shared if name in config}
            text, notes = _text_part(outer | dict(inner))
            return text, (f"only the text part of {brief(config.get('model_type'))} is planned", *notes)
    return config, ()


def _stored(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the checkpoint's weights are stored in, where they are quantised: precision is the plan's own choice."""
    found = next((config[key] for key in QUANTIZED if config.get(key)), None)
    if found is None:
        return ()
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: quantization_config = {brief(found)}: an object is needed: correct it")
    method = found.get("quant_method") or found.get("quant_algo") or "unknown"
    bits = f" with {found['bits']} bits" if type(found.get("bits")) is int else ""
    return (f"the checkpoint is quantised ({method}{bits}); the plan is for the formats that --precision names",)
