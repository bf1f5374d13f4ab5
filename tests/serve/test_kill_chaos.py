"""Somebody kills live and loading workers for a while, one after another. Every stream ends with the right text, the
server goes on, and nothing is left behind.

`ANTIPHON_CHAOS_S` sets for how long (12 s; `-k long` runs a minute), `ANTIPHON_CHAOS_SEED` which workers and when.
"""

import itertools
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from antiphon.serve.engine import Engine
from antiphon.serve.outputs import ThreadSink
from tests.serve.engine_harness import GREEDY, Prompts, TinyModel, Tokens, complete, config, running
from tests.waiting import wait_until

CHAOS_S = float(os.environ.get("ANTIPHON_CHAOS_S", "12"))
SEED = int(os.environ.get("ANTIPHON_CHAOS_SEED", "1"))
NUM_STREAMS = 48
PATIENCE_S = 60.0  # more than any pause on a machine that is busy with other things


class Killer(threading.Thread):
    """Kills a random worker every 0.2 to 5 s, until `duration_s` has passed."""

    def __init__(self, engine: Engine, duration_s: float) -> None:
        super().__init__()
        self.killed: list[int] = []
        self.last_s = 0.0
        self._engine = engine
        self._random = random.Random(SEED)
        self._end_s = time.monotonic() + duration_s

    def run(self) -> None:
        while True:
            time.sleep(math.exp(self._random.uniform(math.log(0.2), math.log(5.0))))
            if time.monotonic() > self._end_s:
                return
            # One that waits for its restart has no process: its number may be somebody else's.
            workers = [worker for worker in list(self._engine._fleet.workers.values()) if worker.channel is not None]
            if workers:
                worker = self._random.choice(workers)
                os.kill(worker.pid, signal.SIGKILL)
                self.last_s = time.monotonic()
                self.killed.append(worker.pid)


class Load:
    """`NUM_STREAMS` streams at any time, read in this thread; `times_s` are those of their outputs."""

    def __init__(self, engine: Engine, prompts: Prompts, reference: Tokens) -> None:
        self.num_finished = 0
        self.times_s: list[float] = []
        self._engine = engine
        self._prompts = prompts
        self._reference = reference
        self._sink = ThreadSink()
        self._tokens: dict[str, list[int]] = {}

    def run(self, goes_on: Callable[[], bool]) -> None:
        """New streams take the place of those that end, while `goes_on`; returns when all have ended."""
        for _ in range(NUM_STREAMS):
            self._submit()
        for output in self._sink.outputs(1 << 62):
            self.times_s.append(time.monotonic())
            self._tokens[output.request_id] += output.token_ids
            if output.finish_reason is None:
                continue
            number = int(output.request_id) % len(self._prompts)
            assert (output.finish_reason, output.error) == ("length", None)
            assert self._tokens.pop(output.request_id) == self._reference[number]
            self.num_finished += 1
            if goes_on():
                self._submit()
            elif not self._tokens:
                return

    def _submit(self) -> None:
        number = self.num_finished + len(self._tokens)
        self._tokens[str(number)] = []
        self._engine.submit_to(self._sink, str(number), self._prompts[number % len(self._prompts)], GREEDY)

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time without any output from `since_s` on."""
        times_s = [since_s, *(each for each in self.times_s if each > since_s)]
        return max((later - earlier for earlier, later in itertools.pairwise(times_s)), default=0.0)


@pytest.mark.parametrize(
    ("layout", "duration_s"),
    [
        pytest.param("2+2/m2", CHAOS_S, id="disaggregated"),
        pytest.param("2", CHAOS_S / 2, id="colocated", marks=pytest.mark.slow),
        pytest.param("2>1+1/m2", CHAOS_S, id="pools", marks=pytest.mark.slow),
        pytest.param("2+2/m2", 60.0, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_kill_chaos(layout: str, duration_s: float, tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    begin_s = time.monotonic()
    with running(config(tiny_model, layout)) as engine:
        startup_s = time.monotonic() - begin_s
        pids = set(engine.worker_pids())
        load, killer = Load(engine, prompts, reference), Killer(engine, duration_s)
        killer.start()
        load.run(killer.is_alive)
        killer.join()
        assert killer.killed
        pause_s = load.longest_pause_s(killer.last_s)
        wait_until(lambda: engine.complete, "all workers are back")
        assert complete(engine, prompts) == reference
        assert engine.stats().status == "ok"
        pids.update(killer.killed, engine.worker_pids())
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "a process, or a zombie, is left"
    print(
        f"\n{layout}: {len(killer.killed)} kills in {duration_s:.0f} s, {load.num_finished} streams; start-up "
        f"{startup_s:.2f} s, longest pause after the last kill {pause_s:.2f} s"
    )
    assert pause_s < startup_s + PATIENCE_S
