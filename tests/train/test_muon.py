"""Muon beside PyTorch's, and on slices of matrices and of stacks beside one process."""

from pathlib import Path

import pytest
import torch

from antiphon.models.config import load_model_spec, model_spec
from antiphon.train.config_tables import OptimizerConfig
from antiphon.train.optimizer import Optimizer, matrices_of, orthogonal, shards_of
from antiphon.train.setup import build_model
from antiphon.train.weights import layer_parameters
from tests.train.harness import CONFIG, LATENT, config_of


def test_a_step_is_that_of_pytorch(tmp_path: Path) -> None:
    config = config_of(tmp_path, "optimizer.name=muon")
    model = build_model(load_model_spec(Path(config.model.path)), config, 16)
    settings = OptimizerConfig(name="muon", weight_decay=0.1)
    shards = shards_of(model, 0, settings)
    optimizer = Optimizer(model, shards, settings)
    out = model.layers[1].get_parameter("out")
    start = out.detach().clone()
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        assert out.grad is not None
        theirs.grad = out.grad.clone()
        shards.reduce()
        optimizer.step(1e-2)
        reference.step()
    apart, way = (theirs - out).detach().norm(), (theirs.detach() - start).norm()
    assert apart < 3e-2 * way, "PyTorch's orthogonalizes in bfloat16"


def test_matrices_come_out_nearly_orthogonal() -> None:
    x = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    for each in (x, x.mT.contiguous()):
        singular = torch.linalg.svdvals(orthogonal(each))
        assert singular.min() > 0.5
        assert singular.max() < 1.3


@pytest.mark.parametrize(
    "config", [CONFIG, LATENT, LATENT | {"q_lora_rank": None}], ids=["heads", "latent", "no_q_rank"]
)
def test_matrices_cover_their_parameters(config: dict[str, object]) -> None:
    spec = model_spec(config)
    taken = {}
    for layer in range(spec.num_layers):
        for each in layer_parameters(spec, layer):
            blocks = matrices_of(spec, each.purpose, each.shape)
            if blocks:
                assert sum(block.size for block in blocks) == torch.Size(each.shape).numel()
                taken[each.purpose] = blocks
    assert {"experts.gate_up", "experts.down", "out"} <= taken.keys()
    assert not taken.keys() & {"router", "input_norm"}
