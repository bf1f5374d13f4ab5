"""Workers die again and again, or cannot come back: who is served meanwhile, what the engine says, when it ends."""

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from antiphon.base.errors import UserError
from antiphon.base.system import memory_kills
from antiphon.serve.engine import Engine
from antiphon.serve.fleet import Event
from antiphon.serve.worker_handle import WorkerName
from tests.serve.engine_harness import (
    GREEDY,
    PATIENCE_S,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    random_prompts,
    running,
)
from tests.waiting import wait_until

RESTARTS = "antiphon.serve.policy.restarts"
# A worker of the real kind, but one that cannot start while the file exists.
BROKEN_WHILE = """
from pathlib import Path
from antiphon.serve.worker import build
real = build.load_model_spec
def load_model_spec(*arguments):
    if Path({flag!r}).exists():
        raise OSError("no space left on device")
    return real(*arguments)
build.load_model_spec = load_model_spec
"""


def kill_and_await_replacement(engine: Engine, role: str, index: int) -> None:
    name = WorkerName(role, index)
    killed = kill(engine, role, index)
    wait_until(lambda: engine.worker_pid(name) != killed and engine._fleet.workers[name].channel is not None, "another")


def keep_away(engine: Engine, role: str, index: int) -> None:
    """Let a worker die twice; with `long_delays` nobody sees it again."""
    kill_and_await_replacement(engine, role, index)
    kill(engine, role, index)
    wait_until(lambda: "restart in" in engine.stats().status, "a worker that waits for its restart")


@pytest.fixture
def long_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SECOND_DELAY_S", "_LONGEST_DELAY_S", "_LONGEST_DELAY_AFTER_KILL_S"):
        monkeypatch.setattr(f"{RESTARTS}.{name}", 1000.0)


@pytest.mark.parametrize(("layout", "role"), [("2+2/m2", "attention"), ("2", "replica")])
def test_the_others_serve_while_one_is_away(
    layout: str, role: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, long_delays: None
) -> None:
    with running(config(tiny_model, layout)) as engine:
        keep_away(engine, role, 0)
        assert complete(engine, prompts) == reference
        stats = engine.stats()
        assert stats.healthy
        assert stats.missing == (f"{role}[0]",)
        words = rf"degraded: waiting for {role}\[0\] \(restart in [\d.]+ s, died 2 times: killed by SIGKILL \(.*\)\)"
        assert re.fullmatch(words, stats.status)


def test_without_an_expert_worker_requests_wait_and_a_drain_does_not(
    tiny_model: TinyModel, prompts: Prompts, long_delays: None
) -> None:
    with running(config(tiny_model, "1+2/m2")) as engine:
        keep_away(engine, "experts", 1)
        run = Run(engine, prompts[:4], GREEDY)
        wait_until(lambda: engine.stats().num_waiting == 4, "requests that wait")
        stats = engine.stats()
        assert (stats.healthy, stats.missing) == (False, ("experts[1]",))
        assert stats.status.startswith("waiting for experts[1] (restart in ")
        asyncio.run(asyncio.wait_for(engine.drain(1000.0), PATIENCE_S))
        assert [request.last.finish_reason for request in run.finish()] == ["abort"] * 4


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        ("1", "replica"),
        ("1+1/m2", "experts"),
        pytest.param("2+1/m2", "attention", marks=pytest.mark.slow),
    ],
)
def test_no_number_of_deaths_ends_serving(
    layout: str, role: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout)) as engine:
        for _ in range(7):
            kill_and_await_replacement(engine, role, 0)
        assert complete(engine, prompts[:4]) == reference[:4]
        assert engine.stats().num_worker_restarts == 7
        children = psutil.Process().children()
        assert not [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]


def test_a_worker_killed_while_it_first_loads_is_started_again(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch, real_start: None
) -> None:
    monkeypatch.setattr(f"{RESTARTS}._SECOND_DELAY_S", 0.1)
    killed: list[int] = []

    def kill_workers(parent: psutil.Process) -> None:
        while len(killed) < 3:
            for child in parent.children():
                if child.pid not in killed and "antiphon.serve.worker.process" in child.cmdline() and len(killed) < 3:
                    child.kill()
                    killed.append(child.pid)
            time.sleep(0.05)

    killer = threading.Thread(target=kill_workers, args=(psutil.Process(),))
    killer.start()
    with running(config(tiny_model, "1")) as engine:
        killer.join()
        assert engine.stats().num_worker_restarts == 3
        assert complete(engine, prompts[:4]) == reference[:4]


@pytest.fixture
def copied_model(tiny_model: TinyModel, tmp_path: Path) -> TinyModel:
    return TinyModel(Path(shutil.copytree(tiny_model.folder, tmp_path / "copy")), None)


def test_a_checkpoint_that_is_gone_ends_the_engine(copied_model: TinyModel, prompts: Prompts) -> None:
    with running(config(copied_model, "2+1/m2")) as engine:
        given_up = threading.Event()
        engine.call_when_given_up(given_up.set)
        (copied_model.folder / "model.safetensors").unlink()
        run = Run(engine, prompts[:8], GREEDY)
        kill(engine, "experts", 0)
        finished = run.finish()
        assert given_up.wait(PATIENCE_S)
        assert engine.fatal is not None
        assert engine.fatal.startswith("experts[0] died and cannot start again: ")
        assert "no .safetensors file" in engine.fatal
        assert engine.failure().exit_code == 1
        assert {request.error for request in finished} == {engine.fatal}
        assert not engine.stats().healthy
        with pytest.raises(UserError, match="the engine has stopped: experts"):
            Run(engine, prompts[:1], GREEDY)
        given_up.clear()
        engine.call_when_given_up(given_up.set)
        assert given_up.is_set(), "who asks later hears it too"


@pytest.mark.parametrize("what", ["weights", "norm_eps"])
def test_a_checkpoint_that_was_exchanged_ends_the_engine(copied_model: TinyModel, prompts: Prompts, what: str) -> None:
    """A worker that loaded it would compute parts of another model."""
    with running(config(copied_model, "2+1/m2")) as engine:
        file = copied_model.folder / ("model.safetensors" if what == "weights" else "config.json")
        file.rename(copied_model.folder / "before")
        if what == "weights":
            tensors = load_file(copied_model.folder / "before")
            save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file)
        else:
            keys = json.loads((copied_model.folder / "before").read_text())
            file.write_text(json.dumps(keys | {"rms_norm_eps": 1e-3}))
        run = Run(engine, prompts[:8], GREEDY)
        kill(engine, "experts", 0)
        run.finish()
        wait_until(lambda: engine.fatal is not None, "the end")
        assert engine.fatal is not None
        assert re.match(rf"experts\[0\] died and cannot start again: .* has other {what} than the server", engine.fatal)


def test_what_may_pass_is_tried_again(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(BROKEN_WHILE.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(config(tiny_model, "1")) as engine:
        flag.touch()
        kill(engine, "replica", 0)
        words = "died 3 times: exited with 1 (OSError: no space left on device)"
        wait_until(lambda: words in engine.stats().status, "deaths in the worker's own words")
        run = Run(engine, prompts[:4], GREEDY)
        flag.unlink()
        assert [request.token_ids for request in run.finish()] == reference[:4]


def test_a_system_that_starts_no_process_is_asked_again(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[WorkerName] = []

    def refuse(name: WorkerName) -> None:
        if len(refused) < 2:
            refused.append(name)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        launch(name)

    with running(config(tiny_model, "1+1/m2")) as engine:
        launch = engine.workforce._launch
        monkeypatch.setattr(engine.workforce, "_launch", refuse)
        run = Run(engine, prompts[:4], GREEDY)
        kill(engine, "experts", 0)
        assert [request.token_ids for request in run.finish()] == reference[:4]
        assert refused == [WorkerName("experts", 0)] * 2
        assert engine.stats().num_worker_restarts == 1


def test_a_bug_of_the_engine_ends_it_aloud(
    tiny_model: TinyModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_tick() -> None:
        raise KeyError("a bug")

    given_up = threading.Event()
    with running(config(tiny_model, "1")) as engine:
        engine.call_when_given_up(given_up.set)
        monkeypatch.setattr(engine.workforce, "on_tick", on_tick)
        assert given_up.wait(PATIENCE_S)
        assert engine.failure().exit_code == 1
        assert str(engine.failure()) == "a bug ended the engine (KeyError: 'a bug'); the log has its traceback"
        with pytest.raises(UserError, match="the engine has stopped: a bug"):
            Run(engine, prompts[:1], GREEDY)


def test_a_bug_in_a_scheduler_leaves_no_request_without_its_last_output(
    tiny_model: TinyModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    with running(config(tiny_model, "1")) as engine:
        (scheduler,) = engine.workforce.schedulers.values()
        monkeypatch.setattr(scheduler, "commit", fail)
        monkeypatch.setattr(scheduler, "end", fail)
        run = Run(engine, prompts[:2], GREEDY)
        outputs = list(run.sink.outputs(2))
        assert [output.finish_reason for output in outputs] == ["error"] * 2
        assert all("a bug ended the engine" in str(output.error) for output in outputs)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
def test_what_the_system_refuses_where_nothing_expects_it_costs_a_round(
    error: BaseException, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every third round, before and behind what the workers say."""
    num_rounds = 0

    def refuse_some(real: Callable[[], None]) -> Callable[[], None]:
        def called() -> None:
            nonlocal num_rounds
            num_rounds += 1
            if num_rounds % 3 == 0:
                raise error
            real()

        return called

    with running(config(tiny_model, "1+1/m2")) as engine:
        monkeypatch.setattr(engine.workforce, "on_tick", refuse_some(engine.workforce.on_tick))
        monkeypatch.setattr(engine._router, "add_to_workers", refuse_some(engine._router.add_to_workers))
        assert complete(engine, prompts[:8]) == reference[:8]
        kill(engine, "experts", 0)
        assert complete(engine, prompts[:8]) == reference[:8]
        assert engine.fatal is None


def test_an_engine_that_the_system_refuses_everything_gives_up(
    tiny_model: TinyModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_timeout_s: float) -> list[Event]:
        raise OSError(24, "Too many open files")

    given_up = threading.Event()
    with running(config(tiny_model, "1")) as engine:
        monkeypatch.setattr("antiphon.serve.engine._GIVE_UP_S", 1.0)
        engine.call_when_given_up(given_up.set)
        monkeypatch.setattr(engine._fleet, "poll", refuse)
        assert given_up.wait(PATIENCE_S)
        assert "the system has refused what the engine needs ([Errno 24] Too many open files)" in str(engine.failure())
        assert len([line for line in caplog.messages if "the round is lost" in line]) == 1, "not once a round"
        with pytest.raises(UserError, match="the engine has stopped: for 1 s the system has refused"):
            Run(engine, prompts[:1], GREEDY)


def test_a_worker_that_the_kernel_ends_for_want_of_memory_is_named_so(tiny_model: TinyModel) -> None:
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = parent / f"antiphon-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text("131072")
    except OSError as error:
        pytest.skip(f"no group of processes with a limit of memory can be made here: {error}")
    before = memory_kills()
    try:
        with running(config(tiny_model, "1")) as engine:
            (group / "cgroup.procs").write_text(str(engine.worker_pid(WorkerName("replica", 0))))
            prompts = random_prompts([150] * 8, seed=3)
            assert complete(engine, prompts) == tiny_model.greedy(prompts)
            if memory_kills() == before:
                pytest.skip("this kernel does not say which processes it ends")
            reasons = [event.text for event in engine.stats().events if event.kind == "lost"]
            assert any("killed by SIGKILL, probably because memory was short: see dmesg" in text for text in reasons)
    finally:
        group.rmdir()
