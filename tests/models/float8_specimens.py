"""Float8 forms of a saved checkpoint, quantised by hand, each beside the float32 form that it multiplies out to."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantized = tuple[Tensor, Tensor, Tensor]  # float8 weight, its scales, what they multiply out to
LARGEST = 448.0
PROJECTIONS = ("proj.weight", "w1.weight", "w2.weight", "w3.weight", "kv_a_proj_with_mqa.weight")


def by_blocks(weight: Tensor) -> Quantized:
    """One scale per 128 x 128."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    narrow, wide = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / LARGEST
            narrow[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            wide[block] = narrow[block].float() * scales[i, j]
    return narrow, scales, wide


def by_rows(weight: Tensor) -> Quantized:
    """One scale per output channel, in bfloat16, as llm-compressor writes it."""
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).bfloat16()
    narrow = (weight / scales.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return narrow, scales, narrow.float() * scales.float()


def by_tensor(weight: Tensor) -> Quantized:
    scale = (weight.abs().max() / LARGEST).reshape(1)
    narrow = (weight / scale).to(torch.float8_e4m3fn)
    return narrow, scale, narrow.float() * scale


def by_tensor_without_axes(weight: Tensor) -> Quantized:
    narrow, scale, wide = by_tensor(weight)
    return narrow, scale.reshape(()), wide


def fp8_config(block: list[int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}


def compressed_config(strategy: str, **changes: Any) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    } | changes


@dataclass(frozen=True)
class Float8Format:
    """`suffix` stands behind a weight's name in the name of its scale."""

    quantize: Callable[[Tensor], Quantized]
    suffix: str
    config: dict[str, Any]


FORMATS = {
    "fp8, blocks of 128 x 128": Float8Format(by_blocks, "_scale_inv", fp8_config([128, 128])),
    "fp8, one scale a tensor": Float8Format(by_tensor_without_axes, "_scale_inv", fp8_config(None)),
    "fp8, one scale a tensor, static activations": Float8Format(
        by_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "static"}
    ),
    "compressed-tensors, one scale a row": Float8Format(by_rows, "_scale", compressed_config("channel")),
    "compressed-tensors, one scale a tensor": Float8Format(by_tensor, "_scale", compressed_config("tensor")),
    "compressed-tensors, blocks of 128 x 128": Float8Format(by_blocks, "_scale", compressed_config("block")),
}


MODELOPT = Float8Format(by_tensor_without_axes, "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"})


def quantize_checkpoint(folder: Path, form: Float8Format) -> Path:
    """Makes the float32 checkpoint in `folder` a float8 one; returns a new folder with what that multiplies out to."""
    wide_folder = folder.with_name(folder.name + "-wide")
    shutil.copytree(folder, wide_folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    # Copies: versions of the library before 0.8 map the file into memory, and this one is written anew below.
    original = {name: tensor.clone() for name, tensor in load_file(file).items()}
    narrow, wide = dict(original), dict(original)
    for name in [name for name in original if name.endswith(PROJECTIONS)]:
        narrow[name], narrow[name + form.suffix], wide[name] = form.quantize(original[name])
        narrow[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    assert len(narrow) > len(original) + 20, "hardly anything was quantised"
    save_file(narrow, file, metadata={"format": "pt"})
    save_file(wide, wide_folder / file.name, metadata={"format": "pt"})
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": form.config}))
    return wide_folder
