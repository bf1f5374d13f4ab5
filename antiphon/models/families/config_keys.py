"""Reading `config.json`: the spellings shared by families, with errors that name key, value and what is supported."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.logging import get_logger
from antiphon.models.checkpoint_folder import brief
from antiphon.models.families.config_values import MAX_POSITIONS, ROPE_RULES
from antiphon.specs.checked import parse_json
from antiphon.specs.model import RopeSpec

_log = get_logger("models")
Config = dict[str, Any]
Value = TypeVar("Value", bound=str)

Scaling = Literal["none", "linear", "dynamic", "yarn", "longrope", "llama3"]
ROPE_TYPES: dict[str, Scaling] = {
    "default": "none",
    "none": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "llama3": "llama3",
}
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OWN_ROPE = ("rope_theta", "partial_rotary_factor")
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)
_SHORT_DTYPES = {"float": "float32", "half": "float16", "double": "float64"}  # as torch has them, too
LAYER_TYPES = ("sliding_attention", "full_attention")
_PARTLY_ROTATED = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "solar_open")  # that may rotate a part of each head


def required_int(config: Config, *keys: str) -> int:
    """The first of `keys` that is present, a positive whole number."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {key} = {brief(value)}: a whole number of at least 1 is needed")
        return value
    raise CheckpointError(f"config.json: {' or '.join(keys)} is missing: copy it from the model's publisher")


def optional_int(config: Config, key: str, default: int) -> int:
    return default if config.get(key) is None else required_int(config, key)


def optional_float(config: Config, key: str) -> float | None:
    value = config.get(key)
    return None if value is None else float(value)


def one_of(config: Config, key: str, supported: Sequence[Value], default: Value) -> Value:
    """The value of `key` if it is supported; `default` if it is absent."""
    value = config.get(key)
    if value is None:
        return default
    if value not in supported:
        raise unsupported(key, value, ", ".join(map(repr, supported)))
    return cast(Value, value)


def unsupported(key: str, value: object, supported: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key} = {brief(value)} is not supported: use a model with {supported}")


def require_absent(config: Config, key: str, *harmless: object) -> None:
    """Refuse a feature the decoder lacks, unless its value switches it off."""
    value = config.get(key)
    if value is not None and value is not False and value not in harmless:
        raise CheckpointError(f"config.json: {key} = {brief(value)} is not supported: use a model without it")


def activation(config: Config, key: str = "hidden_act") -> Literal["silu", "gelu"]:
    return one_of(config, key, ("silu", "gelu"), "silu")


def sliding_window(config: Config) -> int | None:
    return config.get("sliding_window") or None


def sparse_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Qwen's rule: every `decoder_sparse_step`-th layer routes, but for those named in `mlp_only_layers`."""
    step = optional_int(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def uniform_window(config: Config) -> int | None:
    """The sliding window of all layers, None for full attention, where `layer_types` may say it layer by layer."""
    kinds = set(config.get("layer_types") or ())
    if len(kinds) > 1:
        raise unsupported("layer_types", sorted(map(str, kinds)), "one kind of attention in all layers")
    return sliding_window(config) if kinds == {"sliding_attention"} else None


def rope(
    config: Config,
    head_dim: int,
    *,
    interleaved: bool = False,
    max_position: int | None = None,
    partial: float = 1.0,
) -> RopeSpec:
    """Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (published).

    `partial`: the part of each head that is rotated, where no key says it.
    """
    scaling, numbers = _rope_numbers(config)
    if unused := [key for key, value in numbers.items() if value is not None and key not in _known_keys(scaling)]:
        _log.warning("config.json: %s means nothing to the scaling %s: left out", brief(unused[0]), scaling)
    if max_position is None:
        max_position = required_int(config, "max_position_embeddings")
    theta = float(numbers.pop("rope_theta", None) or config["rope_theta"])
    stated = numbers.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if stated not in (None, 1) and config["model_type"] not in _PARTLY_ROTATED:
        raise unsupported("partial_rotary_factor", stated, "1 in this family, whose other readers leave it out")
    partial = stated or partial
    original = _original(config, numbers)
    numbers.pop("original_max_position_embeddings", None)
    return RopeSpec(
        dim=int(head_dim * float(partial)),
        theta=theta,
        interleaved=interleaved,
        scaling=scaling,
        parameters={key: value for key, value in numbers.items() if _is_number(value) and scaling != "none"},
        max_position=max_position,
        original_max_position=int(original or max_position),
    )


def _rope_numbers(config: Config) -> tuple[Scaling, dict[str, Any]]:
    """The scaling and its numbers. Where a file has both spellings, `rope_scaling` was added by hand: it counts, but
    for the base and the rotated part of a head, if it is silent about them."""
    numbers = dict(config.get("rope_parameters") or {})
    if added := config.get("rope_scaling"):
        numbers = {key: numbers[key] for key in _OWN_ROPE if key in numbers} | added
    stated = numbers.pop("rope_type", None) or numbers.get("type")
    numbers.pop("type", None)
    if stated is None and numbers.get("factor") not in (None, 1):
        name = "rope_scaling" if added else "rope_parameters"
        raise CheckpointError(
            f"config.json: {name} has factor = {brief(numbers['factor'])} and no rope_type: add the type, such as "
            f"yarn, or remove the factor"
        )
    kind = str(stated or "default")
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope_type = {brief(kind)} is not supported: use one of {', '.join(sorted(ROPE_TYPES))}"
        )
    scaling = ROPE_TYPES[kind]
    if missing := [key for key in ROPE_NUMBERS[scaling] if numbers.get(key) is None]:
        raise CheckpointError(
            f"config.json: rope_type = {brief(kind)} needs {', '.join(missing)}: add it to rope_parameters"
        )
    return scaling, numbers


def _original(config: Config, numbers: dict[str, Any]) -> int | None:
    """The positions of training before the stretch, where the file says it."""
    return config.get("original_max_position_embeddings") or numbers.get("original_max_position_embeddings")


def _context(config: Config, max_position: int) -> int:
    """The positions a model is good for: YaRN is added by hand to files whose `max_position_embeddings` stays."""
    scaling, numbers = _rope_numbers(config)
    original = _original(config, numbers)
    if scaling != "yarn" or original is None:
        return max_position
    stretched = int(numbers["factor"] * original)
    if stretched > MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: factor = {numbers['factor']} for {original} positions: at most {MAX_POSITIONS:,} positions "
            f"are supported: lower it"
        )
    return max(max_position, stretched)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context's stretch (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _is_number(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, (int, float)) for each in value)
    return isinstance(value, (int, float))


def grouped_query(config: Config, *, interleaved: bool = False, rotary_dim_key: str = "") -> dict[str, Any]:
    """The fields of `AttentionSpec` that most families read from the same keys. `interleaved` as in `rope`;
    `rotary_dim_key` may state the rotated width."""
    num_heads = required_int(config, "num_attention_heads")
    head_dim = optional_int(config, "head_dim", required_int(config, "hidden_size") // num_heads)
    partial = optional_int(config, rotary_dim_key, head_dim) / head_dim if rotary_dim_key else 1.0
    return {
        "num_heads": num_heads,
        "num_kv_heads": optional_int(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "rope": rope(config, head_dim, interleaved=interleaved, partial=partial),
    }


def sizes(config: Config) -> dict[str, Any]:
    """The sizes of `ModelSpec` that all families but DBRX read from the same keys."""
    return {
        "vocab_size": required_int(config, "vocab_size"),
        "hidden_size": required_int(config, "hidden_size"),
        "num_layers": required_int(config, "num_hidden_layers"),
    }


def shared_fields(config: Config, *, max_position_key: str = "max_position_embeddings") -> dict[str, Any]:
    """The fields of `ModelSpec` that most families read from the same keys."""
    return {
        "norm_eps": float(config["rms_norm_eps"]),
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
        "max_position": _context(config, required_int(config, max_position_key)),
        "eos_token_ids": tokens(config, "eos_token_id"),
        "bos_token_id": next(iter(tokens(config, "bos_token_id")), None),
        "dtype": dtype(config),
    }


def tokens(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing."""
    value = config.get(key)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def dtype(config: Config) -> Dtype:
    name = stated_dtype(config) or "float32"
    name = "float32" if name == "float64" else name  # as research code saves: nothing is served wider
    return one_of({"dtype": name}, "dtype", DTYPES, "bfloat16")


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """What `config.json` says its weights are stored in; None where it leaves that to them, or names float8, which
    matrices are in and nothing else."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")
    return None if name == "auto" or name.startswith("float8_") else _SHORT_DTYPES.get(name, name)


# --- `--rope-scaling`: another long-context scaling than `config.json` has, for one run
#
# The text is what would stand under `rope_scaling` (transformers 4: `type`) or `rope_parameters` (5: `rope_type`). It
# takes the place of the file's own, whose rotary base and rotated part stay if the text is silent about them; then the
# family reads it as if the file had it. A key that the scaling has no use for is refused: a file may carry one along,
# which the log names, an option is written for its effect. Rejected: an option for each number, of which a scaling uses
# some.

_OPTION = "--rope-scaling"
_EXAMPLE = """'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'"""
_TRAINED = "original_max_position_embeddings"
_FURTHER: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": (),
    "dynamic": (),
    "yarn": (_TRAINED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (_TRAINED, "factor", "attention_factor", "short_mscale", "long_mscale"),
    "llama3": (_TRAINED,),
}


def _known_keys(scaling: Scaling) -> tuple[str, ...]:
    return (*ROPE_NUMBERS[scaling], *_FURTHER[scaling], *_OWN_ROPE)


def check_rope_scaling(text: str) -> None:
    """`UserError` unless the text is a scaling that a model may have; whether this model may, its config tells."""
    if text:
        _parse_scaling(text)


def with_rope_scaling(config: Mapping[str, Any], text: str) -> dict[str, Any]:
    """`config` with the scaling of the text in place of its own; as it is where the text is empty."""
    result = dict(config)
    if not text:
        return result
    scaling = _parse_scaling(text)
    kept: dict[str, Any] = {}
    for section in (result.get("rope_parameters"), result.get("rope_scaling")):
        kept |= {key: section[key] for key in _OWN_ROPE if key in section} if isinstance(section, Mapping) else {}
    if _TRAINED in scaling:
        result.pop(_TRAINED, None)
    return result | {"rope_parameters": kept | scaling, "rope_scaling": None}


def _parse_scaling(text: str) -> dict[str, Any]:
    try:
        scaling = parse_json(text.encode(), unique_keys=True)
    except ValueError as error:
        raise UserError(f"{_OPTION} {brief(text)}: not valid JSON ({error}): write {_EXAMPLE}") from error
    for name in ("rope_parameters", "rope_scaling"):  # copied with its name
        if isinstance(scaling, dict) and list(scaling) == [name]:
            scaling = scaling[name]
    if not isinstance(scaling, dict):
        raise UserError(f"{_OPTION} {brief(text)}: an object is needed: write {_EXAMPLE}")
    kind = scaling.pop("rope_type", None) or scaling.get("type")
    scaling.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"{_OPTION}: rope_type = {brief(kind)}: use one of {', '.join(sorted(ROPE_TYPES))}")
    form = ROPE_TYPES[kind]
    known = _known_keys(form)
    if unknown := [key for key in scaling if key not in known]:
        raise UserError(f"{_OPTION}: {brief(unknown[0])} means nothing to {kind}: it has {', '.join(known)}")
    if missing := [key for key in ROPE_NUMBERS[form] if scaling.get(key) is None]:
        raise UserError(f"{_OPTION}: {kind} needs {', '.join(missing)}: add it")
    for key, value in scaling.items():
        if value is not None and (wrong := ROPE_RULES[key].wrong(value)):
            raise UserError(f"{_OPTION}: {key} = {brief(value)}: {wrong}")
    return {"rope_type": kind, **scaling}
