"""Predicted steps of replicas that share experts: what they wait for, and what they compute to send rows."""

from dataclasses import replace

import pytest

from antiphon.cost.profile import RowCalls, flat
from antiphon.cost.skew import fullest_part
from antiphon.planner.local_prediction import LocalChoice, Wires, experts_layer_s, fullest_experts_s, predict_decode
from tests.planner.local_times_harness import MODEL, local_times, thread_times


def test_replicas_that_share_experts_compute_a_part_for_all_rows() -> None:
    """Two replicas of 10 requests: each rank has half of the experts for all 20 rows, and rows travel 3 ms a layer."""
    busiest, widest = fullest_part(20, 2, num_experts=8, top_k=2)
    fullest_ms = max(10 + 20 * float(busiest), 30 * float(widest))
    hybrid = LocalChoice(layout="hybrid", num_attention=2, num_experts=2)
    wires = Wires(layer_s=3e-3, dense_layer_s=5e-3, head_s=7e-3)
    found = predict_decode(local_times(), MODEL, hybrid, concurrency=20, context=100, wires=wires)
    assert found.parts_s["attention"] == pytest.approx(5 * 20 * 1e-3)
    assert found.parts_s["experts"] == pytest.approx(4 * fullest_ms * 1e-3)
    assert found.parts_s["exchange"] == pytest.approx((4 * 3 + 5 + 7) * 1e-3)
    assert found.parts_s["engine"] == pytest.approx(3e-3), "it plans for both while neither computes"
    split = replace(hybrid, num_attention=1, attention_tp=2)
    found = predict_decode(local_times(), MODEL, split, concurrency=20, context=100, wires=wires)
    assert found.parts_s["attention"] == pytest.approx(5 * 30 / 2 * 1e-3)
    assert found.parts_s["experts"] == pytest.approx(4 * fullest_ms * 1e-3)
    assert found.parts_s["engine"] == pytest.approx(2e-3)
    whole = replace(hybrid, num_experts=1, expert_tp=2)
    found = predict_decode(local_times(), MODEL, whole, concurrency=20, context=100, wires=wires)
    assert found.parts_s["experts"] == pytest.approx(4 * (20 + 40) / 2 * 1e-3), "every rank has a part of all: even"


@pytest.mark.parametrize(
    ("num_attention", "num_experts", "tp", "expert_tp", "expected_ms"),
    [(2, 2, 1, 1, 1.0), (2, 1, 1, 2, 2.0), (1, 2, 2, 1, 3.0), (2, 2, 2, 2, 1.0), (4, 2, 1, 2, 2.0)],
)
def test_a_rank_that_sends_rows_takes_what_its_calls_take(
    num_attention: int, num_experts: int, tp: int, expert_tp: int, expected_ms: float
) -> None:
    calls = RowCalls(across_s=flat(1e-3), gathered_s=flat(2e-3), completed_s=flat(3e-3))
    choice = LocalChoice(
        layout="hybrid", num_attention=num_attention, num_experts=num_experts, attention_tp=tp, expert_tp=expert_tp
    )
    wires = Wires(layer_s=3e-3)
    num_cores = num_attention * tp
    before = predict_decode(local_times(num_cores), MODEL, choice, concurrency=20, context=100, wires=wires)
    times = local_times(num_cores, row_calls=calls)
    found = predict_decode(times, MODEL, choice, concurrency=20, context=100, wires=wires)
    assert found.parts_s["calls"] == pytest.approx(4 * expected_ms * 1e-3)
    assert found.tpot_s - before.tpot_s == pytest.approx(found.parts_s["calls"])
    plain = LocalChoice(layout="colocated", num_attention=num_cores)
    assert "calls" not in predict_decode(times, MODEL, plain, concurrency=20, context=100).parts_s


def test_replicas_with_experts_of_their_own_wait_for_nobody() -> None:
    two = LocalChoice(layout="colocated", num_attention=2)
    found = predict_decode(local_times(), MODEL, two, concurrency=20, context=100)
    assert found.parts_s["experts"] == pytest.approx(4 * (20 + 20) * 1e-3)
    assert found.parts_s["engine"] == pytest.approx(2e-3)


def test_a_layer_waits_for_the_part_that_most_rows_chose() -> None:
    times = thread_times(1)
    even = 10e-3 + 20e-3
    assert fullest_experts_s(times, MODEL, 20, 1) == pytest.approx(2 * even)
    assert even < fullest_experts_s(times, MODEL, 20, 2) < 1.2 * even
    many = fullest_experts_s(times, MODEL, 900, 2) / experts_layer_s(times, 900, 4)
    assert 1 < many < 1.03, "chance evens out"
