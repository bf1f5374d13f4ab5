"""Workers die at bad moments. Every stream ends with exactly the reference tokens: none missing, none twice."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import build_engine, start_engine
from antiphon.serve.prepare import prepare
from antiphon.serve.worker_handle import WorkerName
from tests.serve.engine_harness import (
    GREEDY,
    NUM_TOKENS,
    PATIENCE_S,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    config,
    is_alive,
    kill,
    running,
    wait_until_idle,
)
from tests.waiting import wait_until

TOTAL = 32 * NUM_TOKENS


def at(marks: dict[float, Callable[[], object]]) -> Callable[[int], None]:
    """Call each function once the given share of all tokens is out."""
    left = sorted(marks.items())

    def on_output(num_tokens: int) -> None:
        while left and num_tokens >= left[0][0] * TOTAL:
            left.pop(0)[1]()

    return on_output


def run_with_deaths(
    engine: Engine, prompts: Prompts, reference: Tokens, marks: dict[float, Callable[[], object]]
) -> None:
    finished = Run(engine, prompts, GREEDY).finish(at(marks))
    assert [request.error for request in finished] == [None] * len(prompts)
    assert [request.token_ids for request in finished] == reference
    assert all(request.last.finish_reason == "length" for request in finished)
    wait_until_idle(engine)


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        ("1", ["replica[0]", "replica[0]"]),
        pytest.param("2", ["replica[0]", "replica[1]"], marks=pytest.mark.slow),
        pytest.param("1+1/m2", ["experts[0]", "attention[0]"], marks=pytest.mark.slow),
        ("2+2/m2", ["attention[0]", "experts[1]", "attention[1]"]),
        ("3+2/m2 free", ["attention[0]", "experts[1]"]),
    ],
)
def test_killed_workers_cost_no_token(
    layout: str, victims: list[str], tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout)) as engine:
        killed: list[int] = []

        def killer(victim: str) -> Callable[[], object]:
            role, index = victim.rstrip("]").split("[")
            return lambda: killed.append(kill(engine, role, int(index)))

        marks = {0.02 + 0.3 * turn: killer(victim) for turn, victim in enumerate(victims)}
        run_with_deaths(engine, prompts, reference, marks)
        assert len(killed) == len(victims)
        assert engine.stats().num_worker_restarts == len(victims)
        assert not any(is_alive(pid) for pid in killed)
        wait_until(lambda: engine.complete, "all workers are back")
        run_with_deaths(engine, prompts, reference, {})


def test_all_workers_killed_at_once(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, "1+1/m2")) as engine:

        def massacre() -> None:
            kill(engine, "attention", 0)
            kill(engine, "experts", 0)

        run_with_deaths(engine, prompts, reference, {0.3: massacre})
        assert engine.stats().num_worker_restarts == 2


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        ("1", "replica"),
        ("1+2/m2", "experts"),
        pytest.param("2+1/m2", "attention", marks=pytest.mark.slow),
    ],
)
def test_a_replacement_killed_while_it_loads(
    layout: str, role: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout)) as engine:
        first = engine.worker_pid(WorkerName(role, 0))

        def kill_twice() -> None:
            kill(engine, role, 0)
            wait_until(lambda: engine.worker_pid(WorkerName(role, 0)) != first, "a replacement")
            kill(engine, role, 0)

        run_with_deaths(engine, prompts, reference, {0.2: kill_twice})
        wait_until(lambda: engine.complete, "all workers are back")  # the second one waited before it was started
        assert engine.stats().num_worker_restarts == 2


@pytest.fixture
def no_look_at_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped processes hang like any other: nobody sees that they are stopped."""
    monkeypatch.setattr("antiphon.serve.workforce._STOPPED_S", float("inf"))


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        ("1", "replica"),
        pytest.param("1+1/m2", "experts", marks=pytest.mark.slow),
        ("2+2/m2", "attention"),
        pytest.param("2+2/m2", "experts", marks=pytest.mark.slow),
        pytest.param("2+2/m2 free", "attention", marks=pytest.mark.slow),
        pytest.param("2+2/m2 free", "experts", marks=pytest.mark.slow),
    ],
)
def test_a_hanging_worker_is_replaced(
    layout: str, role: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens, no_look_at_processes: None
) -> None:
    """The process lives and says nothing. Only the workers' timeout can tell."""
    with running(config(tiny_model, layout, timeout_s=1.5)) as engine:
        first = engine.worker_pid(WorkerName(role, 0))
        run_with_deaths(engine, prompts, reference, {0.2: lambda: kill(engine, role, 0, signal.SIGSTOP)})
        assert engine.worker_pid(WorkerName(role, 0)) != first
        assert engine.stats().num_worker_restarts >= 1


SLOW_TO_JOIN = """
import time
from antiphon.serve.worker.endpoints import PeerLinks
reset = PeerLinks.reset
PeerLinks.reset = lambda *arguments: (time.sleep(0.8), reset(*arguments))
"""


def test_a_replacement_is_not_blamed_for_the_dead(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expert worker says whom it has lost. The next process of that name may take its time to join."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_JOIN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("antiphon.serve.recovery._UNRESPONSIVE_S", 0.2)
    with running(config(tiny_model, "1+1/m2")) as engine:
        run_with_deaths(engine, prompts, reference, {0.2: lambda: kill(engine, "attention", 0)})
        assert engine.stats().num_worker_restarts == 1


def test_a_worker_that_cannot_start_is_one_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The header of the checkpoint is sound, so only the worker that reads the expert finds it missing."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in tiny_model.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"moe_intermediate_size": 25}))
    broken = TinyModel(folder, None)
    for layout in ("1", "1+1/m2"):
        with pytest.raises(UserError, match=r"experts") as caught:
            start_engine(config(broken, layout))
        assert "\n" not in str(caught.value)
        assert "Traceback" not in str(caught.value)


@contextmanager
def loading(settings: ServeConfig, load_timeout_s: float) -> Iterator[Engine]:
    """An engine whose workers have just been started and have `load_timeout_s` to show that they load."""
    engine = build_engine(prepare(settings))
    engine.workforce.load_timeout_s = load_timeout_s
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


def test_a_worker_that_hangs_while_it_loads_is_replaced(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, no_look_at_processes: None, real_start: None
) -> None:
    with loading(config(tiny_model, "1+1/m2"), PATIENCE_S) as engine:
        first = kill(engine, "experts", 0, signal.SIGSTOP)
        wait_until(lambda: engine.workforce.loading_progress()[0] > 0, "the other worker loads")
        engine.workforce.load_timeout_s = 0.1
        wait_until(lambda: engine.worker_pid(WorkerName("experts", 0)) != first, "a replacement")
        engine.workforce.load_timeout_s = PATIENCE_S
        assert not engine.stats().healthy
        died = "experts[0] (loading, died once: killed by SIGKILL (it has not said for 0.1 s how far it has loaded))"
        assert died in engine.stats().status
        finished = Run(engine, prompts[:4], GREEDY).finish()
        assert [request.token_ids for request in finished] == reference[:4]
        assert not is_alive(first)


@pytest.mark.slow
def test_workers_that_never_load_are_one_line(tiny_model: TinyModel, real_start: None) -> None:
    with loading(config(tiny_model, "1"), 0.01) as engine:
        wait_until(lambda: engine.fatal is not None, "the end")
        assert engine.fatal == (
            "replica[0] died 6 times in a row, the last time killed by SIGKILL "
            "(it has not said for 0.0 s how far it has loaded)"
        )
