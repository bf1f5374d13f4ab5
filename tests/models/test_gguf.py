"""GGUF files that llama.cpp's own package wrote: blocks, families, parts, and what is refused."""

import json
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from antiphon.base.errors import CheckpointError
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights, read_blocks
from antiphon.models.gguf.container import TYPES, GgufArray, GgufHeader
from antiphon.models.gguf.metadata import config_of
from antiphon.models.load import load_expert, load_expert_half, open_checkpoint
from antiphon.models.packed import multiplied_out
from antiphon.models.shares import share_of
from antiphon.models.weights import stacked
from tests.models.gguf_specimens import ARCHITECTURES, all_of, finish, metadata, stored_as, wide_gguf, write_gguf
from tests.models.test_families import saved_deepseek
from tests.models.test_shares import logits_of_ranks

BLOCKS = [kind for number in TYPES if (kind := Kind(number)).name not in ("F32", "F16", "BF16")]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 256), (3, 768), (5, 512)])
def test_blocks_are_what_the_package_makes_of_them(kind: Kind, shape: tuple[int, int]) -> None:
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    data, expected = stored_as(kind, array, 7)
    weight = read_blocks(TYPES[int(kind)], torch.from_numpy(data).view(shape[0], -1), shape[1])
    torch.testing.assert_close(multiplied_out(weight, torch.float32), torch.from_numpy(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", BLOCKS)
def test_plans_count_the_bytes_that_are_kept(kind: Kind) -> None:
    block = TYPES[int(kind)]
    weight = read_blocks(block, torch.zeros((16, 3 * 256 // block.size * block.num_bytes), dtype=torch.uint8), 768)
    assert weight.num_bytes == block.kept * 16 * 768


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
    if family == "phimoe":
        changes = {"router_jitter_noise": 0.01}
    is_first = family == "deepseek"
    saved = saved_deepseek(save_model, tools) if is_first else save_model(tools.config(family, **changes))
    write_gguf(saved.folder, tmp_path / "model.gguf", all_of(Kind.F32))
    token_ids = tools.ids(17)
    decoder = tools.load(tmp_path / "model.gguf")
    torch.testing.assert_close(tools.run(decoder, token_ids, [17]), saved.logits(token_ids), rtol=1e-4, atol=1e-4)
    assert load_model_spec(tmp_path / "model.gguf").eos_token_ids == (2,)


BIG = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", [*BLOCKS, Kind.F16, Kind.BF16])
def test_types_through_a_model(kind: Kind, save_model: Any, tools: Any, tmp_path: Path) -> None:
    config = tools.config("qwen3_moe", **BIG, head_dim=64, decoder_sparse_step=1, initializer_range=0.02)
    folder = save_model(config).folder
    file = tmp_path / "model.gguf"
    wide = wide_gguf(folder, file, all_of(kind))
    token_ids = tools.ids(9)
    expected = tools.run(tools.load(wide), token_ids, [9])
    torch.testing.assert_close(tools.run(tools.load(file), token_ids, [9]), expected, rtol=1e-4, atol=1e-4)
    found = logits_of_ranks(SimpleNamespace(folder=file), 2, token_ids, [8, 1], backend=CpuBackend(torch.float32))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    spec, checkpoint = load_model_spec(file), open_weights(file)
    half = load_expert_half(checkpoint, spec, CpuBackend(torch.float32), [0, 1], num_slots=3)
    load_expert(checkpoint, spec, share_of(spec), half, 1, 4, 2)
    half.hold(1, 2, 4)
    whole = load_expert_half(open_weights(wide), spec, ReferenceBackend())
    x_TH, ids = torch.randn(3, spec.hidden_size), torch.full((3, 1), 4, dtype=torch.int32)
    moved = half.forward(1, x_TH, half.to_local(1, ids), torch.ones(3, 1))
    expected = whole.forward(1, x_TH, ids, torch.ones(3, 1))
    assert (moved - expected).abs().max() < 1e-5 * expected.abs().max()


def as_q4_k_m(name: str, shape: tuple[int, ...]) -> Kind:
    """The mix of that name: more bits for values, head and half of the down projections."""
    more = "attn_v" in name or name == "output.weight" or ("ffn_down" in name and "blk.0" in name)
    return all_of(Kind.Q6_K if more else Kind.Q4_K)(name, shape)


def test_types_in_one_file(save_model: Any, tools: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """q, k and v, of two types, stay in few bits too."""
    caplog.set_level("INFO")
    config = tools.config("qwen3_moe", **BIG, head_dim=64, decoder_sparse_step=1, initializer_range=0.02)
    wide = wide_gguf(save_model(config).folder, tmp_path / "model.gguf", as_q4_k_m)
    token_ids, backend = tools.ids(9), CpuBackend(torch.float32)
    found = tools.run(tools.load(tmp_path / "model.gguf", backend), token_ids, [9], 16)
    assert "3 x int8 in groups of 16" in caplog.text
    assert "multiplied out" not in caplog.text
    torch.testing.assert_close(found, tools.run(tools.load(wide), token_ids, [9]), rtol=1e-4, atol=1e-4)


IN_BLOCKS = ["dbrx", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoeshared", "mixtral", "olmoe", "phimoe"]


@pytest.mark.parametrize("family", IN_BLOCKS)
def test_families_in_blocks(family: str, save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Rows in turns, a split up projection, stacked q, k and v, and experts with biases."""
    wider = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
    if family in ("deepseek_v3", "glm4_moe"):
        wider |= {"moe_intermediate_size": 64}
    if family == "deepseek_v3":
        wider |= {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    if family == "dbrx":
        ffn = {"ffn_hidden_size": 64, "moe_num_experts": 5, "moe_top_k": 3}
        wider = {"d_model": 96, "ffn_config": ffn}
    folder = save_model(tools.config(family, **wider)).folder
    kind = Kind.MXFP4 if family == "gpt_oss" else Kind.Q8_0
    wide = wide_gguf(folder, tmp_path / "model.gguf", all_of(kind))
    token_ids, backend = tools.ids(9), CpuBackend(torch.float32)
    found = tools.run(tools.load(tmp_path / "model.gguf", backend), token_ids, [9], 16)
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
    finish(writer)
    return file


def test_what_is_refused(save_model: Any, tools: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", t=(np.zeros((4, 84), dtype=np.uint8), Kind.Q2_K))
    assert "tensor 't' is stored as Q2_K, which is not supported: download" in message_of(lambda: load_model_spec(file))
    file = written(tmp_path / "a.gguf", t=(np.zeros((4, 66), dtype=np.uint8), Kind.IQ2_XXS))
    assert "stored as IQ2_XXS" in message_of(lambda: load_model_spec(file))
    file = written(tmp_path / "a.gguf", "bert")
    assert message_of(lambda: load_model_spec(file)).startswith(
        "a.gguf: general.architecture = 'bert' is not supported: use a GGUF file of dbrx, deepseek"
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


def with_tensors(**added: Any) -> Any:
    """What `write_gguf` calls: further tensors in float32."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, array in added.items():
            writer.add_tensor(name, np.asarray(array, dtype=np.float32))

    return add


def logits_equal(path: Path, saved: Any, tools: Any, num_tokens: int = 17) -> None:
    token_ids = tools.ids(num_tokens)
    found = tools.run(tools.load(path), token_ids, [num_tokens])
    torch.testing.assert_close(found, saved.logits(token_ids), rtol=1e-4, atol=1e-4)


def test_factors_of_rotary_frequencies(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Llama 3's scaling is stored as a tensor, and no key speaks of it."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    saved = save_model(tools.config("mixtral", rope_parameters=scaling, head_dim=12))
    kept = saved.model.model.rotary_emb.inv_freq
    factors = 1e4 ** -(torch.arange(0, 12, 2) / 12) / kept
    assert factors.max() > 2
    write_gguf(saved.folder, tmp_path / "m.gguf", all_of(Kind.F32), with_tensors(**{"rope_freqs.weight": factors}))
    logits_equal(tmp_path / "m.gguf", saved, tools)


def test_two_sets_of_factors(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Phi-3.5-MoE: the file states the magnitude, too."""
    short, long = [1.0, 1.5, 2.0, 2.5], [2.0, 3.0, 5.0, 8.0]
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    scaling |= {"short_mscale": 1.25, "long_mscale": 1.25, "original_max_position_embeddings": 32}
    saved = save_model(tools.config("phimoe", rope_parameters=scaling, router_jitter_noise=0.01))
    tables = with_tensors(**{"rope_factors_short.weight": short, "rope_factors_long.weight": long})

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_attn_factors(1.25)
        writer.add_rope_scaling_orig_ctx_len(32)
        tables(writer)

    write_gguf(saved.folder, tmp_path / "m.gguf", all_of(Kind.F32), add)
    logits_equal(tmp_path / "m.gguf", saved, tools)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(key: str, save_model: Any, tools: Any, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    saved = save_model(tools.config("mixtral", rope_parameters=scaling))
    write_gguf(saved.folder, tmp_path / "m.gguf", all_of(Kind.F32), lambda w: w.add_float32(f"llama.{key}", 4.0))
    logits_equal(tmp_path / "m.gguf", saved, tools)


def test_layers_for_further_tokens_are_left_out(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """GLM-4.5's files hold them behind the others, and count them."""
    saved = save_model(tools.config("glm4_moe", norm_topk_prob=True))
    write_gguf(saved.folder, tmp_path / "plain.gguf", all_of(Kind.F32))
    last = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "plain.gguf").tensors if t.name.startswith("blk.2.")}
    further = {name.replace("blk.2.", "blk.3."): array for name, array in last.items()}
    shapes = {"eh_proj": (48, 96), "enorm": (48,), "hnorm": (48,), "shared_head_norm": (48,), "embed_tokens": (97, 48)}
    further |= {f"blk.3.nextn.{name}.weight": np.ones(shape) for name, shape in shapes.items()}

    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("glm4moe.block_count")
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        with_tensors(**further)(writer)

    write_gguf(saved.folder, tmp_path / "m.gguf", all_of(Kind.F32), add)
    logits_equal(tmp_path / "m.gguf", saved, tools)


def test_gate_and_up_in_one_tensor(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config("qwen3_moe", decoder_sparse_step=1))
    write_gguf(saved.folder, tmp_path / "plain.gguf", all_of(Kind.F32))
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        pair = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
        tensors[name.replace("gate_exps", "gate_up_exps")] = np.concatenate(pair, axis=1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    metadata(writer, "qwen3_moe", json.loads((saved.folder / "config.json").read_text()))
    with_tensors(**tensors)(writer)
    finish(writer)
    logits_equal(tmp_path / "m.gguf", saved, tools)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.ffn_down_exps.scale", (5,)),
        ("blk.0.attn_q.scale", (1,)),
        ("output_norm.bias", (48,)),
        ("token_embd_norm.weight", (48,)),
        ("cls.weight", (2, 48)),
        ("blk.0.layer_output_scale.weight", (1,)),
    ],
)
def test_a_tensor_without_a_use(name: str, shape: Any, save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved, file = save_model(tools.config("qwen3_moe", decoder_sparse_step=1)), tmp_path / "m.gguf"
    write_gguf(saved.folder, file, all_of(Kind.F32), with_tensors(**{name: np.full(shape, 2.0)}))
    assert message_of(lambda: open_checkpoint(file, load_model_spec(file))) == (
        f"m.gguf: tensor {name!r} has no use by its metadata: use another GGUF file of the model"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 0.5),
        ("attention.scale", 0.5),
        ("attention.sliding_window", 4),
        ("attention.value_length", 10),
        ("attn_logit_softcapping", 30.0),
        ("embedding_scale", 2.0),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("logit_scale", 2.0),
        ("rope.dimension_count", 6),
        ("rope.scaling.attn_factor", 2.0),
        ("swiglu_clamp_exp", [7.0, 7.0, 7.0]),
    ],
)
def test_a_key_that_would_change_what_is_computed(
    key: str, value: Any, save_model: Any, tools: Any, tmp_path: Path
) -> None:
    saved, file = save_model(tools.config("qwen3_moe", decoder_sparse_step=1)), tmp_path / "m.gguf"

    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"qwen3moe.{key}", None)
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](f"qwen3moe.{key}", value)

    write_gguf(saved.folder, file, all_of(Kind.F32), add)
    said = message_of(lambda: load_model_spec(file))
    assert "is not supported" in said
    assert key.rpartition(".")[2] in said or "partial_rotary_factor = 0.5" in said


def test_what_the_file_says_of_normalised_weights(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config("qwen3_moe", decoder_sparse_step=1, norm_topk_prob=False))
    write_gguf(saved.folder, tmp_path / "m.gguf", all_of(Kind.F32), lambda w: w.add_expert_weights_norm(False))
    logits_equal(tmp_path / "m.gguf", saved, tools)


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        ("adapter", "llama", "this is no model but an adapter, which must be merged into its model; give the GGUF"),
        ("mmproj", "clip", "this is no model but the part of a model that reads pictures or sound"),
        ("imatrix", "", "this is no model but statistics for a quantiser"),
        ("vocab", "llama", "this is no model but a vocabulary without weights"),
        ("model", "controlvector", "this is no model but a control vector"),
    ],
)
def test_files_that_are_no_models(kind: str, architecture: str, expected: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_type(kind)
    finish(writer)
    assert message_of(lambda: load_model_spec(tmp_path / "m.gguf")).startswith(f"m.gguf: {expected}")


def test_other_containers(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Another alignment and version 2 are read; what is not is refused once, not in two sentences."""
    saved, file = save_model(tools.config("qwen3_moe", decoder_sparse_step=1)), tmp_path / "m.gguf"
    for alignment in (8, 4096):
        write_gguf(saved.folder, file, all_of(Kind.F32), lambda w, a=alignment: w.add_custom_alignment(a))
        logits_equal(file, saved, tools)
    data = file.read_bytes()
    file.write_bytes(data[:4] + (2).to_bytes(4, "little") + data[8:])
    logits_equal(file, saved, tools)
    file.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    little = "versions 2 and 3 of little-endian machines are: download another file"
    assert message_of(lambda: load_model_spec(file)) == f"m.gguf: GGUF version 1 is not supported, {little}"
    write_gguf(saved.folder, file, all_of(Kind.F32), endianess=gguf.GGUFEndian.BIG)
    said = f"m.gguf: GGUF of a big-endian machine is not supported, {little}"
    assert message_of(lambda: load_model_spec(file)) == said
    part = file.rename(tmp_path / "m.gguf.part1of2")
    assert message_of(lambda: load_model_spec(part)).endswith("join the parts, cat PART1 PART2 > model.gguf")
