"""The model of a plan: what runs is read by its family, everything else by the generic reader of sizes.

`--model-set key=value` gives or replaces keys of `config.json`, before it is read; a dotted key goes into a
section. The config that a plan keeps has them. A model with pictures or sound around it is planned as its text part.

The generic reader, `counted_model`, makes a `ModelSpec` with the right sizes of any MoE config; nothing can be run with
it:

1. Usual keys by all their spellings, layers by all the ways families distinguish them (`counted_layers`).
2. Families whose keys mean something else have a line in `QUIRKS`.
3. What does not change a size, or is not counted (rotation, scoring, norms of heads), is not read.

Rejected: planning only what runs, since a planner needs counts, not weights; one reader per family, as models that run
have, since a planner is asked about models of the week.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError, UserError
from antiphon.cost.memory import attention_elements, elements_of, gated_matrices
from antiphon.models.checkpoint_folder import brief
from antiphon.models.config import TEXT_KEYS, check_spec, config_file, load_model_spec, model_spec, read_config
from antiphon.models.counted_layers import Keys, moe_layers, state_layers, state_spec, windowed_layers
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.families.config_values import MAX_POSITIONS, assumed
from antiphon.models.gguf.container import SUFFIX as GGUF_SUFFIX
from antiphon.models.gguf.container import gguf_files, read_gguf
from antiphon.models.quantization import packing_of, quantization_beside
from antiphon.models.shard_index import file_of_each_tensor, read_header
from antiphon.specs.checked import parse_json
from antiphon.specs.model import (
    BYTES_OF,
    AttentionSpec,
    FeedForwardSpec,
    LatentSpec,
    ModelSpec,
    PrecisionSpec,
    RopeSpec,
    RouterSpec,
    SparseSpec,
    StorageDtype,
)

UNKNOWN_TYPE = "unknown"
_ANOTHER_KEY = re.compile(r",\s*[A-Za-z_][\w.]*=")  # other options of `antiphon plan` take lists


@dataclass(frozen=True, kw_only=True)
class Quirk:
    """What a family does unlike the usual. `shared_experts`: their number, which no key says, each as wide as a routed
    one. `output_gate`, `shared_gate`: as in the spec. `tied`: embedding and head, where not stated."""

    shared_experts: int = 0
    output_gate: bool = False
    shared_gate: bool = False
    tied: bool = False


QUIRKS = {
    "llama4_text": Quirk(shared_experts=1),
    "hunyuan": Quirk(shared_experts=1, tied=True),
    "hunyuan_v1_moe": Quirk(shared_experts=1),
    "lfm2_moe": Quirk(tied=True),
    "qwen3_next": Quirk(output_gate=True, shared_gate=True),
    "qwen3_5_moe_text": Quirk(output_gate=True, shared_gate=True),
}


def counted_model(config: Mapping[str, Any]) -> tuple[ModelSpec, tuple[str, ...]]:
    """The sizes that a config describes, and the keys that might be sizes and were not read."""
    keys = Keys(config)
    family = keys.raw("model_type")
    quirk = QUIRKS.get(str(family), Quirk())
    hidden, num_layers = keys.get("hidden"), keys.get("layers")
    routed = moe_layers(keys, num_layers)
    attention = _latent(keys) if keys.raw("kv_lora_rank") is not None else _grouped(keys, hidden, num_layers, quirk)
    states = state_layers(keys, num_layers)
    spec = ModelSpec(
        family=family if isinstance(family, str) else UNKNOWN_TYPE,
        vocab_size=keys.get("vocabulary"),
        hidden_size=hidden,
        num_layers=num_layers,
        moe_layers=routed,
        attention=attention,
        router=_router(keys),
        feed_forward=_feed_forward(keys, quirk, has_dense=not all(routed)),
        tie_embeddings=quirk.tied if keys.raw("tie_word_embeddings") is None else bool(keys.raw("tie_word_embeddings")),
        max_position=keys.get("positions", 131_072),
        state=state_spec(keys, states, hidden, attention.num_heads, attention.head_dim),
    )
    return spec, unread_sizes(keys)


def _router(keys: Keys) -> RouterSpec:
    groups = max(keys.get("groups", 1), 1)
    return RouterSpec(
        num_experts=keys.get("experts"),
        top_k=keys.get("experts per token"),
        num_groups=groups,
        top_k_groups=min(max(keys.get("groups per token", groups), 1), groups),
    )


def _feed_forward(keys: Keys, quirk: Quirk, *, has_dense: bool) -> FeedForwardSpec:
    """Where experts have no width of their own they have that of the dense feed-forward."""
    width = keys.get("expert width") if keys.has("expert width") else keys.get("dense width")
    shared = keys.get("shared experts", quirk.shared_experts) * width
    if keys.has("shared width"):
        shared = keys.get("shared width")
    dense = 0
    if keys.raw("intermediate_size_mlp") is not None:  # Llama-4's second one
        dense = keys.whole("intermediate_size_mlp")
    elif keys.has("dense width") or has_dense:
        dense = keys.get("dense width")
    return FeedForwardSpec(
        intermediate=width,
        shared_intermediate=shared,
        shared_gate=quirk.shared_gate,
        dense_intermediate=dense if has_dense else 0,
    )


def _grouped(keys: Keys, hidden: int, num_layers: int, quirk: Quirk) -> AttentionSpec:
    heads = keys.get("heads")
    head_dim = keys.get("head width", max(hidden // heads, 1))
    window = keys.optional("sliding_window", least=0, most=MAX_POSITIONS)
    if keys.raw("use_sliding_window") is False:
        window = None
    if keys.raw("attention_chunk_size") is not None:
        window = keys.whole("attention_chunk_size", most=MAX_POSITIONS)
    shared = keys.raw("use_cla") is True
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=keys.get("kv heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(head_dim),
        sliding_window=window or None,
        windowed_layers=windowed_layers(keys, num_layers) if window else (),
        query_rank=keys.optional("share_q_dim"),
        output_gate=quirk.output_gate,
        layers_per_cache=keys.whole("cla_share_factor", 2) if shared else 1,
    )


def _latent(keys: Keys) -> AttentionSpec:
    heads = keys.get("heads")
    latent = LatentSpec(
        q_lora_rank=keys.optional("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=keys.whole("qk_rope_head_dim"),
        v_head_dim=keys.whole("v_head_dim"),
    )
    sparse = None
    if keys.raw("index_topk") is not None:
        sparse = SparseSpec(
            heads=keys.whole("index_n_heads"),
            dim=keys.whole("index_head_dim"),
            top_tokens=keys.whole("index_topk", most=MAX_POSITIONS),
        )
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(latent.qk_rope_head_dim),
        latent=latent,
        sparse=sparse,
    )


def _rope(width: int) -> RopeSpec:
    """Any: rotation has no size."""
    return RopeSpec(dim=width - width % 2, theta=10_000.0)


SIZE_WORDS = ("num_", "n_", "_dim", "_size", "_rank", "_heads", "_layers", "expert", "_freq", "_period", "_interval")
NO_SIZES = (
    *("_loss", "_coef", "_token", "token_id", "initializer", "rope", "nextn", "mtp", "capacity", "scal"),
    *("bias", "dropout", "chunk_size", "block_size", "num_labels", "pretrain", "norm", "max_window", "vision", "image"),
    *("audio", "jitter", "temperature", "beta_factor", "alpha_factor", "method", "func", "kernel", "qk_head_dim"),
    "rotary",
)


def unread_sizes(keys: Keys) -> tuple[str, ...]:
    """Keys that were not asked for, hold a number above 1 and sound like a size."""
    return tuple(
        key
        for key, value in keys.config.items()
        if key not in keys.known
        and type(value) is int
        and value > 1
        and any(word in key for word in SIZE_WORDS)
        and not any(word in key for word in NO_SIZES)
    )


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
        notes += (f"of config.json not counted, because it is unknown here: {', '.join(unread)}",)
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
            place[last] = parse_json(written, unique_keys=True)
        except ValueError as error:
            if _ANOTHER_KEY.search(written):
                raise UserError(
                    f"--model-set {text!r}: it takes one key: write --model-set again for each further one"
                ) from error
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


# --- what a checkpoint's weights take

_LAYER = re.compile(r"(?:layers|blk|blocks)\.(\d+)\.")
_OF_EXPERTS = re.compile(r"(?<!shared_)experts\.|_exps\.")
_OF_HEAD = re.compile(r"(?:^|\.)lm_head\.|^output\.")
_IN_FLOATS = re.compile(
    r"embed_tokens|token_embd|\bwte\b|norm|bias|sinks|\.gate\.|_gate_inp|router|kv_b_proj|attn_k?v?_b\."
)
_FLOATS = ("F64", "F32", "F16", "BF16")
EXPERTS, DENSE, HEAD = range(3)  # roles, in the order of `PrecisionSpec.stored`


def stored_precision(path: Path, spec: ModelSpec) -> PrecisionSpec | None:
    """Weights as `antiphon serve` keeps those of this checkpoint: the bytes of each role, and the nearest names. None
    where no weights are there, or all are floats. Reads the heads of all files; `CheckpointError` if one is damaged."""
    by_format: list[Counter[StorageDtype]] = [Counter(), Counter(), Counter()]
    sizes = _sizes_of_gguf(path) if config_file(path).suffix == GGUF_SUFFIX else _sizes_of_shards(path)
    for name, storage, num_bytes in sizes:
        layer = _LAYER.search(name)
        if _IN_FLOATS.search(name) or (layer is not None and int(layer[1]) >= spec.num_layers):
            continue
        role = EXPERTS if _OF_EXPERTS.search(name) else HEAD if _OF_HEAD.search(name) else DENSE
        by_format[role][storage] += num_bytes
    if not by_format[EXPERTS] or not {*by_format[EXPERTS], *by_format[DENSE]} - {"bfloat16"}:
        return None
    hidden, widths = spec.hidden_size, spec.feed_forward
    experts = (
        spec.num_moe_layers * spec.router.num_experts * elements_of(gated_matrices(hidden, widths.intermediate, 1))
    )
    elements = (experts, attention_elements(spec, 1)[0], hidden * spec.vocab_size)
    each = [
        min(BYTES_OF["bfloat16"], found.total() / float(count)) if found else BYTES_OF["bfloat16"]
        for found, count in zip(by_format, elements, strict=True)
    ]
    names: list[StorageDtype] = []
    for found, bytes_each in zip(by_format, each, strict=True):
        most: StorageDtype = found.most_common(1)[0][0] if found else "bfloat16"
        names.append("int8" if most == "int4" and bytes_each >= BYTES_OF["fp8"] else most)
    return PrecisionSpec(weights=names[DENSE], experts=names[EXPERTS], stored=(each[EXPERTS], each[DENSE], each[HEAD]))


def _sizes_of_gguf(path: Path) -> Iterator[tuple[str, StorageDtype, int]]:
    """Name, nearest format and bytes in memory of each tensor."""
    for file in gguf_files(path):
        header = read_gguf(file)
        for name, kind in header.types.items():
            nearest: StorageDtype = "bfloat16" if kind.size == 1 else "int8" if kind.kept >= 1 else "int4"
            yield name, "mxfp4" if kind.name == "MXFP4" else nearest, int(kind.kept * math.prod(header.shapes[name]))


def _sizes_of_shards(path: Path) -> Iterator[tuple[str, StorageDtype, int]]:
    """The same of a folder; codes in words of 32 bits are named by what the config says first."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return
    config = read_config(path)
    packing = packing_of(config | quantization_beside(path, config))
    words: StorageDtype = "int8" if packing is not None and packing.bits == (8,) else "int4"
    of_zeros = 2 if words == "int4" else 4  # times what is stored
    if packing is not None and packing.method == "gptq" and packing.symmetric:
        of_zeros = 0  # all alike
    storages: dict[str, StorageDtype] = {"F8_E4M3": "fp8", "I8": "int8", "I32": words, "U8": "mxfp4"}
    file_of, opened = file_of_each_tensor(path)
    for file in sorted(set(file_of.values())):
        for name, entry in (opened.get(file) or read_header(path / file)).items():
            is_scale = "scale" in name
            num_bytes = 2 * math.prod(entry.shape) if entry.dtype in _FLOATS and not is_scale else entry.num_bytes
            num_bytes *= of_zeros if name.endswith(("zero_point", "qzeros")) else 1
            yield name, storages.get(entry.dtype, "bfloat16"), num_bytes


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
    return (
        f"the checkpoint is quantised ({method}{bits}): planned so, if its weights lie here and --precision names none",
    )
