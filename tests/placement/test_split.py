"""The split of rows over copies: against a linear program, and the native form against the one in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.placement.place import place
from antiphon.placement.split import balancedness, split_loads, split_rows


def native_split(counts: np.ndarray, held: np.ndarray, speeds: np.ndarray | None, knee: int) -> np.ndarray:
    owners = [np.flatnonzero(workers).tolist() for workers in held]
    split = _m2n.ExpertSplit(held.shape[1], owners, [] if speeds is None else speeds.tolist(), knee)
    rows = np.zeros(held.shape, dtype=np.int64)
    rows[held] = split.split(counts.astype(np.uint32))
    return rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 30), st.sampled_from([1, 2, 16]), st.booleans())
def test_native_and_python_give_the_same_rows(
    seed: int, num_workers: int, num_experts: int, knee: int, equal: bool
) -> None:
    random = np.random.default_rng(seed)
    held = random.random((num_experts, num_workers)) < 0.4
    held[np.arange(num_experts), random.integers(0, num_workers, num_experts)] = True
    counts = random.integers(0, random.choice([3, 50, 2000]), num_experts)
    speeds = None if equal else random.uniform(0.3, 1.0, num_workers)
    rows = split_rows(counts, held, speeds, knee)
    assert (rows == native_split(counts, held, speeds, knee)).all()
    assert (rows.sum(axis=1) == counts).all()
    assert (rows[~held] == 0).all()
    assert ((rows == 0) | (rows >= knee) | (counts < knee)[:, None]).all(), "a part below the knee"
    whole = counts < 2 * knee
    assert ((rows[whole] > 0).sum(axis=1) <= 1).all(), "too few rows to be split"


@pytest.mark.parametrize(
    ("num_experts", "num_workers", "slots", "equal"), [(256, 32, 10, True), (64, 8, 10, False), (8, 4, 3, False)]
)
def test_within_two_percent_of_the_linear_program(num_experts: int, num_workers: int, slots: int, equal: bool) -> None:
    """Placed for other loads than those that come, so that the split has something to do."""
    optimum = pytest.importorskip("tests.placement.optimum")
    random = np.random.default_rng(num_experts)
    popular = random.permutation(np.arange(1, num_experts + 1) ** -0.5)
    speeds = None if equal else random.uniform(0.4, 1.0, num_workers)
    held = place(popular, num_workers, slots, speeds=speeds)
    counts = random.poisson(400 * num_experts * popular / popular.sum() * random.lognormal(0, 0.5, (2, num_experts)))
    ours = split_rows(counts, held, speeds)
    times = (ours.sum(axis=1) / (1 if speeds is None else speeds)).max(axis=1)
    for step, time in zip(counts, times, strict=True):
        assert time <= 1.02 * optimum.best_split(step.astype(float), held, speeds)


def test_by_hand() -> None:
    held = np.array([[1, 1], [1, 0], [0, 1]], dtype=bool)
    assert split_rows(np.array([10, 6, 2]), held).tolist() == [[3, 7], [6, 0], [0, 2]]
    assert split_rows(np.array([4, 20, 0]), held).tolist() == [[0, 4], [20, 0], [0, 0]], "nothing to the busy one"
    slow = split_rows(np.array([12, 0, 0]), held, np.array([2.0, 1.0]))
    assert slow[0].tolist() == [8, 4]
    assert split_rows(np.array([7, 0, 0]), held, knee=4).tolist()[0] == [7, 0], "7 rows are less than two knees"
    assert split_rows(np.array([8, 9, 0]), held, knee=4).tolist()[0] == [0, 8], (
        "its level is 0.5 and 8.5: below half a knee"
    )


def test_no_rows_and_one_row() -> None:
    held = np.ones((3, 4), dtype=bool)
    assert split_rows(np.zeros(3, dtype=np.int64), held).sum() == 0
    assert split_rows(np.array([0, 1, 0]), held).sum(axis=0).tolist() == [1, 0, 0, 0]
    assert split_loads(np.zeros((2, 3)), held).shape == (2, 3, 4)
    assert balancedness(np.zeros((3, 4))) == 1.0
    assert balancedness(np.array([[3, 1], [1, 1]])) == pytest.approx(0.75)
    assert balancedness(np.array([[2.0, 1.0]]), np.array([2.0, 1.0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, [[0], []]), "expert 1 is placed on no worker"),
        ((2, [[0], [2]]), "expert 1 is placed on worker 2 of 2"),
        ((2, [[0, 1]], [1.0]), "1 speeds for 2 workers"),
        ((2, [[0, 1]], [1.0, 0.0]), "a worker's speed is 0"),
        ((1, [[0]], [], 0), "a knee of 0 rows"),
    ],
)
def test_native_mistakes_are_named(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _m2n.ExpertSplit(*arguments)


def test_python_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="a knee of 0 rows"):
        split_rows(np.array([1]), np.ones((1, 2), dtype=bool), knee=0)


@pytest.mark.parametrize(
    ("counts", "held", "speeds", "message"),
    [
        ([-1, 2], [[1, 1], [0, 1]], None, "finite numbers of at least 0"),
        ([np.nan, 2], [[1, 1], [0, 1]], None, "whole numbers"),
        ([2.5, 2], [[1, 1], [0, 1]], None, "whole numbers"),
        ([1, 2, 3], [[1, 1], [0, 1]], None, r"loads \(3,\) and copies \(2, 2\)"),
        ([1, 2], [[1, 1], [0, 0]], None, "expert 1 is held by no worker"),
        ([1, 2], [[1, 1], [0, 1]], [0.0, 1.0], "finite number above 0"),
        ([1, 2], [[1, 1], [0, 1]], [1.0, 1.0, 1.0], "speeds .* of 2 workers"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(
    counts: list[float], held: list[list[int]], speeds: list[float] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        split_rows(np.array(counts), np.array(held, bool), None if speeds is None else np.array(speeds))


def test_no_steps_are_split_into_no_rows() -> None:
    assert split_rows(np.zeros((0, 2), int), np.ones((2, 3), bool)).shape == (0, 2, 3)


def test_experts_on_no_worker_are_refused() -> None:
    with pytest.raises(UserError, match="experts on 0 workers"):
        _m2n.ExpertSplit(0, [])
