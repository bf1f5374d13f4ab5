"""A published gpt-oss (MXFP4 experts, windows in every other layer) through engines: layouts, prefix cache, deaths."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.serve.engine_harness import (
    GREEDY,
    Run,
    TinyModel,
    complete,
    config,
    kill,
    random_prompts,
    running,
    save_tiny_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Hidden width 64, 5 experts of 32, windows of 9 tokens in layers 0 and 2 of 4."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4}
    saved = save_tiny_model(folder, "gpt_oss", **sizes, max_position_embeddings=256)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for stem in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, columns, rows = tensors.pop(stem).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=generator).byte()
        scales = torch.randint(121, 125, (num_experts, rows, columns // 32), generator=generator).byte()
        tensors |= {stem + "_blocks": blocks, stem + "_scales": scales}
        saved.model.get_parameter(stem).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return saved


# Three ranks cut the 32 columns of an expert, which share one scale, into 11, 11 and 10.
@pytest.mark.parametrize(
    "layout",
    [
        "1",
        "1p4/m2",
        "2+3/m2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("1+2/m2", "1t2p2", "1+1t3/m2")),
    ],
)
def test_64_greedy_tokens_twice_the_second_time_from_the_prefix_cache(layout: str, model: TinyModel) -> None:
    prompts = random_prompts([1, 70, 33, 100] * 3, seed=5)
    expected = model.greedy(prompts)
    with running(config(model, layout)) as engine:
        assert complete(engine, prompts) == expected
        hits = engine.stats().prefix_cache_hit_tokens
        assert complete(engine, prompts) == expected
        # Of several attention workers one with less to do may be worth more than a short hit.
        short = 3 * 32 if not layout.startswith("2") else 0
        assert engine.stats().prefix_cache_hit_tokens >= hits + 3 * (64 + 96) + short


@pytest.mark.parametrize("role", [pytest.param("attention", marks=pytest.mark.slow), "experts"])
def test_a_dead_worker_changes_no_token(role: str, model: TinyModel) -> None:
    prompts = random_prompts([50, 20] * 4, seed=6)
    expected = model.greedy(prompts)
    with running(config(model, "2+2/m2")) as engine:
        deaths = [0.4]

        def on_output(num_tokens: int) -> None:
            if deaths and num_tokens >= deaths[0] * 64 * len(prompts):
                deaths.pop()
                kill(engine, role, 1)

        finished = Run(engine, prompts, GREEDY).finish(on_output)
        assert not deaths
        assert [request.error for request in finished] == [None] * len(prompts)
        assert [request.token_ids for request in finished] == expected
