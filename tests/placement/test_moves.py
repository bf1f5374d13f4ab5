"""From any placement to any other: within the slots, nobody homeless, one new expert a worker, layer and step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.placement.moves import next_placement, num_moves
from antiphon.specs.placement import ExpertPlacement, Owners


def random_owners(random: np.random.Generator, num_experts: int, num_workers: int, slots: int) -> Owners:
    """Every expert somewhere, and as many copies as chance has it."""
    held: list[set[int]] = [set() for _ in range(num_workers)]
    for expert in random.permutation(num_experts):
        held[random.choice([w for w in range(num_workers) if len(held[w]) < slots])].add(int(expert))
    for worker in range(num_workers):
        lacking = [expert for expert in range(num_experts) if expert not in held[worker]]
        num_copies = int(random.integers(0, slots - len(held[worker]) + 1))
        held[worker].update(random.permutation(lacking)[:num_copies].astype(int).tolist())
    return tuple(tuple(w for w in range(num_workers) if expert in held[w]) for expert in range(num_experts))


def walk(now: ExpertPlacement, target: ExpertPlacement, slots: int) -> int:
    """Go to the target and check every step; how many there were."""
    num_steps = 0
    while (then := next_placement(now, target, slots)) is not None:
        num_steps += 1
        assert then.version == now.version + 1
        assert then.most_held() <= slots
        for worker in range(now.num_workers):
            before, after = now.experts_of(worker), then.experts_of(worker)
            assert all(len(set(after[layer]) - set(before[layer])) <= 1 for layer in now.owners)
        assert num_steps <= sum(map(len, now.owners.values())) * now.num_workers
        now = then
    assert now.owners == target.owners
    assert num_moves(now, target) == 0
    return num_steps


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(0, 10), st.integers(0, 2))
def test_any_placement_is_reached_within_the_slots(seed: int, num_workers: int, more: int, spare: int) -> None:
    random = np.random.default_rng(seed)
    num_experts = num_workers + more
    slots = min(num_experts, -(-num_experts // num_workers) + spare)
    maps = [
        ExpertPlacement(
            num_workers, {layer: random_owners(random, num_experts, num_workers, slots) for layer in (1, 4)}
        )
        for _ in range(2)
    ]
    walk(*maps, slots)


@pytest.mark.parametrize("num_workers", [2, 5])
def test_workers_whose_slots_are_all_taken_exchange_experts(num_workers: int) -> None:
    """Each worker has one slot and wants its neighbour's expert: all of them move in one step."""
    now = ExpertPlacement(num_workers, {0: tuple((worker,) for worker in range(num_workers))})
    then = ExpertPlacement(num_workers, {0: tuple(((worker + 1) % num_workers,) for worker in range(num_workers))})
    assert walk(now, then, 1) == 1


def test_what_is_in_place_stays() -> None:
    placement = ExpertPlacement(2, {0: ((0, 1), (1,))})
    assert next_placement(placement, placement, 2) is None


def test_there_is_no_way_between_maps_of_different_sizes() -> None:
    now = ExpertPlacement(2, {0: ((0,), (1,))})
    others = [
        ExpertPlacement(2, {1: ((0,), (1,))}),
        ExpertPlacement(2, {0: ((0,), (1,), (1,))}),
        ExpertPlacement(3, {0: ((2,), (1,))}),
    ]
    for other in others:
        with pytest.raises(UserError, match="differ in workers, layers or experts"):
            num_moves(now, other)
        with pytest.raises(UserError, match="differ in workers, layers or experts"):
            next_placement(now, other, 2)
