"""Which quantised checkpoints can be read, by what `config.json` says of them.

- `quant_method: fp8` (`models/packed`): blocks of 128 x 128 (DeepSeek-V3, MiniMax-M2), or one scale a tensor.
- `quant_method: compressed-tensors` (llm-compressor, GLM-4.5-FP8, Kimi-K2): float8 and int8 with a scale a row, a block
  of 128 x 128, or a tensor; 4 and 8 bits in words (`pack-quantized`) and MXFP4 (`models/packed`).
- `quant_method: gptq` with 4 and 8 bits, `awq` in its GEMM layout (`models/packed`).
- `quant_method: modelopt` with one float8 scale a tensor.
- `quant_method: mxfp4` of gpt-oss: four-bit experts in blocks of 32.
Activations, keys and values that a checkpoint would round too stay as they are: that is more exact, and `left_out` says
so. Everything else is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief, read_json

Config = Mapping[str, Any]

INSTEAD = (
    "use the model in bfloat16, in FP8, or in 4 or 8 bits as compressed-tensors (pack-quantized), GPTQ, AWQ (gemm) or "
    "GGUF"
)
COMPRESSED = "compressed-tensors"
MXFP4 = "mxfp4"
WIDE_FORMATS = ("float-quantized", "naive-quantized", "int-quantized")  # one tensor with a scale beside it
PACKED_FORMATS = ("pack-quantized", "mxfp4-pack-quantized")
STRATEGIES = ("tensor", "channel", "block")
BLOCK = [128, 128]
_BITS = (4, 8)
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """What `quantization_config` says of packed weights. `bits` and `group_sizes`: those in use, None for whole rows;
    shapes say which a matrix has. `zero_shift`: what is added to stored zero points."""

    method: Literal["compressed-tensors", "gptq", "awq"]
    bits: tuple[int, ...]
    group_sizes: tuple[int | None, ...]
    symmetric: bool = True
    zero_shift: int = 0


def check_quantization(config: Config) -> None:
    """`CheckpointError` for weights that cannot be read."""
    quantization = _quantization(config)
    method = quantization.get("quant_method")
    if not quantization:
        return
    if method == MXFP4 and config.get("model_type") == "gpt_oss":
        return
    if method == COMPRESSED:
        _check_compressed(quantization)
    elif method in ("gptq", "awq"):
        _check_words(quantization)
    elif method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return
    elif method != "fp8":
        raise _unsupported(f"quant_method = {brief(method)}")
    elif (block := quantization.get("weight_block_size")) is not None and block != BLOCK:
        raise _unsupported(f"quant_method = 'fp8' with weight_block_size = {block}")


def left_out(config: Config) -> str | None:
    """What a checkpoint would round besides its weights, and we do not: a line for the log, None if nothing."""
    quantization = _quantization(config)
    rounded = []
    schemes = [scheme.get("input_activations") for scheme in _schemes(quantization)]
    if quantization.get("activation_scheme") is not None or any(schemes):
        rounded.append("activations")
    if quantization.get("kv_cache_scheme") is not None:
        rounded.append("keys and values")
    if not rounded:
        return None
    return f"8 bits for weights only: {' and '.join(rounded)}, which this checkpoint would round too, are not rounded"


def packing_of(config: Config) -> PackedLayout | None:
    """How matrices of several tensors are packed; None where the config names no such form."""
    quantization = _quantization(config)
    method = quantization.get("quant_method")
    if method == COMPRESSED:
        schemes = [weights for form, weights in _weight_schemes(quantization) if form in PACKED_FORMATS]
        if not schemes:
            return None
        sizes = [scheme.get("group_size") if scheme.get("strategy") == "group" else None for scheme in schemes]
        bits = tuple(dict.fromkeys(scheme["num_bits"] for scheme in schemes))
        return PackedLayout(method="compressed-tensors", bits=bits, group_sizes=tuple(dict.fromkeys(sizes)))
    if method not in ("gptq", "awq"):
        return None
    parts = [quantization, *_overrides(quantization)]
    sizes = [size if type(size := _group_size_of(part)) is int and size > 0 else None for part in parts]
    group_sizes = tuple(dict.fromkeys(sizes))
    if method == "awq":
        return PackedLayout(method="awq", bits=(4,), group_sizes=group_sizes, symmetric=False)
    return PackedLayout(
        method="gptq",
        bits=tuple(dict.fromkeys(_bits_of(part) for part in parts)),
        group_sizes=group_sizes,
        symmetric=all(bool(_stated(part, "sym", True)) for part in parts),
        zero_shift=0 if _layout_of(quantization) == "gptq_v2" else 1,
    )


def quantization_beside(folder: Path, config: Config) -> dict[str, Any]:
    """The `quantization_config` that the first tools wrote to a file of its own; nothing where `config` has one."""
    if _quantization(config):
        return {}
    for name, method in _OWN_FILES.items():
        if (folder / name).exists():
            found = read_json(folder / name)
            inner = _mapping(found.get("quantization") or found, name)
            return {"quantization_config": {"quant_method": method, **inner}}
    return {}


def _overrides(quantization: Config) -> Iterator[Config]:
    """GPTQModel's `dynamic`: what differs for modules that a regular expression names; "-:" begins those that are left
    as they were."""
    for name, part in _mapping(quantization.get("dynamic") or {}, "dynamic").items():
        if not name.startswith("-:") and part:
            yield {**quantization, **_mapping(part, f"dynamic: {name}")}


def _layout_of(quantization: Config) -> str:
    """Two tools have two names for it."""
    key, usual = ("version", "gemm") if quantization.get("quant_method") == "awq" else ("checkpoint_format", "gptq")
    return str(_stated(quantization, key, _stated(quantization, "format", usual))).lower()


def _check_words(quantization: Config) -> None:
    """GPTQ and AWQ."""
    method = quantization.get("quant_method")
    for part in (quantization, *_overrides(quantization)):
        bits, size = _bits_of(part), _group_size_of(part)
        if bits not in (_BITS if method == "gptq" else (4,)) or type(bits) is not int:
            raise _unsupported(f"quant_method = {brief(method)} with bits = {brief(bits)}")
        if type(size) is not int or (size != -1 and size < 1):
            raise _unsupported(f"quant_method = {brief(method)} with group_size = {brief(size)}")
    layout = _layout_of(quantization)
    if layout not in (("gemm",) if method == "awq" else ("gptq", "gptq_v2")):
        raise _unsupported(f"quant_method = {brief(method)} in the layout {brief(layout)}")
    if method == "awq" and not _stated(quantization, "zero_point", True):
        raise _unsupported("quant_method = 'awq' without zero points")


def _bits_of(quantization: Config) -> Any:
    """Two tools have two names for it, as for the size of groups."""
    return quantization.get("bits", quantization.get("w_bit"))


def _group_size_of(quantization: Config) -> Any:
    return _stated(quantization, "group_size", _stated(quantization, "q_group_size", -1))


def _stated(section: Config, key: str, default: Any) -> Any:
    """The value of a key; null is the same as absent."""
    value = section.get(key)
    return default if value is None else value


def _quantization(config: Config) -> Config:
    return _mapping(config.get("quantization_config") or config.get("compression_config") or {}, "quantization_config")


def _schemes(quantization: Config) -> Iterator[Config]:
    """The schemes of compressed-tensors, each for some of the modules."""
    for name, scheme in _mapping(quantization.get("config_groups") or {}, "config_groups").items():
        yield _mapping(scheme, f"config_groups: {name}")


def _weight_schemes(quantization: Config) -> Iterator[tuple[Any, Config]]:
    """Format and weights of each scheme. One without weights, as for keys and values alone, rounds none. A scheme may
    have a format of its own where the checkpoint's is "mixed-precision"."""
    for scheme in _schemes(quantization):
        if scheme.get("weights") is not None:
            yield scheme.get("format") or quantization.get("format"), _mapping(scheme["weights"], "weights")


def _mapping(value: object, name: str) -> Config:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} = {brief(value)}: an object is needed, download it again")
    return value


def _check_compressed(quantization: Config) -> None:
    for key in ("transform_config", "sparsity_config"):
        part = _mapping(quantization.get(key) or {}, key)
        if part and part.get("format") != "dense":
            raise _unsupported(f"quant_method = {COMPRESSED!r} with {key}")
    for form, weights in _weight_schemes(quantization):
        bits = weights.get("num_bits")
        kind = f"{weights.get('type', 'unknown')}{bits if type(bits) is int else brief(bits)}"
        if form in PACKED_FORMATS:
            _check_packed(form, weights, kind)
            continue
        strategy = weights.get("strategy")
        if form not in WIDE_FORMATS or kind != ("int8" if form == "int-quantized" else "float8"):
            raise _unsupported(f"quant_method = {COMPRESSED!r} with format = {brief(form)} and {kind} weights")
        if strategy not in STRATEGIES or not _stated(weights, "symmetric", True):
            raise _unsupported(f"quant_method = {COMPRESSED!r} with weights by {brief(strategy)}")
        if strategy == "block" and weights.get("block_structure") not in (None, BLOCK, "x".join(map(str, BLOCK))):
            raise _unsupported(f"quant_method = {COMPRESSED!r} with block_structure = {weights['block_structure']}")


def _check_packed(form: str, weights: Config, kind: str) -> None:
    kinds = ("float4",) if form.startswith(MXFP4) else ("int4", "int8")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if kind not in kinds or strategy not in ("group", "channel"):
        raise _unsupported(
            f"quant_method = {COMPRESSED!r} with format = {brief(form)}, {kind} weights by {brief(strategy)}"
        )
    if strategy == "group" and (type(size) is not int or size < 1):
        raise _unsupported(f"quant_method = {COMPRESSED!r} with group_size = {brief(size)}")


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: {what} is not supported: {INSTEAD}")
