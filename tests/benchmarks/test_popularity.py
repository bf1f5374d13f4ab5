"""Lina's estimate of popularity: the paper's equation by hand, paths, packing, and when phase two is needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.placement.split import most_popular, needs_phase_two
from benchmarks.popularity import PathProfile, devices_of_experts, pack_first_fit


def follow(num_rows: int, num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """Top-1 ids [L, T, 1] of rows that choose the sum of their last two choices, modulo E."""
    random = np.random.default_rng(seed)
    ids = [random.integers(0, num_experts, num_rows), random.integers(0, num_experts, num_rows)]
    for layer in range(2, num_layers):
        ids.append((ids[layer - 1] + ids[layer - 2]) % num_experts)
    return np.stack(ids)[..., None]


def test_equation_1_by_hand() -> None:
    paths = [[0.5, 0.25, 0.25, 0.0]] * 3 + [[0.0, 0.5, 0.0, 0.5]]
    assert devices_of_experts(paths, 16).tolist() == [6.0, 5.0, 3.0, 2.0]


def test_longer_paths_know_more() -> None:
    """The choice follows from two layers: paths of length 2 know it, those of length 1 nothing."""
    profile, rows = follow(4000, 5, 8), follow(500, 5, 8, seed=1)
    actual = np.bincount(rows[4, :, 0], minlength=8) / 500
    known = PathProfile(profile, 8, 2).popularity(rows[:4, :, 0], 4)
    np.testing.assert_allclose(known, actual)
    guessed = PathProfile(profile, 8, 1).probabilities(rows[:4, :, 0], 4)
    assert (guessed > 0).sum(axis=1).tolist() == [1] * 500
    assert guessed.max() < 0.2


def test_only_the_top_k_of_a_path_count() -> None:
    ids = np.zeros((2, 10, 2), dtype=np.int64)
    ids[1] = [[0, 1]] * 6 + [[1, 2]] * 3 + [[3, 2]]
    probabilities = PathProfile(ids, 4, 1).probabilities(np.zeros((1, 1), dtype=np.int64), 1)
    np.testing.assert_allclose(probabilities, [[6 / 20, 9 / 20, 0.0, 0.0]])


def test_a_path_that_was_never_seen_counts_as_a_shorter_one() -> None:
    ids = np.array([[0, 1, 1], [0, 0, 1], [2, 2, 3]])[..., None]
    profile = PathProfile(ids, 4, 2)
    assert profile.probabilities(np.array([[3], [1]]), 2).argmax() == 3, "as the path of layer 1 alone"
    assert profile.probabilities(np.array([[3], [3]]), 2).argmax() == 2, "as the mean of all rows"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 2))
def test_packing_gives_every_expert_a_place(seed: int, num_devices: int, extra: int) -> None:
    random = np.random.default_rng(seed)
    num_experts = int(random.integers(1, 17))
    most = -(-num_experts // num_devices) + extra
    shares = random.pareto(1.0, num_experts) * (random.random(num_experts) < 0.7)
    devices = num_devices * shares / max(shares.sum(), 1e-9)
    held = pack_first_fit(devices, num_devices, most)
    assert held.any(axis=1).all()
    assert (held.sum(axis=0) <= most).all()


def test_packing_by_hand() -> None:
    """2.3 devices are two whole ones and a part; the parts of 0.7, 0.6, 0.4, 0.3 fill two more."""
    held = pack_first_fit(np.array([2.3, 0.7, 0.6, 0.4, 0.0]), 5, 3)
    assert [np.flatnonzero(row).tolist() for row in held] == [[0, 1, 2], [2], [3], [3], [4]]


def test_phase_two_is_for_other_experts_not_for_another_order() -> None:
    actual = np.array([5, 9, 1, 0])
    assert most_popular(actual, 2) == [1, 0]
    assert not needs_phase_two(np.array([0.6, 0.4, 0.0, 0.0]), actual, 1)
    assert needs_phase_two(np.array([0.6, 0.0, 0.4, 0.0]), actual, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PathProfile(np.zeros((2, 3, 1), dtype=np.int64), 4, 0), "a sample path of 0 layers"),
        (lambda: PathProfile(np.zeros((2, 0, 1), dtype=np.int64), 4, 1), "no rows to profile"),
        (lambda: pack_first_fit(np.ones(5), 2, 2), "5 experts do not fit on 2 devices of 2: give each at least 3"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()  # type: ignore[operator]
