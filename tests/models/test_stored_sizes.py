"""`config.json` against the weights' headers: other sizes are refused before anything is allocated or looped over."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from antiphon.base.errors import CheckpointError
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec, tensor_names
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.tensors import check_sizes

OTHER = "weights and config.json are of different models, download both again"
STORED = "the weights have 3 layers, 5 experts, 97 tokens, a hidden size of 48"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rename_tensors(folder: Path, old: str, new: str | None) -> None:
    """Rename, or leave out where `new` is None, every tensor whose name begins with `old`."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if not name.startswith(old):
            tensors[name] = tensor.clone()
        elif new is not None:
            tensors[new + name.removeprefix(old)] = tensor.clone()
    save_file(tensors, file)


def refusal(folder: Path, load: Any = None) -> str:
    """What `check_sizes` says, or `load` of a half; it takes no time, whatever the numbers are."""

    def attempt() -> None:
        spec, checkpoint = load_model_spec(folder), Checkpoint(folder)
        if load is None:
            check_sizes(checkpoint, spec, tensor_names(spec))
        else:
            load(checkpoint, spec, ReferenceBackend())

    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        attempt()
    assert time.process_time() - start < 2
    return str(caught.value)


@pytest.fixture
def folder(save_model: Any, tools: Any) -> Path:
    path: Path = save_model(tools.config("mixtral")).folder
    return path


@pytest.mark.parametrize("load", [None, load_attention_half, load_expert_half])
def test_other_numbers_of_layers(folder: Path, load: Any) -> None:
    for num_layers in (2, 4, 10_000):
        edit_config(folder, num_hidden_layers=num_layers)
        assert refusal(folder, load) == (
            f"config.json: {num_layers} layers, but the weights in {folder} have 3: {OTHER}"
        )


@pytest.mark.parametrize("load", [None, load_attention_half, load_expert_half])
def test_other_numbers_of_experts(folder: Path, load: Any) -> None:
    for num_experts in (4, 6, 100_000):
        edit_config(folder, num_local_experts=num_experts)
        assert refusal(folder, load) == (
            f"config.json: {num_experts} experts, but layer 0 of the weights in {folder} has 5: {OTHER}"
        )


def test_other_numbers_of_stacked_experts(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("dbrx")).folder
    edit_config(folder, ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 50_000, "moe_top_k": 3})
    assert refusal(folder) == (
        "model.safetensors: tensor transformer.blocks.0.ffn.router.layer.weight has shape [5, 48], "
        f"config.json asks for [50000, 48]: {OTHER}"
    )


@pytest.mark.parametrize("change", [{"vocab_size": 10**7}, {"hidden_size": 48_000}])
def test_other_vocabulary_or_hidden_size(folder: Path, change: dict[str, int]) -> None:
    edit_config(folder, **change)
    asked = [change.get("vocab_size", 97), change.get("hidden_size", 48)]
    assert refusal(folder) == (
        f"model.safetensors: tensor model.embed_tokens.weight has shape [97, 48], config.json asks for {asked}: {OTHER}"
    )


@pytest.mark.parametrize(
    ("key", "most"),
    [("num_hidden_layers", "10,000"), ("num_local_experts", "100,000"), ("hidden_size", "1,048,576")],
)
def test_a_size_beyond_all_bounds_is_refused_with_what_the_weights_have(folder: Path, key: str, most: str) -> None:
    edit_config(folder, **{key: 10**9})
    assert refusal(folder) == (
        f"config.json: {key} = 1000000000: at most {most} is supported, {STORED}: "
        f"copy the file from the model's publisher"
    )


def test_a_layer_that_is_missing(folder: Path) -> None:
    rename_tensors(folder, "model.layers.1.", None)
    assert refusal(folder) == f"{folder}: layer 1 of 3 is missing: the download is incomplete, repeat it"


def test_names_of_another_family(folder: Path) -> None:
    rename_tensors(folder, "model.layers.", "blocks.")
    assert refusal(folder) == f"{folder}: no tensor is named model.layers.0.*, as those of mixtral are: {OTHER}"


def test_layers_for_further_tokens_are_left_out(save_model: Any, tools: Any) -> None:
    """DeepSeek-V3 is published with 61 layers and a 62nd that predicts the token after the next."""
    folder = save_model(tools.config("deepseek_v3")).folder
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    norm = tensors["model.norm.weight"]
    for stored in ("weight", "qweight", "weight_packed"):  # in floats, and in few bits
        save_file(tensors | extra | {f"model.layers.3.eh_proj.{stored}": norm.clone()}, file)
        tools.load(folder)
    save_file(tensors | extra, file)
    assert refusal(folder) == f"config.json: 3 layers, but the weights in {folder} have 4: {OTHER}"
