"""Balance of experts over workers: never worse than contiguous, greedy within its factor, slots kept."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.placement.place import (
    balance,
    busiest_share,
    contiguous,
    expert_costs,
    place,
    placement_of,
    worker_costs,
)

LOADS = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=7)


def best_by_brute_force(costs: np.ndarray, num_workers: int) -> float:
    """The least maximum over all ways of giving each expert to one worker."""
    best = float("inf")
    for owners in itertools.product(range(num_workers), repeat=costs.size):
        loads = np.bincount(owners, weights=costs, minlength=num_workers)
        best = min(best, float(loads.max()))
    return best


@settings(max_examples=50, deadline=None)
@given(LOADS, st.integers(1, 4), st.integers(0, 2), st.floats(0.0, 5.0))
def test_fractions_are_a_placement(loads: list[float], num_workers: int, extra: int, floor: float) -> None:
    slots = -(-len(loads) // num_workers) + extra
    fractions = balance(loads, num_workers, slots, floor=floor)
    assert fractions.shape == (len(loads), num_workers)
    assert np.allclose(fractions.sum(axis=1), 1.0)
    assert ((fractions > 0).sum(axis=0) <= slots).all()
    if num_workers <= len(loads):
        assert ((fractions > 0).sum(axis=0) >= 1).all(), "a worker without experts"


@settings(max_examples=50, deadline=None)
@given(LOADS, st.integers(1, 4), st.integers(0, 2), st.floats(0.0, 5.0))
def test_never_worse_than_contiguous_nor_better_than_possible(
    loads: list[float], num_workers: int, extra: int, floor: float
) -> None:
    num_workers = min(num_workers, len(loads))
    costs = expert_costs(loads, floor)
    worst = worker_costs(balance(loads, num_workers, -(-len(loads) // num_workers) + extra, floor=floor), costs).max()
    assert worst <= worker_costs(contiguous(len(loads), num_workers), costs).max() + 1e-9
    assert worst >= costs.sum() / num_workers - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7), st.integers(1, 3))
def test_greedy_keeps_its_factor(loads: list[float], num_workers: int) -> None:
    """With room for all experts on any worker: at most 4/3 - 1/(3 N) of the optimum without copies."""
    costs = expert_costs(loads)
    worst = worker_costs(balance(loads, num_workers, len(loads)), costs).max()
    assert worst <= (4 / 3 - 1 / (3 * num_workers)) * best_by_brute_force(costs, num_workers) + 1e-9


def test_by_hand_without_copies() -> None:
    fractions = balance([8.0, 7.0, 6.0, 5.0], 2, 2)
    assert sorted(worker_costs(fractions, np.array([8.0, 7.0, 6.0, 5.0]))) == [13.0, 13.0]


def test_a_hot_expert_gets_copies_where_there_are_slots() -> None:
    loads = np.array([9.0, 1.0, 1.0, 1.0])
    assert worker_costs(balance(loads, 2, 2), loads).max() == 10.0
    shared = balance(loads, 2, 3)
    assert shared[0].tolist() == [0.5, 0.5]
    assert worker_costs(shared, loads).max() == pytest.approx(6.0, abs=0.51)


def test_cold_experts_cost_the_floor() -> None:
    """K = 4: eight experts without rows weigh as much as one with four, so they do not all land on one worker."""
    fractions = balance([4.0] + [0.0] * 5, 3, 2, floor=4.0)
    assert worker_costs(fractions, expert_costs([4.0] + [0.0] * 5, 4.0)).tolist() == [8.0, 8.0, 8.0]


def test_odd_counts() -> None:
    assert contiguous(5, 3).sum(axis=0).tolist() == [2.0, 2.0, 1.0]
    assert placement_of(contiguous(5, 3)) == (((0, 1.0),), ((0, 1.0),), ((1, 1.0),), ((1, 1.0),), ((2, 1.0),))
    assert busiest_share(balance([1.0] * 5, 3), [1.0] * 5) == pytest.approx(0.4)
    assert busiest_share(contiguous(5, 3), [0.0] * 5) == pytest.approx(0.4)


def test_more_workers_than_experts_share_them() -> None:
    fractions = balance([3.0, 1.0], 4, 1)
    assert (fractions > 0).sum() == 4
    assert np.allclose(fractions.sum(axis=1), 1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: balance([1.0] * 5, 2, 2), "5 experts do not fit in 2 x 2 slots: give each worker at least 3"),
        (lambda: balance([1.0], 0), "0 workers"),
        (lambda: balance([1.0, -1.0], 1), "at least 0"),
        (lambda: balance([], 1), "one number per expert"),
        (lambda: contiguous(3, 4), "4 workers for 3 experts"),
        (lambda: balance([1.0] * 8, 10**9, 8), "room for 8,000,000,000 copies of 8 experts: give fewer, at most"),
        (lambda: place(np.ones(8), 10**9, 8), "room for 8,000,000,000 copies of 8 experts: give fewer, at most"),
        (lambda: balance([1.0, 2.0], 1.5, 2), "1.5 workers: give a whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: balance([1.0, 2.0], 2, math.nan), "nan slots of a worker: give a whole number"),  # type: ignore[arg-type]
        (lambda: balance([1.0, 2.0], 2, 2, floor=math.inf), "loads and their floor must be numbers of at least 0"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()  # type: ignore[operator]


def test_equal_experts_that_do_not_divide_are_cut_evenly_where_slots_allow() -> None:
    """8 equal experts on 5 workers: with three slots each exactly a fifth, with two at best a quarter."""
    even, coarse = (worker_costs(balance([1.0] * 8, 5, slots), np.ones(8)) for slots in (3, 2))
    np.testing.assert_allclose(even, 8 / 5)
    assert coarse.max() == pytest.approx(2.0)
