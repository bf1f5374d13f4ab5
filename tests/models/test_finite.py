"""NaN and infinity in weights are refused at loading, with tensor and file named; experts are not looked at."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.base.errors import CheckpointError
from antiphon.models.weights import check_finite

SPOILED = [
    ("qwen3_moe", "model.norm.weight", (5,)),
    ("qwen3_moe", "model.layers.0.input_layernorm.weight", (0,)),
    ("qwen3_moe", "model.layers.2.self_attn.q_norm.weight", (11,)),
    ("qwen3_moe", "model.layers.1.mlp.gate.weight", (4, 47)),
    ("qwen3_moe", "model.embed_tokens.weight", (96, 0)),
    ("qwen3_moe", "lm_head.weight", (0, 1)),
    ("qwen3_moe", "model.layers.1.self_attn.k_proj.weight", (3, 3)),
    ("qwen2_moe", "model.layers.0.self_attn.v_proj.bias", (2,)),
    ("phimoe", "model.layers.0.input_layernorm.bias", (2,)),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", (7,)),
    ("deepseek_v3", "model.layers.1.self_attn.kv_a_layernorm.weight", (7,)),
]


def spoil(folder: Path, name: str, place: tuple[int, ...], value: float, dtype: torch.dtype) -> None:
    file = folder / "model.safetensors"
    tensors = {key: tensor.clone().to(dtype) for key, tensor in load_file(file).items()}
    tensors[name][place] = value
    save_file(tensors, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("family", "name", "place"), SPOILED)
def test_one_bad_number_is_refused(
    family: str, name: str, place: tuple[int, ...], value: float, save_model: Any, tools: Any
) -> None:
    folder = save_model(tools.config(family)).folder
    spoil(folder, name, place, value, torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        tools.load(folder)
    assert str(caught.value) == (
        f"model.safetensors: tensor {name} holds {value} at {list(place)}: "
        f"the weights are damaged, download the file again"
    )


def test_experts_are_not_looked_at(save_model: Any, tools: Any) -> None:
    """They are nearly all of a checkpoint; looking at each number would cost more than a twentieth of the loading."""
    folder = save_model(tools.config("mixtral")).folder
    spoil(folder, "model.layers.0.block_sparse_moe.experts.0.w1.weight", (0, 0), float("nan"), torch.float32)
    tools.load(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_numbers_are_fine(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    check_finite(torch.full((1000,), largest, dtype=dtype), "a", "file")
    check_finite(torch.tensor([largest, -largest, 0.0], dtype=dtype), "a", "file")
    check_finite(torch.empty(0, 3, dtype=dtype), "a", "file")
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(CheckpointError, match="tensor a holds"):
            check_finite(torch.tensor([largest, bad, -largest], dtype=dtype), "a", "file")
