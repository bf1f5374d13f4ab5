"""Loading either half: layouts, dtypes, shards, what each role reads, and how much memory it takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_attention_half, load_expert_half
from antiphon.specs.placement import contiguous_placement

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


def test_a_tied_head_is_the_embedding(save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config("qwen3_moe", tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint(saved.folder)
    token_ids = tools.ids(5)
    found = tools.run(tools.load(saved.folder), token_ids, [5])
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
    script = Path(__file__).with_name("measure_loading.py")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(large_checkpoint), *role],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    measured = json.loads(done.stdout)
    assert measured["peak"] <= 1.1 * measured["read"] + largest
