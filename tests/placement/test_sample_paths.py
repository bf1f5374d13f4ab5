"""Lina's estimate of popularity: the paper's equation by hand, paths, packing, and when phase two is needed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.placement.sample_paths import (
    PathProfile,
    devices_of_experts,
    estimate_score,
    pack_first_fit,
    read_path_profile,
)
from antiphon.placement.split import most_popular, needs_phase_two


def follow(num_rows: int, num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """Top-1 ids [L, T, 1] of rows that choose the sum of their last two choices, modulo E."""
    random = np.random.default_rng(seed)
    ids = [random.integers(0, num_experts, num_rows), random.integers(0, num_experts, num_rows)]
    for layer in range(2, num_layers):
        ids.append((ids[layer - 1] + ids[layer - 2]) % num_experts)
    return np.stack(ids)[..., None]


def test_equation_1_by_hand() -> None:
    experts, shares = [[0, 1, 2]] * 3 + [[1, 3, 0]], [[0.5, 0.25, 0.25]] * 3 + [[0.5, 0.5, 0.0]]
    assert devices_of_experts(np.array(experts), np.array(shares), 4, 16).tolist() == [6.0, 5.0, 3.0, 2.0]


def test_longer_paths_know_more() -> None:
    """The choice follows from two layers: paths of length 2 know it, those of length 1 nothing."""
    profile, rows = follow(4000, 5, 8), follow(500, 5, 8, seed=1)
    actual = np.bincount(rows[4, :, 0], minlength=8) / 500
    known = PathProfile.of_rows(profile, 8, 2).popularity(rows[:4, :, 0], 4)
    np.testing.assert_allclose(known, actual)
    _, guessed = PathProfile.of_rows(profile, 8, 1).expected(rows[:4, :, 0], 4)
    assert guessed.shape == (500, 1)
    assert guessed.max() < 0.2


def test_only_the_top_k_of_a_path_count() -> None:
    ids = np.zeros((2, 10, 2), dtype=np.int64)
    ids[1] = [[0, 1]] * 6 + [[1, 2]] * 3 + [[3, 2]]
    experts, shares = PathProfile.of_rows(ids, 4, 1).expected(np.zeros((1, 1), dtype=np.int64), 1)
    assert experts.tolist() == [[1, 0]]
    np.testing.assert_allclose(shares, [[9 / 20, 6 / 20]])


def test_a_path_that_was_never_seen_counts_as_a_shorter_one() -> None:
    ids = np.array([[0, 1, 1], [0, 0, 1], [2, 2, 3]])[..., None]
    profile = PathProfile.of_rows(ids, 4, 2)
    assert profile.expected(np.array([[3], [1]]), 2)[0] == 3, "as the path of layer 1 alone"
    assert profile.expected(np.array([[3], [3]]), 2)[0] == 2, "as the mean of all rows"


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
        (lambda: PathProfile.of_rows(np.zeros((2, 3, 1), dtype=np.int64), 4, 0), "a sample path of 0 layers"),
        (lambda: PathProfile.of_rows(np.zeros((2, 0, 1), dtype=np.int64), 4, 1), "no rows to profile"),
        (lambda: PathProfile.of_rows(np.zeros((2, 3, 1), dtype=np.int64), 256, 8), "with 256 experts it has 1 to 7"),
        (lambda: pack_first_fit(np.ones(5), 2, 2), "5 experts do not fit on 2 devices of 2: give each at least 3"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()  # type: ignore[operator]


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile, rows = PathProfile.of_rows(follow(400, 5, 8), 8, 2, layers=(1, 2, 3, 5, 6)), follow(50, 5, 8, seed=1)
    profile.write(tmp_path / "paths")
    found = read_path_profile(tmp_path / "paths")
    assert (found.layers, found.num_experts, found.top_k, found.length) == ((1, 2, 3, 5, 6), 8, 1, 2)
    for layer in range(5):
        for ours, theirs in zip(
            profile.expected(rows[:layer, :, 0], layer), found.expected(rows[:layer, :, 0], layer), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("damage", ["text", "cut", "missing", "expert"])
def test_a_damaged_profile_is_refused(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "paths"
    PathProfile.of_rows(follow(40, 3, 8), 8, 2).write(file)
    if damage == "text":
        file.write_text("nothing of the kind")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "expert":
        PathProfile.of_rows(follow(40, 3, 8) + 8, 16, 2).write(file)
        with np.load(file) as archive:
            arrays = dict(archive)
        arrays["about"][0] = 8
        with file.open("wb") as opened:
            np.savez(opened, **arrays)
    else:
        file.unlink()
    with pytest.raises(UserError, match=str(file)):
        read_path_profile(file)


def test_an_estimate_is_scored_by_steps() -> None:
    actual = np.array([[6, 3, 1, 0], [0, 1, 3, 6]])
    right, elsewhere = estimate_score(np.array([[0.5, 0.4, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0]]), actual, 1)
    assert right == 0.5
    assert elsewhere == pytest.approx((0.1 + 1.0) / 2)
