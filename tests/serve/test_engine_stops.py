"""Worker processes that somebody stops (SIGSTOP): for good, for a moment, or together with the engine."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.engine_harness import (
    GREEDY,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    config,
    kill,
    running,
)
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # of workers that wait for others: far from anything that a test may take


@pytest.mark.parametrize(
    ("layout", "role"), [("1", "replica"), ("2", "replica"), ("2+2/m2", "attention"), ("2+2/m2", "experts")]
)
def test_a_stopped_worker_is_replaced_long_before_the_timeout(
    layout: str, role: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    with running(config(tiny_model, layout, timeout_s=TIMEOUT_S)) as engine:
        times_s: list[float] = []
        stopped: list[tuple[int, float]] = []

        def on_output(num_tokens: int) -> None:
            times_s.append(time.monotonic())
            if num_tokens >= 500 and not stopped:
                stopped.append((kill(engine, role, 0, signal.SIGSTOP), time.monotonic()))

        finished = Run(engine, prompts, GREEDY).finish(on_output)
        assert [request.token_ids for request in finished] == reference
        pid, stop_s = stopped[0]
        pause_s = max(later - earlier for earlier, later in itertools.pairwise(times_s))
        print(f"\n{layout} {role}: streams stood still for {pause_s:.2f} s after SIGSTOP")
        wait_until(lambda: engine.complete and engine.worker_pids().count(pid) == 0, "a replacement")
        assert time.monotonic() - stop_s < TIMEOUT_S / 2
        assert engine.stats().num_worker_restarts == 1


def test_a_short_stop_costs_no_worker(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.serve.workforce._STOPPED_S", 10.0)  # on a busy machine a second takes many
    with running(config(tiny_model, "2+2/m2", timeout_s=TIMEOUT_S)) as engine:
        pids = engine.worker_pids()
        for role in ("attention", "experts"):
            run = Run(engine, prompts[:8], GREEDY)
            kill(engine, role, 1, signal.SIGSTOP)
            time.sleep(1.0)
            kill(engine, role, 1, signal.SIGCONT)
            assert [request.token_ids for request in run.finish()] == reference[:8]
        assert engine.worker_pids() == pids


def test_workers_may_be_paused(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the benchmark does while others run, and longer than a worker may be stopped otherwise."""
    monkeypatch.setattr("antiphon.serve.workforce._STOPPED_S", 0.3)
    with running(config(tiny_model, "1+1/m2", timeout_s=TIMEOUT_S)) as engine:
        pids = engine.worker_pids()
        run = Run(engine, prompts[:8], GREEDY)
        engine.pause_workers()
        time.sleep(2.0)
        assert all(worker.is_stopped for worker in engine._fleet.workers.values())
        engine.resume_workers()
        assert [request.token_ids for request in run.finish()] == reference[:8]
        assert engine.worker_pids() == pids


ENGINE = """
import sys
from pathlib import Path
from tests.serve.engine_harness import GREEDY, Run, TinyModel, config, random_prompts, running
from tests.serve.fork_server import fork_workers

fork_workers()
settings = config(TinyModel(Path(sys.argv[1]), None), sys.argv[2], timeout_s=float(sys.argv[3]))
with running(settings) as engine:
    run = Run(engine, random_prompts([1, 9, 33, 90] * 8), GREEDY)
    finished = run.finish(lambda num_tokens: num_tokens == 100 and print("serving", flush=True))
    print(sum(len(request.token_ids) for request in finished), engine.stats().num_worker_restarts, flush=True)
"""


@pytest.mark.parametrize(("layout", "timeout_s"), [("1", 1.5), ("1+1/m2", 30.0)])
def test_an_engine_that_is_stopped_with_its_workers_goes_on_with_them(
    layout: str, timeout_s: float, tiny_model: TinyModel
) -> None:
    """Longer than a worker may be stopped, and, with the short timeout, longer than one may owe a step."""
    command = [sys.executable, "-c", ENGINE, str(tiny_model.folder), layout, str(timeout_s)]
    with PROGRAMS.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(4.0)
            os.killpg(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == f"{32 * 64} 0\n"
            assert process.wait(60.0) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
