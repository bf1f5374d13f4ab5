"""`antiphon train --plan`: the plan's layout runs, its prediction stands beside what was measured, other plans are
refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Sizes
from antiphon.cost.training.setup import TrainingPrecision
from antiphon.models.config import load_model_spec
from antiphon.models.config import read_config as read_model
from antiphon.planner.training import plan_training
from antiphon.specs.cluster import load_cluster
from antiphon.specs.training_plan import TrainingPlan, training_plan_to_json
from antiphon.train.config import TrainConfig
from antiphon.train.planned_run import planned_config
from antiphon.train.setup import plan_options, prepare
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import config_of, write_run

FILE = Path("plan.json")


def planned(config: TrainConfig, **layout: Any) -> TrainingPlan:
    """A plan for the run of `config` with this layout."""
    precision = TrainingPrecision(weights="float32", compute="float32", activation_wire="float32")
    plan = plan_training(
        load_model_spec(Path(config.model.path)),
        load_cluster("one-h100-server"),
        sequence_length=config.sequence_length,
        global_batch=config.batch,
        num_devices=1,
        precision=precision,
        compress=False,
        overlap="none",
        zero=0,
    )
    plan = replace(plan, model_config=read_model(Path(config.model.path)), num_devices=8)
    return replace(plan, layout=replace(plan.layout, **layout))


def test_every_layout_becomes_its_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path, "batch=8", "parallel.row_budget=2", "parallel.tensor=3")
    spec = load_model_spec(Path(config.model.path))
    plan = planned(
        config,
        attention="sequence",
        experts="expert",
        dispatch="all_gather",
        model_parallel=2,
        pipeline=2,
        data_parallel=2,
        micro_batch=1,
        num_micro_batches=4,
        zero=2,
        gradient_wire="bfloat16",
        activation_wire="fp8",
        overlap="inter",
        rematerialized=("ln1_out", "fc1_out+fc3_out"),
    )
    found = planned_config(plan, config, spec, FILE)
    assert found.micro_batch == 2, "of both data-parallel ranks"
    parallel = found.parallel
    assert (parallel.sequence, parallel.expert, parallel.tensor, parallel.expert_tensor) == (2, 2, 1, 1)
    assert (parallel.pipeline, parallel.zero, parallel.dispatch) == (2, 2, "gather_scatter")
    assert parallel.row_budget == 2, "the run's own"
    assert (found.communication.gradients, found.communication.activations) == ("bfloat16", "float8")
    assert found.memory.again == ("ln1_out", "fc1_out+fc3_out")
    assert found.overlap.beside
    dropped = plan_options(spec, found, Sizes(world_size=8, sequence=2, expert=2, pipeline=2)).dropped
    assert {"ln1_out", "fc1_out"} <= set(dropped)
    serial = planned_config(replace(plan, layout=replace(plan.layout, overlap="none")), config, spec, FILE)
    assert not serial.overlap.beside
    tiled = planned_config(replace(plan, layout=replace(plan.layout, overlap="intra")), config, spec, FILE)
    assert (found.overlap.inside, tiled.overlap.beside, tiled.overlap.inside) == (False, True, True)
    tensor = planned_config(
        replace(plan, layout=replace(plan.layout, attention="tensor", experts="tensor")), config, spec, FILE
    ).parallel
    assert (tensor.sequence, tensor.expert, tensor.tensor, tensor.expert_tensor) == (1, 1, 2, 2)


def test_without_overlap_nothing_else_changes(tmp_path: Path) -> None:
    """`overlap none` of a plan runs. On several ranks: tests/train/test_lina.py."""
    losses = []
    for beside in ("true", "false"):
        config = config_of(tmp_path / beside, f"overlap.beside={beside}", "steps=2")
        losses.append(Trainer(prepare(config)).run()["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("layout", "plan", "changes", "message"),
    [
        ({"activation_wire": "bfloat16"}, {}, (), r"activation_wire is bfloat16, compute float32.*wire=float32"),
        ({}, {"gradients": "bfloat16"}, (), r"gradients is bfloat16.*--precision gradients=float32"),
        ({"rematerialized": ("rmsnorm_1",)}, {}, (), r"memory.again names 'rmsnorm_1'.*ln1_out"),
        ({}, {}, ("memory.remake=full",), r"--set memory.remake=full: plan.json decides memory.remake"),
        ({}, {"compute": "bfloat16"}, (), r"compute is bfloat16, this run has float32.*--set dtype=bfloat16"),
        ({}, {"sequence_length": 99}, (), r"sequence_length is 99, this run has 16.*--set sequence_length=99"),
        ({}, {"global_batch": 99}, (), r"global_batch is 99, this run has 4.*--set batch=99"),
        ({}, {"model_config": {}}, (), r"does not say which config.json"),
        ({}, {}, ("parallel.expert=2",), r"--set parallel.expert=2: plan.json decides parallel.expert"),
        ({}, {}, ("micro_batch=1",), r"--set micro_batch=1: plan.json decides micro_batch"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, layout: dict[str, Any], plan: dict[str, Any], changes: tuple[str, ...], message: str
) -> None:
    config = config_of(tmp_path)
    spec = load_model_spec(Path(config.model.path))
    with pytest.raises(UserError, match=message):
        planned_config(replace(planned(config, **layout), **plan), config, spec, FILE, changes)


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    other = read_model(Path(config.model.path)) | {"hidden_size": 64}
    with pytest.raises(UserError, match=r"with hidden_size 64, this model has 32: use that model, or plan for this"):
        planned_config(
            replace(planned(config), model_config=other), config, load_model_spec(Path(config.model.path)), FILE
        )


def test_two_ranks_obey(tmp_path: Path) -> None:
    """What was predicted and what was measured stand side by side, on the terminal, in JSON and on the page."""
    run = write_run(tmp_path / "run")
    config = config_of(tmp_path / "run")
    layout = {
        "model_parallel": 2,
        "data_parallel": 1,
        "micro_batch": 2,
        "num_micro_batches": config.batch // 2,
        "overlap": "intra",
        "rematerialized": ("ln1_out", "ln2_out", "ffn_in", "fc2_in"),
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(training_plan_to_json(planned(config, **layout))))
    facts_file = tmp_path / "facts.json"
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(run), "--plan", str(plan)]
    ended = PROGRAMS.run([*command, "--set", "output.log_every=1", "--json", str(facts_file)], text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "measured / predicted" in ended.stdout
    rows = {row["name"]: row for row in json.loads(facts_file.read_text())["compared"]}
    assert rows["a step"]["measured"] > 0
    assert rows["MFU"]["predicted"] > 0
    assert "memory of a rank by the plan" in (tmp_path / "run" / "out" / "report.html").read_text()
    wrong = PROGRAMS.run([*command, "--nproc", "3"], text=True, timeout=100)
    assert wrong.returncode == 2
    assert "3 ranks are asked for" in wrong.stderr
