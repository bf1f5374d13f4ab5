"""A worker on a GPU is killed in the middle: the text is the CPU's, and the GPU takes its successor."""

import pytest
import torch

from tests.serve.engine_harness import GREEDY, Run, TinyModel, config, kill, random_prompts, running, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    return save_tiny_model(folder, num_hidden_layers=2, decoder_sparse_step=1, max_position_embeddings=256)


@pytest.mark.parametrize(("layout", "role"), [("1", "replica"), ("1+2/m2", "attention"), ("1+2/m2", "experts")])
def test_a_killed_worker_costs_no_token(tiny: TinyModel, layout: str, role: str) -> None:
    prompts = random_prompts([1, 9, 33])
    with running(config(tiny, layout, num_blocks=256, device="cuda", kernels="auto")) as engine:
        killed = []

        def at(num_tokens: int) -> None:
            if num_tokens >= 30 and not killed:
                killed.append(kill(engine, role, 0))

        finished = Run(engine, prompts, GREEDY).finish(at)
    assert killed
    assert [each.token_ids for each in finished] == tiny.greedy(prompts)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_attention_and_experts_on_different_devices(tiny: TinyModel, devices: tuple[str, str]) -> None:
    from antiphon.serve.config import OneRole

    prompts = random_prompts([1, 9, 33])
    roles = {"of_attention": OneRole(device=devices[0]), "of_experts": OneRole(device=devices[1])}
    with running(config(tiny, "1+1/m2", num_blocks=256, **roles)) as engine:
        finished = Run(engine, prompts, GREEDY).finish()
    assert [each.token_ids for each in finished] == tiny.greedy(prompts)
