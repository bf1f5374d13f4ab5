"""Whole runs on one process: they learn, resume to the bit, survive kills, and what they export is served."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from antiphon.base.errors import CheckpointError, UserError
from antiphon.cli.train import export
from antiphon.train import checkpoint
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import config_of, losses, same_tensors, write_run


def finished(folder: Path, *changes: str) -> Trainer:
    trainer = Trainer(prepare(config_of(folder, *changes)))
    trainer.run()
    return trainer


def test_a_run_learns_and_tells(tmp_path: Path) -> None:
    trainer = Trainer(prepare(config_of(tmp_path, "steps=60", "output.checkpoint_every=0")))
    facts = trainer.run()
    curve = losses(tmp_path)
    assert [step for step, _ in curve] == list(range(60))
    assert curve[0][1] > 5.5, "the first loss is that of chance, log 320"
    assert curve[-1][1] < 2.5
    assert facts["held_out_loss"] < 4
    assert facts["tokens"] == 60 * 4 * 16
    board = EventAccumulator(str(tmp_path / "out/tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("1 learning/loss")]
    assert [step for step, _ in shown] == list(range(60))
    assert shown[-1][1] == pytest.approx(curve[-1][1])
    assert len(board.Scalars("3 experts/fullest_expert_ratio/layer_01")) == 60
    tags = board.Tags()
    rows = [f"3 experts/expert_rows/layer_{layer:02d}" for layer in range(2)]
    assert tags["histograms"] == rows, "no curve an expert"
    assert sorted(tags["scalars"])[0].startswith("1 learning"), "what people look for stands first"
    assert len(tags["scalars"]) < 100
    assert "4 operators and bytes/operator_s/fc1_backward" in tags["scalars"]


def test_the_same_seed_gives_the_same_bits_and_another_others(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "a"), finished(tmp_path / "b")
    assert same_tensors(first.model, second.model)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    other = finished(tmp_path / "c", "seed=1")
    assert not same_tensors(first.model, other.model)


def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")

    class Broken(Exception):
        pass

    def break_off(result: TrainedStep) -> None:
        if result.step == 4:
            raise Broken

    with pytest.raises(Broken):
        Trainer(prepare(config_of(tmp_path / "broken")), break_off).run()
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path / "broken/out/checkpoints")] == ["step-00000003"]
    resumed = finished(tmp_path / "broken")
    assert same_tensors(whole.model, resumed.model)
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken"), "no step is there twice, none is missing"


def test_passes_of_one_step_add_up_to_it(tmp_path: Path) -> None:
    """Whatever the passes, the loss is the mean over the step's targets. The balance loss is left out: it is a product
    of means over each pass."""
    plain = ("dtype=float64", "loss.balance=0", "data.document_masks=true")
    whole, cut = finished(tmp_path / "a", *plain), finished(tmp_path / "b", *plain, "micro_batch=1")
    for (_, first), (_, second) in zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True):
        assert first == pytest.approx(second, rel=1e-7)
    for ours, theirs in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_only_the_newest_checkpoints_stay_and_a_partial_one_is_none(tmp_path: Path) -> None:
    finished(tmp_path, "output.checkpoint_every=1", "output.keep=2")
    folder = tmp_path / "out" / "checkpoints"
    assert [path.name for path in checkpoint.find_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    (folder / ".step-00000007.partial").mkdir()
    assert len(checkpoint.find_checkpoints(folder)) == 2


def test_a_damaged_checkpoint_and_one_of_another_model_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished(tmp_path)
    before, newest = checkpoint.find_checkpoints(tmp_path / "out/checkpoints")
    with pytest.raises(UserError, match=r"step-00000006 is of another model \(num_experts 5, now 6\): change output"):
        Trainer(prepare(config_of(tmp_path, num_experts=6))).run()
    whole = finished(tmp_path / "whole")
    for file in newest.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    trainer = finished(tmp_path)
    assert same_tensors(trainer.model, whole.model), "made again from the checkpoint before"
    said = caplog.text
    assert "step-00000006: cannot be loaded" in said
    assert "put aside as" in said
    assert f"goes on from {before}" in said
    for file in (tmp_path / "out/checkpoints").glob("step-*/*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000003: cannot be loaded"):
        Trainer(prepare(config_of(tmp_path))).run()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_bit_that_turned_on_the_disk_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    whole = finished(tmp_path)
    newest = tmp_path / "out/checkpoints/step-00000006"
    data = bytearray((newest / name).read_bytes())
    data[len(data) // 2] ^= 1
    (newest / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{name} is not what was written: it is damaged"):
        export(tmp_path / "out", tmp_path / "exported")
    assert same_tensors(finished(tmp_path).model, whole.model), "made again from the checkpoint before"
    assert f"step-00000006: cannot be loaded ({name} is not what was written)" in caplog.text


def test_how_weights_were_stored_does_not_make_another_model(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    again = Trainer(prepare(config_of(tmp_path, dtype="bfloat16", transformers_version="9.0")))
    assert again.run()["steps"] == 6


def test_a_checkpoint_without_digests_is_believed(tmp_path: Path) -> None:
    """Versions before wrote none."""
    whole = finished(tmp_path)
    file = tmp_path / "out/checkpoints/step-00000006/run.json"
    facts = json.loads(file.read_text())
    assert facts.pop("files")
    del facts["digest"]
    file.write_text(json.dumps(facts))
    assert same_tensors(finished(tmp_path).model, whole.model)


def test_a_kill_at_any_time_loses_nothing_but_the_last_steps(tmp_path: Path) -> None:
    """SIGKILL as soon as the first checkpoint is there, or being written; then on to the bits of an undisturbed run."""
    whole = finished(tmp_path / "whole", "steps=12", "output.checkpoint_every=1")
    file = write_run(tmp_path / "killed")
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), "--set", "steps=12"]
    command += ["--set", "output.checkpoint_every=1"]
    with PROGRAMS.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        folder = tmp_path / "killed/out/checkpoints"
        deadline = time.monotonic() + 120
        while not (folder.exists() and any(folder.iterdir())):
            assert time.monotonic() < deadline, "no checkpoint within 120 s"
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    resumed = finished(tmp_path / "killed", "steps=12", "output.checkpoint_every=1")
    assert same_tensors(whole.model, resumed.model)


ON_A_FULL_DISK = """
import resource
from antiphon.cli.main import main
from antiphon.cli.train import train
resource.setrlimit(resource.RLIMIT_FSIZE, (160 * 1024, 160 * 1024))
main()
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """No file may grow beyond what metrics and token ids need: the log says so at every save, the run fails in the end,
    and goes on from the last whole checkpoint when there is room."""
    whole = finished(tmp_path / "whole", "steps=6")
    finished(tmp_path / "full", "steps=3", "optimizer.schedule=constant")
    file = write_run(tmp_path / "full")
    command = [sys.executable, "-c", ON_A_FULL_DISK, "train", str(file), "--set", "optimizer.schedule=constant"]
    ended = PROGRAMS.run(command, text=True, timeout=120)
    assert ended.returncode == 1
    words = "step-00000006: cannot be written (File too large: the size of a file is limited to 163,840 here, raise it"
    assert words in ended.stderr + ended.stdout
    assert "unexpected pos" not in ended.stderr + ended.stdout
    assert [path.name for path in (tmp_path / "full/out/checkpoints").iterdir()] == ["step-00000003"]
    assert whole.state.step == finished(tmp_path / "full", "steps=6", "optimizer.schedule=constant").state.step


def antiphon(*arguments: object, run: Callable[..., Any] = PROGRAMS.run) -> str:
    """Runs the command; its standard output."""
    command = [sys.executable, "-m", "antiphon.cli.main", *map(str, arguments)]
    done = run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_train_export_generate(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    shown = antiphon("train", file, "--set", "steps=80", "--set", "output.log_every=20")
    assert "step     80  loss" in shown
    assert "Next: antiphon export" in shown
    as_a_program = partial(subprocess.run, capture_output=True, check=False)
    antiphon("export", tmp_path / "out", tmp_path / "exported", "--dtype", "float32", run=as_a_program)
    antiphon("export", tmp_path / "out", tmp_path / "fp8", "--dtype", "fp8")
    answer = antiphon("generate", tmp_path / "fp8", "the cat sat", "--max-tokens", "12", "--json", "-")
    assert "on the" in json.loads(answer)["text"], "in blocks of 8 bits"
    answer = antiphon("generate", tmp_path / "exported", "the cat sat", "--max-tokens", "12", "--json", "-")
    assert "on the" in json.loads(answer)["text"]
    assert (tmp_path / "exported" / "tokenizer.json").exists()
