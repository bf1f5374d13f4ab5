"""The check of memory before the first step."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.base.errors import ResourceError
from antiphon.comm.mesh import Sizes
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig
from antiphon.train.memory import KEPT_OVER_NEEDED, check_memory, memory_need, setup_of
from antiphon.train.model import Batch
from antiphon.train.optimizer import Optimizer, shards_of
from antiphon.train.setup import build_model, prepare
from tests.train.harness import config_of, loss_of


def need_of(config: TrainConfig) -> float:
    return memory_need(load_model_spec(Path(config.model.path)), config, setup_of(config, Sizes())).total


@pytest.mark.parametrize("change", ["dtype=float32", "dtype=float64", "optimizer.name=muon"])
def test_states_are_what_the_trainer_holds(tmp_path: Path, change: str) -> None:
    config = config_of(tmp_path, change)
    spec = load_model_spec(Path(config.model.path))
    need = memory_need(spec, config, setup_of(config, Sizes()))
    model = build_model(spec, config, config.sequence_length)
    shards = shards_of(model, 0, config.optimizer)
    shards.reduce()
    optimizer = Optimizer(model, shards, config.optimizer)
    optimizer.step(1e-3)
    held = sum(parameter.nbytes for parameter in model.parameters())
    moments = sum(moment.nbytes for _, _, moment in optimizer.moments(1))
    assert need.parameters == pytest.approx(held, rel=0.02)
    assert need.gradients == pytest.approx(held, rel=0.02)
    assert need.optimizer == pytest.approx(moments, rel=0.02)


def test_activations_lie_between_what_is_needed_and_what_is_kept(tmp_path: Path) -> None:
    """Against what a forward pass of a model of usual proportions keeps: its layers, and autograd outside of them."""
    shape = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8}
    config = config_of(tmp_path, "sequence_length=64", "batch=8", **shape)
    spec = load_model_spec(Path(config.model.path))
    model = build_model(spec, config, 64)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros((8, 64), dtype=torch.long)
    batch = Batch(ids, ids, torch.arange(64).expand(8, 64), None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, batch, torch.tensor(512))
    need = memory_need(spec, config, setup_of(config, Sizes()))
    held = model.held.now + sum(storage.nbytes() for storage in saved.values()) - need.head
    assert loss.isfinite()
    assert 0.8 * need.activations < held < KEPT_OVER_NEEDED * need.activations


def test_what_does_not_fit_is_refused_and_what_would_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, "batch=16")
    spec = load_model_spec(Path(config.model.path))
    total = need_of(config)
    with pytest.raises(
        ResourceError, match=r"training needs .* \(parameters .*, activations .*: set micro_batch=[248]"
    ):
        check_memory(spec, config, setup_of(config, Sizes()), free_bytes=int(total) - 1)
    with pytest.raises(ResourceError, match="are free: take a smaller model"):
        check_memory(spec, config, setup_of(config, Sizes()), free_bytes=1000)
    long = replace(config, sequence_length=1 << 20, micro_batch=1)
    with pytest.raises(ResourceError, match="are free: shorten sequence_length, or divide the model"):
        check_memory(spec, long, setup_of(long, Sizes()), free_bytes=1 << 30)
    with pytest.raises(ResourceError, match="needs 2 ranks of"):
        check_memory(spec, config, setup_of(config, Sizes()), ranks_here=2, free_bytes=int(1.9 * total))
    with caplog.at_level(logging.WARNING, "antiphon.train"):
        check_memory(spec, config, setup_of(config, Sizes()), free_bytes=int(total) + 1)
        assert "training may need" in caplog.records[0].message
        caplog.clear()
        check_memory(spec, config, setup_of(config, Sizes()), free_bytes=int(3 * total))
        assert not caplog.records


def test_a_checkpoint_beside_steps_is_a_copy(tmp_path: Path) -> None:
    """Of parameters and moments; at the end of a run it takes the place of activations."""
    every = ("steps=9", "output.checkpoint_every=3", "micro_batch=1")
    config = config_of(tmp_path, *every)
    spec = load_model_spec(Path(config.model.path))
    setup = setup_of(config, Sizes())
    need = memory_need(spec, config, setup)
    assert need.copy == pytest.approx(need.parameters + need.optimizer)
    end = memory_need(spec, config_of(tmp_path, *every, "output.checkpoint_every=0"), setup)
    assert end.copy == max(0.0, need.copy - need.activations - need.head)
    for other in ("output.save_beside=false", "memory.offload=moments"):
        assert memory_need(spec, config_of(tmp_path, *every, other), setup).copy == 0, other
    with pytest.raises(ResourceError, match=r"are free: set output.save_beside to false: steps wait for checkpoints"):
        check_memory(spec, config, setup, free_bytes=int(need.total - 1))


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    huge = {"hidden_size": 65536, "moe_intermediate_size": 65536, "num_hidden_layers": 64, "num_experts": 256}
    with pytest.raises(ResourceError, match=r"training needs .* TiB .*: take a smaller model, or divide it"):
        prepare(config_of(tmp_path, **huge))
