"""Checkpoints in few bits, packed as their formats' published layouts say, each beside what it multiplies out to.

Written from the layouts and apart from the reader: a code's place is computed, not viewed."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.float8_specimens import by_rows

Written = tuple[dict[str, Tensor], Tensor]  # tensors by suffix behind the module's name, and the float32 matrix
PROJECTIONS = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """`unsigned` [R, C] from 0; x = scales * (unsigned - zeros), a column's group in `group_of`."""

    unsigned: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def wide(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_of].float(), self.scales[:, self.group_of].float()
        return (self.unsigned.float() - zeros) * scales


def codes_of(weight: Tensor, bits: int, group: int, symmetric: bool, mixed: bool = False) -> Codes:
    """`mixed`: groups are not of neighbouring columns."""
    columns = weight.shape[1]
    group_of = torch.arange(columns) // (columns if group == -1 else group)
    if mixed:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]
    num_groups, most = int(group_of.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(weight.shape[0], num_groups), torch.empty(weight.shape[0], num_groups)
    for g in range(num_groups):
        part = weight[:, group_of == g]
        if symmetric:
            scales[:, g], zeros[:, g] = part.abs().amax(1) / (2 ** (bits - 1) - 1), 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = (-low / scales[:, g]).round()
    scales = scales.half()
    unsigned = (weight / scales[:, group_of].float() + zeros[:, group_of]).round().clamp(0, most)
    return Codes(unsigned.long(), scales, zeros.long(), group_of)


def words(codes: Tensor, bits: int) -> Tensor:
    """Along the last axis: element i at bits i * b of the words, the last of which may be filled up."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    parts = [padded[..., place::per_word] << bits * place for place in range(per_word)]
    total = sum(parts[1:], parts[0])
    return torch.where(total >= 2**31, total - 2**32, total).int()


def compressed(bits: int, group: int, symmetric: bool = True, mixed: bool = False) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        made = codes_of(weight, bits, group, symmetric, mixed)
        tensors = {
            "weight_packed": words(made.unsigned, bits),
            "weight_scale": made.scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(made.zeros.t(), bits).t().contiguous()
        if mixed:
            tensors["weight_g_idx"] = made.group_of.int()
        return tensors, Codes(made.unsigned, made.scales.bfloat16(), made.zeros, made.group_of).wide

    return write


def with_first_zero_points(bits: int) -> Callable[[Tensor], Written]:
    """As compressed-tensors wrote them before 0.10: a byte each, with their sign."""

    def write(weight: Tensor) -> Written:
        tensors, wide = compressed(bits, 16, False)(weight)
        zeros = codes_of(weight, bits, 16, False).zeros - 2 ** (bits - 1)
        return tensors | {"weight_zero_point": zeros.to(torch.int8)}, wide

    return write


def gptq(bits: int, group: int, *, symmetric: bool, mixed: bool = False, less: int = 1) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        made = codes_of(weight, bits, group, symmetric, mixed)
        return {
            "qweight": words(made.unsigned, bits).t().contiguous(),
            "qzeros": words((made.zeros - less & 2**bits - 1).t(), bits),
            "scales": made.scales.t().contiguous(),
            "g_idx": made.group_of.int(),
        }, made.wide

    return write


def awq(group: int) -> Callable[[Tensor], Written]:
    def by_output(codes: Tensor) -> Tensor:
        ordered = codes.view(codes.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)
        return words(ordered, 4)

    def write(weight: Tensor) -> Written:
        made = codes_of(weight, 4, group, False)
        return {
            "qweight": by_output(made.unsigned.t()),
            "qzeros": by_output(made.zeros.t()),
            "scales": made.scales.t().contiguous(),
        }, made.wide

    return write


def int8_rows(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def mxfp4(weight: Tensor) -> Written:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).view(weight.shape[0], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(2).clamp(min=1e-20))) - 2
    units = blocks / 2 ** exponents[:, :, None]
    nearest = (units.abs()[..., None] - values).abs().argmin(-1)
    codes = nearest + 8 * (units < 0)
    wide = (values[nearest] * torch.where(units < 0, -1, 1) * 2 ** exponents[:, :, None]).flatten(1)
    nibbles = codes.flatten(1)
    packed = (nibbles[:, 0::2] + 16 * nibbles[:, 1::2]).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, wide


def compressed_words(bits: int, group: int, form: str = "pack-quantized", kind: str = "int", **how: Any) -> Any:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": group} | how
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }


ORDERED, ORDERED_BYTES = "int4 in groups of 16 in act order", "int8 in groups of 16 in act order"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}


def scheme(kind: str, form: str, **weights: Any) -> dict[str, Any]:
    """One of several `config_groups`."""
    return {"format": form, "targets": [f"re:.*{kind}.*"], "weights": {"symmetric": True} | weights}


def float8_rows(weight: Tensor) -> Written:
    narrow, scales, wide = by_rows(weight)
    return {"weight": narrow, "weight_scale": scales}, wide


INT4 = scheme("experts", "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
INT8 = scheme("self_attn", "int-quantized", num_bits=8, type="int", strategy="channel")
FP8 = scheme("self_attn", "float-quantized", num_bits=8, type="float", strategy="channel")
WIDER = scheme("self_attn", "pack-quantized", num_bits=8, type="int", strategy="group", group_size=32)


def _schemes(*schemes: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{number}": each for number, each in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


def _dynamic(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"+:.*self_attn.*": changes, "-:.*x": {}}}


MIXED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written], Callable[[Tensor], Written]]] = {
    "int4 and int8 rows": (_schemes(INT4, INT8), compressed(4, 16), int8_rows),
    "int4 and float8 rows": (_schemes(INT4, FP8), compressed(4, 16), float8_rows),
    "int4 and int8 in wider groups": (_schemes(INT4, WIDER), compressed(4, 16), compressed(8, 32)),
    "GPTQ, another number of bits": (_dynamic(bits=8), gptq(4, 16, symmetric=True), gptq(8, 16, symmetric=True)),
    "GPTQ, another size of groups": (_dynamic(group_size=32), gptq(4, 16, symmetric=True), gptq(4, 32, symmetric=True)),
    "GPTQ, zero points": (_dynamic(sym=False), gptq(4, 16, symmetric=True), gptq(4, 16, symmetric=False)),
}  # `quantization_config`; how experts and dense layers are written, and attention


@dataclass(frozen=True)
class PackedForm:
    write: Callable[[Tensor], Written]
    config: dict[str, Any]
    kept: str = ""  # words of the log for matrices that stay in few bits


PACKED = {
    "compressed-tensors int4": PackedForm(compressed(4, 16), compressed_words(4, 16), "int4 in groups of 16"),
    "compressed-tensors int4, whole rows": PackedForm(
        compressed(4, -1), compressed_words(4, 16, strategy="channel", group_size=None), "int4 with a scale a row"
    ),
    "compressed-tensors int4, zero points": PackedForm(
        compressed(4, 16, False), compressed_words(4, 16, symmetric=False), "int4 in groups of 16"
    ),
    "compressed-tensors int4, act-order": PackedForm(
        compressed(4, 16, mixed=True), compressed_words(4, 16, actorder="group"), "int4 in groups of 16 in act order"
    ),
    "compressed-tensors int8": PackedForm(compressed(8, 16), compressed_words(8, 16), "int8 in groups of 16"),
    "compressed-tensors int8, zero points": PackedForm(
        compressed(8, 16, False), compressed_words(8, 16, symmetric=False), "int8 in groups of 16"
    ),
    "compressed-tensors int4, first zero points": PackedForm(
        with_first_zero_points(4), compressed_words(4, 16, symmetric=False), "int4 in groups of 16"
    ),
    "compressed-tensors int8, first zero points": PackedForm(
        with_first_zero_points(8), compressed_words(8, 16, symmetric=False), "int8 in groups of 16"
    ),
    "compressed-tensors int8, a scale a row": PackedForm(
        int8_rows, compressed_words(8, 16, "int-quantized", strategy="channel"), "int8 with a scale a row"
    ),
    "compressed-tensors mxfp4": PackedForm(
        mxfp4, compressed_words(4, 32, "mxfp4-pack-quantized", "float"), "mxfp4 in groups of 32"
    ),
    "GPTQ": PackedForm(gptq(4, 16, symmetric=True), GPTQ, "int4 in groups of 16"),
    "GPTQ, zero points": PackedForm(gptq(4, 16, symmetric=False), GPTQ | {"sym": False}, "int4 in groups of 16"),
    "GPTQ, desc_act": PackedForm(
        gptq(4, 16, symmetric=False, mixed=True), GPTQ | {"sym": False, "desc_act": True}, ORDERED
    ),
    "GPTQ int8, desc_act": PackedForm(
        gptq(8, 16, symmetric=False, mixed=True), GPTQ | {"bits": 8, "sym": False, "desc_act": True}, ORDERED_BYTES
    ),
    "GPTQ version 2": PackedForm(
        gptq(4, 16, symmetric=False, less=0), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}
    ),
    "GPTQ version 2 under its other name": PackedForm(
        gptq(4, 16, symmetric=False, less=0), GPTQ | {"sym": False, "format": "gptq_v2"}
    ),
    "GPTQ int8": PackedForm(gptq(8, 16, symmetric=True), GPTQ | {"bits": 8}, "int8 in groups of 16"),
    "GPTQ int8, zero points": PackedForm(gptq(8, 16, symmetric=False), GPTQ | {"bits": 8, "sym": False}),
    "AWQ": PackedForm(
        awq(16),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        "int4 in groups of 16",
    ),
}


def pack_checkpoint(folder: Path, form: PackedForm, others: Mapping[str, Callable[[Tensor], Written]] = {}) -> Path:
    """Makes the float32 checkpoint in `folder` a packed one; returns a new folder with what that multiplies out to.
    `others`: how matrices are written whose names hold these words."""
    wide_folder = folder.with_name(folder.name + "-wide")
    shutil.copytree(folder, wide_folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    original = {name: tensor.clone() for name, tensor in load_file(file).items()}
    narrow, wide = dict(original), dict(original)
    for name in [name for name in original if name.endswith(PROJECTIONS)]:
        write = next((other for words, other in others.items() if words in name), form.write)
        tensors, multiplied_out = write(narrow.pop(name))
        narrow |= {name.removesuffix("weight") + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
        wide[name] = multiplied_out[:, : original[name].shape[1]].contiguous()
    assert len(narrow) > len(original) + 20, "hardly anything was packed"
    save_file(narrow, file, metadata={"format": "pt"})
    save_file(wide, wide_folder / file.name, metadata={"format": "pt"})
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": form.config}))
    return wide_folder
