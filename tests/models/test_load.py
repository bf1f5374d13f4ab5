"""Loading either half: layouts, dtypes, shards, what each role reads, and how much memory it takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.base.errors import CheckpointError, UserError
from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes
from antiphon.kernels.api import KernelBackend, RotaryTable
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.models.planned import stored_precision
from antiphon.models.rounding import WeightRounding
from antiphon.models.write_quantized import write_quantized
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.placement import contiguous_placement
from tests.models.gguf_specimens import all_of, write_gguf
from tests.models.packed_specimens import PACKED, pack_checkpoint

Tensors = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file({k: v.contiguous().clone() for k, v in change(load_file(file)).items()}, file)


def stack_experts(tensors: Tensors, prefix: str, gate: str, up: str, down: str, num_experts: int) -> Tensors:
    """Per-expert tensors of every layer as the two stacked tensors transformers 5 holds."""
    out = {k: v for k, v in tensors.items() if f"{prefix}.experts." not in k}
    for layer in range(3):
        stem = f"model.layers.{layer}.{prefix}.experts"
        if f"{stem}.0.{gate}.weight" not in tensors:
            continue
        gates, ups, downs = (
            [tensors[f"{stem}.{e}.{name}.weight"] for e in range(num_experts)] for name in (gate, up, down)
        )
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), 1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(downs)
    return out


@pytest.mark.parametrize(
    ("family", "prefix", "router", "names", "num_experts"),
    [
        ("mixtral", "block_sparse_moe", "gate", ("w1", "w3", "w2"), 5),
        ("phimoe", "block_sparse_moe", "router", ("w1", "w3", "w2"), 5),
        ("olmoe", "mlp", "gate", ("gate_proj", "up_proj", "down_proj"), 5),
        ("deepseek_v3", "mlp", "gate", ("gate_proj", "up_proj", "down_proj"), 8),
    ],
)
def test_stacked_experts_equal_one_tensor_per_expert(
    family: str, prefix: str, router: str, names: tuple[str, str, str], num_experts: int, save_model: Any, tools: Any
) -> None:
    saved = save_model(tools.config(family))
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(saved.folder), token_ids, [17])

    def restack(tensors: Tensors) -> Tensors:
        stacked = stack_experts(tensors, prefix, *names, num_experts)
        return {k.replace(f"{prefix}.gate.weight", f"mlp.{router}.weight"): v for k, v in stacked.items()}

    rewrite(saved.folder, restack)
    assert not any(".experts.0." in name for name in Checkpoint(saved.folder).names)
    assert torch.equal(tools.run(tools.load(saved.folder), token_ids, [17]), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx"])
def test_shards_equal_one_file(family: str, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config(family), max_shard_size="40KB")
    assert len(list(saved.folder.glob("*.safetensors"))) > 2
    token_ids = tools.ids(17)
    found = tools.run(tools.load(saved.folder), token_ids, [17])
    assert float((found - saved.logits(token_ids)).abs().max()) < 2e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints_are_widened(dtype: torch.dtype, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config("qwen2_moe"))
    rewrite(saved.folder, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    for parameter in saved.model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    token_ids = tools.ids(17)
    found = tools.run(tools.load(saved.folder), token_ids, [17])
    assert float((found - saved.logits(token_ids)).abs().max()) < 2e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx", "deepseek_v3", "phimoe"])
def test_each_role_reads_its_own_bytes_and_reports_them(family: str, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config(family))
    spec, backend = load_model_spec(saved.folder), ReferenceBackend()
    tensors = load_file(saved.folder / "model.safetensors")
    routed = sum(v.nbytes for k, v in tensors.items() if ".experts." in k)
    outer = sum(v.nbytes for k, v in tensors.items() if ".experts." not in k)

    calls: list[tuple[int, int]] = []
    checkpoint = Checkpoint(saved.folder)
    half = load_attention_half(checkpoint, spec, backend, lambda *call: calls.append(call))
    assert checkpoint.bytes_read == half.weight_bytes == outer
    assert calls == sorted(calls)
    assert calls[-1] == (outer, outer)

    checkpoint = Checkpoint(saved.folder)
    experts = load_expert_half(checkpoint, spec, backend)
    assert checkpoint.bytes_read == experts.num_bytes == routed

    checkpoint = Checkpoint(saved.folder)
    load_expert_half(checkpoint, spec, backend, [3, 1])
    assert checkpoint.bytes_read == routed * 2 // spec.router.num_experts


CHANGES: dict[str, dict[str, Any]] = {
    "attention": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "norm_eps": {"rms_norm_eps": 1e-3},
    "router": {"num_experts_per_tok": 1},
    "feed_forward": {"hidden_act": "gelu"},
}


def test_a_fingerprint_tells_checkpoints_apart_that_compute_otherwise(save_model: Any, tools: Any) -> None:
    """`config.json` alone may differ. That a text ends elsewhere is the server's affair, and file names are nothing."""
    folder: Path = save_model(tools.config("qwen3_moe")).folder
    config = json.loads((folder / "config.json").read_text())

    def differing(**keys: Any) -> list[str]:
        (folder / "config.json").write_text(json.dumps(config | keys))
        found = Checkpoint(folder).fingerprint(load_model_spec(folder))
        return [what for what, digest in found.items() if digest != known[what]]

    known = Checkpoint(folder).fingerprint(load_model_spec(folder))
    for what, keys in CHANGES.items():
        assert differing(**keys) == [what], keys
    assert differing(eos_token_id=[5]) == []
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert differing() == []
    rewrite_file = load_file(folder / "other.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in rewrite_file.items()}, folder / "other.safetensors")
    assert differing() == ["weights"]


def test_a_file_that_is_written_anew_in_its_place_is_found_out(save_model: Any, tools: Any) -> None:
    """Before it is mapped and after; another file under its name is none of a map's business."""
    folder: Path = save_model(tools.config("mixtral")).folder
    file, name = folder / "model.safetensors", "model.norm.weight"
    early, late = Checkpoint(folder), Checkpoint(folder)
    before = early.read(name).clone()
    data = file.read_bytes()
    file.rename(folder / "old")
    file.write_bytes(data)
    assert torch.equal(early.read(name), before)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was changed after it was opened: put back"):
        late.read(name)
    (folder / "old").rename(file)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was changed after it was opened: put back"):
        early.read(name)


def test_workers_partial_sums_add_up(save_model: Any, tools: Any) -> None:
    """Three workers, five experts in uneven runs, and a replica: the sums of their parts are the whole layer."""
    saved = save_model(tools.config("mixtral"))
    spec, backend, checkpoint = load_model_spec(saved.folder), ReferenceBackend(), Checkpoint(saved.folder)
    whole = load_expert_half(checkpoint, spec, backend)
    placement = contiguous_placement(5, 3, spec.expert_layers)
    halves = [load_expert_half(checkpoint, spec, backend, placement.experts_of(worker)) for worker in range(3)]
    x = torch.randn(7, spec.hidden_size)
    ids = torch.tensor([[0, 4], [1, 2], [3, 0], [4, 3], [2, 2], [1, 0], [0, 1]], dtype=torch.int32)
    weights = torch.rand(7, 2)
    parts = [half.forward(1, x, half.to_local(1, ids), weights) for half in halves]
    assert torch.allclose(sum(parts), whole.forward(1, x, ids, weights), atol=1e-5)
    assert halves[1].to_local(1, ids).tolist()[1:4] == [[-1, 0], [1, -1], [-1, 1]]


def test_experts_may_differ_by_layer(save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config("qwen3_moe"))
    spec, backend, checkpoint = load_model_spec(saved.folder), ReferenceBackend(), Checkpoint(saved.folder)
    assert spec.moe_layers == (False, True, False)
    half = load_expert_half(checkpoint, spec, backend, {1: [4, 0]})
    assert half.expert_ids == {1: (4, 0)}
    with pytest.raises(UserError) as caught:
        load_expert_half(checkpoint, spec, backend, {0: [1]})
    assert str(caught.value) == "expert ids are given for layers [0]: only [1] have experts"
    with pytest.raises(UserError) as caught:
        load_expert_half(checkpoint, spec, backend, [0, 5])
    assert str(caught.value) == "layer 1: expert ids [0, 5]: give distinct ids from 0 to 4"


@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend(torch.float32)], ids=["reference", "cpu"])
def test_a_tied_head_is_the_embedding(backend: KernelBackend, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config("qwen3_moe", tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint(saved.folder)
    token_ids = tools.ids(5)
    decoder = tools.load(saved.folder, backend)
    assert decoder.attention_half.embedding_WH is None, "one table is kept"
    found = tools.run(decoder, token_ids, [5], 16)
    assert float((found - saved.logits(token_ids)).abs().max()) < 2e-4


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 300 MB Qwen3-MoE in bfloat16: large enough for the measurement, too plain for text."""
    folder = tmp_path_factory.mktemp("large")
    hidden, vocab, layers, experts, width = 512, 48_000, 4, 16, 1024
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{stem}.self_attn.{name}_proj": (128, hidden) for name in ("k", "v")}
        shapes |= {f"{stem}.self_attn.{name}_proj": (512, hidden) for name in ("q", "o")}
        shapes |= {f"{stem}.self_attn.{name}_norm": (64,) for name in ("q", "k")}
        shapes[f"{stem}.mlp.gate"] = (experts, hidden)
        for expert in range(experts):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                shapes[f"{stem}.mlp.experts.{expert}.{name}_proj"] = shape
    tensors = {name + ".weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "intermediate_size": width,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measured_alone(folder: Path, *role: str) -> dict[str, float]:
    """What `measure_loading` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("measure_loading.py")), str(folder), *role],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize(
    ("role", "largest"),
    [
        (["attention"], 48_000 * 512 * 2),
        (["experts"], 1024 * 512 * 2),
        (["experts", *map(str, range(8))], 1024 * 512 * 2),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_is_what_is_kept_plus_one_tensor(role: list[str], largest: int, large_checkpoint: Path) -> None:
    measured = measured_alone(large_checkpoint, *role)
    assert measured["peak"] <= 1.1 * measured["read"] + largest


def weight_bytes_in(part: Any, seen: set[int]) -> int:
    """Of everything that an object holds: packed weights and tensors, each once."""
    if id(part) in seen or isinstance(part, RotaryTable):
        return 0
    seen.add(id(part))
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(num_bytes := getattr(part, "num_bytes", None), int):
        return num_bytes
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    inside = vars(part).values() if type(part).__module__.startswith("antiphon.models") else inside
    return sum(weight_bytes_in(each, seen) for each in inside)


WIDE = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "vocab_size": 2048}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
PLANNED: dict[str, PrecisionSpec] = {
    "as-stored": PrecisionSpec(),
    "int8": PrecisionSpec(weights="int8", experts="int8"),
    "int4": PrecisionSpec(weights="int8", experts="int4"),
    "mxfp4": PrecisionSpec(weights="int8", experts="mxfp4"),
}


@pytest.mark.parametrize("weights", PLANNED)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"head_dim": 128}),
        ("qwen3_moe", {"head_dim": 128, "vocab_size": 4096, "tie_word_embeddings": True}),
        ("deepseek_v3", LATENT),
    ],
)
def test_plans_count_what_is_packed(
    family: str, sizes: dict[str, Any], weights: str, save_model: Any, tools: Any
) -> None:
    """Of each role; what is more are biases, norms of heads, and pages that are not full."""
    folder = save_model(tools.config(family, **WIDE | sizes)).folder
    spec, checkpoint, backend = load_model_spec(folder), open_weights(folder, weights), CpuBackend(torch.bfloat16)
    half = load_attention_half(checkpoint, spec, backend)
    planned = float(attention_weight_bytes(spec, 1, PLANNED[weights]))
    assert weight_bytes_in(half, set()) == pytest.approx(planned, rel=0.05)
    experts = load_expert_half(checkpoint, spec, backend)
    planned = float(expert_weight_bytes(spec, spec.router.num_experts, 1, PLANNED[weights]))
    assert experts.num_bytes == pytest.approx(planned, rel=0.02)


STORED_FORMATS = {
    "compressed-tensors int4": ("int4", "int4"),
    "compressed-tensors int4, zero points": ("int4", "int4"),
    "compressed-tensors int8": ("int8", "int8"),
    "compressed-tensors mxfp4": ("mxfp4", "mxfp4"),
    "GPTQ": ("int4", "int4"),
    "AWQ": ("int4", "int4"),
    Kind.Q4_0: ("int4", "int4"),
    Kind.Q8_0: ("int8", "int8"),
    Kind.Q5_1: ("int8", "int8"),
    Kind.Q4_K: ("int4", "int4"),
    Kind.Q6_K: ("int8", "int8"),
    Kind.MXFP4: ("mxfp4", "mxfp4"),
    "written by antiphon quantize": ("int8", "int4"),
}


@pytest.mark.parametrize("form", STORED_FORMATS, ids=lambda form: getattr(form, "name", form))
def test_plans_count_what_a_checkpoint_stores(form: str | Kind, save_model: Any, tools: Any, tmp_path: Path) -> None:
    """Of each role, when a checkpoint in few bits is kept as it is."""
    folder = save_model(tools.config("qwen3_moe", **WIDE, head_dim=128, decoder_sparse_step=1)).folder
    if isinstance(form, Kind):
        write_gguf(folder, folder := tmp_path / "model.gguf", all_of(form))
    elif form in PACKED:
        pack_checkpoint(folder, PACKED[form])
    else:
        wanted = WeightRounding(experts="int4", dense="int8")
        write_quantized(folder, folder := tmp_path / "out", wanted, lambda done, total: None)
    spec, checkpoint, backend = load_model_spec(folder), open_weights(folder), CpuBackend(torch.bfloat16)
    stored = stored_precision(folder, spec)
    assert stored is not None
    assert (stored.weights, stored.experts) == STORED_FORMATS[form]
    half = load_attention_half(checkpoint, spec, backend)
    assert weight_bytes_in(half, set()) == pytest.approx(float(attention_weight_bytes(spec, 1, stored)), rel=0.05)
    experts = load_expert_half(checkpoint, spec, backend)
    planned = float(expert_weight_bytes(spec, spec.router.num_experts, 1, stored))
    assert experts.num_bytes == pytest.approx(planned, rel=0.05)


def test_settings_in_a_file_of_their_own_count_in_plans_too(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("qwen3_moe", **WIDE, head_dim=128)).folder
    pack_checkpoint(folder, PACKED["GPTQ"])  # symmetric: its zero points are not kept
    spec, file = load_model_spec(folder), folder / "config.json"
    stored, config = stored_precision(folder, spec), json.loads(file.read_text())
    (folder / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    file.write_text(json.dumps(config))
    assert stored is not None
    assert stored_precision(folder, spec) == stored


def test_floats_and_missing_weights_have_no_stored_precision(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("qwen3_moe")).folder
    assert stored_precision(folder, load_model_spec(folder)) is None
    spec = load_model_spec(folder)
    (folder / "model.safetensors").unlink()
    assert stored_precision(folder, spec) is None


@pytest.mark.slow
@pytest.mark.parametrize("weights", PLANNED)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_what_is_resident_is_what_a_plan_counts(weights: str, save_model: Any, tools: Any) -> None:
    """Of a model of 200 million weights in a process of its own. The allocator keeps some of what rounding worked in:
    20 MB beside 166 MB were seen."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "vocab_size": 16_384, "head_dim": 128}
    config = tools.config("qwen3_moe", **sizes, num_experts=16, decoder_sparse_step=1, num_hidden_layers=6)
    measured = measured_alone(save_model(config, max_shard_size="50MB").folder, "whole", weights)
    assert measured["planned"] > 1e8
    assert measured["resident"] == pytest.approx(
        measured["planned"], rel=0.05, abs=0.05 * measured["planned"] + (48 << 20)
    )
