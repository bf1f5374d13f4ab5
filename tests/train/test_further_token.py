"""The layer for a further token: its loss by another way, what it learns, its way through checkpoints and exports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from antiphon.base.errors import CheckpointError, UserError
from antiphon.cli import train as commands
from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec
from antiphon.models.load import open_checkpoint
from antiphon.train.config_tables import LossConfig
from antiphon.train.further_token import next_tokens
from antiphon.train.hugging_face import import_weights
from antiphon.train.model import Batch
from antiphon.train.routing import Routing
from antiphon.train.sequence_parallel import Sequences
from antiphon.train.setup import build_model, prepare
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import LATENT, config_of, loss_of, losses, same_tensors, write_run

DEEP: dict[str, Any] = LATENT | {"num_nextn_predict_layers": 1}
MTP = "loss.mtp=0.3"


def finished(folder: Path, *changes: str, model: dict[str, Any] = DEEP) -> Trainer:
    trainer = Trainer(prepare(config_of(folder, *changes, **model)))
    trainer.run()
    return trainer


def further(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return [line["mtp_loss"] for line in lines if "mtp_loss" in line]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_what_is_to_be_predicted() -> None:
    ids, targets = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, IGNORED, 4, 5]])
    positions = torch.tensor([[0, 1, 0, 1]])  # two documents
    following, wanted = next_tokens(ids, targets, positions)
    assert following[0, :3].tolist() == [2, 3, 4]
    assert wanted.tolist() == [[IGNORED, IGNORED, 5, IGNORED]], "no document knows what the next begins with"


def test_its_loss_by_another_way(tmp_path: Path) -> None:
    """Position by position in plain torch: the norms, the projection, and the token after the next."""
    config = config_of(tmp_path, MTP, "dtype=float64", **DEEP)
    spec = load_model_spec(tmp_path / "model")
    model = build_model(spec, config, 16)
    for each in model.parameters():
        each.data.normal_(std=0.3, generator=torch.Generator().manual_seed(each.numel()))
    ids = torch.randint(1, 320, (2, 10), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(9).expand(2, 9), None)
    count = torch.tensor(18.0)
    loss = loss_of(model, batch, count)
    (ours,) = model.further_losses
    layer, tensors = model.layers[spec.num_layers], dict(model.named_parameters())
    with torch.no_grad():
        assert torch.equal(loss_of(model, batch, count), loss) or torch.allclose(loss_of(model, batch, count), loss)
        routing = Routing(spec.router, LossConfig(balance=0.0), model.mesh.stage, num_layers=1)
        rows = rms(model._rows(0, None, batch, routing), tensors["final_norm"], spec.norm_eps)
        embedded = tensors["embedding"][ids[:, 1:]]
        both = [
            rms(embedded, tensors["layers.2.mtp_embedding_norm"], spec.norm_eps),
            rms(rows, tensors["layers.2.mtp_row_norm"], spec.norm_eps),
        ]
        x = torch.cat(both, -1) @ tensors["layers.2.mtp_projection"].T
        sequences = Sequences.of(spec, model._parallel(batch), model.cos_PR, model.sin_PR, batch.positions_BS, None)
        x = rms(layer(x, sequences, routing), tensors["layers.2.mtp_head_norm"], spec.norm_eps)
        logits = x @ tensors["head"].T
        theirs = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 2:].flatten(), reduction="sum") / count
    assert float(ours) == pytest.approx(float(theirs), rel=1e-9)
    loss.backward()
    assert tensors["layers.2.mtp_projection"].grad is not None
    assert float(tensors["layers.2.mtp_projection"].grad.abs().max()) > 0


def test_its_balance_over_the_model_is_over_itself(tmp_path: Path) -> None:
    """It is one of the model's layers by weight, and looks at its own use alone, which is all that it can change."""
    spec = load_model_spec(config_of(tmp_path, **DEEP).model.path)
    stage, gradients = connect(Sizes(), 0).stage, []
    drawn = torch.rand(12, spec.router.num_experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layers, routing in (
        (4, Routing(spec.router, LossConfig(balance_over="model"), stage, num_layers=4).apart()),
        (1, Routing(spec.router, LossConfig(balance_over="model"), stage, num_layers=1)),
    ):
        logits = drawn.clone().requires_grad_()
        x = torch.zeros(12, 4, dtype=torch.float64, requires_grad=True)
        routing.attach(x, logits, drawn.topk(spec.router.top_k).indices).sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad * layers)
    torch.testing.assert_close(*gradients)


def test_it_learns_beside_the_model(tmp_path: Path) -> None:
    trained = finished(tmp_path / "a", MTP, "steps=60", "output.checkpoint_every=0")
    curve = further(tmp_path / "a")
    assert curve[0] > 5.0
    assert curve[-1] < curve[0] - 2
    plain = finished(tmp_path / "b", "steps=1")
    assert losses(tmp_path / "a")[0][1] == losses(tmp_path / "b")[0][1], "the loss that is shown is the model's"
    assert plain.model.further_losses == []
    assert trained.spec.num_layers == 2


def test_through_checkpoint_and_export(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", MTP)
    finished(tmp_path / "cut", MTP, "steps=3", "optimizer.schedule_steps=6")
    resumed = finished(tmp_path / "cut", MTP, "optimizer.schedule_steps=6")
    assert same_tensors(whole.model, resumed.model)
    commands.export(tmp_path / "whole/out", tmp_path / "new", "float32")
    found = load_file(tmp_path / "new/model.safetensors")
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens", "mlp.gate"):
        assert f"model.layers.2.{name}.weight" in found, name
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["lm_head.weight"])
    assert json.loads((tmp_path / "new/config.json").read_text())["num_nextn_predict_layers"] == 1
    open_checkpoint(tmp_path / "new", load_model_spec(tmp_path / "new"))
    config = config_of(tmp_path / "again", MTP, "seed=5", **DEEP)
    again = build_model(load_model_spec(tmp_path / "new"), config, 16)
    import_weights(again, tmp_path / "new")
    assert same_tensors(again, whole.model)
    begin = (f"model.path={tmp_path / 'new'}", "model.begin=checkpoint", 'optimizer.frozen=["layers.2.*"]')
    frozen = finished(tmp_path / "frozen", MTP, *begin)
    for name, value in frozen.model.layers[2].state_dict().items():
        assert torch.equal(value, whole.model.layers[2].state_dict()[name]), name
    assert not torch.equal(frozen.model.embedding, whole.model.embedding)


def test_a_checkpoint_without_it(tmp_path: Path) -> None:
    finished(tmp_path, "steps=1")
    commands.export(tmp_path / "out", tmp_path / "new", "float32")
    file = tmp_path / "new/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    begin = (f"model.path={tmp_path / 'new'}", "model.begin=checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        finished(tmp_path / "b", MTP, *begin)


def test_a_run_without_it_cannot_go_on_with_it(tmp_path: Path) -> None:
    """Whatever is allowed: no checkpoint has the layer."""
    finished(tmp_path, "steps=2", "output.checkpoint_every=1")
    with pytest.raises(
        UserError, match=r"loss\.mtp is 0\.3, and .*step-00000002 has no layer for a further token: set"
    ):
        prepare(config_of(tmp_path, MTP, "steps=4", **DEEP), allowed=("loss.mtp",))
    assert len(list((tmp_path / "out/checkpoints").glob("step-*"))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("parallel.zero=2", "loss.mtp is 0.3 and parallel.zero is 2: the layer for a further token needs"),
        ("communication.sums=priority", "communication.sums is 'priority'"),
        ("parallel.pipeline=2", "parallel.pipeline is 2"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        finished(tmp_path, MTP, change)
    assert message in str(caught.value)


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loss\.mtp is 0\.3 and the model's num_nextn_predict_layers is 0"):
        finished(tmp_path, MTP, model=LATENT)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    changes = (MTP, "dtype=float64", "loss.balance=0.1", "loss.bias_rate=0")
    finished(tmp_path / "one", *changes)
    switches = [part for change in (*changes, "parallel.sequence=2", "parallel.expert=2") for part in ("--set", change)]
    file = write_run(tmp_path / "two", **DEEP)
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), "--nproc", "2", *switches]
    done = PROGRAMS.run(command, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert isinstance(done, subprocess.CompletedProcess)
    for (_, one), (_, two) in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-9)
    for one, two in zip(further(tmp_path / "one"), further(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-9)
