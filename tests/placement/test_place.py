"""Placement with copies: against the integer optimum, with slots, speeds, and what is there already."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.placement.place import chance_of, contiguous, moves_by_layer, place, recent_loads
from antiphon.placement.split import balancedness, split_loads


def random_case(random: np.random.Generator) -> tuple[np.ndarray, int, int, np.ndarray]:
    """(loads, workers, slots, speeds): log-normal, Zipf or Pareto loads, with 0 to 2 slots more than needed."""
    num_workers = int(random.integers(2, 5))
    num_experts = int(random.integers(num_workers, 11))
    slots = min(num_experts, -(-num_experts // num_workers) + int(random.integers(0, 3)))
    loads = [
        random.lognormal(0, 1, num_experts),
        random.permutation(np.arange(1, num_experts + 1) ** -1.0),
        random.pareto(1.2, num_experts) + 0.01,
    ][random.integers(3)]
    equal = random.random() < 0.5
    return 100 * loads, num_workers, slots, np.ones(num_workers) if equal else random.uniform(0.4, 1.0, num_workers)


def busiest(loads: np.ndarray, held: np.ndarray, speeds: np.ndarray) -> float:
    return float((split_loads(loads, held, speeds).sum(axis=-2) / speeds).max())


@pytest.mark.parametrize(
    ("seed", "num_cases"), [(1, 25), pytest.param(2, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_within_five_percent_of_the_optimum(seed: int, num_cases: int) -> None:
    optimum = pytest.importorskip("tests.placement.optimum")
    random = np.random.default_rng(seed)
    for _ in range(num_cases):
        loads, num_workers, slots, speeds = random_case(random)
        held = place(loads, num_workers, slots, speeds=speeds)
        best = optimum.best_placement(loads, num_workers, slots, speeds)
        assert busiest(loads, held, speeds) <= 1.05 * best, (loads, num_workers, slots, speeds)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_slots_hold_and_every_expert_has_a_home(seed: int, again: bool) -> None:
    random = np.random.default_rng(seed)
    loads, num_workers, slots, speeds = random_case(random)
    held = place(loads, num_workers, slots, speeds=speeds)
    if again:
        held = place(loads[::-1], num_workers, slots, speeds=speeds, present=held, move_cost=1.0)
    assert held.shape == (loads.size, num_workers)
    assert (held.sum(axis=0) <= slots).all()
    assert (held.any(axis=1)).all()
    assert (held.any(axis=0)).all(), "a worker without experts"


def test_large_layers_come_near_an_even_load() -> None:
    """61 layers of 256 experts on 32 workers: the lower bound is the mean load, which no optimum can beat."""
    loads = np.random.default_rng(0).lognormal(0, 0.9, (61, 256))
    for slots, least in ((10, 0.98), (9, 0.95)):
        held = place(loads, 32, slots)
        assert balancedness(split_loads(loads, held)).min() >= least
        assert (held.sum(axis=1) <= slots).all()


def test_by_hand() -> None:
    assert busiest(np.array([8.0, 7, 6, 5]), place(np.array([8.0, 7, 6, 5]), 2, 2), np.ones(2)) == 13.0
    hot = np.array([9.0, 1, 1, 1])
    assert busiest(hot, place(hot, 2, 2), np.ones(2)) == 10.0
    assert busiest(hot, place(hot, 2, 3), np.ones(2)) == 6.0
    assert place(np.array([3.0, 1.0]), 4, 1).sum(axis=1).tolist() == [3, 1]
    cold = place(np.array([4.0, 0, 0, 0, 0, 0]), 3, 2, floor=4.0)
    assert cold.sum(axis=0).tolist() == [2, 2, 2], "without rows an expert costs the floor"


def test_a_slow_worker_gets_less() -> None:
    loads, speeds = np.full(12, 10.0), np.array([1.0, 1.0, 0.5])
    times = split_loads(loads, place(loads, 3, 8, speeds=speeds), speeds).sum(axis=0) / speeds
    np.testing.assert_allclose(times, 48.0, rtol=0.01)


def test_few_pairs_of_workers_share_two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = np.random.default_rng(0).lognormal(0, 0.5, (4, 64))

    def sharing_twice() -> int:
        held = place(loads, 16, 5).astype(int)
        assert (held.sum(axis=(1, 2)) == 80).all()
        return int((np.triu(np.swapaxes(held, 1, 2) @ held, 1) > 1).sum())

    spread = sharing_twice()
    monkeypatch.setattr("antiphon.placement.place.SPREAD", 0.0)
    assert spread < 0.6 * sharing_twice()


def test_moves_are_made_only_if_they_pay() -> None:
    random = np.random.default_rng(0)
    loads = random.lognormal(0, 0.5, (3, 32))
    now = place(loads, 8, 5)
    later = loads * random.lognormal(0, 0.3, loads.shape)
    free = place(later, 8, 5, present=now)
    dear = place(later, 8, 5, present=now, move_cost=1e9)
    some = place(later, 8, 5, present=now, move_cost=0.02)
    assert (dear == now).all()
    assert (moves_by_layer(now, some) <= moves_by_layer(now, free)).all()
    assert moves_by_layer(now, some).sum() < moves_by_layer(now, free).sum()
    stays, moved = (balancedness(split_loads(later, held)) for held in (now, some))
    assert (moved >= stays).all()


@pytest.mark.parametrize("hot", [False, True])
def test_few_moves_level_the_load_and_chance_moves_little(hot: bool) -> None:
    """64 experts on 8 workers with two copies each: a new map would move half of them for the same balance."""
    random = np.random.default_rng(0)
    shares = random.permutation((1 + np.arange(64.0)) ** -0.5)
    shares /= shares.sum()
    if hot:
        shares = shares / 2
        shares[3] += 0.5
    held = contiguous(64, 8) > 0
    moves = []
    for _ in range(6):
        loads = recent_loads(random.multinomial(4096, shares, size=(40, 1)).astype(float))
        wanted = place(loads, 8, 10, present=held[None], move_cost=0.02 * loads.sum() / 8)[0]
        moves.append(int(moves_by_layer(held, wanted)))
        held = wanted
    assert balancedness(split_loads(4096 * shares, held)) > 0.9
    assert moves[0] < 10
    assert sum(moves[1:]) < 6


def test_layers_that_no_move_can_help_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    now = np.broadcast_to(contiguous(8, 4) > 0, (3, 8, 4))
    monkeypatch.setattr(
        "antiphon.placement.place._changed_or_new", lambda costs, *_: searched.append(len(costs)) or now[: len(costs)]
    )
    loads = np.full((3, 8), 10.0)
    loads[1, 0] += 1.0
    assert (place(loads, 4, 3, present=now, move_cost=1.0) == now).all()
    assert searched == [], "the busiest worker has 0.75 more than an even load"
    place(loads, 4, 3, present=now, move_cost=0.5)
    assert searched == [1]


def test_noise_is_what_a_change_must_gain_besides_its_moves() -> None:
    now = contiguous(8, 4) > 0
    loads = np.full(8, 10.0)
    loads[0] = 18.0  # 28 on the busiest worker, 22 would be even
    assert moves_by_layer(now[None], place(loads, 4, 3, present=now, move_cost=0.1, noise=3.0)[None]) > 0
    assert (place(loads, 4, 3, present=now, move_cost=0.1, noise=6.0) == now).all()


def test_chance_of_a_recent_load_is_its_deviation() -> None:
    counts = np.random.default_rng(0).poisson(50.0, (4000, 40, 1, 1)).astype(float)
    found = np.std([recent_loads(window)[0, 0] for window in counts])
    assert found == pytest.approx(chance_of(50.0, 40), rel=0.05)


def test_recent_steps_count_more() -> None:
    window = np.zeros((9, 1, 2))
    window[:8, 0, 0], window[8, 0, 1] = 10.0, 10.0
    old, new = recent_loads(window, half_life_steps=1.0)[0]
    assert new == pytest.approx(10 * 256 / 511)
    assert old == pytest.approx(10 * 255 / 511)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: place(np.ones(5), 2, 2), "5 experts do not fit in 2 x 2 slots: give each worker at least 3"),
        (lambda: place(np.ones(5), 0, 2), "0 workers"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("loads", [[np.nan, 1.0], [np.inf, 1.0], [-1.0, 1.0], [[[1.0, 1.0]]]])
def test_loads_that_are_no_loads_are_refused(loads: list[float]) -> None:
    with pytest.raises(UserError, match="must be"):
        place(np.array(loads), 2, 2)


def test_speeds_and_present_owners_must_fit() -> None:
    loads = np.ones(4)
    for speeds in ([0.0, 1.0], [1.0, 1.0, 1.0], [np.nan, 1.0], [1e-320, 1.0]):
        with pytest.raises(UserError, match="of 2 workers: give each a finite number above 0"):
            place(loads, 2, 3, speeds=np.array(speeds))
    with pytest.raises(UserError, match=r"present \(3, 2\): give"):
        place(loads, 2, 3, present=np.ones((3, 2), bool))
    with pytest.raises(UserError, match="0 experts"):
        place(np.ones((2, 0)), 2, 3)
    assert place(np.ones((0, 4)), 2, 3).shape == (0, 4, 2)
