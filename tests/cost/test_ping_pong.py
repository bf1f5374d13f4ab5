"""MegaScale-Infer eq. 1 to 5 worked by hand, and the layer's general time against a step-by-step schedule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.ping_pong import (
    balanced_attention_workers,
    bottleneck,
    conditions,
    free_step,
    iteration,
    layer_time,
    micro_batch_bounds,
    min_micro_batches,
    throughput_per_cost,
)


def test_equation_5_where_its_conditions_hold() -> None:
    # m = 3, L = 4, T_a = 10, T_e = 9, T_c = 2: (10 + 9 + 4) + 10 * (12 - 1).
    assert conditions(3, 10, 9, 2) == (True, True, True)
    assert iteration(3, 4, 10, 9, 2) == 23 + 110
    # Eq. 4: one micro-batch takes from (10 + 9 + 4) + 30 * 3 to 30 * 4.
    assert micro_batch_bounds(3, 4, 10, 9, 2) == (113, 120)


def test_with_too_few_micro_batches_each_layer_has_bubbles() -> None:
    # m = 2: 20 of work against a round of 23, so 23 a layer: 4 * 23 and the second micro-batch 10 behind.
    assert conditions(2, 10, 9, 2)[2] == False  # noqa: E712 - a numpy bool
    assert layer_time(2, 10, 9, 2) == 23
    assert iteration(2, 4, 10, 9, 2) == 4 * 23 + 10
    assert iteration(1, 4, 10, 9, 2) == 4 * 23
    assert bottleneck(2, 10, 9, 2) == "bubbles"


def test_a_step_for_itself_hides_heads_behind_experts() -> None:
    # L = 10, T_a = 2, T_e = 4, T_c = 0.5. Alone: 10 * 7 and the head.
    assert free_step(1, 10, 2, 4, 0.5, [5, 5]) == pytest.approx(80)
    # m = 3: the experts compute all the time, 3 * 10 * 4; heads of 12 fit beside them.
    assert free_step(3, 10, 2, 4, 0.5, [0.5] * 24) == pytest.approx(120, rel=0.03)
    # With heads of 40 attention does: 3 * (20 + 40).
    assert free_step(3, 10, 2, 4, 0.5, [4] * 10) == pytest.approx(180)
    # m = 2, head of 12: a layer of the other leaves 5 of 7, so 2.4 of its layers pass by. Two heads of 2.4 * 7, and the
    # other 7.6 layers of both at 8.
    assert free_step(2, 10, 2, 4, 0.5, [0.1] * 120) == pytest.approx(2 * 2.4 * 7 + 7.6 * 8, rel=0.03)


def test_the_micro_batch_rules() -> None:
    """3 micro-batches for T_c < T_f / 2, at least 4 for slower communication; 2 if it cost nothing."""
    shares = np.array([0.0, 0.01, 0.25, 0.5, 0.51, 0.99, 1.0])
    np.testing.assert_array_equal(min_micro_batches(shares, 1.0), [2, 3, 3, 3, 4, 4, 4])


def test_a_network_slower_than_both_sets_the_pace() -> None:
    assert conditions(4, 10, 10, 15)[1] == False  # noqa: E712 - a numpy bool
    assert layer_time(4, 10, 10, 15) == 60
    assert bottleneck(4, 10, 10, 15) == "network"
    assert layer_time(4, 10, 10, 5, 15) == 60, "the way back alone is enough"
    assert (bottleneck(4, 10, 9, 1), bottleneck(4, 9, 10, 1)) == ("attention", "experts")


def test_balance_and_objective() -> None:
    # k1 = 2, k3 = 0.5 per row, 8 experts, top 2: 2 * 8 / (0.5 * 2).
    assert balanced_attention_workers(2.0, 0.5, 8, 2) == 16
    # 600 tokens in 2 s on 4 devices of cost 3 and 8 of cost 1: 300 / 20.
    assert throughput_per_cost(600, 2.0, 4, 3.0, 8, 1.0) == 15


def test_unbalanced_sides_break_condition_1() -> None:
    assert [bool(holds) for holds in conditions(4, 10, 5, 1)] == [False, True, True]


def scheduled(m: int, num_layers: int, t_a: float, t_e: float, t_c: float) -> float:
    """The schedule itself: four resources in turn, each taking micro-batches in order."""
    free = [0.0, 0.0, 0.0, 0.0]
    ready = [0.0] * m
    for _ in range(num_layers):
        for batch in range(m):
            for resource, time in enumerate((t_a, t_c, t_e, t_c)):
                start = max(ready[batch], free[resource])
                free[resource] = ready[batch] = start + time
    return max(ready)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), *(st.integers(1, 20) for _ in range(3)))
def test_iteration_equals_the_schedule(m: int, num_layers: int, t_a: int, t_e: int, t_c: int) -> None:
    assert iteration(m, num_layers, t_a, t_e, t_c) == pytest.approx(scheduled(m, num_layers, t_a, t_e, t_c))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 80), *(st.floats(0, 1) for _ in range(3)))
def test_slower_parts_are_never_faster(m: int, num_layers: int, t_a: float, t_e: float, t_c: float) -> None:
    now = iteration(m, num_layers, t_a, t_e, t_c)
    assert iteration(m, num_layers, t_a + 0.1, t_e, t_c) >= now
    assert iteration(m, num_layers, t_a, t_e + 0.1, t_c) >= now
    assert iteration(m, num_layers, t_a, t_e, t_c + 0.1) >= now
    assert iteration(m + 1, num_layers, t_a, t_e, t_c) >= now
    least, most = micro_batch_bounds(m, num_layers, t_a, t_e, t_c)
    assert least <= most * (1 + 1e-12)
