"""Which quantised checkpoints can be read: those whose weights multiply out at load.

- `quant_method: fp8` (`models/dequantize`): blocks of 128 x 128 (DeepSeek-V3, MiniMax-M2), or one scale a tensor.
- `quant_method: compressed-tensors` (llm-compressor, GLM-4.5-FP8): a scale a row, a block of 128 x 128, or a tensor.
- `quant_method: mxfp4` of gpt-oss: four-bit experts in blocks of 32 (`models/dequantize`).
Activations, keys and values that a checkpoint would round to float8 too stay as they are: that is more exact, and
`left_out` says so. Everything else is refused by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError

Config = Mapping[str, Any]

INSTEAD = (
    "use the model in bfloat16 or float16, or in FP8 (quant_method fp8, or compressed-tensors with float8 weights)"
)
COMPRESSED = "compressed-tensors"
MXFP4 = "mxfp4"
FORMATS = ("float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "block")
BLOCK = [128, 128]


def check_quantization(config: Config) -> None:
    """`CheckpointError` for weights that are not multiplied out."""
    quantization = _quantization(config)
    method = quantization.get("quant_method")
    if not quantization:
        return
    if method == MXFP4 and config.get("model_type") == "gpt_oss":
        return
    if method == COMPRESSED:
        _check_compressed(quantization)
    elif method != "fp8":
        raise _unsupported(f"quant_method = {method!r}")
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
    return f"float8 for weights only: {' and '.join(rounded)}, which this checkpoint would round too, are not rounded"


def refuse_gguf(path: Path) -> None:
    """`CheckpointError` if `path` is a GGUF file or a folder of them."""
    file = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), None)
    if file is not None:
        raise CheckpointError(
            f"{file}: GGUF is not supported: use the checkpoint in Hugging Face format (.safetensors)"
        )


def _quantization(config: Config) -> Config:
    return _mapping(config.get("quantization_config") or config.get("compression_config") or {}, "quantization_config")


def _schemes(quantization: Config) -> Iterator[Config]:
    """The schemes of compressed-tensors, each for some of the modules."""
    for name, scheme in _mapping(quantization.get("config_groups") or {}, "config_groups").items():
        yield _mapping(scheme, f"config_groups: {name}")


def _mapping(value: object, name: str) -> Config:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} = {value!r}: an object is needed, download it again")
    return value


def _check_compressed(quantization: Config) -> None:
    for key in ("transform_config", "sparsity_config"):
        part = _mapping(quantization.get(key) or {}, key)
        if part and part.get("format") != "dense":
            raise _unsupported(f"quant_method = {COMPRESSED!r} with {key}")
    for scheme in _schemes(quantization):
        # a scheme may have a format of its own where the checkpoint's is "mixed-precision"
        form = scheme.get("format") or quantization.get("format")
        weights = _mapping(scheme.get("weights") or {}, "weights")
        kind = f"{weights.get('type', 'unknown')}{weights.get('num_bits', '')}"
        strategy = weights.get("strategy")
        if form not in FORMATS or kind != "float8":
            raise _unsupported(f"quant_method = {COMPRESSED!r} with format = {form!r} and {kind} weights")
        if strategy not in STRATEGIES or not weights.get("symmetric", True):
            raise _unsupported(f"quant_method = {COMPRESSED!r} with weights by {strategy!r}")
        if strategy == "block" and weights.get("block_structure") not in (None, BLOCK):
            raise _unsupported(f"quant_method = {COMPRESSED!r} with block_structure = {weights['block_structure']}")


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: {what} is not supported: {INSTEAD}")
