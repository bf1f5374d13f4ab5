"""The balancer plans from the rows of all attention workers together."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from antiphon.serve import balancer
from antiphon.serve.balancer import Balancer
from antiphon.specs.placement import ExpertPlacement, contiguous_placement

FIRST = contiguous_placement(4, 2, [3])


def planned(*counts_of_workers: list[int]) -> list[ExpertPlacement]:
    """What a `static` balancer aims at after steps in which each attention worker counted this."""
    aims: list[ExpertPlacement] = []
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=aims.append)
    made = Balancer("static", FIRST, num_micro_batches=1)
    for step in range(balancer.WINDOW_STEPS):
        made.advance(placing)
        assert made._plan is None, "too few steps"
        for counts in counts_of_workers:
            made.count(step, np.array(counts, dtype=np.uint32).tobytes())
    made.advance(placing)
    assert made._plan is not None
    made._plan.result(60)
    made.advance(placing)
    return aims


@pytest.mark.parametrize(
    "counts",
    [[[90, 0, 5, 5], [0, 90, 5, 5]], [[90, 90, 10, 10]]],
    ids=["two workers", "one worker"],
)
def test_two_hot_experts_are_parted(counts: list[list[int]]) -> None:
    (aim,) = planned(*counts)
    assert aim.owners[3][0] != aim.owners[3][1], "both were on worker 0"


def test_what_one_worker_counts_is_not_all() -> None:
    assert planned([90, 5, 5, 0], [0, 5, 5, 90]) == [], "together they are even"


def test_threads_take_short_turns_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    usual = sys.getswitchinterval()
    monkeypatch.setattr(Balancer, "_make_plan", lambda *_: seen.append(sys.getswitchinterval()))
    planned([90, 5, 5, 0])
    assert seen == [pytest.approx(5e-4)]
    assert sys.getswitchinterval() == usual


def test_a_plan_that_took_long_is_not_made_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancer, "PERIOD_S", 0.0)
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=None)
    made = Balancer("window", FIRST, num_micro_batches=1)
    rows = np.array([10, 10, 10, 10], dtype=np.uint32).tobytes()

    def plans(took_s: float) -> bool:
        """Whether the next plan is begun after 40 steps, if the last one took so long."""
        made._planning_s, made._planned_s, made._plan = took_s, time.monotonic() - 10.0, None
        for step in range(balancer.WINDOW_STEPS):
            made.count(step, rows)
        made.advance(placing)
        if made._plan is not None:
            made._plan.result(60)
        return made._plan is not None

    assert plans(0.4)
    assert not plans(0.6)


def test_speeds_are_measured_anew_when_experts_moved() -> None:
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=None)
    made = Balancer("window", FIRST, num_micro_batches=1)
    for worker, busy_s in enumerate((1.0, 2.0)):
        made._speeds.add(worker, num_batches=100, rows=[[10_000]], busy_s=busy_s)
    placing.current = replace(FIRST, version=1)
    made.advance(placing)
    assert made._speeds._busy_s == [1.0, 2.0], "only the version is new"
    placing.current = replace(FIRST, version=2, owners={3: ((0, 1), (0,), (1,), (1,))})
    made.advance(placing)
    assert made._speeds._busy_s == [0.0, 0.0]
    made._speeds.add(0, num_batches=100, rows=[[10_000]], busy_s=1.0)
    placing.current = replace(placing.current, version=3, speeds=(1.0, 0.5))
    made.advance(placing)
    assert made._speeds._busy_s == [0.0, 0.0], "rows are split anew"
