"""Plans for the least time: against all batches, at a rate and for requests at once; queues and eq. 11 by hand."""

import re
from dataclasses import replace

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.planner.candidates import Pins
from antiphon.planner.explain import NoPlan
from antiphon.planner.least_latency import least_latency
from antiphon.planner.outcome import outcome_at, place_wait_s
from antiphon.planner.room import batch_limits
from antiphon.planner.setting import SearchLimits
from antiphon.planner.space import make_space
from antiphon.reproduce.mix import throughput
from antiphon.specs.plan import LAYOUTS, Objective, PhaseName
from antiphon.specs.workload import SloSpec
from tests.planner.serving_specimens import planned, setting, workload

FREE = SloSpec()


@pytest.mark.parametrize(("phase", "objective"), [("decode", "tpot"), ("serve", "tpot")])
def test_no_batch_that_takes_the_rate_is_faster(phase: PhaseName, objective: Objective) -> None:
    where = replace(setting(workload=workload(requests_per_s=60.0, slo=FREE)), phase=phase, objective=objective)
    space = make_space(replace(where, phase="decode"), LAYOUTS)
    limits = np.minimum(batch_limits(where, space.candidates), 96)
    few = np.flatnonzero(limits > 1)[:: max(len(limits) // 40, 1)]
    candidates, limits, instances = space.candidates.take(few), limits[few], space.instances[few]
    if phase == "serve":
        candidates = candidates.having(step_tokens=np.full(len(few), 2048))
    found = least_latency(where, candidates, limits, instances)
    every = [outcome_at(where, candidates.having(batch=np.minimum(batch, limits)), instances) for batch in range(1, 97)]
    times = np.array([np.where(one.why_not == 0, one.tpot_s, np.inf) for one in every])
    best = times.min(axis=0)
    assert np.isfinite(best).any(), "some candidate takes the rate"
    reached = np.where(found.why_not == 0, found.tpot_s, np.inf)
    if phase == "decode":  # those that cannot be the fastest of their layout are left at a batch of 1
        assert reached.min() == pytest.approx(best.min())
    else:
        assert (reached[np.isfinite(best)] <= best[np.isfinite(best)] * 1.02).all()


def test_requests_at_once_are_shared_out_over_the_cluster() -> None:
    one, many = (
        planned(objective="tpot", workload=workload(max_batch=at_once, slo=FREE)).plan.phases["decode"]
        for at_once in (1, 64)
    )
    assert (one.batch, one.num_instances) == (1, 1)
    assert many.batch * many.num_instances >= 64
    assert (one.predicted.tpot_s or 0) < (many.predicted.tpot_s or 0)
    assert "the least time of one request at once" in one.notes
    assert "the least time of 64 requests at once" in many.notes


def test_the_least_time_is_never_longer_than_that_of_another_objective() -> None:
    at_once = workload(max_batch=8, slo=FREE)
    for objective, phase in (("ttft", "prefill"), ("tpot", "decode")):
        times = [
            planned(objective=name, phases=(phase,), workload=at_once).plan.phases[phase].predicted
            for name in (objective, "per-gpu", "per-power")
        ]
        latency = [one.ttft_s if phase == "prefill" else one.tpot_s for one in times]
        assert latency[0] == min(latency)


def test_a_pass_has_no_more_prompts_than_there_are_requests() -> None:
    few, many = (
        planned(phases=("prefill",), workload=workload(max_batch=count, slo=FREE)).plan.phases["prefill"]
        for count in (2, 200)
    )
    assert few.batch < many.batch


def test_what_does_not_fit_at_once_says_how_much_does() -> None:
    with pytest.raises(NoPlan, match=r"1,000,000 requests at once do not fit on small: it holds [\d,]+ ") as refused:
        planned(objective="tpot", workload=workload(max_batch=1_000_000, slo=FREE))
    assert 0 < refused.value.nearest["max_batch"] < 1_000_000


@pytest.mark.parametrize("phase", ["decode", "serve"])
@pytest.mark.parametrize("at_once", [9, 15, 17])
def test_requests_that_workers_do_not_share_evenly_all_have_a_place(phase: PhaseName, at_once: int) -> None:
    for pins in (Pins(attention_dp=8), Pins(micro_batches=2)):
        found = planned(
            objective="tpot",
            phases=(phase,),
            workload=workload(max_batch=at_once, slo=FREE),
            limits=SearchLimits(pins=pins),
        ).plan.phases[phase]
        assert found.batch * found.num_instances >= at_once


def test_prompts_that_do_not_fit_at_once_are_counted_as_requests() -> None:
    with pytest.raises(NoPlan, match="prefill: 10,000,000 requests at once") as refused:
        planned(objective="ttft", phases=("prefill",), workload=workload(max_batch=10_000_000, slo=FREE))
    held = round(refused.value.nearest["max_batch"])
    assert 0 < held < 100_000
    planned(objective="ttft", phases=("prefill",), workload=workload(max_batch=held, slo=FREE))


@pytest.mark.parametrize(
    ("objective", "phases"), [("ttft", ("decode",)), ("tpot", ("prefill",)), ("tpot", ("prefill", "decode"))]
)
def test_a_latency_is_of_a_server_that_has_it(objective: Objective, phases: tuple[PhaseName, ...]) -> None:
    with pytest.raises(UserError, match=f"objective {objective} is of one kind of server that has that time"):
        planned(objective=objective, phases=phases)


def test_losers_say_which_part_of_a_layer_takes_longer() -> None:
    phase = planned(objective="tpot", workload=workload(max_batch=8, slo=FREE)).plan.phases["decode"]
    reasons = [loser.reason for loser in phase.rejected if loser.predicted is not None]
    assert reasons
    assert all(re.search("more in a layer|no longer, its stages|^equal", reason) for reason in reasons)


@pytest.mark.parametrize(("places", "load"), [(1, 0.5), (1, 0.9), (8, 0.7), (64, 0.95)])
def test_a_wait_for_a_place_is_that_of_erlang(places: int, load: float) -> None:
    offered = places * load
    blocked = 1.0
    for count in range(1, places + 1):  # Erlang B, then C
        blocked = offered * blocked / (count + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    exact = waits / (places * (1 - load))
    found = float(place_wait_s(np.array([float(places)]), np.array([load]), np.array([1.0]))[0])
    assert found == pytest.approx(exact, rel=1e-9 if places == 1 else 0.2)


def test_a_full_house_waits_without_end_and_an_empty_one_not_at_all() -> None:
    found = place_wait_s(np.array([4.0, 4.0]), np.array([1.0, 0.0]), np.array([1.0, 1.0]))
    assert list(found) == [np.inf, 0.0]


@pytest.mark.parametrize("phases", [("prefill", "decode"), ("serve",)])
def test_a_plan_of_the_whole_service_has_eq_11(phases: tuple[PhaseName, ...]) -> None:
    result = planned(phases=phases, workload=workload(requests_per_s=20.0, slo=FREE))
    first, last = (result.plan.phases[name].predicted for name in (phases[0], phases[-1]))
    lengths = result.settings[phases[0]].lengths
    waits_s = 0.0 if len(phases) == 1 else last.queueing_s
    expected = throughput(lengths.prompt, lengths.output, waits_s, first.ttft_s, last.tpot_s)
    assert result.plan.request_tokens_per_s == pytest.approx(float(expected))
    assert planned().plan.request_tokens_per_s is None
