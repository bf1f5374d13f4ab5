"""Float8 checkpoints equal what they multiply out to, in every format that is read; all others are refused by name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.load import load_expert, load_expert_half
from antiphon.models.quantization import check_quantization, left_out, packing_of
from antiphon.models.shares import share_of
from tests.models.float8_specimens import (
    FORMATS,
    MODELOPT,
    Float8Format,
    Quantized,
    by_blocks,
    by_rows,
    by_tensor,
    compressed_config,
    fp8_config,
    quantize_checkpoint,
)
from tests.models.test_shares import logits_of_ranks

INSTEAD = (
    "use the model in bfloat16, in FP8, or in 4 or 8 bits as compressed-tensors (pack-quantized), GPTQ, AWQ (gemm) or "
    "GGUF"
)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_float8_equals_its_multiplied_out_form(family: str, form: str, save_model: Any, tools: Any) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 144, "initializer_range": 0.08}
    wider = {} if family == "minimax_m2" else {"moe_intermediate_size": 136}
    folder = save_model(tools.config(family, **sizes, **wider)).folder
    wide_folder = quantize_checkpoint(folder, FORMATS[form])
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    assert torch.equal(tools.run(tools.load(folder), token_ids, [17]), expected)


@pytest.mark.parametrize("form", [*FORMATS.values(), MODELOPT], ids=[*FORMATS, "modelopt"])
def test_ranks_of_float8_and_an_expert_that_moves(form: Float8Format, save_model: Any, tools: Any) -> None:
    """Blocks of 128 straddle the border between two ranks."""
    sizes = {"hidden_size": 160, "intermediate_size": 144, "initializer_range": 0.08, "moe_intermediate_size": 136}
    folder = save_model(tools.config("glm4_moe", **sizes)).folder
    wide_folder = quantize_checkpoint(folder, form)
    token_ids, backend = tools.ids(17), CpuBackend(torch.float32)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    found = logits_of_ranks(SimpleNamespace(folder=folder), 2, token_ids, [16, 1], backend=backend)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    spec, checkpoint = load_model_spec(folder), Checkpoint(folder)
    layer = spec.moe_layers.index(True)
    half = load_expert_half(checkpoint, spec, backend, [0, 1], num_slots=3)
    load_expert(checkpoint, spec, share_of(spec), half, layer, 4, 2)
    half.hold(layer, 2, 4)
    whole = load_expert_half(Checkpoint(wide_folder), spec, ReferenceBackend())
    x_TH, ids = torch.randn(3, spec.hidden_size), torch.full((3, 1), 4, dtype=torch.int32)
    moved = half.forward(layer, x_TH, half.to_local(layer, ids), torch.ones(3, 1))
    torch.testing.assert_close(moved, whole.forward(layer, x_TH, ids, torch.ones(3, 1)), rtol=1e-4, atol=1e-4)


def save_stacked(folder: Path, quantize: Callable[[Tensor], Quantized], suffix: str) -> tuple[Checkpoint, list[Tensor]]:
    """Three experts of [200, 130] in one tensor named "experts", and what each multiplies out to."""
    parts = [quantize(torch.randn(200, 130)) for _ in range(3)]
    tensors = {"experts": torch.stack([p[0] for p in parts]), "experts" + suffix: torch.stack([p[1] for p in parts])}
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder), [p[2] for p in parts]


@pytest.mark.parametrize(
    ("quantize", "suffix", "scale_bytes"), [(by_blocks, "_scale_inv", 2 * 2 * 4), (by_rows, "_scale", 200 * 2)]
)
def test_stacked_float8_is_read_one_expert_at_a_time(
    quantize: Callable[[Tensor], Quantized], suffix: str, scale_bytes: int, tmp_path: Path
) -> None:
    checkpoint, wide = save_stacked(tmp_path, quantize, suffix)
    assert torch.equal(checkpoint.read("experts", rows=(1, 2))[0], wide[1])
    assert checkpoint.bytes_read == 200 * 130 + scale_bytes
    assert torch.equal(checkpoint.read("experts"), torch.stack(wide))


def test_rows_of_a_tensor_share_its_one_scale(tmp_path: Path) -> None:
    """DBRX's layout: experts stacked by rows of one matrix."""
    narrow, scale, wide = by_tensor(torch.randn(300, 130))
    save_file({"w1": narrow, "w1_scale": scale}, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint(tmp_path).read("w1", rows=(150, 290)), wide[150:290])
    narrow, scale, wide = by_rows(torch.randn(300, 130))
    save_file({"w1": narrow, "w1_scale": scale}, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint(tmp_path).read("w1", rows=(150, 290)), wide[150:290])


@pytest.mark.parametrize("quantize", [by_blocks, by_rows, by_tensor])
@pytest.mark.parametrize(("start", "stop"), [(0, 300), (100, 140), (128, 256), (150, 290), (299, 300)])
def test_parts_of_a_float8_matrix(
    quantize: Callable[[Tensor], Quantized], start: int, stop: int, tmp_path: Path
) -> None:
    """Rows and columns that begin and end inside blocks of 128."""
    narrow, scale, wide = quantize(torch.randn(300, 300))
    save_file({"w": narrow, "w_scale": scale}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("w", rows=(start, stop)), wide[start:stop])
    assert torch.equal(checkpoint.read("w", cut=(1, start, stop)), wide[:, start:stop])
    assert torch.equal(checkpoint.read("w", rows=(7, 150), cut=(1, start, stop)), wide[7:150, start:stop])


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_float8_without_scales(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert message_of(lambda: Checkpoint(tmp_path).read("a")) == (
        "model.safetensors: tensor a is float8 without a_scale_inv or a_scale: download the checkpoint again"
    )


def test_a_float8_vector(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2).to(torch.float8_e4m3fn), "a_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert message_of(lambda: Checkpoint(tmp_path).read("a")) == (
        "model.safetensors: tensor a is float8 and has shape [2]: only matrices may be float8, download the checkpoint "
        "again"
    )


def test_scales_of_a_dtype_that_products_lack(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(8, 64).to(torch.float8_e4m3fn), "a_scale": torch.ones(8, 1, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert message_of(lambda: Checkpoint(tmp_path).read("a")) == (
        "model.safetensors: a_scale has the dtype torch.float64: F32, BF16, F16 or F8_E8M0 is needed"
    )


def test_null_is_the_same_as_absent() -> None:
    for quantization in (
        {"quant_method": "gptq", "bits": 4, "group_size": None, "sym": None, "checkpoint_format": None},
        {"quant_method": "awq", "bits": 4, "group_size": None, "zero_point": None, "version": None},
        with_weights(symmetric=None, strategy="block", block_structure="128x128"),
    ):
        config = CONFIG | {"quantization_config": quantization}
        check_quantization(config)
        packing = packing_of(config)
        assert packing is None or (packing.symmetric, packing.group_sizes) == (packing.method == "gptq", (None,))


def test_float8_with_scales_of_another_shape(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(200, 64).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(4, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert message_of(lambda: Checkpoint(tmp_path).read("a")) == (
        "model.safetensors: a_scale_inv has shape [4, 1], [200, 64] needs [200, 1], [2, 1] or [1, 1]: only scales of "
        "rows, of blocks of 128 x 128 and of tensors are supported"
    )


CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


def with_weights(**changes: Any) -> dict[str, Any]:
    """A config of compressed-tensors whose weights differ from float8 by channel."""
    config = compressed_config("channel")
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quant_method = 'awq' in the layout 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "quant_method = 'awq' without zero points"),
        ({"quant_method": "gptq", "bits": 3}, "quant_method = 'gptq' with bits = 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "quant_method = 'gptq' with group_size = 0"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "quant_method = 'gptq' in the layout 'marlin'",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method = 'modelopt'"),
        ({"bits": 4}, "quant_method = null"),
        (fp8_config([64, 64]), "quant_method = 'fp8' with weight_block_size = [64, 64]"),
        (
            with_weights(num_bits=2, type="int", strategy="group") | {"format": "pack-quantized"},
            "quant_method = 'compressed-tensors' with format = 'pack-quantized', int2 weights by 'group'",
        ),
        (
            with_weights(num_bits="4", type="int", strategy="channel") | {"format": "pack-quantized"},
            "quant_method = 'compressed-tensors' with format = 'pack-quantized', int'4' weights by 'channel'",
        ),
        (
            with_weights(num_bits=4, type="int", strategy="group", group_size=-3) | {"format": "pack-quantized"},
            "quant_method = 'compressed-tensors' with group_size = -3",
        ),
        (
            with_weights(num_bits=4) | {"format": "nvfp4-pack-quantized"},
            "quant_method = 'compressed-tensors' with format = 'nvfp4-pack-quantized' and float4 weights",
        ),
        (with_weights(strategy="group"), "quant_method = 'compressed-tensors' with weights by 'group'"),
        (
            with_weights(strategy="block", block_structure=[64, 128]),
            "quant_method = 'compressed-tensors' with block_structure = [64, 128]",
        ),
        (
            compressed_config("channel", sparsity_config={"format": "sparse-24-bitmask"}),
            "quant_method = 'compressed-tensors' with sparsity_config",
        ),
        (
            compressed_config("channel", transform_config={"config_groups": {"R1": {}}}),
            "quant_method = 'compressed-tensors' with transform_config",
        ),
    ],
)
def test_other_formats_are_refused_by_name(quantization: dict[str, Any], expected: str) -> None:
    config = CONFIG | {"quantization_config": quantization}
    assert message_of(lambda: model_spec(config)) == f"config.json: {expected} is not supported: {INSTEAD}"


@pytest.mark.parametrize("group_size", ["group_size", "q_group_size"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_bits_and_groups_have_two_names(method: str, group_size: str) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": method, "w_bit": 4, group_size: 128}}
    check_quantization(config)
    packing = packing_of(config)
    assert packing is not None
    assert (packing.bits, packing.group_sizes) == ((4,), (128,))


@pytest.mark.parametrize(
    ("quantization", "what"),
    [
        (["fp8"], "quantization_config = ['fp8']"),
        (compressed_config("channel", config_groups=["W8A8"]), "config_groups = ['W8A8']"),
        (compressed_config("channel", config_groups={"W8A8": ["Linear"]}), "config_groups: W8A8 = ['Linear']"),
    ],
)
def test_configs_of_another_shape(quantization: Any, what: str) -> None:
    config = CONFIG | {"quantization_config": quantization}
    assert message_of(lambda: model_spec(config)).startswith(f"config.json: {what}: an object is needed")


def test_a_scheme_without_weights_rounds_none() -> None:
    """As llm-compressor writes one for keys and values."""
    of_keys = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
    for quantization in (compressed_config("channel"), with_weights(num_bits=4, type="int", strategy="channel")):
        packed = quantization["config_groups"]["group_0"]["weights"]["type"] == "int"
        groups = quantization["config_groups"] | {"group_1": of_keys}
        form = "pack-quantized" if packed else "float-quantized"
        config = CONFIG | {"quantization_config": quantization | {"config_groups": groups, "format": form}}
        check_quantization(config)
        packing = packing_of(config)
        assert (packing and packing.bits) == ((4,) if packed else None)


@pytest.mark.parametrize(
    ("quantization", "rounded"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        (fp8_config([128, 128]), "activations"),
        (compressed_config("tensor"), "activations"),
        (
            compressed_config("tensor", kv_cache_scheme={"num_bits": 8, "type": "float"}),
            "activations and keys and values",
        ),
    ],
)
def test_what_is_not_rounded_is_said(quantization: Any, rounded: str | None) -> None:
    line = f"8 bits for weights only: {rounded}, which this checkpoint would round too, are not rounded"
    assert left_out(CONFIG | {"quantization_config": quantization}) == (rounded and line)
