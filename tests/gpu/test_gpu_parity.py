"""One GPU computes what the CPU computes: operations, models of every family, engines in every layout, the server.

In float32, where rounding differs by so little that greedy tokens are the same. (Each operation of the reference
back-end against naive loops, on the GPU too: `tests/kernels/test_reference`.)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.batch import make_attention_batch
from antiphon.specs.model import RouterSpec
from tests.models.conftest import load_decoder, random_ids
from tests.models.decoder import Decoder
from tests.serve.engine_harness import (
    Prompts,
    TinyModel,
    Tokens,
    complete,
    config,
    random_prompts,
    running,
    save_tiny_model,
)
from tests.serve.server_harness import ServerProcess, event_texts, serve

DEVICE = "cuda"
FAMILIES = ("mixtral", "dbrx", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "gpt_oss", "deepseek_v2", "deepseek_v3")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def near(found: Tensor, expected: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(found.float().cpu(), expected.float().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_experts_and_gate_agree(num_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 64, generator=generator)
    router_weight = torch.randn(16, 64, generator=generator)
    matrices = [torch.randn(shape, generator=generator) / 8 for shape in ((32, 64), (32, 64), (64, 32)) * 16]
    router = RouterSpec(num_experts=16, top_k=4, scoring="softmax")
    results = []
    for device in ("cpu", DEVICE):
        backend = ReferenceBackend(device, dtype)
        experts = backend.new_experts(ExpertShape(16, 64, 32, "silu"))
        for index in range(16):
            experts.set_expert(index, *matrices[3 * index : 3 * index + 3])
        rows = x.to(device, dtype)
        ids, weights = backend.gate(rows, backend.pack_linear(router_weight), None, router)
        results.append((ids.cpu(), weights, backend.grouped_ffn(rows, ids, weights, experts)))
    (ids, weights, y), (gpu_ids, gpu_weights, gpu_y) = results
    if dtype is torch.float32:
        assert torch.equal(ids, gpu_ids)
    same = (ids == gpu_ids).all(dim=1)  # in narrow types a close choice of experts may turn
    assert same.float().mean() > 0.8
    near(gpu_weights.cpu()[same], weights[same], tolerance)
    near(gpu_y.cpu()[same], y[same], tolerance)


def logits(decoder: Decoder, token_ids: Tensor, device: str) -> Tensor:
    """A prompt in two pieces, then token by token."""
    half = decoder.attention_half
    cache = half.new_cache(8, 16)
    parts, start = [], 0
    with torch.inference_mode():
        for size in (20, 10, *[1] * (len(token_ids) - 30)):
            batch = make_attention_batch([size], [start + size], [[5, 2, 6, 1]], 16, device)
            ids = token_ids[start : start + size].to(device)
            parts.append(half.head(decoder.forward(ids, cache, batch)))
            start += size
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_logits(family: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", family)
    token_ids = random_ids(37)
    backend = ReferenceBackend(DEVICE)
    found = logits(load_decoder(model.folder, backend), token_ids, DEVICE)
    near(found, logits(load_decoder(model.folder), token_ids, "cpu"))
    with torch.inference_mode():
        near(found, model.model(token_ids[None]).logits[0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "decoder_sparse_step": 1, "max_position_embeddings": 256}
    return save_tiny_model(folder, **sizes)


@pytest.fixture(scope="module")
def expected(tiny: TinyModel) -> tuple[Prompts, Tokens]:
    prompts = random_prompts([1, 9, 33, 90] * 4)
    with running(config(tiny, "1", kernels="reference")) as engine:
        return prompts, complete(engine, prompts)


@pytest.mark.parametrize("layout", ["1", "1+1/m1", "1+1/m2", "2+1/m2", "1+2/m3"])
def test_every_layout_gives_the_cpus_tokens(layout: str, tiny: TinyModel, expected: tuple[Prompts, Tokens]) -> None:
    prompts, tokens = expected
    settings = config(tiny, layout, num_blocks=256, device=DEVICE, kernels="auto")
    with running(settings) as engine:
        assert engine.workforce.kernels == {"reference"}
        assert complete(engine, prompts) == tokens


def test_the_server_answers_what_the_cpu_answers(live_server: ServerProcess, checkpoint: Path, tmp_path: Path) -> None:
    body = {"prompt": "bada do", "temperature": 0, "max_tokens": 32, "stream": True}
    texts = []
    with serve(checkpoint, tmp_path, "--layout", "disaggregated", "--device", DEVICE) as server:
        for each in (live_server, server):
            with each.http.stream("POST", "/v1/completions", json=body) as response:
                texts.append("".join(event_texts(response.iter_lines())))
        assert f"float32 on {DEVICE}" in server.log
        assert server.end() == 0
    assert texts[0] == texts[1]
