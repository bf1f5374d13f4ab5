"""What sentences about losers and limits say, against numbers worked out apart from them."""

import re
from dataclasses import replace

import numpy as np
import pytest

from antiphon.planner.candidates import Pins
from antiphon.planner.explain import NoPlan, most_requests_per_s, why_slower
from antiphon.planner.rate_match import best_by_size
from antiphon.planner.search import SearchLimits, evaluate_phase, make_plan, settings_of
from antiphon.specs.plan import Objective
from antiphon.specs.workload import LengthSpec, SloSpec
from tests.planner.serving_specimens import check_counts, cluster, device, group, model, planned, setting, workload


@pytest.mark.parametrize("percentile", [0.5, 0.99])
def test_the_largest_rate_is_that_of_the_tail_and_can_be_kept(percentile: float) -> None:
    slo = SloSpec(tpot_s=0.02, percentile=percentile)
    with pytest.raises(NoPlan, match="requests/s are too many") as raised:
        planned(workload=workload(requests_per_s=1e5, slo=slo))
    most = raised.value.nearest["requests_per_s"]
    phase = planned(workload=workload(requests_per_s=most, slo=slo)).plan.phases["decode"]
    for loser in phase.rejected:
        found = re.search(r"takes at most ([0-9.e+]+) requests/s in this layout", loser.reason)
        assert found is None or float(found.group(1)) < most
    with pytest.raises(NoPlan):
        planned(workload=workload(requests_per_s=most * 1.01, slo=slo))


def test_spare_capacity_is_explained_by_whole_instances() -> None:
    where = setting(workload=workload(requests_per_s=3.0), cluster=cluster(group(num_nodes=4)))
    table = evaluate_phase(where)
    reasons = [why_slower(where, table, index, int(table.best("per-gpu"))) for index in range(0, len(table), 40)]
    found = [re.search(r"\(the rate is (\d+)% of what its whole instances? would take\)", r) for r in reasons]
    assert any(found)
    for index, match in zip(range(0, len(table), 40), found, strict=True):
        if match:
            count = int(table.outcome.num_instances[index])
            most = most_requests_per_s(where, table.one(index), count)
            assert int(match.group(1)) == round(300.0 / most)
            expected = table.outcome.capacity[index] * count / where.lengths.output  # at the median there is no tail
            assert most == pytest.approx(float(expected))


def test_who_is_better_alone_loses_by_the_pair() -> None:
    """A loser of two pools that is not behind in its own phase is not called equal; its best pair is named."""
    seen = 0
    for nodes in (2, 3, 5):
        for devices in (3, 4):
            machines = cluster(group(device(scale_up_domain=devices), nodes, devices))
            result = planned(
                cluster=machines, phases=("prefill", "decode"), workload=workload(slo=SloSpec(tpot_s=0.05))
            )
            check_counts(result, machines, 8)
            for phase in result.plan.phases.values():
                mine = phase.predicted.tokens_per_s / sum(use.num_devices for use in phase.devices)
                for loser in phase.rejected:
                    assert "equal" not in loser.reason
                    if loser.predicted is not None and loser.predicted.per_gpu > mine * (1 + 1e-5):
                        seen += 1
                        assert re.search(r"by itself; .*(best pair with the other pool|fit beside)", loser.reason)
    assert seen > 0


def test_the_best_of_each_size_is_what_no_smaller_one_beats() -> None:
    sizes, scores = np.array([4, 2, 2, 8, 6, 3]), np.array([5.0, 1.0, 2.0, 9.0, 4.0, 2.0])
    assert best_by_size(sizes, scores, 9).tolist() == [2, 0, 3]
    assert best_by_size(sizes, scores, 2).tolist() == [2, 3]


def test_a_decode_pool_that_asks_for_more_than_the_rest_can_prefill_is_still_a_plan() -> None:
    """Prefill far slower than a single decode instance: as many prefill instances as there is room for."""
    machines = cluster(group(num_nodes=2))
    requests = workload(slo=SloSpec(), input_tokens=LengthSpec(median=4000), output_tokens=LengthSpec(median=4))
    only = SearchLimits(max_micro_batches=1, pins=Pins(attention_tp=1, attention_dp=1, expert_tp=1, pp=1))
    result = planned(cluster=machines, workload=requests, phases=("prefill", "decode"), layouts=("tp_pp",), limits=only)
    check_counts(result, machines, 8)
    assert result.plan.phases["prefill"].num_instances == 7
    assert result.plan.phases["decode"].num_instances == 1


def test_shares_that_round_above_one_are_one() -> None:
    rounded_up = 0
    for experts in range(1, 13):
        for top_k in range(1, experts + 1):
            spec = model(router=replace(model().router, num_experts=experts, top_k=top_k))
            for skew in (0.5, 1.0, 2.0):
                where = setting(model=spec, workload=workload(expert_skew=skew))
                rounded_up += sum(where.shares) != 1.0
                assert where.busiest_each(np.array([1]), np.array([experts]))[0] <= 1.0
    assert rounded_up > 0


def test_a_rate_beyond_all_counting_is_too_many() -> None:
    with pytest.raises(NoPlan, match="are too many"):
        make_plan(settings_of(model(), cluster(), workload(requests_per_s=1e20)), model_name="small")


@pytest.mark.parametrize("objective", ["per-gpu", "tpot"])
def test_a_reason_has_one_number_at_most(objective: Objective) -> None:
    """Two are for a table. Names of devices and letters of the papers are none."""
    seen = 0
    for nodes, slo in ((2, SloSpec(tpot_s=0.02)), (5, SloSpec(tpot_s=0.002)), (4, SloSpec())):
        machines = cluster(group(device(scale_up_domain=4), nodes, 4))
        for rate in (None, 3.0):
            try:
                result = planned(cluster=machines, workload=workload(slo=slo, requests_per_s=rate), objective=objective)
            except NoPlan:
                continue
            for phase in result.plan.phases.values():
                for said in (*phase.notes, *(loser.reason for loser in phase.rejected)):
                    for sentence in said.split(". "):
                        seen += 1
                        assert len(re.findall(r"(?<![A-Za-z_0-9.])[0-9][0-9.,e+]*", sentence)) <= 1, sentence
    assert seen > 5
