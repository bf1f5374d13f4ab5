"""The smallest cluster, one more node, what changes with promise, lengths and network; the table's front."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.planner.explain import NoPlan, total_weight_bytes
from antiphon.planner.search import evaluate_phase, make_plan, settings_of
from antiphon.planner.what_if import (
    base_value,
    one_more_node,
    other_formats,
    sensitivity,
    smallest_cluster,
    with_nodes,
    with_prompts,
)
from antiphon.specs.model import WEIGHT_FORMATS, PrecisionSpec
from antiphon.specs.plan import LAYOUTS, PhaseName
from antiphon.specs.workload import LengthSpec, SloSpec
from tests.planner.serving_specimens import cluster, device, group, model, setting, two_kinds, workload


def test_the_smallest_cluster_is_the_smallest() -> None:
    """By brute force: with one node less there is no plan."""
    machines = cluster(group(num_nodes=6, devices_per_node=2))
    requests = workload(requests_per_s=700.0)
    found = smallest_cluster(settings_of(model(), machines, requests), model_name="small")
    count = found.cluster.groups[0].num_nodes
    feasible = []
    for nodes in range(1, 7):
        try:
            make_plan(settings_of(model(), with_nodes(machines, (nodes,)), requests), model_name="small")
            feasible.append(nodes)
        except NoPlan:
            pass
    assert count == min(feasible) > 1


def test_a_cluster_that_is_too_small_grows() -> None:
    machines = cluster(group(num_nodes=1, devices_per_node=2))
    found = smallest_cluster(settings_of(model(), machines, workload(requests_per_s=700.0)), model_name="small")
    assert found.cluster.groups[0].num_nodes > 1
    assert found.plan.phases["decode"].predicted.tokens_per_s == pytest.approx(700 * workload().output_tokens.mean)


def test_both_phases_and_two_kinds() -> None:
    both: tuple[PhaseName, ...] = ("prefill", "decode")
    settings = settings_of(model(), two_kinds(), workload(requests_per_s=20.0), phases=both, objective="per-cost")
    found = smallest_cluster(settings, model_name="small")
    devices = {group.device.name for group in found.cluster.groups}
    for phase in found.plan.phases.values():
        assert all(use.device in devices for use in phase.devices)


def test_size_needs_a_rate_and_a_possible_promise() -> None:
    with pytest.raises(UserError, match="has no rate: give requests_per_s"):
        smallest_cluster(settings_of(model(), cluster(), workload()), model_name="small")
    hopeless = workload(requests_per_s=1.0, slo=SloSpec(tpot_s=1e-5))
    with pytest.raises(NoPlan, match="nearest feasible promise"):
        smallest_cluster(settings_of(model(), cluster(), hopeless), model_name="small")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_more_node_never_lowers_the_total(phase: str) -> None:
    where = setting(cluster=cluster(group(device("a")), group(device("b"), 3, 5)), phase=phase)
    found = one_more_node(where)
    assert [device for device, _, _ in found] == ["a", "b"]
    gains = [gain for _, _, gain in found]
    assert min(gains) >= 1.0
    assert max(gains) > 1.0


def test_other_formats_of_weights() -> None:
    """A device of which int8 leaves next to nothing, and bfloat16 too little."""
    needed = total_weight_bytes(setting(precision=PrecisionSpec(weights="int8")))
    small = setting(
        cluster=cluster(group(device(memory_bytes=int(1.25 * needed)), 1, 1)), precision=PrecisionSpec(weights="int4")
    )
    found = other_formats(small)
    assert [name for name, *_ in found] == list(WEIGHT_FORMATS)
    sizes, rates = [each[1] for each in found], [each[2] for each in found]
    assert sizes == sorted(sizes, reverse=True)
    assert rates[0] == 0.0, "does not fit"
    assert 0 < rates[1] < rates[-1]
    assert found[-1][3] == pytest.approx(1.0)


def test_sensitivity_over_each_axis() -> None:
    where = setting()
    table = evaluate_phase(where)
    for over in ("slo", "context", "network"):
        points = sensitivity(where, table, over=over)
        best = [max((score for score in of_layout.values() if score), default=0.0) for of_layout in points.values()]
        assert list(points) == sorted(points)
        first, *_, last = points.values()
        assert set(first) == {"disaggregated", "hybrid", "tp_pp", "dp_ep"}
        steps = np.diff(best)
        assert (steps <= 1e-6).all() if over == "context" else (steps >= -1e-6 * max(best)).all()
        for layout, score in first.items():
            assert (score == last[layout]) == (over == "network" and layout == "tp_pp"), (
                "a pipeline sends next to nothing"
            )
    gains = {layout: (last[layout] or 0.0) / (score or 1.0) for layout, score in first.items()}
    assert max(gains, key=lambda layout: gains[layout]) == "disaggregated", "a faster network helps it most"


def test_sensitivity_agrees_with_the_search_at_its_own_value() -> None:
    where = setting()
    table = evaluate_phase(where)
    for over in ("slo", "context", "network"):
        (found,) = sensitivity(where, table, over=over, values=(base_value(where, table, over),)).values()
        for layout, score in found.items():
            index = table.best("per-gpu", table.candidates.layout == LAYOUTS.index(layout))
            assert score == pytest.approx(float(table.per_gpu[index]))


def test_sensitivity_says_what_cannot_run() -> None:
    where = setting()
    (found,) = sensitivity(where, evaluate_phase(where), over="slo", values=(1e-6,)).values()
    assert set(found.values()) == {None}
    with pytest.raises(UserError, match="over is 'luck'"):
        sensitivity(where, evaluate_phase(where), over="luck")
    with pytest.raises(UserError, match="must be above 0"):
        sensitivity(where, evaluate_phase(where), over="network", values=(0.0,))


def test_a_trace_is_stretched() -> None:
    traced = workload(input_tokens=LengthSpec(median=10, trace=(5, 10, 20)))
    assert with_prompts(traced, 20).input_tokens.trace == (10, 20, 40)


def test_the_front_is_what_nothing_beats() -> None:
    where = setting(workload=replace(workload(), slo=SloSpec(tpot_s=0.05)))
    table = evaluate_phase(where)
    for layout in ("disaggregated", "hybrid", "tp_pp", "dp_ep", None):
        front = table.pareto("per-gpu", layout)
        latency, scores = table.outcome.tpot_s[front], table.per_gpu[front]
        assert front.size
        assert (np.diff(latency) >= 0).all()
        assert (np.diff(scores) > 0).all()
        among = np.ones(len(table), dtype=bool) if layout is None else table.candidates.layout == LAYOUTS.index(layout)
        for index in np.flatnonzero(among):
            assert (scores[latency <= table.outcome.tpot_s[index]].max(initial=0.0)) >= table.per_gpu[index]
