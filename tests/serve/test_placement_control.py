"""The balancer plans from the rows of all attention workers together."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from antiphon.serve import placement_control
from antiphon.serve.placement_control import Balancer
from antiphon.specs.placement import ExpertPlacement, contiguous_placement

FIRST = contiguous_placement(4, 2, [3])


def planned(*counts_of_workers: list[int]) -> list[ExpertPlacement]:
    """What a `static` balancer aims at after steps in which each attention worker counted this."""
    aims: list[ExpertPlacement] = []
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=aims.append)
    made = Balancer("static", FIRST, num_micro_batches=1, load_rows=512)
    for step in range(placement_control.WINDOW_STEPS):
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


@pytest.mark.parametrize("rows", [16, 256, 4096])
def test_chance_moves_no_expert(rows: int) -> None:
    first = replace(contiguous_placement(16, 4, range(8)), knee=8)
    made = Balancer("window", first, num_micro_batches=2, load_rows=512)
    random = np.random.default_rng(rows)
    for _ in range(10):
        counts = random.multinomial(rows, np.full(16, 1 / 16), (placement_control.WINDOW_STEPS, 8)).astype(np.uint32)
        assert made._make_plan([[step.tobytes()] for step in counts], first, 5, (1.0,) * 4, 10_000) is None


def test_a_slow_worker_s_experts_move_once() -> None:
    now = replace(contiguous_placement(16, 4, range(8)), knee=8)
    made = Balancer("window", now, num_micro_batches=2, load_rows=512)
    random = np.random.default_rng(0)
    planned = []
    for _ in range(6):
        counts = random.multinomial(256, np.full(16, 1 / 16), (placement_control.WINDOW_STEPS, 8)).astype(np.uint32)
        planned.append(made._make_plan([[step.tobytes()] for step in counts], now, 5, (0.5, 1.0, 1.0, 1.0), 80))
        now = planned[-1] or now
    assert planned[0] is not None
    assert planned[1:] == [None] * 5


def test_a_move_must_pay_within_the_expected_life() -> None:
    now = replace(contiguous_placement(8, 4, [0]), knee=8)
    made = Balancer("window", now, num_micro_batches=1, load_rows=512)
    window = [[np.array([52, 48, 40, 40, 40, 40, 40, 40], dtype=np.uint32).tobytes()]] * placement_control.WINDOW_STEPS
    assert made._make_plan(window, now, 3, (1.0,) * 4, 80) is None, (
        "a load costs 6 rows a step, 10 are gained and 4 are not worth it"
    )
    assert made._make_plan(window, now, 3, (1.0,) * 4, 800) is not None


def test_a_placement_ages_until_experts_move() -> None:
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=None)
    made = Balancer("window", FIRST, num_micro_batches=1, load_rows=512)
    for step in range(30):
        made.count(step, np.ones(4, dtype=np.uint32).tobytes())
        made.count(step, np.ones(4, dtype=np.uint32).tobytes())
    assert made._age_steps == 30
    placing.current = replace(FIRST, version=1)
    made.advance(placing)
    assert made._age_steps == 30, "only the version is new"
    placing.current = replace(FIRST, version=2, owners={3: ((0, 1), (0,), (1,), (1,))})
    made.advance(placing)
    assert made._age_steps == 0


def test_threads_take_short_turns_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    usual = sys.getswitchinterval()
    monkeypatch.setattr(Balancer, "_make_plan", lambda *_: seen.append(sys.getswitchinterval()))
    planned([90, 5, 5, 0])
    assert seen == [pytest.approx(5e-4)]
    assert sys.getswitchinterval() == usual


def test_a_plan_that_took_long_is_not_made_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_control, "PERIOD_S", 0.0)
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=None)
    made = Balancer("window", FIRST, num_micro_batches=1, load_rows=512)
    rows = np.array([10, 10, 10, 10], dtype=np.uint32).tobytes()

    def plans(took_s: float) -> bool:
        """Whether the next plan is begun after 40 steps, if the last one took so long."""
        made._planning_s, made._planned_s, made._plan = took_s, time.monotonic() - 10.0, None
        for step in range(placement_control.WINDOW_STEPS):
            made.count(step, rows)
        made.advance(placing)
        if made._plan is not None:
            made._plan.result(60)
        return made._plan is not None

    assert plans(0.4)
    assert not plans(0.6)


def test_speeds_are_measured_anew_when_experts_moved() -> None:
    placing: Any = SimpleNamespace(moving=False, current=FIRST, slots=2, aim=None)
    made = Balancer("window", FIRST, num_micro_batches=1, load_rows=512)
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
