"""Checkpoints and servers that many tests share: they cost more than most tests."""

import subprocess
from collections.abc import Iterator

import pytest

from antiphon.serve import worker_handle
from tests.serve.api_harness import Live, fake_engine, live
from tests.serve.engine_harness import Prompts, TinyModel, random_prompts, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Qwen3-MoE with 5 experts, two layers, all of them with experts."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    return save_tiny_model(folder, num_hidden_layers=2, decoder_sparse_step=1, max_position_embeddings=256)


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started as programs: they need seconds until they load, in which they can be hit."""
    monkeypatch.setattr(worker_handle, "subprocess", subprocess)


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """32 prompts: one token, less than a block, more than one, and many."""
    return random_prompts([1, 9, 33, 90] * 8)


@pytest.fixture(scope="session")
def reference(tiny_model: TinyModel, prompts: Prompts) -> list[list[int]]:
    """Transformers' 64 greedy tokens of each prompt."""
    return tiny_model.greedy(prompts)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Live]:
    """A module's server over a fake engine; modules with other settings have their own."""
    with live(fake_engine()) as running:
        yield running


@pytest.fixture
def server(shared_server: Live) -> Live:
    """The module's server, with an engine that has seen nothing yet."""
    shared_server.engine.reset()
    return shared_server
