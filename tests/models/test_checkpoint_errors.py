"""What people read when a checkpoint is missing something, damaged, or not supported: one line with the mend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.base.errors import CheckpointError
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.load import load_attention_half, load_expert_half, open_checkpoint


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(save_model: Any, tools: Any) -> Path:
    saved: Path = save_model(tools.config("mixtral"), max_shard_size="60KB").folder
    return saved


def load_all(folder: Path) -> None:
    spec, checkpoint, backend = load_model_spec(folder), Checkpoint(folder), ReferenceBackend()
    load_attention_half(checkpoint, spec, backend)
    load_expert_half(checkpoint, spec, backend)


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


NORM = "model.layers.1.input_layernorm.weight"


def test_truncated_shard(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    assert message_of(lambda: load_all(folder)) == (
        f"{shard.name}: truncated: {size - 100:,} bytes, its header promises {size:,}: download it again"
    )


def test_shard_cut_within_its_header(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    with shard.open("r+b") as file:
        file.truncate(50)
    assert message_of(lambda: load_all(folder)) == (
        f"{shard.name}: truncated: 50 bytes, its header promises {header + 8:,}: download it again"
    )


def test_empty_shard(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    shard.write_bytes(b"")
    assert message_of(lambda: load_all(folder)) == f"{shard.name}: empty: download it again"


def test_page_of_html_instead_of_a_shard(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    shard.write_bytes(b"<!DOCTYPE html><html>not found</html>")
    promised = int.from_bytes(b"<!DOCTYP", "little")
    assert message_of(lambda: load_all(folder)) == (
        f"{shard.name}: not a safetensors file: its first 8 bytes promise a header of {promised:,} bytes, "
        f"the file has 37: download it again"
    )


def test_damaged_header(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    data = bytearray(shard.read_bytes())
    data[8:12] = b"!!!!"
    shard.write_bytes(data)
    assert message_of(lambda: load_all(folder)) == (
        f"{shard.name}: damaged safetensors header (Expecting value: line 1 column 1 (char 0)): download it again"
    )


def test_header_whose_offsets_do_not_fit_the_shape(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    assert message_of(lambda: Checkpoint(tmp_path)) == (
        "model.safetensors: damaged safetensors header (20 bytes for shape [2, 3] of F32): download it again"
    )


def test_missing_shard(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    shards = len(list(folder.glob("*.safetensors")))
    shard.unlink()
    assert message_of(lambda: load_all(folder)) == (
        f"{folder}: 1 of {shards} shards missing, the first is {shard.name}: download it"
    )


def test_missing_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for number, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        shard.rename(folder / f"part{number}.safetensors")
    assert message_of(lambda: load_all(folder)) == (
        f"{folder}: {number + 1} .safetensors files but no model.safetensors.index.json: download it from the publisher"
    )


def test_damaged_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    assert message_of(lambda: load_all(folder)) == (
        "model.safetensors.index.json: weight_map = null: an object with names is needed: download it again"
    )


def test_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert message_of(lambda: load_all(folder)) == (
        f"{folder}: no .safetensors file: give a folder in Hugging Face format"
    )


def test_no_such_folder(tmp_path: Path) -> None:
    assert message_of(lambda: load_model_spec(tmp_path / "nowhere")) == (
        f"{tmp_path / 'nowhere'} is missing: give a checkpoint folder in Hugging Face format"
    )


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert message_of(lambda: load_all(folder)) == (
        f"{folder / 'config.json'} is missing: give a checkpoint folder in Hugging Face format"
    )


def test_weights_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(CheckpointError, match=f"is one file of a checkpoint: give the folder {tmp_path}"):
        load_model_spec(tmp_path / "model.safetensors")
    (tmp_path / "sha256-abc").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match=r"sha256-abc is a GGUF file without the ending \.gguf: rename it"):
        load_model_spec(tmp_path / "sha256-abc")


def test_config_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert message_of(lambda: load_all(folder)).startswith(f"{folder / 'config.json'}: not valid JSON (")


def test_missing_tensor(folder: Path) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    del index["weight_map"][NORM]
    index_file.write_text(json.dumps(index))
    assert message_of(lambda: load_all(folder)) == (
        f"{folder}: tensor {NORM} is missing: config.json and weights do not belong together, "
        f"or the download is incomplete"
    )


def test_a_head_that_is_not_the_embedding(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("mixtral")).folder
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert message_of(lambda: open_checkpoint(folder, load_model_spec(folder))) == (
        "config.json: tie_word_embeddings = true, but lm_head.weight in model.safetensors is not "
        "model.embed_tokens.weight: write false there, or leave lm_head.weight out of the weights"
    )
    tensors = load_file(file)
    for head in (tensors["model.embed_tokens.weight"].clone(), None):  # a copy, none
        stored = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        save_file(stored if head is None else stored | {"lm_head.weight": head}, file)
        open_checkpoint(folder, load_model_spec(folder))


@pytest.mark.parametrize(
    ("family", "tensor", "size"),
    [
        ("mixtral", "model.layers.1.self_attn.q_proj.bias", 48),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.0.w1.bias", 40),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w4.weight", 40),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w1.pre_quant_scale", 40),
        ("mixtral", "model.layers.0.self_attn.q_proj.weight_scale", 48),
        ("mixtral", "model.layers.0.layer_scale", 48),
        ("mixtral", "model.norm.bias", 48),
        ("mixtral", "model.embed_norm.weight", 48),
        ("mixtral", "lm_head.bias", 97),
        ("qwen2_moe", "model.layers.0.self_attn.q_norm.weight", 8),
        ("deepseek_v3", "model.layers.1.self_attn.q_proj.weight", 48),
    ],
)
def test_a_tensor_that_config_json_says_nothing_of(
    family: str, tensor: str, size: int, save_model: Any, tools: Any
) -> None:
    folder = save_model(tools.config(family)).folder
    file, spec = folder / "model.safetensors", load_model_spec(folder)
    tensors = load_file(file) | {tensor: torch.zeros(size)}
    save_file(tensors, file)
    open_checkpoint(folder, spec)
    tensors[tensor][3] = 0.5
    save_file(tensors, file)
    assert message_of(lambda: open_checkpoint(folder, spec)) == (
        f"model.safetensors: tensor {tensor!r} has no use by config.json: state there what it belongs to, such as "
        f"attention_bias, or leave the tensor out of the weights"
    )


@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.output_scale",
        "model.layers.0.self_attn.q_proj.input_scale",
        "mtp.layers.0.input_layernorm.weight",
        "model.mtp_emb_norm.0.weight",
    ],
)
def test_tensors_of_what_is_left_out(tensor: str, save_model: Any, tools: Any) -> None:
    """Rounding of activations, keys and values, tables that are computed, and layers for further tokens."""
    folder = save_model(tools.config("mixtral")).folder
    save_file(load_file(folder / "model.safetensors") | {tensor: torch.full((8,), 3.0)}, folder / "model.safetensors")
    open_checkpoint(folder, load_model_spec(folder))


def test_index_names_the_wrong_shard(folder: Path) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    other = next(file for file in sorted(set(index["weight_map"].values())) if file != index["weight_map"][NORM])
    index["weight_map"][NORM] = other
    index_file.write_text(json.dumps(index))
    assert message_of(lambda: load_all(folder)) == (
        f"{other}: tensor {NORM} is missing, though model.safetensors.index.json says it is there: download both again"
    )


def test_wrong_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 98}))
    shard = shard_of(folder, "model.embed_tokens.weight")
    assert message_of(lambda: load_all(folder)) == (
        f"{shard.name}: tensor model.embed_tokens.weight has shape [97, 48], config.json asks for [98, 48]: "
        f"weights and config.json are of different models, download both again"
    )


def test_experts_under_unknown_names(folder: Path) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if ".experts." not in k}
    index_file.write_text(json.dumps(index))
    spec, checkpoint = load_model_spec(folder), Checkpoint(folder)
    assert message_of(lambda: load_expert_half(checkpoint, spec, ReferenceBackend())) == (
        f"{folder}: experts of layer 0 not found: expected model.layers.0.block_sparse_moe.experts.0.w1.weight "
        f"or model.layers.0.mlp.experts.gate_up_proj"
    )


def test_integer_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert message_of(lambda: Checkpoint(tmp_path).read("a")) == (
        "model.safetensors: tensor a has dtype I8: use weights in F64, F32, F16, BF16, F8_E4M3, U8"
    )


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (5 - len(header) % 4)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert torch.equal(Checkpoint(tmp_path).read("a"), values)


CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "llama"},
            f"config.json: model_type = 'llama' is not supported: use one of {', '.join(sorted(FAMILIES))}",
        ),
        ({"hidden_size": None}, "config.json: hidden_size is missing: copy it from the model's publisher"),
        (
            {"hidden_size": 0},
            "config.json: hidden_size = 0: a whole number of at least 1 is needed: "
            "copy the file from the model's publisher",
        ),
        (
            {"hidden_act": "relu"},
            "config.json: hidden_act = 'relu' is not supported: use a model with 'silu', 'gelu'",
        ),
        (
            {"topk_method": "noaux_tc"},
            "config.json: topk_method = 'noaux_tc' is not supported: use a model with 'greedy', 'group_limited_greedy'",
        ),
        ({"mlp_bias": True}, "config.json: mlp_bias = true is not supported: use a model without it"),
        (
            {"dtype": "int8"},
            "config.json: dtype = 'int8' is not supported: use a model with 'float32', 'bfloat16', 'float16'",
        ),
    ],
)
def test_unsupported_configs(change: dict[str, Any], expected: str) -> None:
    assert message_of(lambda: model_spec(CONFIG | change)) == expected


def test_a_lone_file_needs_no_index(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("mixtral")).folder
    load_all(folder)
    assert len(load_file(folder / "model.safetensors")) == len(Checkpoint(folder).names)
