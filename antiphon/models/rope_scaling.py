"""`--rope-scaling`: another long-context scaling than `config.json` has, for one run.

The text is what would stand under `rope_scaling` (transformers 4: `type`) or `rope_parameters` (5: `rope_type`). It
takes the place of the file's own, whose rotary base and rotated part stay if the text is silent about them; then the
family reads it as if the file had it. A key that the scaling has no use for is refused: a file may carry one along, an
option is written for its effect.
Rejected: an option for each number, of which a scaling uses some.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.base.errors import UserError
from antiphon.models.families.config_keys import ROPE_NUMBERS, ROPE_TYPES
from antiphon.models.families.config_values import ROPE_RULES
from antiphon.models.files import brief, parse_json

OPTION = "--rope-scaling"
EXAMPLE = """'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'"""
_OWN = ("rope_theta", "partial_rotary_factor")
_TRAINED = "original_max_position_embeddings"
_FURTHER: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": (),
    "dynamic": (),
    "yarn": (_TRAINED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (_TRAINED, "factor", "attention_factor", "short_mscale", "long_mscale"),
    "llama3": (_TRAINED,),
}


def check_rope_scaling(text: str) -> None:
    """`UserError` unless the text is a scaling that a model may have; whether this model may, its config tells."""
    if text:
        _parse(text)


def with_rope_scaling(config: Mapping[str, Any], text: str) -> dict[str, Any]:
    """`config` with the scaling of the text in place of its own; as it is where the text is empty."""
    result = dict(config)
    if not text:
        return result
    scaling = _parse(text)
    kept: dict[str, Any] = {}
    for section in (result.get("rope_parameters"), result.get("rope_scaling")):
        kept |= {key: section[key] for key in _OWN if key in section} if isinstance(section, Mapping) else {}
    if _TRAINED in scaling:
        result.pop(_TRAINED, None)
    return result | {"rope_parameters": kept | scaling, "rope_scaling": None}


def _parse(text: str) -> dict[str, Any]:
    try:
        scaling = parse_json(text.encode(), unique_keys=True)
    except ValueError as error:
        raise UserError(f"{OPTION} {brief(text)}: not valid JSON ({error}): write {EXAMPLE}") from error
    for name in ("rope_parameters", "rope_scaling"):  # copied with its name
        if isinstance(scaling, dict) and list(scaling) == [name]:
            scaling = scaling[name]
    if not isinstance(scaling, dict):
        raise UserError(f"{OPTION} {brief(text)}: an object is needed: write {EXAMPLE}")
    kind = scaling.pop("rope_type", None) or scaling.get("type")
    scaling.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"{OPTION}: rope_type = {brief(kind)}: use one of {', '.join(sorted(ROPE_TYPES))}")
    form = ROPE_TYPES[kind]
    known = (*ROPE_NUMBERS[form], *_FURTHER[form], *_OWN)
    if unknown := [key for key in scaling if key not in known]:
        raise UserError(f"{OPTION}: {brief(unknown[0])} means nothing to {kind}: it has {', '.join(known)}")
    if missing := [key for key in ROPE_NUMBERS[form] if scaling.get(key) is None]:
        raise UserError(f"{OPTION}: {kind} needs {', '.join(missing)}: add it")
    for key, value in scaling.items():
        if value is not None and (wrong := ROPE_RULES[key].wrong(value)):
            raise UserError(f"{OPTION}: {key} = {brief(value)}: {wrong}")
    return {"rope_type": kind, **scaling}
