"""Steps that stand out are named, left out, or undone; a run with them has the same bits again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.base.errors import CheckpointError, UserError
from antiphon.train import checkpoint
from antiphon.train.config_tables import WatchConfig
from antiphon.train.samples import Samples
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer
from antiphon.train.watch import LEAST_STEPS, SpikeLimit, spike
from tests.train.harness import config_of, losses, same_tensors

STEADY = [(2.0 + 0.01 * step, 1.0) for step in range(LEAST_STEPS)]
BAD_STEP, BATCH = 35, 4
RUN = ("steps=44", "optimizer.schedule=constant", "output.checkpoint_every=10", "loss.balance=0", "watch.loss_rise=1.5")


def test_what_is_a_spike() -> None:
    config = WatchConfig()
    assert not spike(config, STEADY, 2.2, 1.2)
    assert "loss 4.0000 is 1.9" in spike(config, STEADY, 4.0, 1.0)
    assert "gradient norm 20 is 20.0 times" in spike(config, STEADY, 2.0, 20.0)
    assert " and gradient norm" in spike(config, STEADY, 4.0, 20.0)
    assert "are not both finite" in spike(config, [], math.nan, 1.0)
    assert not spike(config, STEADY[1:], 9.0, 90.0), "too few steps to compare with"
    still = [(2.0, 0.0)] * LEAST_STEPS  # of gradients that are zero
    assert spike(config, still, 2.0, 1.0) == "gradient norm 1 is above the last steps' 0"
    assert not spike(WatchConfig(norm_ratio=0, loss_rise=0), STEADY, 9.0, 90.0)


def test_a_run_that_only_skips_ends() -> None:
    limit = SpikeLimit()
    for step in range(10):
        limit.skipped(step, "x")
    with pytest.raises(UserError, match=r"step 10: x; 10 steps before it were left out for the same reason: lower"):
        limit.skipped(10, "x")
    limit.good()
    limit.skipped(11, "x")
    for _ in range(5):
        limit.rolled_back(50, "x")
    with pytest.raises(UserError, match="went back to step 50 5 times"):
        limit.rolled_back(50, "x")


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of one step are noise."""
    batch = Samples.batch
    bad = set(range(BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH))

    def spoiled(samples: Samples, numbers: Any, device: torch.device) -> Any:
        found = batch(samples, numbers, device)
        if bad & set(numbers):
            found.targets_BS.random_(1, 320, generator=torch.Generator().manual_seed(0))
        return found

    monkeypatch.setattr(Samples, "batch", spoiled)


def alarms(folder: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["alarm"]) for line in lines if line.get("alarm", "").startswith("step ")]


def run(folder: Path, *changes: str, until: int | None = None) -> Trainer:
    class Killed(Exception):
        pass

    def stop(result: TrainedStep) -> None:
        if result.step == until:
            raise Killed

    trainer = Trainer(prepare(config_of(folder, *RUN, *changes)), stop)
    if until is None:
        trainer.run()
    else:
        with pytest.raises(Killed):
            trainer.run()
    return trainer


def test_warned_skipped_and_rolled_back(tmp_path: Path, bad_batch: None) -> None:
    warned = run(tmp_path / "a")
    ((step, text),) = alarms(tmp_path / "a")
    assert step == BAD_STEP
    assert "nats above the last steps'" in text
    assert text.endswith("set watch.on_spike to skip or rollback, or lower the rate")
    skipped = run(tmp_path / "b", "watch.on_spike=skip")
    ((_, text),) = alarms(tmp_path / "b")
    assert text.endswith("its update is left out")
    curve = dict(losses(tmp_path / "b"))
    assert curve[BAD_STEP + 1] < curve[BAD_STEP] - 1.5
    assert not same_tensors(warned.model, skipped.model)
    rolled = run(tmp_path / "c", "watch.on_spike=rollback")
    ((step, text),) = alarms(tmp_path / "c")
    assert step == 30
    assert text.endswith(f"back to step 30, without samples 120 to {(BAD_STEP + 1) * BATCH - 1}")
    assert [step for step, _ in losses(tmp_path / "c")] == list(range(44)), "none twice"
    assert rolled.state.num_samples == (44 + BAD_STEP + 1 - 30) * BATCH
    assert max(loss for step, loss in losses(tmp_path / "c") if step >= 30) < curve[BAD_STEP] - 1.5
    # killed right behind the roll back, and once more behind the next checkpoint: the same bits
    run(tmp_path / "d", "watch.on_spike=rollback", until=32)
    run(tmp_path / "d", "watch.on_spike=rollback", until=41)
    assert same_tensors(run(tmp_path / "d", "watch.on_spike=rollback").model, rolled.model)
    assert losses(tmp_path / "d") == losses(tmp_path / "c")


def test_without_a_checkpoint_a_step_is_skipped(tmp_path: Path, bad_batch: None) -> None:
    run(tmp_path, "watch.on_spike=rollback", "output.checkpoint_every=0", "steps=37")
    assert "there is no checkpoint to go back to yet" in alarms(tmp_path)[0][1]
    state = checkpoint.read_facts(checkpoint.find_checkpoints(tmp_path / "out/checkpoints")[-1])["state"]
    assert len(state.recent) == 36


def test_moments_that_begin_anew_also_after_a_roll_back(tmp_path: Path, bad_batch: None) -> None:
    """The optimizer changes at a checkpoint, and the spike comes before the next: every checkpoint stays."""
    trained = ("output.checkpoint_every=10", "watch.on_spike=rollback", "optimizer.frozen=['layers.0.router']")
    run(tmp_path, *trained, "steps=30")
    there = checkpoint.find_checkpoints(tmp_path / "out/checkpoints")
    config = config_of(tmp_path, *RUN, *trained, "optimizer.frozen=[]", "output.keep=9")
    run_of = prepare(config, allowed=("optimizer",))
    trainer = Trainer(run_of)
    trainer.run()
    assert alarms(tmp_path)[0][1].endswith("back to step 30, without samples 120 to 143")
    assert set(there) <= set(checkpoint.find_checkpoints(tmp_path / "out/checkpoints"))
    assert not list((tmp_path / "out/checkpoints").glob("*.damaged"))


def test_bits_do_not_depend_on_when_a_skipped_step_is_saved(tmp_path: Path, bad_batch: None) -> None:
    skip = ("watch.on_spike=skip", "steps=39")
    never = run(tmp_path / "a", *skip, "output.checkpoint_every=0")
    often = run(tmp_path / "b", *skip, "output.checkpoint_every=1")
    assert same_tensors(never.model, often.model)


def test_a_checkpoint_that_lacks_moments_stays(tmp_path: Path) -> None:
    """Where they may not begin anew: it is whole, and of something else."""
    few = ("steps=4", "output.checkpoint_every=2", "optimizer.frozen=['layers.0.router']")
    run(tmp_path, *few)
    trainer = Trainer(prepare(config_of(tmp_path, *RUN, *few, "optimizer.frozen=[]"), allowed=("optimizer",)))
    trainer._build()
    folder = tmp_path / "out/checkpoints"
    with pytest.raises(
        CheckpointError, match=r"step-00000004: holds no optimizer\.layers\.0\.router\.exp_avg: another"
    ):
        checkpoint.load_newest(folder, trainer.model, trainer._shards, trainer._optimizer)
    assert [each.name for each in sorted(folder.iterdir())] == ["step-00000002", "step-00000004"]
