"""What an export keeps: the choice of experts, layers that are not trained, and the precision that is asked for."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.system import one_writer
from antiphon.cli import train as commands
from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.route import choose_experts
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_attention_half, open_checkpoint
from antiphon.models.rounding import float8_blocks
from antiphon.train import checkpoint_parts, hugging_face
from antiphon.train.checkpoint_parts import StoredParameters
from antiphon.train.config import read_config
from antiphon.train.hugging_face import export, files_beside, import_weights
from antiphon.train.model import MoeModel
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from antiphon.train.weights import FirstValues, Weights
from tests.models.conftest import FAMILIES
from tests.models.gguf_specimens import Kind, all_of, wide_gguf
from tests.models.packed_specimens import PACKED, pack_checkpoint
from tests.train.harness import LATENT, LiveParameters, config_of, same_tensors, write_model, write_run

TOKENS = 10_000
PUBLISHED = [family for family in FAMILIES if family != "kimi_k2"]


def trainable(folder: Path) -> MoeModel:
    model = MoeModel(load_model_spec(folder), connect(Sizes(), 0), max_positions=16, dtype=torch.float32)
    import_weights(model, folder)
    return model


@pytest.mark.parametrize("family", PUBLISHED)
def test_trainer_and_server_choose_the_same_experts(family: str, save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Score biases were written in bfloat16, with a mean that left few digits: 0.1% of tokens chose others. The other
    weights are rounded before, so that only the biases could differ."""
    folder = save_model(tools.config(family)).folder
    model, spec = trainable(folder), load_model_spec(folder)
    for each in model.parameters():
        each.data = each.data.bfloat16().float()
    routed = [layer for layer, routes in enumerate(spec.moe_layers) if routes]
    for layer in routed if spec.router.has_score_bias else ():
        bias = Weights(model.layers[layer], torch.float32).stored("score_bias")
        bias.copy_(3.0 + 0.01 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(layer)))
    export(
        LiveParameters(model), tmp_path / "out", json.loads((folder / "config.json").read_text()), {}, torch.bfloat16
    )
    half = load_attention_half(open_checkpoint(tmp_path / "out", spec), spec, ReferenceBackend())
    x_TH = torch.randn(TOKENS, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer in routed:
        weights = Weights(model.layers[layer], torch.float32)
        bias_E = weights.stored("router_bias") if spec.router.has_logit_bias else None
        logits_TE = torch.nn.functional.linear(x_TH, weights.stored("router"), bias_E)
        ours, _ = choose_experts(logits_TE, weights.optional("score_bias"), spec.router)
        served = half.layers[layer]
        theirs, _ = half.backend.gate(x_TH, served.router, served.score_bias_E, spec.router)
        assert torch.equal(ours.sort().values, theirs.sort().values)


def test_the_mean_of_score_biases_is_taken_out_while_training(tmp_path: Path) -> None:
    trainer = Trainer(prepare(config_of(tmp_path, "loss.bias_rate=0.3", **LATENT)))
    trainer.run()
    bias = Weights(trainer.model.layers[1], torch.float32).stored("score_bias")
    assert float(bias.abs().max()) > 0.3
    assert abs(float(bias.mean())) < 1e-6


def with_further_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Gives the checkpoint a layer for further tokens; returns its tensors."""
    config = json.loads((folder / "config.json").read_text())
    layer, hidden = config["num_hidden_layers"], config["hidden_size"]
    where = f"model.layers.{layer}."
    further = {
        where + "eh_proj.weight": torch.randn(hidden, 2 * hidden),
        where + "enorm.weight": torch.randn(hidden),
        where + "mlp.gate.e_score_correction_bias": torch.randn(config["n_routed_experts"]),
    }
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return further


def test_layers_for_further_tokens_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of(tmp_path, **LATENT)
    model = MoeModel(load_model_spec(tmp_path / "model"), connect(Sizes(), 0), max_positions=16, dtype=torch.float32)
    beside = files_beside(tmp_path / "model", tmp_path / "model")
    export(LiveParameters(model), tmp_path / "begin", LATENT, beside, torch.float32)
    further = with_further_layer(tmp_path / "begin")
    begin = (f"model.path={tmp_path / 'begin'}", "model.begin=checkpoint")
    Trainer(prepare(config_of(tmp_path, *begin, **LATENT))).run()
    commands.export(tmp_path / "out", tmp_path / "exported", "float32")
    found = load_file(tmp_path / "exported/model.safetensors")
    for name, tensor in further.items():
        assert torch.equal(found[name], tensor), name
    assert "are not trained: copied from" in caplog.text
    assert json.loads((tmp_path / "exported/config.json").read_text())["num_nextn_predict_layers"] == 1
    open_checkpoint(tmp_path / "exported", load_model_spec(tmp_path / "exported"))


def test_an_export_without_such_layers_does_not_promise_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(prepare(config_of(tmp_path, **(LATENT | {"num_nextn_predict_layers": 1})))).run()
    commands.export(tmp_path / "out", tmp_path / "exported", "float32")
    assert json.loads((tmp_path / "exported/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "the run began with random weights" in caplog.text


def test_float64_comes_back_bit_for_bit(tmp_path: Path) -> None:
    trainer = Trainer(prepare(config_of(tmp_path, "dtype=float64")))
    trainer.run()
    commands.export(tmp_path / "out", tmp_path / "exported", "float64")
    assert json.loads((tmp_path / "exported/config.json").read_text())["dtype"] == "float64"
    again = MoeModel(
        load_model_spec(tmp_path / "exported"),
        connect(Sizes(), 0),
        max_positions=16,
        dtype=torch.float64,
        first=FirstValues(5),
    ).double()
    import_weights(again, tmp_path / "exported")
    for (name, first), (_, second) in zip(trainer.model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(first, second), name


def test_a_quantised_checkpoint_is_multiplied_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "model")
    model = MoeModel(load_model_spec(tmp_path / "model"), connect(Sizes(), 0), max_positions=16, dtype=torch.float32)
    config = json.loads((tmp_path / "model/config.json").read_text())
    export(LiveParameters(model), tmp_path / "q", config, {}, torch.float32)
    tensors = load_file(tmp_path / "q/model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.0.down_proj.weight"))
    scale = tensors[name].abs().max() / 448
    quantised = (tensors[name] / scale).to(torch.float8_e4m3fn)
    tensors |= {name: quantised, name + "_scale_inv": scale.view(1, 1)}
    save_file(tensors, tmp_path / "q/model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "q/config.json").write_text(json.dumps(config | {"quantization_config": how}))
    import_weights(model, tmp_path / "q")
    assert "q is quantised (fp8): its weights are multiplied out" in caplog.text
    down = Weights(model.layers[0], torch.float32).stored("experts.down")[0]
    assert torch.equal(down, quantised.float() * scale)


@pytest.mark.parametrize("form", ["compressed-tensors int4, act-order", "GPTQ, desc_act", "AWQ"])
def test_packed_weights_begin_a_run_as_they_multiply_out(form: str, save_model: Any, tools: Any) -> None:
    """Columns that are stored in another order too."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "head_dim": 16}
    folder = save_model(tools.config("qwen3_moe", **sizes)).folder
    found = []
    for each in (pack_checkpoint(folder, PACKED[form]), folder):
        model = MoeModel(load_model_spec(each), connect(Sizes(), 0), max_positions=16, dtype=torch.float32)
        import_weights(model, each)
        found.append(dict(model.named_parameters()))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_gguf_file_begins_a_run(
    save_model: Any, tools: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it multiplies out, with a word; one with floats as it is."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "decoder_sparse_step": 1}
    wide = wide_gguf(save_model(tools.config("qwen3_moe", **sizes)).folder, tmp_path / "model.gguf", all_of(Kind.Q8_0))
    assert same_tensors(trainable(tmp_path / "model.gguf"), trainable(wide))
    assert caplog.text.count("is quantised") == caplog.text.count("model.gguf is quantised (blocks)") == 1


def test_an_export_holds_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once: a projection or an expert. What is held besides: the tensors of one file."""
    trainer = Trainer(prepare(config_of(tmp_path)))
    trainer.run()
    whole = 4 * sum(each.numel() for each in trainer.model.parameters())
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 30_000)
    written, read, largest = [], [], [0]
    save, read_rows = hugging_face.save_whole, StoredParameters.read

    def noted_save(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        written.append(sum(each.nbytes for each in tensors.values()))
        save(tensors, file, metadata)

    def noted_read(source: StoredParameters, *arguments: Any) -> torch.Tensor:
        found = read_rows(source, *arguments)
        read.append(found.nbytes)
        largest[0] = max(largest[0], found.nbytes)
        return found

    monkeypatch.setattr(hugging_face, "save_whole", noted_save)
    monkeypatch.setattr(StoredParameters, "read", noted_read)
    commands.export(tmp_path / "out", tmp_path / "exported", "float32")
    assert whole > 4 * 45_000
    assert sum(read) == whole == sum(written)
    assert largest[0] == 4 * 320 * 32, "the embedding: no stack of experts"
    assert max(written) <= max(30_000, largest[0])
    assert len(written) > 3
    again = trainable(tmp_path / "exported")
    assert same_tensors(again, trainer.model)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trainer(prepare(config_of(tmp_path, "steps=1"))).run()

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("antiphon.models.write_quantized.save_file", full)
    with pytest.raises(UserError, match=r"exported cannot be written \(.*No space left .*remove it$"):
        commands.export(tmp_path / "out", tmp_path / "exported")
    assert not list((tmp_path / "exported").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be written \(File exists\)"):
        commands.export(tmp_path / "out", tmp_path / "file")


def test_an_export_has_the_tokenizer_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of another name was left out without a word."""
    write_model(tmp_path / "model")
    tokenizer = (tmp_path / "model/tokenizer.json").rename(tmp_path / "of_the_run.json")
    (tmp_path / "model/generation_config.json").write_text("{}")
    Trainer(prepare(read_config(write_run(tmp_path), ["steps=1", f"data.tokenizer={tokenizer}"]))).run()
    commands.export(tmp_path / "out", tmp_path / "new")
    assert (tmp_path / "new/tokenizer.json").read_text() == tokenizer.read_text()
    assert (tmp_path / "new/generation_config.json").is_file()
    shutil.rmtree(tmp_path / "model")
    tokenizer.unlink()
    commands.export(tmp_path / "out", tmp_path / "without")
    assert f"{tokenizer} is not there: the export has no tokenizer" in caplog.text
    assert {each.name for each in (tmp_path / "without").iterdir()} == {"config.json", "model.safetensors"}


def test_a_folder_with_another_model_is_left_as_it_is(tmp_path: Path) -> None:
    Trainer(prepare(config_of(tmp_path, "steps=1"))).run()
    theirs = tmp_path / "theirs/config.json"
    theirs.parent.mkdir()
    theirs.write_text("{}")
    with pytest.raises(UserError, match=r"theirs holds config\.json already: name a new folder"):
        commands.export(tmp_path / "out", theirs.parent)
    assert theirs.read_text() == "{}"


def test_a_box_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once an expert; of a parameter that is read whole nothing is kept."""
    trainer = Trainer(prepare(config_of(tmp_path)))
    trainer.run()
    stored = StoredParameters(tmp_path / "out/checkpoints/step-00000006", trainer.spec)
    read = []
    box = StoredParameters._box

    def noted(source: StoredParameters, key: str, *arguments: Any) -> torch.Tensor:
        read.append(key)
        return box(source, key, *arguments)

    monkeypatch.setattr(StoredParameters, "_box", noted)
    layer = trainer.model.layers[1]
    for expert in range(5):
        for name in ("experts_gate_up", "experts_down"):
            rows = stored.read(f"layers.1.{name}", expert, expert + 1)
            assert torch.equal(rows[0], getattr(layer, name)[expert])
    assert len(read) == 2
    assert not any(stored._kept.values())


def test_boxes_of_checkpoints_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_parts, "BOX_BYTES", 4000)
    trainer = Trainer(prepare(config_of(tmp_path)))
    trainer.run()
    newest = tmp_path / "out/checkpoints/step-00000006"
    sizes = [
        chunk.sizes.numel() * 4
        for stored in FileSystemReader(newest).read_metadata().state_dict_metadata.values()
        for chunk in getattr(stored, "chunks", [])
    ]
    assert max(sizes) <= 4 * 2 * 24 * 32, "a row of a stack of experts is one of them"
    stored = StoredParameters(newest, load_model_spec(tmp_path / "model"))
    whole = trainer.model.layers[1].experts_gate_up
    assert torch.equal(stored.read("layers.1.experts_gate_up", 2, 5), whole[2:5])
    assert torch.equal(stored.read("embedding"), trainer.model.embedding)
    with pytest.raises(CheckpointError, match=r"holds no layers\.9\.qkv"):
        stored.read("layers.9.qkv")
    (newest / ".metadata").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"step-00000006: cannot be read .* damaged, take another one"):
        StoredParameters(newest, stored.spec)


def test_two_exports_do_not_write_one_folder(tmp_path: Path) -> None:
    Trainer(prepare(config_of(tmp_path, "steps=1"))).run()
    with (
        one_writer(tmp_path / "new", "wait"),
        pytest.raises(UserError, match="new: another run writes it: wait for it"),
    ):
        commands.export(tmp_path / "out", tmp_path / "new")
    commands.export(tmp_path / "out", tmp_path / "new")


def test_blocks_of_float8() -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    weight[128:] = 0
    codes, scales = float8_blocks(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == weight.shape
    assert scales.shape == (2, 2)
    wide = codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    torch.testing.assert_close(wide, weight, rtol=1 / 16, atol=float(scales.max()) / 512)
    assert not wide[128:].any()


@pytest.mark.parametrize("model", [{}, LATENT])
def test_float8_is_served(tmp_path: Path, model: dict[str, Any]) -> None:
    """The server reads what was written; its experts' products are those of the rounded weights."""
    trainer = Trainer(prepare(config_of(tmp_path, "steps=2", **model)))
    trainer.run()
    commands.export(tmp_path / "out", tmp_path / "fp8", "fp8")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    tensors = load_file(tmp_path / "fp8/model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    of_experts = [name for name in kinds if ".experts." in name and name.endswith("proj.weight")]
    assert of_experts
    assert all(kinds[name] == torch.float8_e4m3fn for name in of_experts)
    assert all(kinds[name + "_scale_inv"] == torch.float32 for name in of_experts)
    for part in ("embed_tokens", "lm_head", "norm", "mlp.gate."):
        assert all(kind != torch.float8_e4m3fn for name, kind in kinds.items() if part in name), part
    linear = {name for name, each in tensors.items() if each.ndim == 2 and "embed" not in name and "scale" not in name}
    wide = {name for name in linear if kinds[name] != torch.float8_e4m3fn}
    assert {name + ".weight" for name in config["quantization_config"]["modules_to_not_convert"]} == wide
    assert {"lm_head.weight", "model.layers.1.mlp.gate.weight"} <= wide
    assert not any("self_attn" in name for name in wide)
    spec = load_model_spec(tmp_path / "fp8")
    half = load_attention_half(open_checkpoint(tmp_path / "fp8", spec), spec, ReferenceBackend())
    assert len(half.layers) == spec.num_layers
    again = trainable(tmp_path / "fp8")
    for (name, ours), (_, theirs) in zip(again.named_parameters(), trainer.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1 / 14, atol=2e-3, msg=name)


def test_stacked_experts_have_no_blocks(save_model: Any, tools: Any, tmp_path: Path) -> None:
    folder = save_model(tools.config("gpt_oss")).folder
    with pytest.raises(UserError, match=r"--dtype fp8: .* stores all experts of a layer in one tensor"):
        export(LiveParameters(trainable(folder)), tmp_path / "out", {}, {}, torch.float8_e4m3fn)


@pytest.mark.parametrize("family", ["gpt_oss", "dbrx"])
def test_stacked_experts_are_held_one_projection_at_a_time(
    family: str, save_model: Any, tools: Any, tmp_path: Path
) -> None:
    held: list[weakref.ref[Any]] = []

    class Source(LiveParameters):
        def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
            found = super().read(name, first, last)
            if name.endswith("experts_down"):
                assert held.pop()() is None, "gate and up are still there"
            if not name.endswith("experts_gate_up"):
                return found
            memory = found.numpy().copy()
            held.append(weakref.ref(memory))
            return torch.from_numpy(memory)

    export(Source(trainable(save_model(tools.config(family)).folder)), tmp_path / "out", {}, {}, torch.float32)
