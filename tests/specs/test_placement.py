"""Which worker owns which experts: uneven splits, replicas, and the errors of impossible maps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.placement import ExpertPlacement, contiguous_placement


@given(st.integers(1, 64).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))))
def test_contiguous_runs_cover_all_experts_once(sizes: tuple[int, int]) -> None:
    num_experts, num_workers = sizes
    placement = contiguous_placement(num_experts, num_workers)
    runs = [placement.experts_of(worker) for worker in range(num_workers)]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert placement.num_experts == num_experts


def test_a_replica_is_held_by_both_owners() -> None:
    placement = ExpertPlacement(num_workers=2, owners=((0, 1), (1,), (0,)))
    assert placement.experts_of(0) == (0, 2)
    assert placement.experts_of(1) == (0, 1)


@pytest.mark.parametrize("workers", [0, 5])
def test_too_many_or_no_workers(workers: int) -> None:
    with pytest.raises(UserError, match=f"^{workers} expert workers for 4 experts: use 1 to 4$"):
        contiguous_placement(4, workers)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (((0,), ()), "expert 1 is placed on no worker: give it at least one of 0..1"),
        (((0,), (1, 1)), r"expert 1 is placed on \(1, 1\): use distinct workers from 0 to 1"),
        (((0,), (2,)), r"expert 1 is placed on \(2,\): use distinct workers from 0 to 1"),
        (((0,), (0,)), r"expert workers \[1\] hold no expert: use at most 2 workers"),
    ],
)
def test_impossible_placements(owners: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ExpertPlacement(num_workers=2, owners=owners)
