"""The balancer plans from the rows of all attention workers together."""

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
