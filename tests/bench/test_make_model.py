"""The yardstick checkpoint: same bits for the same seed, published names, a lossless tokenizer, text that wanders."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from antiphon.bench.harness.limits import DecoderSizes
from antiphon.models.config import load_model_spec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("yardstick_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    assert script.main(["tiny", str(path)]) == 0
    return path


def test_half_a_checkpoint_is_not_kept(
    script: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "half"
    with monkeypatch.context() as broken:
        broken.setattr(script, "save_file", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            script.main(["tiny", str(half)])
    assert (half / "config.json").exists()
    for _ in range(2):
        assert script.main(["tiny", str(half), "--keep"]) == 0
        assert {file.name for file in half.iterdir()} == {file.name for file in folder.iterdir()}


def test_bits_depend_on_the_seed_alone(script: ModuleType, folder: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        again = tmp_path / str(seed)
        script.make_model(script.PRESETS["tiny"], again, seed)
        pairs = [(file, again / file.name) for file in sorted(folder.glob("*.safetensors"))]
        assert all((one.read_bytes() == other.read_bytes()) is same for one, other in pairs)


def test_tensors_are_named_as_in_published_checkpoints(folder: Path) -> None:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: tensor for file in set(weight_map.values()) for name, tensor in load_file(folder / file).items()}
    assert set(tensors) == set(weight_map)
    assert tensors["model.layers.1.mlp.experts.7.gate_proj.weight"].shape == (32, 64)
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (64, 32)
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["num_experts"] == 8


def test_a_gguf_has_the_same_weights_and_texts(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["tiny", str(tmp_path), "--layers", "1", "--gguf", "BF16,Q8_0"]) == 0
    text = "Hello, wörld! bafe dogu\n"
    for kind, most in (("bf16", 0.0), ("q8_0", 0.02)):
        whole = load_model_spec(tmp_path / f"{kind}.gguf")
        assert (whole.num_layers, whole.router.num_experts) == (1, 8)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=f"{kind}.gguf")
        assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tmp_path).encode(text)
        tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{kind}.gguf").tensors}
        found = dequantize(
            tensors["blk.0.ffn_down_exps.weight"].data, tensors["blk.0.ffn_down_exps.weight"].tensor_type
        )
        stored = load_file(tmp_path / "model-00002-of-00002.safetensors")
        expected = torch.stack([stored[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(8)]).float()
        assert (torch.from_numpy(found) - expected).abs().max() <= most


def test_number_of_parameters_is_what_the_bounds_assume(script: ModuleType, tmp_path: Path) -> None:
    num_parameters = script.make_model(script.PRESETS["tiny"], tmp_path)
    sizes = DecoderSizes(spec=load_model_spec(tmp_path))
    norms = 2 * (2 * 64 + 2 * 16) + 64
    assert num_parameters == sizes.decoder_parameters(sizes.spec.router.num_experts) + 2 * sizes.head_parameters + norms


def test_tokenizer_round_trips_any_text_and_fills_the_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello, wörld! 日本 bafe dogu\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 512
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "bafe"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nbafe<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [511]


def test_greedy_text_does_not_repeat_and_all_experts_are_used(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    picked: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, outputs: picked.append(outputs[-1].flatten()))
    prompts = torch.randint(0, 509, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        sequences = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=32, do_sample=False)
    generated = sequences[:, 32:]
    assert generated.shape == (4, 32)
    assert int(generated.max()) < 509
    # A tiny vocabulary meets old tokens now and then; a loop of one or two tokens would show.
    assert min(len(set(row)) for row in generated.tolist()) >= 8
    counts = torch.bincount(torch.cat(picked), minlength=8).float()
    assert counts.min() > 0.4 * counts.mean()
