"""GGUF files that llama.cpp's own package wrote: blocks, families, parts, and what is refused."""

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from antiphon.base.errors import CheckpointError
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights, read_blocks
from antiphon.models.gguf.container import TYPES, GgufArray, GgufHeader
from antiphon.models.gguf.metadata import config_of
from antiphon.models.load import open_checkpoint
from antiphon.models.packed import multiplied_out
from antiphon.models.weights import stacked
from tests.models.gguf_specimens import ARCHITECTURES, all_of, stored_as, write_gguf

BLOCKS = [kind for number in TYPES if (kind := Kind(number)).name not in ("F32", "F16", "BF16")]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 256), (3, 768), (5, 512)])
def test_blocks_are_what_the_package_makes_of_them(kind: Kind, shape: tuple[int, int]) -> None:
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    data, expected = stored_as(kind, array, 7)
    weight = read_blocks(TYPES[int(kind)], torch.from_numpy(data).view(shape[0], -1), shape[1])
    torch.testing.assert_close(multiplied_out(weight, torch.float32), torch.from_numpy(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("kinds", "bits"),
    [
        ((Kind.Q4_K, Kind.Q4_K, Kind.Q6_K), 8 + 2 * 8 / 16 + 2 * 16 / 256),
        ((Kind.Q6_K, Kind.Q5_K), 8 + 2 * 8 / 16 + 2 * 16 / 256),
        ((Kind.Q4_0, Kind.Q8_0), 8.5),
        ((Kind.Q5_1, Kind.Q4_0), 9.5),
    ],
)
def test_matrices_of_other_types_become_one(kinds: tuple[Kind, ...], bits: float) -> None:
    """Projections that are stacked, as llama.cpp's mixes have q, k and v: nothing is rounded."""
    parts = []
    for number, kind in enumerate(kinds):
        data, _ = stored_as(kind, np.random.default_rng(number).normal(size=(3, 768)).astype(np.float32), number)
        parts.append(read_blocks(TYPES[int(kind)], torch.from_numpy(data).view(3, -1), 768))
    whole = stacked(parts)
    assert whole is not None
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert whole.num_bytes * 8 == pytest.approx(bits * 768 * whole.num_rows)
    data, _ = stored_as(Kind.MXFP4, np.ones((3, 768), dtype=np.float32), 1)
    assert stacked([*parts, read_blocks(TYPES[int(Kind.MXFP4)], torch.from_numpy(data).view(3, -1), 768)]) is None


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_families_in_float32(family: str, save_model: Any, tools: Any, tmp_path: Path) -> None:
    """The file alone gives the model's logits."""
    changes = {"norm_topk_prob": True} if family in ("dots1", "glm4_moe", "deepseek_v3") else {}
    if family == "qwen2_moe":
        changes = {"mlp_only_layers": []}
    if family == "qwen3_moe":
        changes = {"decoder_sparse_step": 1}
    saved = save_model(tools.config(family, **changes))
    write_gguf(saved.folder, tmp_path / "model.gguf", all_of(Kind.F32))
    token_ids = tools.ids(17)
    decoder = tools.load(tmp_path / "model.gguf")
    torch.testing.assert_close(tools.run(decoder, token_ids, [17]), saved.logits(token_ids), rtol=1e-4, atol=1e-4)
    assert load_model_spec(tmp_path / "model.gguf").eos_token_ids == (2,)


def q4_k_m(name: str, shape: tuple[int, ...]) -> Kind:
    """As llama.cpp mixes types."""
    better = "ffn_down" in name or "attn_v" in name or name.startswith("output.")
    return all_of(Kind.Q6_K if better else Kind.Q4_K)(name, shape)


def wide_gguf(folder: Path, file: Path, kind: Kind | None, **how: Any) -> Path:
    """Beside `file`, one with float32 for what its blocks multiply out to. No `kind`: `q4_k_m`."""
    wide = write_gguf(folder, file, q4_k_m if kind is None else all_of(kind), **how)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("wide.gguf"), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, tensor in wide.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_name("wide.gguf")


BIG = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", [*BLOCKS, Kind.F16, Kind.BF16, None])
def test_types_through_a_model(
    kind: Kind | None, save_model: Any, tools: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tools.config("qwen3_moe", **BIG, head_dim=64, decoder_sparse_step=1, initializer_range=0.02)
    folder = save_model(config).folder
    wide = wide_gguf(folder, tmp_path / "model.gguf", kind)
    token_ids = tools.ids(9)
    caplog.set_level("INFO")
    found = tools.run(tools.load(tmp_path / "model.gguf"), token_ids, [9])
    assert "multiplied out" not in caplog.text
    torch.testing.assert_close(found, tools.run(tools.load(wide), token_ids, [9]), rtol=1e-4, atol=1e-4)


def test_a_file_in_parts(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """The package splits by numbers of tensors; any part names the model, and so does the folder."""
    saved = save_model(tools.config("qwen3_moe", decoder_sparse_step=1))
    write_gguf(saved.folder, tmp_path / "model.gguf", all_of(Kind.F32), split_max_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    token_ids = tools.ids(17)
    for path in (parts[0], parts[-1], tmp_path):
        logits = tools.run(tools.load(path), token_ids, [17])
        torch.testing.assert_close(logits, saved.logits(token_ids), rtol=1e-4, atol=1e-4)
    parts[1].unlink()
    assert message_of(lambda: load_model_spec(parts[0])).endswith(f"the first is {parts[1].name}: download it")


def message_of(action: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(file: Path, architecture: str = "qwen3moe", **tensors: Any) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_what_is_refused(save_model: Any, tools: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", t=(np.zeros((4, 84), dtype=np.uint8), Kind.Q2_K))
    assert "tensor 't' is stored as Q2_K, which is not supported: download" in message_of(lambda: load_model_spec(file))
    file = written(tmp_path / "a.gguf", t=(np.zeros((4, 66), dtype=np.uint8), Kind.IQ2_XXS))
    assert "stored as IQ2_XXS" in message_of(lambda: load_model_spec(file))
    file = written(tmp_path / "a.gguf", "bert")
    assert message_of(lambda: load_model_spec(file)).startswith(
        "a.gguf: general.architecture = 'bert' is not supported: use a GGUF file of deepseek"
    )
    header = GgufHeader({"general.architecture": GgufArray(mmap.mmap(-1, 8), 4, 2, 0)}, {}, {}, {})
    assert message_of(lambda: config_of(header)).startswith("general.architecture = an array of 2 is not supported")
    file = written(tmp_path / "a.gguf")
    assert "qwen3moe.attention.head_count is missing" in message_of(lambda: load_model_spec(file))
    (tmp_path / "b.gguf").write_bytes(b"GGML" + bytes(40))
    assert "not a GGUF file: it begins with b'GGML'" in message_of(lambda: load_model_spec(tmp_path / "b.gguf"))
    assert message_of(lambda: load_model_spec(tmp_path / "c.gguf")).startswith(f"{tmp_path / 'c.gguf'} is missing")
    assert "GGUF files of 2 models: give one of them" in message_of(lambda: load_model_spec(tmp_path))
    saved = save_model(tools.config("qwen3_moe", decoder_sparse_step=1))
    write_gguf(saved.folder, tmp_path / "d.gguf", all_of(Kind.F32))
    data = (tmp_path / "d.gguf").read_bytes()
    (tmp_path / "d.gguf").write_bytes(data[:-400])
    assert "d.gguf: truncated:" in message_of(lambda: open_weights(tmp_path / "d.gguf"))


def test_metadata_that_lies_about_sizes(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved, file = save_model(tools.config("qwen3_moe", decoder_sparse_step=1)), tmp_path / "d.gguf"
    write_gguf(saved.folder, file, all_of(Kind.F32))
    data = file.read_bytes()
    for key, expected in (
        (b"qwen3moe.block_count", "1000000 layers"),
        (b"qwen3moe.embedding_length", "hidden"),
        (b"qwen3moe.expert_count", "1000000"),
    ):
        place = data.index(key) + len(key) + 4
        file.write_bytes(data[:place] + (1_000_000).to_bytes(4, "little") + data[place + 4 :])
        said = message_of(lambda: open_checkpoint(file, load_model_spec(file)))
        assert "d.gguf" in said, key
        assert expected in said or "1000000" in said, said
