"""Speeds of expert workers from what they did: a slow one is found and stays found, load and chance make none slow."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from antiphon.serve.placement_control import WorkerSpeeds

Cost = Callable[[float], float]  # seconds of a batch, from its rows


def add_even(speeds: WorkerSpeeds, worker: int, num_rows: int, busy_s: float, *, num_batches: int = 100) -> None:
    """Four experts of one layer, with the same rows."""
    speeds.add(worker, num_batches, [[num_rows // 4] * 4], busy_s)


def test_without_reports_all_are_equal() -> None:
    assert WorkerSpeeds(3, 8).shares() == (1.0, 1.0, 1.0)


def test_a_worker_at_half_speed_is_found_and_small_differences_are_not() -> None:
    speeds = WorkerSpeeds(3, 8)
    for worker, busy_s in enumerate((1.0, 2.0, 1.1)):
        add_even(speeds, worker, 100_000, busy_s)
    assert speeds.shares() == (1.0, 0.5, 1.0)


def test_few_rows_take_the_time_of_reading_weights() -> None:
    """Below the knee the time does not depend on the rows, so the speeds must not either."""
    speeds = WorkerSpeeds(2, 64)
    add_even(speeds, 0, 4000, 1.0)
    add_even(speeds, 1, 2000, 1.0)
    assert speeds.shares() == (1.0, 1.0)


def test_half_the_experts_below_the_knee_are_half_the_work() -> None:
    speeds = WorkerSpeeds(2, 64)
    speeds.add(0, 100, [[1000] * 4], 2.0)
    speeds.add(1, 100, [[1000] * 2], 2.6)
    assert speeds.shares() == (1.0, pytest.approx(0.5 * 2.0 / 2.6))


def test_old_reports_fade() -> None:
    speeds = WorkerSpeeds(2, 1)
    for slow_s in (2.0, 1.0):
        for _ in range(50):
            add_even(speeds, 0, 10_000, 1.0)
            add_even(speeds, 1, 10_000, slow_s)
    assert speeds.shares() == (1.0, 1.0)


def test_more_work_explains_a_longer_batch() -> None:
    """The first worker has the hot expert: twice the rows take four times as long. Its own speed may be that of all."""
    speeds = WorkerSpeeds(3, 1)
    for worker, (num_rows, busy_s) in enumerate(((100_000, 8.0), (50_000, 2.0), (50_000, 2.0))):
        add_even(speeds, worker, num_rows, busy_s)
    assert speeds.shares() == (1.0, 1.0, 1.0)


def test_less_work_that_takes_as_long_is_what_a_batch_costs_anyway() -> None:
    speeds = WorkerSpeeds(3, 1)
    for worker, (num_rows, busy_s) in enumerate(((50_000, 2.0), (100_000, 2.0), (100_000, 2.1))):
        add_even(speeds, worker, num_rows, busy_s)
    assert speeds.shares() == (1.0, 1.0, 1.0)


def test_a_slow_worker_stays_slow_when_loads_change_and_is_measured_anew() -> None:
    speeds = WorkerSpeeds(3, 1)
    for worker, busy_s in enumerate((1.0, 2.0, 1.0)):
        add_even(speeds, worker, 100_000, busy_s)
    assert speeds.shares() == (1.0, 0.5, 1.0)
    speeds.forget()
    assert speeds.shares() == (1.0, 0.5, 1.0), "nothing is known of the new loads"
    for worker, busy_s in enumerate((2.4, 4.8, 2.4)):
        add_even(speeds, worker, 60_000 if worker == 1 else 120_000, busy_s)
    assert speeds.shares() == (1.0, 0.25, 1.0), "it has become slower"


def test_a_slow_worker_that_looks_fast_makes_no_other_slow() -> None:
    speeds = WorkerSpeeds(3, 1)
    for worker, busy_s in enumerate((2.0, 1.0, 1.0)):
        add_even(speeds, worker, 100_000, busy_s)
    assert speeds.shares() == (0.5, 1.0, 1.0)
    speeds.forget()
    for worker, busy_s in enumerate((1.0, 2.0, 2.1)):
        add_even(speeds, worker, 100_000, busy_s)
    assert speeds.shares() == (0.5, 1.0, 1.0)


def test_a_moment_says_nothing() -> None:
    speeds = WorkerSpeeds(2, 1)
    add_even(speeds, 0, 10_000, 0.1)
    add_even(speeds, 1, 10_000, 0.9)
    assert speeds.shares() == (1.0, 1.0)


def test_a_slow_worker_is_found_while_the_others_wait_for_it() -> None:
    speeds = WorkerSpeeds(3, 8)
    for worker, busy_s in enumerate((4.0, 0.4, 0.4)):
        add_even(speeds, worker, 4_000, busy_s)
    assert speeds.shares() == (0.1, 1.0, 1.0)


# --- round after round: what is told changes the loads, and the loads change what is measured -------------------------

NUM_ROWS = 128.0  # of a batch, all workers
COSTS: dict[str, Cost] = {
    "proportional": lambda rows: 1e-4 * rows,
    "fixed costs": lambda rows: 1e-3 + 1e-4 * rows,
    "halts": lambda rows: 1e-4 * rows * (rows / 32) ** 0.7,  # a part of a core: more work is halted more often
}


def batches(shares: Sequence[float], slowness: Sequence[float], cost: Cost) -> tuple[list[float], list[float]]:
    """Rows and seconds of a batch, by worker."""
    rows = [NUM_ROWS * share / sum(shares) for share in shares]
    return rows, [factor * cost(count) for factor, count in zip(slowness, rows, strict=True)]


def rounds(
    speeds: WorkerSpeeds, slowness: Sequence[float], cost: Cost, num_rounds: int, *, noise: float = 0.03, seed: int = 0
) -> list[tuple[float, ...]]:
    """Shares after each plan: rows follow the shares, and of each 5 s the slowest worker computes half of the time.
    Every report of half a second is off by chance."""
    chance = random.Random(seed)
    found = [speeds.shares()]
    for _ in range(num_rounds):
        rows, batch_s = batches(found[-1], slowness, cost)
        num_batches = round(0.25 / max(batch_s))
        for _ in range(10):
            for worker, time_s in enumerate(batch_s):
                factor = max(0.1, chance.gauss(1.0, noise * 10**0.5))
                add_even(
                    speeds,
                    worker,
                    round(rows[worker] * num_batches),
                    num_batches * time_s * factor,
                    num_batches=num_batches,
                )
        found.append(speeds.shares())
        if found[-1] != found[-2]:
            speeds.forget()
    return found


def num_changes(found: list[tuple[float, ...]]) -> int:
    return sum(before != after for before, after in pairwise(found))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", COSTS)
def test_a_slow_worker_is_told_once_or_twice_and_then_left_alone(kind: str, seed: int) -> None:
    slowness = (2.0, 1.0, 1.0, 1.0)
    found = rounds(WorkerSpeeds(4, 1), slowness, COSTS[kind], 8, seed=seed)
    assert 1 <= num_changes(found) <= 2
    assert found[-1] == found[2], "settled after two plans"
    assert found[-1][1:] == (1.0, 1.0, 1.0)
    assert 0.3 < found[-1][0] < 0.6
    _, batch_s = batches(found[-1], slowness, COSTS[kind])
    assert batch_s[0] < 1.25 * batch_s[1], "nobody waits for it"


@pytest.mark.parametrize("kind", COSTS)
def test_a_wrong_rise_is_taken_back_and_comes_ever_more_rarely(kind: str) -> None:
    found = rounds(WorkerSpeeds(4, 1), (2.0, 1.0, 1.0, 1.0), COSTS[kind], 400)
    rises = [number for number, (before, after) in enumerate(pairwise(found)) if after[0] > before[0]]
    assert len(rises) <= 6
    assert sum(each[0] > 0.7 for each in found) <= 20, "of 400 rounds"


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_chance_makes_no_worker_slow(kind: str, noise: float) -> None:
    for seed in range(5):
        assert num_changes(rounds(WorkerSpeeds(4, 1), (1.0,) * 4, COSTS[kind], 20, noise=noise, seed=seed)) == 0


@pytest.mark.parametrize("kind", COSTS)
def test_a_slow_worker_that_becomes_fast_again_is_found(kind: str) -> None:
    speeds = WorkerSpeeds(4, 1)
    assert rounds(speeds, (2.0, 1.0, 1.0, 1.0), COSTS[kind], 4)[-1][0] < 0.7
    found = rounds(speeds, (1.0, 1.0, 1.0, 1.0), COSTS[kind], 40)
    assert found[-1] == (1.0, 1.0, 1.0, 1.0)
    assert num_changes(found) <= 2
