"""From a checkpoint's `config.json` to a `ModelSpec`, by the family that knows its keys.

Which tokens end a text, `config.json`, `generation_config.json` and the tokenizer may each say differently. A model
that was tuned to chat ends its turn with a token that often only the newest of these files knows; one that is missed
lets an answer run into the next turn. So each of them counts. Only the engine asks the tokenizer's files, once: they
may hold 20 MB. Rejected: `generation_config.json` alone, as transformers does. Many folders have none, or one that was
left behind.

`families/config_values` bounds each value before a family reads it; relations between values (`check_spec`) hold for
every family and are checked on what it made, once, where an error names what the spec says.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.logging import get_logger
from antiphon.models.checkpoint_folder import SUFFIX as SAFETENSORS
from antiphon.models.checkpoint_folder import brief, instead_of_config, open_regular, read_json
from antiphon.models.families import config_keys
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.families.config_values import MAX_WIDTH, RULES, check_value, check_values, completed
from antiphon.models.gguf.container import MAGIC, SUFFIX, gguf_files
from antiphon.models.gguf.metadata import gguf_config
from antiphon.models.quantization import check_quantization, quantization_beside
from antiphon.models.shard_index import evidence_of, stored_dtype
from antiphon.models.tensor_names import NAMES, TensorNames
from antiphon.specs.catalog import a_file_of, refuse_another
from antiphon.specs.checked import canonical
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec, RopeSpec, RouterSpec

# Models that people bring and that do not run: what each has that we lack, and which model to use instead. A wrapper is
# a text model with vision or audio around it. Rejected: running its text part alone, which would answer a request with
# a picture as if there were none.
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
_PART_OF_GGUF = re.compile(r"\.gguf[.-](part|split)", re.IGNORECASE)
OTHER_PARTS = {"vision": "vision", "audio": "audio", "talker": "speech"}


def load_model_spec(path: str | Path, rope_scaling: str = "") -> ModelSpec:
    """Read a checkpoint folder's `config.json`, or that file itself. `CheckpointError` for anything unsupported.
    `rope_scaling`: JSON in place of the file's own (`config_keys`).

    `generation_config.json` beside it, if there, adds tokens that end a text (Qwen lists two). Weights are looked at
    for their dtype where no key says it, and to say what they hold where a size is beyond all bounds.
    """
    file = config_file(path)
    if file.suffix == SUFFIX:
        return _of_gguf(file, rope_scaling)
    config = config_keys.with_rope_scaling(read_config(path), rope_scaling)
    config |= quantization_beside(file.parent, config)
    if config_keys.stated_dtype(config) is None and (stored := stored_dtype(file.parent)) is not None:
        config = config | {"dtype": stored}
    spec = model_spec(config, lambda names: evidence_of(file.parent, names))
    endings = stated_endings(config, file.parent)
    check_tokens("generation_config.json: eos_token_id", endings, spec.vocab_size)
    return replace(spec, eos_token_ids=endings) if endings else spec


def _of_gguf(file: Path, rope_scaling: str) -> ModelSpec:
    """What is wrong with a size is said of the file, whose metadata took the place of `config.json`."""
    try:
        return model_spec(config_keys.with_rope_scaling(gguf_config(file), rope_scaling))
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("config.json", f"{file.name} (metadata)")) from error


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
        raise _refusal(config)
    config = completed(config)
    check_values(config, lambda: evidence(NAMES[model_type]))
    check_quantization(config)
    spec = FAMILIES[model_type](config)
    check_spec(spec)
    _check_layer_types(config, spec)
    return spec


def _check_layer_types(config: Mapping[str, Any], spec: ModelSpec) -> None:
    """`CheckpointError` if `layer_types`, where a file has it, says anything else than what will be computed. Some
    families do not read it."""
    kinds, known = config.get("layer_types"), config_keys.LAYER_TYPES
    if not kinds:
        return
    if len(kinds) != spec.num_layers or not set(kinds) <= set(known):
        supported = f"one of {', '.join(known)} for each of {spec.num_layers} layers"
        raise config_keys.unsupported("layer_types", kinds, supported)
    for layer, kind in enumerate(kinds):
        window = spec.attention.window_of(layer)
        if (kind == "full_attention") != (window is None):
            raise CheckpointError(
                f"config.json: layer_types = {kind!r} for layer {layer}, whose sliding_window is {brief(window)}: "
                f"correct one of them"
            )


def _refusal(config: Mapping[str, Any]) -> CheckpointError:
    """Why a model of a type that is no family's does not run, and what does."""
    name = config.get("model_type")
    if isinstance(name, str) and name in LACKING:
        what, instead = LACKING[name]
        return CheckpointError(f"config.json: model_type = {name!r} is not supported, it has {what}: use {instead}")
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), None)
    if text is not None:
        return _wrapper(config, brief(name), text)
    same = [each for each in FAMILIES if isinstance(name, str) and canonical(each) == canonical(name)]
    fix = f"write {same[0]}" if same else f"use one of {', '.join(sorted(FAMILIES))}"
    return CheckpointError(f"config.json: model_type = {brief(name)} is not supported: {fix}")


def _wrapper(config: Mapping[str, Any], name: str, text: Mapping[str, Any]) -> CheckpointError:
    parts = [part for key, part in OTHER_PARTS.items() if any(key in other for other in config)]
    instead = TEXT_MODELS.get(name.strip("'"), "a text-only model, whose config.json has no text_config")
    return CheckpointError(
        f"config.json: model_type = {name} is not supported, it is a text model "
        f"({text.get('model_type', 'unknown')}) with {' and '.join(parts) or 'other parts'} around it and only text "
        f"models run: use {instead}"
    )


def refuse_other_model(config: Mapping[str, Any], spec: ModelSpec, what: str) -> None:
    """`UserError` if `config`, from `what`, is of a model with other sizes than `spec`."""
    theirs = model_spec(config)
    for name in ("num_layers", "hidden_size", "vocab_size", "moe_layers", "router", "feed_forward", "attention"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UserError(f"{what} is of another model, with another {name}: measure this one with antiphon profile")


def config_file(path: str | Path) -> Path:
    """A folder's `config.json`, or where it has none its GGUF file, or the file that was given."""
    path = Path(path)
    try:
        file = path / "config.json" if path.is_dir() else path
        if path.is_dir() and not os.path.lexists(file) and (files := gguf_files(path)):
            return files[0]
    except OSError:  # reading it says what is wrong
        return path
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a checkpoint folder's `config.json`, or of that file itself. `CheckpointError` if it is damaged."""
    file = config_file(path)
    if file.suffix == SUFFIX:
        return gguf_config(file)
    was_given = file == Path(path)
    instead = instead_of_config(file if was_given else file.parent)
    if not was_given:
        return read_json(file, instead)
    with a_file_of("model", file):
        _refuse_other_files(file, instead)
        config = read_json(file, instead)
    refuse_another("model", file)
    return config


def _refuse_other_files(file: Path, missing: str) -> None:
    """`CheckpointError` for a file that was given in the place of a folder, and holds no config: weights, a text."""
    with open_regular(file, missing) as opened:
        start = opened.read(1024)
    if start.startswith(MAGIC):
        if _PART_OF_GGUF.search(file.name):
            raise CheckpointError(f"{file} is a part of a GGUF file: join the parts, cat PART1 PART2 > model{SUFFIX}")
        raise CheckpointError(f"{file} is a GGUF file without the ending {SUFFIX}: rename it, or make a link to it")
    if file.suffix == SAFETENSORS:
        raise CheckpointError(f"{file} is one file of a checkpoint: give the folder {file.parent}")
    if file.suffix != ".json" and not start.lstrip().startswith(b"{"):
        raise CheckpointError(f"{file} is no model: give a checkpoint folder, its config.json or a GGUF file")


def tensor_names(spec: ModelSpec) -> TensorNames:
    return NAMES[spec.family]


_log = get_logger("models")
_NUMBER = re.compile("[0-9]{1,9}")
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")


def with_tokenizer_ending(path: Path, spec: ModelSpec) -> ModelSpec:
    """`spec` with the tokenizer's `eos_token` among the tokens that end a text; a line of the log says so.

    A tokenizer that is damaged or not there says nothing here; who needs it reads it and says what is wrong."""
    file = config_file(path)
    if file.suffix == SUFFIX:
        return spec
    folder = file.parent
    try:
        text = _ending_text(folder)
        token = None if text is None else _id_of(folder, text)
    except CheckpointError:
        return spec
    if token is None or not 0 <= token < spec.vocab_size or token in spec.eos_token_ids:
        return spec
    others = spec.eos_token_ids if stated_endings(read_config(path), folder) else ()
    named = " or ".join(map(str, others)) or "none"
    _log.info(
        "a text ends at token %d (%s) too, the tokenizer's eos_token: config.json and generation_config.json name %s",
        token,
        brief(text),
        named,
    )
    return replace(spec, eos_token_ids=(*others, token))


def _ending_text(folder: Path) -> str | None:
    for name in _NAMING:
        token = _json_of(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            return text
    return None


def _id_of(folder: Path, text: str) -> int | None:
    """The token's number: in the file that names it, or in the tokenizer's own."""
    added = _json_of(folder / _NAMING[0]).get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("content") == text and _NUMBER.fullmatch(number):
            return int(number)
    tokenizer = _json_of(folder / "tokenizer.json")
    listed = tokenizer.get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, Mapping) and token.get("content") == text:
            return _whole(token.get("id"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    for names in (vocabulary, _json_of(folder / "added_tokens.json"), _json_of(folder / "vocab.json")):
        if isinstance(names, Mapping) and text in names:
            return _whole(names[text])
    if isinstance(vocabulary, list):  # Unigram's: pairs of a text and its score, in the order of their numbers
        return next(
            (number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair[:1] == [text]), None
        )
    return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _json_of(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}


MAX_PARAMETERS = 10**15  # a hundred times the largest model that was ever described; planning computes in 64 bits
Check = tuple[bool, str]


def check_spec(spec: ModelSpec) -> None:
    """`CheckpointError` for the first relation that does not hold, naming the values, the limit and what to change."""
    for checks in (_router, _attention, _rope, _sizes):
        for holds, wrong in checks(spec):
            if not holds:
                raise CheckpointError(f"config.json: {wrong}")
    check_tokens("config.json: eos_token_id", spec.eos_token_ids, spec.vocab_size)
    if spec.bos_token_id is not None:
        check_tokens("config.json: bos_token_id", [spec.bos_token_id], spec.vocab_size)


def check_tokens(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """`CheckpointError` for a token id that the vocabulary does not have. `where`: file and key."""
    if wrong := [token for token in token_ids if not 0 <= token < vocab_size]:
        raise CheckpointError(
            f"{where} = {wrong[0]}: the vocabulary has tokens 0 to {vocab_size - 1}: correct it, or vocab_size"
        )


def _router(spec: ModelSpec) -> Iterable[Check]:
    router = spec.router
    experts, groups = router.num_experts, router.num_groups
    yield (
        1 <= router.top_k <= experts,
        f"{router.top_k} experts per token of {experts} experts: lower the experts per token to {experts} or less",
    )
    yield groups >= 1, f"{groups} groups of experts: at least 1 is needed: correct n_group"
    yield (
        experts % groups == 0,
        f"{experts} experts do not divide into {groups} groups of equal size: correct n_group",
    )
    yield (
        1 <= router.top_k_groups <= groups,
        f"{router.top_k_groups} groups per token of {groups} groups: use 1 to {groups} for topk_group",
    )
    yield from _groups(router) if groups > 1 else ()
    yield any(spec.moe_layers), "no layer has experts: correct the keys that say which layers are dense"
    yield (
        len(spec.moe_layers) == spec.num_layers,
        f"{len(spec.moe_layers)} layers are said to be dense or not, of {spec.num_layers}: say it for each",
    )


def _groups(router: RouterSpec) -> Iterable[Check]:
    per_group = router.num_experts // router.num_groups
    reachable = router.top_k_groups * per_group
    yield (
        router.top_k <= reachable,
        f"{router.top_k} experts per token, but {router.top_k_groups} groups of {per_group} have {reachable}: "
        f"raise topk_group or lower the experts per token",
    )
    yield (
        router.group_score != "top2" or per_group >= 2,
        f"groups of {per_group} expert: the two best of each group are compared, so 2 are needed: lower n_group",
    )


def _attention(spec: ModelSpec) -> Iterable[Check]:
    attention = spec.attention
    yield (
        attention.num_heads % attention.num_kv_heads == 0,
        f"{attention.num_heads} attention heads are not a multiple of {attention.num_kv_heads} key and value heads: "
        f"correct one of them",
    )
    yield (
        attention.sliding_window is not None or not any(attention.windowed_layers),
        "sliding_window is missing, and some layers have one: copy it from the model's publisher",
    )
    yield (
        math.isfinite(attention.scale) and attention.scale > 0,
        f"scores would be multiplied by {attention.scale}: correct the width of a head or mscale_all_dim",
    )


def _rope(spec: ModelSpec) -> Iterable[Check]:
    rope = spec.attention.rope
    width = spec.attention.latent.qk_rope_head_dim if spec.attention.latent else spec.attention.head_dim
    least = 4 if rope.scaling == "dynamic" else 2  # the power dim / (dim - 2)
    yield (
        rope.dim % 2 == 0 and least <= rope.dim <= width,
        f"rotary embedding of {rope.dim} dimensions in heads of {width}: an even number of at least {least}, "
        f"no more than a head has, is needed: correct the width of a head or partial_rotary_factor",
    )
    yield (
        rope.original_max_position >= 2 or rope.scaling == "none",
        f"original_max_position_embeddings = {rope.original_max_position}: at least 2 is needed: correct it",
    )
    yield from _rope_numbers(rope)


def _rope_numbers(rope: RopeSpec) -> Iterable[Check]:
    numbers = rope.parameters
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):  # their difference divides
        yield low < high, f"low_freq_factor = {low} is not below high_freq_factor = {high}: correct one of them"
    slow, fast = numbers.get("beta_slow"), numbers.get("beta_fast")
    if isinstance(slow, (int, float)) and isinstance(fast, (int, float)):  # Kimi-K2 has 1 for both
        yield slow <= fast, f"beta_slow = {slow} is above beta_fast = {fast}: correct one of them"
    if rope.scaling == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = numbers[key]
            found = len(factors) if isinstance(factors, list) else brief(factors)
            yield (
                found == rope.dim // 2,
                f"{key} has {found} factors: {rope.dim // 2}, one for two rotated dimensions, are needed: "
                f"copy it from the model's publisher",
            )


def _sizes(spec: ModelSpec) -> Iterable[Check]:
    for field in fields(spec.feed_forward):
        width = getattr(spec.feed_forward, field.name)
        if isinstance(width, int):
            yield 0 <= width <= MAX_WIDTH, f"a feed-forward of width {width}: at most {MAX_WIDTH:,} is supported"
    total = count_parameters(spec).total
    yield (
        total <= MAX_PARAMETERS,
        f"the sizes make a model of {total:.1e} parameters: at most {MAX_PARAMETERS:.0e} are supported: correct them",
    )
