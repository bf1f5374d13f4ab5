"""The search against brute force, plans against their own fields, and what must not happen on any cluster."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import expected_distinct
from antiphon.planner.candidates import Pins
from antiphon.planner.explain import NoPlan
from antiphon.planner.predict import predict
from antiphon.planner.room import batch_limits, instances_that_fit
from antiphon.planner.search import SearchLimits, evaluate_phase
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import step_times
from antiphon.planner.worker_times import rows_each, rows_received
from antiphon.specs.plan import LATENCIES, LAYOUTS, OBJECTIVES, Layout
from antiphon.specs.workload import SloSpec
from tests.planner.serving_specimens import (
    candidates,
    check_counts,
    cluster,
    device,
    group,
    model,
    planned,
    setting,
    two_kinds,
    workload,
)

PHASES = ("prefill", "decode")


@pytest.mark.parametrize(("skew", "rows"), [(1.0, 1.0), (1.1, 1.1), (50.0, None)])
def test_skew_fills_the_busiest_expert_worker_but_no_row_comes_twice(skew: float, rows: float | None) -> None:
    where = setting()
    workers = candidates(attention_dp=3, expert_ep=2, slots=4, batch=np.array([30]))
    tokens = rows_each(where, workers) * 3
    found = rows_received(where, workers, skew * tokens * where.model.router.top_k / 2)
    even = tokens * expected_distinct(where.model.router.num_experts, where.model.router.top_k, 2) / 2
    np.testing.assert_allclose(found, tokens if rows is None else rows * even)


def best_disaggregated_by_brute_force(where: Setting) -> float:
    """Every degree, one at a time, and every batch of each, by plain loops."""
    target_s = where.workload.slo.tpot_s
    experts, devices = where.model.router.num_experts, where.cluster.num_devices
    best = 0.0
    for tp_a in (1, 2, 3, 4):
        for tp_e in (1, 2, 3, 4):
            for workers in range(1, experts + 1):
                for dp in range(1, devices + 1):
                    for m in (1, 2):
                        one = candidates(
                            attention_tp=tp_a,
                            attention_dp=dp,
                            expert_tp=tp_e,
                            expert_ep=workers,
                            slots=-(-experts // workers),
                            micro_batches=m,
                        )
                        if tp_a * dp + tp_e * workers > devices or instances_that_fit(where.cluster, one)[0] == 0:
                            continue
                        batches = np.arange(1, int(batch_limits(where, one)[0]) + 1)
                        if not batches.size:
                            continue
                        tried = one.take(np.zeros(batches.size, dtype=np.int64)).having(batch=batches)
                        step_s = step_times(where, tried).step_s
                        rates = tried.instance_batch / step_s / (tp_a * dp + tp_e * workers)
                        kept = rates[step_s <= (np.inf if target_s is None else target_s)]
                        best = max(best, float(kept.max(initial=0.0)))
    return best


@pytest.mark.parametrize("devices_per_node", [3, 4])
def test_the_search_finds_what_brute_force_finds(devices_per_node: int) -> None:
    where = setting(
        cluster=cluster(group(device(scale_up_domain=devices_per_node), 2, devices_per_node)),
        model=model(router=replace(model().router, num_experts=5)),
        limits=SearchLimits(max_micro_batches=2),
    )
    table = evaluate_phase(where, ("disaggregated",))
    found = float(table.per_gpu[table.best("per-gpu")])
    expected = best_disaggregated_by_brute_force(where)
    assert expected > 0
    if devices_per_node == 4:  # the search tries TP 1, 2, 4 on a domain of 4, the loops above 3 as well
        assert found >= expected * 0.98
    else:
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_batch_is_the_largest_that_keeps_the_promise() -> None:
    where = setting(workload=workload(slo=SloSpec(tpot_s=0.06)))
    table = evaluate_phase(where)
    kept = np.flatnonzero(table.feasible)
    assert (table.outcome.tpot_s[kept] <= 0.06).all()
    chosen = table.candidates.take(kept)
    one_more = chosen.having(batch=table.outcome.batch[kept] + 1)
    at_limit = table.outcome.batch[kept] == batch_limits(where, chosen)
    assert 0 < at_limit.sum() < at_limit.size
    assert (step_times(where, one_more).step_s[~at_limit] > 0.06).all()


@pytest.mark.parametrize(
    ("objective", "phases"),
    [
        *itertools.product(sorted(set(OBJECTIVES) - set(LATENCIES)), [("decode",), ("prefill",), PHASES, ("serve",)]),
        *[("tpot", ("decode",)), ("tpot", ("serve",)), ("ttft", ("prefill",)), ("ttft", ("serve",))],
    ],
)
def test_every_number_of_a_plan_follows_from_its_fields(objective: str, phases: tuple[str, ...]) -> None:
    result = planned(cluster=two_kinds(), objective=objective, phases=phases)
    for name, phase in result.plan.phases.items():
        again = predict(result.settings[name], phase)
        assert again == phase.predicted
        assert {loser.layout for loser in phase.rejected} == set(LAYOUTS) - {phase.layout}


def test_a_skewed_plan_follows_from_its_fields_and_replicates_hot_experts() -> None:
    result = planned(
        workload=workload(expert_skew=1.0),
        layouts=("disaggregated",),
        limits=SearchLimits(extra_slots=(1,), pins=Pins(expert_ep=4)),
    )
    phase = result.plan.phases["decode"]
    assert predict(result.settings["decode"], phase) == phase.predicted
    assert any(len(owners) > 1 for owners in phase.placement)
    for owners in phase.placement:
        assert sum(fraction for _, fraction in owners) == pytest.approx(1.0)


def test_skew_is_slower_where_experts_are_spread_and_the_same_where_they_are_not() -> None:
    def rate(skew: float, *layouts: Layout) -> float:
        pins = Pins(expert_ep=4) if layouts == ("disaggregated",) else Pins()
        limits = SearchLimits(extra_slots=(0,), pins=pins)
        of = workload(expert_skew=skew)
        return planned(workload=of, layouts=layouts, limits=limits).plan.phases["decode"].predicted.per_gpu

    assert rate(1.2, "disaggregated") < 0.98 * rate(0.0, "disaggregated")
    assert rate(1.2, "dp_ep") < 0.99 * rate(0.0, "dp_ep")
    assert rate(1.2, "tp_pp") == rate(0.0, "tp_pp")


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.sampled_from(PHASES), st.booleans()
)
def test_odd_counts_give_a_plan_or_say_why_not(
    devices: int, nodes: int, experts: int, top_k: int, phase: str, two: bool
) -> None:
    groups = (group(device("a", scale_up_domain=8), nodes, devices), group(device("b"), 3, 5))
    machines = cluster(*groups[: 1 + two])
    spec = model(router=replace(model().router, num_experts=experts, top_k=min(top_k, experts)))
    nearest: dict[str, float] = {}
    result = None
    try:
        result = planned(model=spec, cluster=machines, phases=(phase,))
    except NoPlan as error:
        nearest = error.nearest
    assert bool(result) != bool(nearest)
    if result is not None:
        check_counts(result, machines, experts)
