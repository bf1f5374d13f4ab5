"""`antiphon train --nproc N`: the losses of one process, though every resume shares the work in another way."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.train.checkpoint import find_checkpoints, read_facts
from antiphon.train.ranks import sizes_of
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import LATENT, config_of, losses, write_run

STAGES = (
    (2, 2, ("parallel.expert=2", "parallel.sequence=2", "parallel.zero=2", "parallel.dispatch=auto")),
    (
        3,
        4,
        (
            "parallel.tensor=2",
            "parallel.expert=2",
            "parallel.expert_tensor=2",
            "parallel.dispatch=gather_scatter",
            "parallel.zero=1",
        ),
    ),
    (5, 2, ("parallel.pipeline=2", "parallel.zero=1")),
    (6, 1, ()),
)
OVERLAPPED = (
    "communication.sums=priority",
    "communication.partition=true",
    "communication.chunk_bytes=2000",
    "communication.pipeline_experts=true",
)
FIVE_EXPERTS: dict[str, Any] = {}
TIED = LATENT | {"num_hidden_layers": 3, "tie_word_embeddings": True}


def train(file: Path, ranks: int, *changes: str) -> str:
    options = [option for change in changes for option in ("--set", change)]
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), *options]
    started = [*command, "--nproc", str(ranks)] if ranks > 1 else command
    ended = PROGRAMS.run(started, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def held_out(folder: Path) -> dict[int, float]:
    """The held-out loss behind every step."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}


@pytest.mark.parametrize(
    "model", [FIVE_EXPERTS, pytest.param(TIED, marks=pytest.mark.slow)], ids=["qwen3_moe", "deepseek_v3"]
)
def test_two_ranks_then_four_then_a_pipeline_then_one(tmp_path: Path, model: dict[str, Any]) -> None:
    """Clipping is active, rows are dropped, two micro-batches a step, five experts on two ranks; or moving score
    biases, a tied embedding and stages of two and one layers."""
    fixed = (
        "optimizer.schedule=constant",
        "micro_batch=2",
        "optimizer.clip=0.5",
        "loss.capacity=1.1",
        "output.evaluate_every=1",
    )
    alone, shared = write_run(tmp_path / "alone", **model), write_run(tmp_path / "shared", **model)
    train(alone, 1, *fixed)
    for steps, ranks, changes in STAGES:
        train(shared, ranks, *fixed, *changes, f"steps={steps}")
        newest = find_checkpoints(tmp_path / "shared/out/checkpoints")[-1]
        names = {each.name for each in newest.iterdir()} - {"run.json"}
        assert set(read_facts(newest)["files"]) == names, "each rank's file has its digest"
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "shared")
    assert [step for step, _ in found] == list(range(6))
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert held_out(tmp_path / "shared") == pytest.approx(held_out(tmp_path / "alone"), rel=1e-5)
    assert_metrics(metrics_of(tmp_path / "alone"), metrics_of(tmp_path / "shared"))


def assert_metrics(alone: list[dict[str, Any]], shared: list[dict[str, Any]]) -> None:
    """What several ranks write besides: the chosen dispatch, bytes by collective, time of waiting."""
    assert all(row.get("dispatch") in ("all_to_all", "gather_scatter") for row in shared[:2])
    for step, row in enumerate(shared[:5]):
        kind = "gradients." if step < 3 else "pipeline."  # pipeline ranks share a tied embedding at most
        assert any(name.startswith(kind) and num for name, num in row["collective_bytes"].items())
        assert row["exposed_comm_s"] > 0
    assert not any("collective_bytes" in row for row in (*alone, *shared[5:]))
    assert sum(sum(row["dropped_rows"]) for row in alone) > 0
    assert [row["dropped_rows"] for row in shared] == [row["dropped_rows"] for row in alone]


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (
            3,
            "parallel.expert=2",
            r"experts: pipeline 1 \* expert 2 \* expert_tensor 1 is 2, which does not divide the 3",
        ),
        (
            3,
            "parallel.pipeline=2",
            r"attention: pipeline 2 \* sequence 1 \* tensor 1 is 2, which does not divide the 3",
        ),
        (4, "parallel.pipeline=4", r"pipeline \* virtual_stages is 4, more than the 2 layers: use at most 2"),
        (
            24,
            "parallel.pipeline=24",
            r"pipeline is 24, a step has 12 micro-batches.*set micro_batch to a part of batch",
        ),
        (2, "parallel.virtual_stages=2", r"virtual_stages is 2, but a pipeline of 1 has nothing to interleave"),
        (5, "parallel.sequence=5", r"sequence \* tensor is 5, more than the 4 attention heads: use at most 4"),
        (6, "parallel.expert=6", r"expert is 6, more than the 5 experts"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, ranks: int, change: str, message: str) -> None:
    config = config_of(tmp_path, change, "batch=12", "micro_batch=1" if "pipeline" in change else "micro_batch=0")
    with pytest.raises(UserError, match=message):
        sizes_of(config, load_model_spec(Path(config.model.path)), ranks)


def test_sequences_that_ranks_cannot_share(tmp_path: Path) -> None:
    config = config_of(tmp_path, "batch=4")
    with pytest.raises(UserError, match=r"4 sequences of a pass cannot be shared by 3 data-parallel ranks"):
        sizes_of(config, load_model_spec(Path(config.model.path)), 3)


@pytest.mark.slow
@pytest.mark.parametrize("switches", [OVERLAPPED, ("overlap.inside=true",)], ids=["overlapped", "inside"])
def test_a_killed_rank_is_started_again(tmp_path: Path, switches: tuple[str, ...]) -> None:
    """In the middle of a step whose sums and rows overlap: torchrun starts the ranks anew, they go on from the
    checkpoint, and the curve is the undisturbed one, bit for bit."""
    alone, killed = write_run(tmp_path / "alone"), write_run(tmp_path / "killed")
    fixed = ("parallel.expert=2", "parallel.sequence=2", "output.checkpoint_every=2", "steps=40", *switches)
    train(alone, 2, *fixed)
    options = [option for change in fixed for option in ("--set", change)]
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(killed), *options, "--nproc", "2"]
    with (tmp_path / "output").open("w") as output, PROGRAMS.Popen(command, stderr=output, stdout=output) as run:
        try:
            await_step(tmp_path / "killed", 7)
            launcher = psutil.Process(run.pid)
            ranks = [each for each in launcher.children() if each.cmdline() == launcher.cmdline()]
            assert len(ranks) == 2
            ranks[1].kill()
            assert run.wait(250) == 0, (tmp_path / "output").read_text()
        finally:
            run.kill()
    said = (tmp_path / "output").read_text()
    assert "resumed from" in said, said
    assert losses(tmp_path / "killed") == losses(tmp_path / "alone")


def await_step(folder: Path, step: int) -> None:
    """Until the run has logged `step`."""
    for _ in range(2000):
        if (folder / "out" / "metrics.jsonl").is_file() and any(line["step"] >= step for line in metrics_of(folder)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in 100 s")
