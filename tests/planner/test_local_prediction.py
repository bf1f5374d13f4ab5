"""Predictions of the local engine, worked out by hand from small tables, and the tables' file."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.profile import flat, read_profile
from antiphon.planner.candidates import DISAGGREGATED, Candidates, candidates_of
from antiphon.planner.local_prediction import LocalChoice, Wires, experts_layer_s, predict_decode
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import step_times
from antiphon.planner.worker_times import decode_context
from antiphon.specs.plan import LAYOUTS
from tests.planner.local_times_harness import MODEL, line, local_times, profile, thread_times
from tests.planner.serving_specimens import cluster, device, group, setting


def apart(attention: int = 1, experts: int = 1, micro_batches: int = 1) -> LocalChoice:
    return LocalChoice(
        layout="disaggregated", num_attention=attention, num_experts=experts, num_micro_batches=micro_batches
    )


def test_a_colocated_step_is_the_sum_of_its_parts() -> None:
    found = predict_decode(local_times(), MODEL, LocalChoice(layout="colocated"), concurrency=10, context=100)
    assert found.parts_s["attention"] == pytest.approx(5 * (10 + 10) / 2 * 1e-3)
    assert found.parts_s["experts"] == pytest.approx(4 * (20 + 20) / 2 * 1e-3)
    assert found.tpot_s == pytest.approx((50 + 80 + 5 + 3 + 2) * 1e-3)
    assert found.tokens_per_s == pytest.approx(10 / found.tpot_s)
    longer = predict_decode(local_times(), MODEL, LocalChoice(layout="colocated"), concurrency=10, context=300)
    assert longer.tpot_s - found.tpot_s == pytest.approx(5 * 10 * 200 * 1e-6)


def test_replicas_share_requests_and_slow_each_other() -> None:
    slow = replace(local_times().slowdowns, replica_beside_replica=flat(1.5))
    two = LocalChoice(layout="colocated", num_attention=2)
    found = predict_decode(local_times(slowdowns=slow), MODEL, two, concurrency=20, context=100)
    assert found.tpot_s == pytest.approx((1.5 * (5 * 20 + 4 * 40 + 5) + 3 + 2) * 1e-3)
    assert found.tokens_per_s == pytest.approx(20 / found.tpot_s)


def test_more_replicas_than_cores_take_turns() -> None:
    four = predict_decode(
        local_times(), MODEL, LocalChoice(layout="colocated", num_attention=4), concurrency=40, context=100
    )
    two = predict_decode(
        local_times(), MODEL, LocalChoice(layout="colocated", num_attention=2), concurrency=20, context=100
    )
    assert four.tpot_s == pytest.approx(2 * two.tpot_s)


def test_one_micro_batch_waits_for_every_part() -> None:
    """T_a = 10 + 10 + 0.2, T_e = 20 + 20 + 0.2, T_c = 0.5: a layer takes 20.2 + 40.2 + 1.0; the dense one T_a."""
    found = predict_decode(local_times(), MODEL, apart(), concurrency=10, context=100)
    assert (found.t_a_s, found.t_e_s, found.t_c_s) == (
        pytest.approx(20.2e-3),
        pytest.approx(40.2e-3),
        pytest.approx(0.5e-3),
    )
    assert found.tpot_s == pytest.approx((4 * 61.4 + 20.2 + 5 + 3 + 2) * 1e-3)


def test_two_micro_batches_hide_the_faster_side() -> None:
    """Rows halve: T_a = 15.2, T_e = 30.2; m T_f = 60.4 beats T_a + T_e + 2 T_c = 46.4."""
    found = predict_decode(local_times(), MODEL, apart(micro_batches=2), concurrency=10, context=100)
    layer, once = 60.4, 15.2 + 30.2 + 1.0
    trailing = once + 30.2 - layer
    dense = 2 * 15.2
    assert found.tpot_s == pytest.approx((4 * layer + trailing + dense + 5 + 3 + 3 + 2) * 1e-3)


def test_sides_that_work_at_once_slow_each_other_for_the_time_they_share() -> None:
    """The faster side (15.2) always has the other beside it; the slower (30.2) for the share the faster is busy."""
    slow = replace(local_times().slowdowns, attention_beside_experts=flat(1.5), experts_beside_attention=flat(1.2))
    times = local_times(slowdowns=slow)
    found = predict_decode(times, MODEL, apart(micro_batches=2), concurrency=10, context=100)
    assert found.t_a_s is not None
    assert found.t_e_s is not None
    assert found.t_a_s == pytest.approx(15.2e-3 * 1.5)
    assert found.t_e_s == pytest.approx(30.2e-3 * (1 + 0.2 * found.t_a_s / found.t_e_s))
    alone = predict_decode(times, MODEL, apart(), concurrency=10, context=100)
    assert alone.t_e_s == pytest.approx(40.2e-3)


def test_more_workers_than_cores_cannot_beat_their_work_over_the_cores() -> None:
    """1 + 2 workers on 2 cores, two micro-batches of 5 rows: T_a = 15.4 with two messages, T_e = 15.2 for 4 experts."""
    found = predict_decode(local_times(), MODEL, apart(experts=2, micro_batches=2), concurrency=10, context=100)
    work = 2 * (15.4 + 2 * 15.2)
    assert found.parts_s["layers"] >= 4 * work / 2 * 1e-3
    assert found.parts_s["layers"] < 1.5 * 4 * work / 2 * 1e-3


def test_fewer_requests_than_micro_batches_or_workers() -> None:
    one = predict_decode(local_times(), MODEL, apart(), concurrency=1, context=100)
    assert predict_decode(local_times(), MODEL, apart(micro_batches=3), concurrency=1, context=100) == one
    both = predict_decode(local_times(), MODEL, apart(attention=2), concurrency=1, context=100)
    assert both.tpot_s == pytest.approx(one.tpot_s)


@pytest.mark.parametrize(
    ("choice", "concurrency", "message"),
    [
        (apart(), 0, "0 requests of context 100: both must be at least 1"),
        (apart(attention=1, experts=1), 1, ""),
    ],
)
def test_impossible_questions_are_refused(choice: LocalChoice, concurrency: int, message: str) -> None:
    if not message:
        times = local_times(num_cores=8)
        with pytest.raises(UserError, match=r"no times with 4 threads, only with 8, 1: .* --threads 8,1,4"):
            predict_decode(times, MODEL, choice, concurrency=concurrency, context=100)
        return
    with pytest.raises(UserError, match=message):
        predict_decode(local_times(), MODEL, choice, concurrency=concurrency, context=100)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 200), st.integers(1, 4000), st.booleans()
)
@settings(max_examples=50, deadline=None)
def test_more_context_or_slower_experts_never_help(
    attention: int, experts: int, micro_batches: int, concurrency: int, context: int, together: bool
) -> None:
    choice = apart(attention, experts, micro_batches)
    if together:
        choice = LocalChoice(layout="colocated", num_attention=attention)
    times = local_times()
    found = predict_decode(times, MODEL, choice, concurrency=concurrency, context=context)
    longer = predict_decode(times, MODEL, choice, concurrency=concurrency, context=context + 500)
    assert math.isfinite(found.tpot_s)
    assert found.tpot_s > 0
    assert longer.tpot_s >= found.tpot_s
    assert sum(found.parts_s.values()) == pytest.approx(found.tpot_s)
    threads = tuple(
        replace(each, experts_s={held: line(4e-3, 0.05) for held in each.experts_s}) for each in times.threads
    )
    slower = predict_decode(replace(times, threads=threads), MODEL, choice, concurrency=concurrency, context=context)
    assert slower.tpot_s > found.tpot_s


def test_experts_between_and_below_the_numbers_measured() -> None:
    times = thread_times(1)
    assert experts_layer_s(times, 10, 6) == pytest.approx(30e-3)
    assert experts_layer_s(times, 10, 2) == pytest.approx(10e-3)


def test_the_file_brings_back_the_same_tables(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(profile())))
    assert read_profile(path) == profile()
    changed = json.loads(path.read_text())
    changed["engine"]["read_bytes_per_s"] = {"two": 1.0}
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"unknown key engine.read_bytes_per_s.two: it must be a valid integer"):
        read_profile(path)


def columns(**changes: object) -> Candidates:
    plain = {"layout": LAYOUTS.index("dp_ep"), "attention_kind": 0, "expert_kind": 0, "attention_tp": 1, "pp": 1}
    more = {"attention_dp": 1, "expert_tp": 1, "expert_ep": 1, "slots": 5, "micro_batches": 1, "piece_devices": 0}
    return candidates_of(**(plain | more | {"batch": np.array([1, 20])} | changes))  # type: ignore[arg-type]


def test_a_plan_takes_its_decode_steps_from_here() -> None:
    """The very numbers that benchmarks/predict.py holds against the engine."""
    where = setting(profile=profile())
    assert where.profile is not None
    assert where.profile.engine is not None
    found = step_times(where, columns())
    context = float(np.max(decode_context(where, columns())))
    two = LocalChoice(layout="colocated", num_attention=2)
    expected = predict_decode(where.profile.engine, where.model, two, concurrency=40, context=context)
    assert found.step_s[1] == pytest.approx(expected.tpot_s, rel=0.01)
    layers = step_times(where, columns(layout=DISAGGREGATED, slots=5, micro_batches=2))
    choice = LocalChoice(layout="disaggregated", num_micro_batches=2)
    apart_s = predict_decode(where.profile.engine, where.model, choice, concurrency=40, context=context)
    assert layers.t_e_s[1] == pytest.approx(apart_s.t_e_s)
    assert layers.step_s[1] == pytest.approx(apart_s.tpot_s, rel=0.01)
    ranks = step_times(where, columns(attention_tp=2, expert_tp=2))
    split = predict_decode(
        where.profile.engine,
        where.model,
        LocalChoice(layout="colocated", attention_tp=2),
        concurrency=20,
        context=context,
    )
    assert ranks.step_s[1] == pytest.approx(split.tpot_s, rel=0.01)
    other = step_times(where, columns(attention_tp=2))
    assert other.step_s[1] != found.step_s[1], "the engine does not run that: it is modelled"


def test_ranks_share_a_layer_and_stages_take_turns() -> None:
    whole = predict_decode(local_times(), MODEL, LocalChoice(layout="colocated"), concurrency=20, context=100)
    split = predict_decode(
        local_times(), MODEL, LocalChoice(layout="colocated", attention_tp=2), concurrency=20, context=100
    )
    one_thread = predict_decode(
        local_times(), MODEL, LocalChoice(layout="colocated", num_attention=2), concurrency=40, context=100
    )
    for part in ("attention", "experts", "head"):
        assert split.parts_s[part] == pytest.approx(one_thread.parts_s[part] / 2), part
    assert split.parts_s["exchange"] > 0
    assert split.tpot_s < one_thread.tpot_s
    stages = LocalChoice(layout="colocated", num_stages=2)
    staged = predict_decode(local_times(), MODEL, stages, concurrency=20, context=100)
    halves = predict_decode(
        local_times(), MODEL, LocalChoice(layout="colocated", num_attention=2), concurrency=20, context=100
    )
    # Two micro-batches of half the rows: three turns of a stage of three of the five layers.
    assert staged.parts_s["attention"] == pytest.approx(3 * 3 / 5 * halves.parts_s["attention"])
    assert whole.tpot_s < staged.tpot_s


def test_between_machines_the_network_says_how_long_rows_travel() -> None:
    wires = Wires(layer_s=4e-3, hop_s=2e-3)
    near = predict_decode(local_times(), MODEL, apart(), concurrency=10, context=100)
    far = predict_decode(local_times(), MODEL, apart(), concurrency=10, context=100, wires=wires)
    assert far.t_c_s == 4e-3
    assert far.tpot_s - near.tpot_s == pytest.approx(4 * 2 * 3.5e-3)
    stages = LocalChoice(layout="colocated", num_stages=2)
    far = predict_decode(local_times(), MODEL, stages, concurrency=20, context=100, wires=wires)
    assert far.parts_s["hops"] == pytest.approx(4e-3)


def two_machines(bytes_per_s: float) -> Setting:
    """Two nodes of one core each."""
    core = device(kind="cpu", scale_up_domain=1, scale_out_bytes_per_s=bytes_per_s)
    return setting(profile=profile(), cluster=cluster(group(core, num_nodes=2, devices_per_node=1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_tp": 2, "expert_tp": 2},
        {"pp": 2, "micro_batches": 2},
        {"attention_dp": 2, "expert_ep": 2},
        {"attention_dp": 2, "expert_tp": 2},
        {"attention_tp": 2, "expert_ep": 2},
        {"layout": DISAGGREGATED, "micro_batches": 2},
    ],
)
def test_a_plan_for_two_machines_is_as_fast_as_its_link(changes: dict[str, int]) -> None:
    where, slower = two_machines(1e9), two_machines(1e6)
    more = {"piece_devices": 0 if "layout" in changes else 1, **changes}
    quick, slow = step_times(where, columns(**more)), step_times(slower, columns(**more))
    assert np.all(slow.step_s > quick.step_s)
    assert where.profile is not None
    assert where.profile.engine is not None
    alone = LocalChoice(layout="colocated", num_attention=2)
    context = float(np.max(decode_context(where, columns())))
    one_row = predict_decode(where.profile.engine, where.model, alone, concurrency=2, context=context)
    assert quick.step_s[0] < 2 * one_row.tpot_s, "it is measured, not modelled"


def test_replicas_on_two_machines_send_nothing() -> None:
    quick, slow = (step_times(two_machines(rate), columns(piece_devices=1)) for rate in (1e9, 1e6))
    assert np.array_equal(quick.step_s, slow.step_s)


def test_a_replica_of_one_process_takes_the_times_of_a_worker_with_both_sides() -> None:
    """Ranks, stages, and workers with one side take those of one side alone."""
    slower = replace(thread_times(1), both_sides=True, attention_s=line(2e-3, 20e-3), head_s=line(0.0, 9e-3))
    times = local_times()
    both = replace(times, threads=(*times.threads, slower))
    replicas = LocalChoice(layout="colocated", num_attention=2)
    found = predict_decode(both, MODEL, replicas, concurrency=2, context=100)
    assert found.parts_s["head"] == pytest.approx(9e-3)
    assert found.parts_s["attention"] == pytest.approx(
        2 * predict_decode(times, MODEL, replicas, concurrency=2, context=100).parts_s["attention"]
    )
    for choice in (LocalChoice(layout="colocated", num_stages=2), LocalChoice(layout="colocated", attention_tp=2)):
        alone = predict_decode(times, MODEL, choice, concurrency=2, context=100)
        assert predict_decode(both, MODEL, choice, concurrency=2, context=100) == alone
    alone = predict_decode(times, MODEL, apart(), concurrency=2, context=100)
    assert predict_decode(both, MODEL, apart(), concurrency=2, context=100) == alone
