"""Folders that `antiphon quantize` writes: what compressed-tensors makes of them, errors, and runs that are stopped."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from antiphon.base.errors import UserError
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.rounding import WeightRounding, format_of, quantize, rounded
from antiphon.models.write_quantized import write_quantized
from tests.models.decoder import Decoder

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32}

WIDER = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EAGER: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "qwen2_moe": {"shared_expert_intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
}


def silent(done: float, total: float | None) -> None:
    pass


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Every matrix by the library's own decompression, found by its own config."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        groups = config.config_groups.values()
        scheme = next(group for group in groups if any(_matches(target, module) for target in group.targets))
        parts = {
            key.removeprefix(module + "."): value for key, value in tensors.items() if key.startswith(module + ".")
        }
        compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
        found[module + ".weight"] = compressor.decompress(parts, scheme)["weight"].float()
    return found


def _matches(target: str, module: str) -> bool:
    assert target.startswith("re:")
    return re.match(target.removeprefix("re:"), module) is not None


@pytest.mark.parametrize(
    ("experts", "dense", "group"),
    [("int4", None, 32), ("int8", "int8", 16), ("mxfp4", "int8", 32), ("int4", "int8", 8)],
)
def test_the_library_reads_what_is_written(
    experts: Any, dense: Any, group: int, save_model: Any, tools: Any, tmp_path: Path
) -> None:
    saved = save_model(tools.config("qwen3_moe", **SIZES))
    out = tmp_path / "out"
    errors = write_quantized(saved.folder, out, WeightRounding(experts=experts, dense=dense, group=group), silent)
    theirs, ours = decompressed(out), open_weights(out)
    source = load_file(saved.folder / "model.safetensors")
    assert len(theirs) >= 5 * 3
    for name, weight in theirs.items():
        torch.testing.assert_close(ours.read(name), weight, rtol=1e-2 if experts == "mxfp4" else 1e-6, atol=1e-6)
        assert (weight - source[name]).norm() < 0.2 * source[name].norm()
    kept = {name for name in source if name not in theirs}
    assert all(torch.equal(ours.read(name), source[name]) for name in kept)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= kept
    assert not any("mlp.gate.weight" in name for name in theirs)
    assert all(0 < each.relative < 0.2 for each in errors.values())
    token_ids = tools.ids(9)
    assert torch.isfinite(tools.run(tools.load(out), token_ids, [9])).all()


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize(
    ("family", "experts", "dense", "group"),
    [
        ("qwen3_moe", "int4", "int8", 32),
        ("qwen3_moe", "int4", None, 128),
        ("qwen3_moe", "int8", "int8", 32),
        ("deepseek_v3", "int4", "int8", 32),
        ("mixtral", "int4", "int8", 32),
        ("qwen2_moe", "int4", "int8", 32),
    ],
)
def test_transformers_loads_what_is_written(
    family: str, experts: Any, dense: Any, group: int, dequantize: bool, save_model: Any, tools: Any, tmp_path: Path
) -> None:
    """Its logits of the folder are ours: by its own loading, which multiplies out at load or in the first pass."""
    saved = save_model(tools.config(family, **WIDER | OF_FAMILY.get(family, {})))
    out = tmp_path / "out"
    write_quantized(saved.folder, out, WeightRounding(experts=experts, dense=dense, group=group), silent)
    token_ids = tools.ids(9)
    ours = tools.run(tools.load(out), token_ids, [9])
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=dequantize), **EAGER
    ).eval()
    with torch.inference_mode():
        theirs = model(token_ids[None]).logits[0]
    assert (ours - saved.logits(token_ids)).norm() > 0.01 * ours.norm()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("dequantize", [True, False])
def test_transformers_loads_mxfp4(dequantize: bool, save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Of a model in bfloat16, in which it multiplies them out: exactly."""
    saved = save_model(tools.config("qwen3_moe", **WIDER))
    file = saved.folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    out = tmp_path / "out"
    write_quantized(saved.folder, out, WeightRounding(experts="mxfp4"), silent)
    token_ids = tools.ids(9)
    ours = tools.run(tools.load(out), token_ids, [9])
    how = {"quantization_config": CompressedTensorsConfig(dequantize=dequantize)}
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, **how, **EAGER)
    torch.nn.Module.float(model).eval()  # by name: transformers refuses it of quantized models
    with torch.inference_mode():
        theirs = model(token_ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_a_run_that_was_stopped_goes_on(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config("qwen3_moe", **SIZES), max_shard_size="60KB")
    assert len(list(saved.folder.glob("*.safetensors"))) > 3
    wanted, out = WeightRounding(experts="int4"), tmp_path / "out"
    done: list[float] = []

    def stop(number: float, total: float | None) -> None:
        done.append(number)
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(saved.folder, out, wanted, stop)
    first = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert len(first) == 2
    assert not (out / "config.json").exists()
    errors = write_quantized(saved.folder, out, wanted, silent)
    assert all((out / name).stat().st_mtime_ns == time for name, time in first.items())
    assert errors == write_quantized(saved.folder, tmp_path / "again", wanted, silent)
    assert torch.isfinite(tools.run(tools.load(out), tools.ids(9), [9])).all()
    with pytest.raises(UserError, match="was made otherwise"):
        write_quantized(saved.folder, out, WeightRounding(experts="int8"), silent)
    with pytest.raises(UserError, match="in few bits already"):
        write_quantized(out, tmp_path / "third", wanted, silent)
    (shard := min(out.glob("*.safetensors"))).unlink()
    shard.mkdir()
    with pytest.raises(UserError, match=f"{shard.name} is damaged .*: remove it"):
        write_quantized(saved.folder, out, wanted, silent)
    with pytest.raises(UserError, match="holds the model itself"):
        write_quantized(saved.folder, saved.folder, wanted, silent)


def test_what_cannot_be_written(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config("qwen3_moe", **SIZES))
    with pytest.raises(UserError, match=r"--group 128: .* has 64 columns, which groups of 128 do not divide"):
        write_quantized(saved.folder, tmp_path / "out", WeightRounding(experts="int4", group=128), silent)
    saved = save_model(tools.config("granitemoe"))
    with pytest.raises(UserError, match="stores all experts of a layer in one tensor"):
        write_quantized(saved.folder, tmp_path / "out", WeightRounding(experts="int4", group=8), silent)


def test_shards_of_other_weights_are_not_kept(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Another model of the same shape at the same path: its folder would have the weights of the one before."""
    saved, out = save_model(tools.config("qwen3_moe", **SIZES)), tmp_path / "out"
    write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    file = saved.folder / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"from other weights .*: remove the folder {out}, or give another"):
        write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    (out / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged .*: remove it"):
        write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)


def test_a_shard_in_which_a_bit_turned_is_not_kept(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved, out = save_model(tools.config("qwen3_moe", **SIZES)), tmp_path / "out"
    write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    shard = out / "model.safetensors"
    whole = shard.read_bytes()
    for place in (len(whole) - 1, len(whole) // 2, whole.index(b'"errors"') + 30):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"model\.safetensors is damaged .*: remove it"):
            write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    shard.write_bytes(whole)
    write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)


def test_a_folder_with_another_model_is_left_as_it_is(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved, out = save_model(tools.config("qwen3_moe", **SIZES)), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"out holds config\.json: give another folder"):
        write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    assert (out / "config.json").read_text() == "{}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_a_shard_that_was_written_takes_no_memory(save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Embedding and head of a MiB each stay in floats; pages of the files that hold them are given back."""
    saved = save_model(tools.config("qwen3_moe", **SIZES, vocab_size=4096), max_shard_size="1500KB")

    def resident_bytes(done: float, total: float | None) -> None:
        maps = Path("/proc/self/smaps").read_text().split("VmFlags")
        sizes = [part for part in maps if str(saved.folder) in part]
        assert sizes
        assert sum(int(part.partition("Rss:")[2].split()[0]) for part in sizes) < 900, "KiB"

    write_quantized(saved.folder, tmp_path / "out", WeightRounding(experts="int4"), resident_bytes)


def test_two_runs_do_not_write_one_folder(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved, out = save_model(tools.config("qwen3_moe", **SIZES)), tmp_path / "out"

    def second(done: float, total: float | None) -> None:
        with pytest.raises(UserError, match="another run writes it: wait for it"):
            write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)

    write_quantized(saved.folder, out, WeightRounding(experts="int4"), second)
    write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)


def test_what_the_system_refuses(save_model: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and a file in the place of a folder: one line, and nothing half written is left."""
    saved, out = save_model(tools.config("qwen3_moe", **SIZES)), tmp_path / "out"

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr("antiphon.models.write_quantized.save_file", full)
        with pytest.raises(UserError, match=r"out cannot be written \(.*No space left.*\): make room"):
            write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    assert not list(out.iterdir())
    (out / ".partial").mkdir()
    (out / ".partial/.tmp123").write_bytes(b"of a run that was killed, by the library's own temporary name")
    write_quantized(saved.folder, out, WeightRounding(experts="int4"), silent)
    assert not list(out.glob(".*"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file cannot be written"):
        write_quantized(saved.folder, tmp_path / "file", WeightRounding(experts="int4"), silent)


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a GGUF file: give the folder in Hugging Face format"):
        write_quantized(tmp_path / "model.gguf", tmp_path / "out", WeightRounding(experts="int4"), silent)
    with pytest.raises(UserError, match="is a GGUF file"):
        write_quantized(tmp_path, tmp_path / "out", WeightRounding(experts="int4"), silent)


@pytest.mark.parametrize("kind", ["int8", "int4", "mxfp4"])
def test_the_best_clip_errs_least(kind: Any) -> None:
    torch.manual_seed(1)
    weight, form = torch.randn(40, 96) ** 3, format_of(kind, 32, torch.float32)
    best = (rounded(weight, form).dequantize() - weight).square().view(40, 3, 32).sum(2)
    plain = (quantize(weight, form).dequantize() - weight).square().view(40, 3, 32).sum(2)
    assert (best <= plain).all()
    assert (best < plain).any() or kind == "int8"  # whose steps are so small that a clip never pays


@pytest.mark.parametrize("weights", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "gpt_oss", "dbrx", "deepseek_v3"])
def test_rounding_at_load(weights: str, family: str, save_model: Any, tools: Any) -> None:
    """Every layout of experts; logits stay near those of the floats."""

    saved = save_model(tools.config(family))
    spec, checkpoint, backend = load_model_spec(saved.folder), open_weights(saved.folder, weights), ReferenceBackend()
    half = load_expert_half(checkpoint, spec, backend)
    assert all(each.formats.gate_up and each.formats.down for each in half.experts.values())
    decoder = Decoder(load_attention_half(checkpoint, spec, backend), half)
    logits, token_ids = tools.run(decoder, tools.ids(17), [17]), tools.ids(17)
    expected = saved.logits(token_ids)
    assert not torch.equal(logits, expected)
    bound = {"int8": 0.08, "int4": 0.6, "mxfp4": 0.8}[weights]
    assert (logits - expected).norm() < bound * expected.norm()
