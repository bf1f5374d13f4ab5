"""What guards a run: its configuration when it goes on, its folder, its disk, and signals."""

import errno
import gc
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import CheckpointError, UserError
from antiphon.cli import train as commands
from antiphon.cli.commands import single_command
from antiphon.report.document import html
from antiphon.report.training_run import read_run, run_page
from antiphon.train import checkpoint
from antiphon.train.passes import HeldOutLoss
from antiphon.train.run_folder import Metrics, OutputLock
from antiphon.train.saver import Saver
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import config_of, losses, same_tensors, write_run


def finished(folder: Path, *changes: str, allowed: tuple[str, ...] = ()) -> Trainer:
    trainer = Trainer(prepare(config_of(folder, *changes), allowed=allowed))
    trainer.run()
    return trainer


def steps_of(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.find_checkpoints(folder / "out/checkpoints")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=1", "seed 0, now 1"),
        ("sequence_length=8", "sequence_length 16, now 8"),
        ("batch=2", "batch 4, now 2"),
        ("dtype=bfloat16", "dtype 'float32', now 'bfloat16'"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate 0.01, now 0.001"),
        ("optimizer.name=muon", "optimizer.name 'adamw', now 'muon'"),
        ("optimizer.schedule=wsd", "optimizer.schedule 'cosine', now 'wsd'"),
        ("optimizer.schedule_steps=9", "optimizer.schedule_steps 6, now 9"),
        ('optimizer.rates={"*.router"=0.5}', "optimizer.rates {}, now {*.router = 0.5}"),
        ("loss.balance=0.5", "loss.balance 0.01, now 0.5"),
        ("data.document_masks=false", "data.document_masks true, now false"),
        ('data.files=["text/00*.txt"]', "other text (data.files"),
        ("data.pieces=5", "other text (data.files"),
    ],
)
def test_a_run_that_goes_on_is_the_same_run(tmp_path: Path, change: str, message: str) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    with pytest.raises(UserError) as caught:
        finished(tmp_path, "steps=4", change)
    said = str(caught.value)
    assert f"step-00000003 was trained with {message}" in said
    key = "data.files" if "other text" in message else change.partition("=")[0]
    assert said.endswith(f"allow it: --allow-change {key}")
    trainer = finished(tmp_path, "steps=4", change, allowed=(key,))
    assert trainer.state.step == 4


def test_a_key_that_may_change_has_to_exist(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    with pytest.raises(UserError, match=r"--allow-change optimizer\.lr_rate: there is no such key"):
        finished(tmp_path, allowed=("optimizer.lr_rate",))
    for known in ("optimizer", "data.files", "data.share", "overlap.schedule", "seed"):
        finished(tmp_path, allowed=(known,))


def test_what_is_harmless_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    caplog.set_level("INFO")
    finished(tmp_path, "steps=4", "output.keep=1", "micro_batch=2", "memory.remake=full")
    for words in ("steps is 4 now, it was 3", "micro_batch is 2 now, it was 0", "memory.remake is 'full' now"):
        assert words in caplog.text


def test_more_steps_do_not_make_the_rate_jump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finished(tmp_path, "steps=6")
    trainer = finished(tmp_path, "steps=9")
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert len(rates) == 9
    assert rates[6:] == pytest.approx([1e-3] * 3), "the final rate"
    assert rates[5] > rates[6]
    assert "the schedule of the rate ends at step 6 and stays at 0.001" in caplog.text
    assert trainer.config.optimizer.schedule_steps == 6
    again = finished(tmp_path, "steps=10")
    assert again.config.optimizer.schedule_steps == 6, "however often it is extended"


def test_moments_of_another_optimizer_begin_anew_when_it_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    finished(tmp_path, "steps=4", "optimizer.name=muon", allowed=("optimizer",))
    assert "moments of the optimizer begin anew" in caplog.text


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    lock = OutputLock(tmp_path / "out")
    with pytest.raises(UserError, match=rf"out is in use by process {os.getpid()} on .*, since 20"):
        finished(tmp_path)
    lock.close()
    finished(tmp_path)
    OutputLock(tmp_path / "out").close()


def test_metrics_that_are_no_steps_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there, and a full disk takes nothing away."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n[1]\n{"loss": 1}\n{"step": 9}\n{"step\xff": 1}\n{"st')
    Metrics(tmp_path, 5).close()
    assert file.read_text() == '{"step": 0}\n'

    def full(path: Path, text: str, **_: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        Metrics(tmp_path, 5)
    assert file.read_text() == '{"step": 0}\n'
    assert not list(tmp_path.glob("*.partial"))


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, signal\nfrom pathlib import Path\nfrom antiphon.train.run_folder import OutputLock\n"
        f"lock = OutputLock(Path({str(tmp_path)!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert "process" in (tmp_path / "lock").read_text(), "the file stays"
    OutputLock(tmp_path).close()


def test_lines_of_metrics_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk takes half a line; it is written whole once there is room, and said once."""
    metrics, write = Metrics(tmp_path, 0), os.write
    metrics.write(0, {"loss": 1.0})

    def full(descriptor: int, content: bytes) -> int:
        if len(content) > 5:
            return write(descriptor, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as no_room:
        no_room.setattr(os, "write", lambda descriptor, content: full(descriptor, content[:10]))
        metrics.write(1, {"loss": 2.0})
        metrics.write(2, {"loss": 3.0})
    assert [step for step, _ in lines_of(tmp_path)] == [0]
    assert caplog.text.count("metrics.jsonl cannot be written (No space left on device): the run goes on") == 1
    metrics.write(3, {"loss": 4.0})
    metrics.close()
    assert lines_of(tmp_path) == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]


def lines_of(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_what_the_disk_does_not_take_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("antiphon.train.setup.write_run_facts", full)
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: False)  # this process has other tests to run
    with pytest.raises(CheckpointError, match=r"out: cannot be written \(No space left on device\): make room, or"):
        CliRunner().invoke(single_command(commands.train), [str(write_run(tmp_path))], catch_exceptions=False)


def test_a_folder_in_the_place_of_a_file_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: False)  # this process has other tests to run
    file = write_run(tmp_path)
    (tmp_path / "out/metrics.jsonl").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written \(Is a directory\)"):
        CliRunner().invoke(single_command(commands.train), [str(file)], catch_exceptions=False)
    (tmp_path / "out/metrics.jsonl").rmdir()
    shutil.rmtree(tmp_path / "out/checkpoints")
    (tmp_path / "out/checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"out/checkpoints: cannot be written \(File exists\)"):
        CliRunner().invoke(single_command(commands.train), [str(file)], catch_exceptions=False)


def test_a_missing_file_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3")
    (tmp_path / "out/checkpoints/step-00000003/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000003: cannot be loaded \(__0_0\.distcp: No such file"):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a training checkpoint"),
        ("{}", "run.json has no version: it is damaged"),
        ('{"version": 2, "config": {}, "model_config": {}}', "run.json has no state: it is damaged"),
        (
            '{"version": 2, "config": {}, "model_config": {}, "state": {"step": "six"}}',
            "run.json: state: step is 'six': it must be a valid integer",
        ),
    ],
)
def test_a_checkpoint_whose_facts_are_damaged_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    whole = finished(tmp_path / "whole")
    finished(tmp_path)
    newest = tmp_path / "out/checkpoints/step-00000006"
    (newest / "run.json").write_text(text)
    resumed = finished(tmp_path)
    assert same_tensors(whole.model, resumed.model)
    assert said in caplog.text
    assert ".step-00000006.damaged, the run goes on from" in caplog.text
    (newest / "run.json").write_text(text)
    assert checkpoint.best_checkpoint(newest.parent) is None, "the first one was not evaluated"
    (newest.with_name("step-00000003") / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step-0000000[36].*(name a folder step|damaged)"):
        finished(tmp_path)


def test_a_checkpoint_of_a_former_version(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3")
    file = tmp_path / "out/checkpoints/step-00000003/run.json"
    facts = json.loads(file.read_text())
    facts.pop("text")
    facts.pop("digest")
    file.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"a text that its run\.json does not name.*--allow-change data\.files"):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")
    file.write_text(json.dumps(facts | {"version": 1}))
    with pytest.raises(
        CheckpointError, match=r"is of version 1, this is 2: go on with the Antiphon that wrote it \(\d"
    ):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")
    assert file.exists(), "it is not put aside"
    file.write_text(json.dumps(facts | {"text": "", "config": facts["config"] | {"newer": 1}}))
    with pytest.raises(
        CheckpointError, match=r"unknown key newer.*; unless it was edited, go on with the Antiphon that"
    ):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")


def test_a_checkpoint_whose_facts_were_edited_is_refused(tmp_path: Path) -> None:
    """Of other samples than those that come next, a run would say nothing."""
    whole = finished(tmp_path / "whole")
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    file = tmp_path / "out/checkpoints/step-00000003/run.json"
    text, facts = file.read_text(), json.loads(file.read_text())
    facts["state"]["num_samples"] += 1000
    file.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r'run\.json was changed after it was written.*remove its "digest"'):
        finished(tmp_path)
    assert steps_of(tmp_path) == [3], "it is not put aside"
    file.write_text(json.dumps(json.loads(text), sort_keys=True))
    assert same_tensors(whole.model, finished(tmp_path).model), "only what it says counts"


def test_what_no_digest_guards_is_believed(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    file = tmp_path / "out/checkpoints/step-00000003/run.json"
    facts = json.loads(file.read_text())
    facts.pop("digest")
    facts["state"]["num_samples"] += 1000
    file.write_text(json.dumps(facts))
    added = finished(tmp_path).state.num_samples - facts["state"]["num_samples"]
    assert added == finished(tmp_path / "whole").state.num_samples // 2


def test_a_checkpoint_under_another_step_is_refused(tmp_path: Path) -> None:
    """Later ones would lie before it, and be removed first."""
    finished(tmp_path, "steps=3")
    folder = tmp_path / "out/checkpoints"
    (folder / "step-00000003").rename(folder / "step-00000009")
    with pytest.raises(CheckpointError, match=r"step-00000009 is step 3 by its run\.json: rename it to step-00000003"):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")
    assert steps_of(tmp_path) == [9]
    (folder / "step-00000009").rename(folder / "best")
    with pytest.raises(UserError, match="best is a checkpoint under another name, and none is beside it: rename it"):
        finished(tmp_path, "steps=4", "optimizer.schedule_steps=3")


def test_a_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    checkpoint_folder, elsewhere = tmp_path / "out/checkpoints/step-00000003", tmp_path / "elsewhere"
    checkpoint_folder.rename(elsewhere)
    checkpoint_folder.symlink_to(elsewhere)
    finished(tmp_path, "output.keep=1")
    assert steps_of(tmp_path) == [6]
    assert (elsewhere / "run.json").exists(), "what is elsewhere stays"


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(CheckpointError, match=r"step-00000006: cannot be written \(it needs .*, 1000 B are free\)"):
            finished(tmp_path)
    assert steps_of(tmp_path) == [3], "the one before is whole"
    assert losses(tmp_path)[-1][0] == 5
    assert finished(tmp_path).state.step == 6


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    """Else no reader but Python's takes it, and a run that ends with such a step ended with an error."""
    wild = ("optimizer.learning_rate=1e20", "optimizer.clip=0", "optimizer.warmup_steps=0", "watch.on_spike=skip")
    facts = Trainer(prepare(config_of(tmp_path, *wild))).run()
    assert facts["loss"] is None
    json.dumps(facts, allow_nan=False)
    text = (tmp_path / "out/metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["loss"] is None for row in rows if "loss" in row] == [False, *[True] * 5]
    record = read_run(tmp_path / "out")
    assert record.curve("loss")[0] == [0]
    assert "nats a token at step 1" in html(run_page(record))


def test_the_checkpoint_of_the_lowest_held_out_loss_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = iter([3.0, 2.0, 2.5, 2.25, 2.75, 2.5, 2.0])

    def evaluate(trainer: Trainer) -> None:
        trainer._held_out = HeldOutLoss(loss=next(held_out), error=None, num_targets=1)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    finished(tmp_path, "output.keep_best=true", "output.evaluate_every=1", "output.checkpoint_every=0", "output.keep=1")
    assert steps_of(tmp_path) == [2, 6], "the best and the newest"
    commands.export(tmp_path / "out", tmp_path / "exported", "float32", best=True)
    best = checkpoint.best_checkpoint(tmp_path / "out/checkpoints")
    assert best is not None
    assert best.name == "step-00000002"
    finished(tmp_path / "plain")
    assert checkpoint.best_checkpoint(tmp_path / "plain/out/checkpoints") is not None, "the end is always evaluated"
    with pytest.raises(UserError, match="--best: no checkpoint in"):
        commands.export(tmp_path, tmp_path / "x", best=True)


def stopping(number: int, at: int) -> Callable[[TrainedStep], None]:
    def on_step(result: TrainedStep) -> None:
        if result.step == at:
            os.kill(os.getpid(), number)

    return on_step


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """Tests may run under `nohup`, which a run obeys."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_behind_the_step_and_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    whole = finished(tmp_path / "whole")
    facts = Trainer(prepare(config_of(tmp_path / "broken")), stopping(number, 3)).run()
    assert (facts["stopped_by"], facts["steps"]) == (number.name, 4)
    assert steps_of(tmp_path / "broken") == [3, 4]
    resumed = finished(tmp_path / "broken")
    assert same_tensors(whole.model, resumed.model)
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken")


def test_nohup_is_obeyed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        facts = Trainer(prepare(config_of(tmp_path)), stopping(signal.SIGHUP, 3)).run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (facts["stopped_by"], facts["steps"]) == (None, 6)


@pytest.mark.usefixtures("no_nohup")
def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path) -> None:
    """Its last lines have no reader, and its terminal answers with errors."""
    file = write_run(tmp_path)
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), "--set", "output.log_every=1"]
    command += ["--set", "steps=100000", "--set", "output.checkpoint_every=0"]
    number, terminal = pty.fork()
    if not number:
        os.execv(command[0], command)
    shown, deadline_s = b"", time.monotonic() + 120
    while b"loss" not in shown:
        assert time.monotonic() < deadline_s
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    while (ended := os.waitpid(number, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert len(steps_of(tmp_path)) == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output\.folder .*: cannot be written"):
        OutputLock(tmp_path / "file" / "out")
    gc.collect()


def test_a_time_limit_saves_too(tmp_path: Path) -> None:
    facts = Trainer(prepare(config_of(tmp_path)), max_hours=0.0).run()
    assert (facts["stopped_by"], facts["steps"]) == ("--max-hours", 0)
    assert finished(tmp_path).state.step == 6


SIGNALLED = """
import os, signal, sys
from antiphon.train import trainer
whole = trainer.Trainer._step
def step(self):
    result = whole(self)
    for number in {numbers} if result.step == 3 and self.mesh.rank == {rank} else []:
        os.kill(os.getpid(), number)
    return result
trainer.Trainer._step = step
from antiphon.cli.main import main
main()
"""


def signalled(file: Path, numbers: str, *arguments: str, rank: int = 0) -> Any:
    script = SIGNALLED.format(numbers=numbers, rank=rank)
    return PROGRAMS.run([sys.executable, "-c", script, "train", str(file), *arguments], text=True, timeout=180)


@pytest.mark.parametrize(("number", "code"), [("signal.SIGTERM", 0), ("signal.SIGINT", 130)])
def test_the_exit_code_says_how_it_ended(tmp_path: Path, number: str, code: int) -> None:
    ended = signalled(write_run(tmp_path), f"[{number}]")
    assert ended.returncode == code, ended.stderr
    assert steps_of(tmp_path) == [3, 4]
    assert "after step 4: the same command goes on" in ended.stdout


def test_a_save_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its thread was never started came in the place of why."""

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trainer = Trainer(
        prepare(config_of(tmp_path)), on_step=lambda _: monkeypatch.setattr(threading.Thread, "start", full)
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        trainer.run()


def test_a_second_signal_ends_at_once_and_what_is_saved_is_whole(tmp_path: Path) -> None:
    ended = signalled(write_run(tmp_path), "[signal.SIGTERM] * 2")
    assert ended.returncode == -15, ended.stderr
    assert steps_of(tmp_path) in ([], [3]), "step 3 is saved beside step 4, and may have been cut off"
    assert finished(tmp_path).state.step == 6


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(tmp_path: Path) -> None:
    ended = signalled(write_run(tmp_path), "[signal.SIGTERM]", "--nproc", "2", rank=1)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(tmp_path) == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_ends_in_seconds(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(write_run(tmp_path)), "--nproc", "2"]
    command += ["--set", "steps=100000", "--set", "output.checkpoint_every=0"]
    metrics, temporary = tmp_path / "out/metrics.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        deadline_s = time.monotonic() + 300
        while not (metrics.exists() and '"loss"' in metrics.read_text()):
            assert time.monotonic() < deadline_s, "no step within 300 s"
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) == code
    assert len(steps_of(tmp_path)) == 1
    assert not list(temporary.iterdir()), "torch's launcher leaves a folder behind"


def test_a_page_of_a_run_whose_ranks_changed_measures_the_last(tmp_path: Path) -> None:
    finished(tmp_path, "steps=3", "optimizer.schedule_steps=6")
    file = tmp_path / "out/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line |= {"num_ranks": 2, "step_s": 100.0, "peak_rss_bytes": 1 << 50} if "loss" in line else {}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished(tmp_path)
    record = read_run(tmp_path / "out")
    assert record.ranks == [(0, 2), (3, 1)]
    median_s = record.median("step_s")
    assert median_s is not None
    assert median_s < 100
    assert len(record.curve("loss")[0]) == 6, "what is learned is one curve"
    assert "The number of ranks changed: 2 ranks from step 1, 1 rank from step 4" in str(run_page(record))


def test_steps_wait_for_the_copy_of_a_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no checkpoint until two more steps are done holds no step up."""
    write, may_write, waited = Saver._write, threading.Event(), []

    def slow(saver: Any, *arguments: Any) -> None:
        waited.append(may_write.wait(60))
        write(saver, *arguments)

    def on_step(result: TrainedStep) -> None:
        if result.step == 4:
            may_write.set()

    monkeypatch.setattr(Saver, "_write", slow)
    Trainer(prepare(config_of(tmp_path)), on_step).run()
    assert waited == [True, True]
    assert steps_of(tmp_path) == [3, 6]
