"""`antiphon train --nproc N`: the losses of one process, on another number of ranks after every resume."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.train.ranks import sizes_of
from tests.train.harness import config_of, losses, write_run

STAGES = (
    (2, 2, ("parallel.expert=2", "parallel.sequence=2", "parallel.zero=2", "parallel.dispatch=auto")),
    (
        4,
        4,
        (
            "parallel.tensor=2",
            "parallel.expert=2",
            "parallel.expert_tensor=2",
            "parallel.dispatch=gather_scatter",
            "parallel.zero=1",
        ),
    ),
    (6, 1, ()),
)


def train(file: Path, ranks: int, *changes: str) -> str:
    options = [option for change in changes for option in ("--set", change)]
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), *options]
    started = [*command, "--nproc", str(ranks)] if ranks > 1 else command
    ended = subprocess.run(started, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("model", [{}, {"num_experts": 6, "num_attention_heads": 2, "num_key_value_heads": 1}])
def test_two_ranks_then_four_then_one(tmp_path: Path, model: dict[str, int]) -> None:
    """Clipping is active, rows are dropped, two micro-batches a step, five experts on two ranks, a KV head that does
    not divide."""
    fixed = ("optimizer.schedule=constant", "micro_batch=2", "optimizer.clip=0.5", "loss.capacity=1.1")
    alone, shared = write_run(tmp_path / "alone", **model), write_run(tmp_path / "shared", **model)
    train(alone, 1, *fixed)
    for steps, ranks, changes in STAGES:
        train(shared, ranks, *fixed, *changes, f"steps={steps}")
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "shared")
    assert [step for step, _ in found] == list(range(6))
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_metrics(metrics_of(tmp_path / "alone"), metrics_of(tmp_path / "shared"))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_metrics(alone: list[dict[str, Any]], shared: list[dict[str, Any]]) -> None:
    """What several ranks write besides: the chosen dispatch, bytes by collective, time of waiting."""
    assert all(row.get("dispatch") in ("all_to_all", "gather_scatter") for row in shared[:2])
    for row in shared[:4]:
        assert any(name.startswith("gradients.") and num for name, num in row["collective_bytes"].items())
        assert row["exposed_comm_s"] > 0
    assert not any("collective_bytes" in row for row in (*alone, *shared[4:]))
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
        (3, "batch=4", r"4 sequences of a pass cannot be shared by 3 data-parallel ranks"),
        (8, "parallel.sequence=8", r"sequence \* tensor is 8, more than the 4 attention heads: use at most 4"),
        (6, "parallel.expert=6", r"expert is 6, more than the 5 experts"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, ranks: int, change: str, message: str) -> None:
    config = config_of(tmp_path, change, *(["batch=12"] if not change.startswith("batch") else []))
    with pytest.raises(UserError, match=message):
        sizes_of(config, load_model_spec(Path(config.model.path)), ranks)
