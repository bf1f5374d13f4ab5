"""Runs that are killed: in every phase once, and at random times again and again. They end with the bits of a run that
was left alone, and nothing half-written is taken for whole."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.models.config import load_model_spec
from antiphon.train import checkpoint
from antiphon.train.config import read_config
from antiphon.train.setup import build_model, cache_of, prepare
from antiphon.train.shards import Shards
from antiphon.train.tokens import SPLITS, open_tokens
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import losses, same_tensors, write_run

pytestmark = pytest.mark.usefixtures("one_thread")
PATIENCE_S = 120
KILLS = 20
WHERE = ("whole", "ended")
QUIET: dict[str, Any] = {
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
    "env": os.environ | {"OMP_NUM_THREADS": "1"},
}
STEPS = ("steps=40", "output.checkpoint_every=3", "output.evaluate_every=7")


def command(file: Path, *changes: str) -> list[str]:
    switches = [part for change in changes for part in ("--set", change)]
    return [sys.executable, "-m", "antiphon.cli.main", "train", str(file), *switches]


def undisturbed(folder: Path, *changes: str) -> Trainer:
    trainer = Trainer(prepare(read_config(write_run(folder), changes)))
    trainer.run()
    return trainer


def ended(folder: Path, *changes: str) -> Any:
    """The model of the run's last checkpoint, once the run has been ended."""
    config = read_config(folder / "train.toml", changes)
    Trainer(prepare(config)).run()
    model = build_model(load_model_spec(folder / "model"), config, 1)
    found = checkpoint.find_checkpoints(folder / "out/checkpoints")
    checkpoint.load(found[-1], model, Shards(model), None)
    return model


def wait_until(what: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def phase(name: str, out: Path) -> Callable[[], bool]:
    """Whether the run is in it."""
    folder = out / "checkpoints"
    return {
        "tokenizing": (out / "tokens/train.bin").exists,
        "first step": (out / "run.json").exists,
        "save": lambda: folder.exists() and any(each.name.endswith(".partial") for each in folder.iterdir()),
        "steps": lambda: bool(checkpoint.find_checkpoints(folder)),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", ["tokenizing", "first step", "save", "steps"])
@pytest.mark.parametrize("beside", ["true", "false"])
def test_ended_in_every_phase(tmp_path: Path, how: signal.Signals, name: str, beside: str) -> None:
    changes = ("steps=12", "output.checkpoint_every=1", f"output.save_beside={beside}")
    whole = undisturbed(tmp_path / "whole", *changes)
    file = write_run(tmp_path / "ended")
    with PROGRAMS.Popen(command(file, *changes), **QUIET) as process:
        wait_until(phase(name, tmp_path / "ended/out"), process)
        process.send_signal(how)
        process.wait(PATIENCE_S)
    assert same_tensors(ended(tmp_path / "ended", *changes), whole.model)
    assert losses(tmp_path / "ended") == losses(tmp_path / "whole")
    for split in SPLITS:
        first, second = (open_tokens(cache_of(read_config(tmp_path / each / "train.toml")), split) for each in WHERE)
        assert first.digest == second.digest


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_export_that_is_ended_is_none(tmp_path: Path, how: signal.Signals) -> None:
    """What is left has no `config.json`, so nothing loads it; the command says what to do."""
    undisturbed(tmp_path, "steps=3")
    export = [sys.executable, "-m", "antiphon.cli.main", "export", str(tmp_path / "out"), str(tmp_path / "new")]
    with PROGRAMS.Popen(export, **QUIET) as process:
        wait_until((tmp_path / "new").exists, process)
        process.send_signal(how)
        process.wait(PATIENCE_S)
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert "config.json" not in written or "model.safetensors" in written
    if "config.json" not in written:
        again = PROGRAMS.run([*export[:-1], str(tmp_path / "other")], text=True, timeout=PATIENCE_S)
        assert again.returncode == 0, again.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_times(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", *STEPS)
    file, drawn = write_run(tmp_path / "killed"), random.Random(7)
    for _ in range(KILLS):
        with PROGRAMS.Popen(command(file, *STEPS), **QUIET) as process:
            wait_s = drawn.uniform(0.2, 5.0)
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(PATIENCE_S)
    assert same_tensors(ended(tmp_path / "killed", *STEPS), whole.model)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
