"""Servers that decode and compute prompts on the same devices: their steps, the search for them, pools beside them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import ResourceError, UserError
from antiphon.cost.layers import StepRows, attended
from antiphon.models.planned import load_planned_model
from antiphon.planner.candidates import Candidates, candidates_of
from antiphon.planner.mixed_steps import mixed_step, with_prompts
from antiphon.planner.predict import predict
from antiphon.planner.search import PlanResult, SearchLimits, evaluate_phase, make_plan, settings_of
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import step_times
from antiphon.sim.demand import draw_demand
from antiphon.sim.pools import pools_of
from antiphon.sim.promise import checked, kept_promise
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import ClusterSpec, cluster_from_json
from antiphon.specs.plan import LAYOUTS, PhaseName, plan_from_json, plan_to_json
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec

SERVER: ClusterSpec = cluster_from_json({"name": "two", "groups": [{"device": "H100", "num_nodes": 2}]}, "two", Path())
REQUESTS = WorkloadSpec(
    name="requests",
    requests_per_s=8.0,
    input_tokens=LengthSpec(median=300, sigma=0.6),
    output_tokens=LengthSpec(median=80, sigma=0.5),
    slo=SloSpec(ttft_s=2.0, tpot_s=0.05, percentile=0.9),
)
MODEL = load_planned_model(shipped_file("model", "qwen3-30b-a3b"), ()).spec
SERVE: tuple[PhaseName, ...] = ("prefill", "decode", "serve")


def setting_of(workload: WorkloadSpec = REQUESTS, phase: PhaseName = "serve") -> Setting:
    return settings_of(MODEL, SERVER, workload, phases=(phase,), limits=SearchLimits(max_micro_batches=2))[phase]


def server(*, tp: int, dp: int = 1, ep: int = 1, batch: int = 32) -> Candidates:
    return candidates_of(
        layout=LAYOUTS.index("dp_ep"),
        attention_kind=0,
        expert_kind=0,
        attention_tp=tp,
        attention_dp=dp,
        expert_tp=tp * dp // ep,
        expert_ep=ep,
        slots=-(-MODEL.router.num_experts // ep),
        pp=1,
        micro_batches=1,
        piece_devices=tp * dp,
        batch=batch,
        step_tokens=2048,
    )


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return make_plan(settings_of(MODEL, SERVER, REQUESTS, phases=SERVE), model_name="m")


def test_a_step_without_prompts_is_one_of_decode() -> None:
    setting = setting_of()

    def time_of(**prompts: float) -> float:
        rows = StepRows(decoding=16.0, context=500.0, **prompts)
        return float(attended(MODEL, setting.roofs[0], rows, 2.0, setting.precision).total_s)

    assert time_of(prompt_tokens=0.0, prompt=300.0) == time_of()
    assert time_of(prompt_tokens=400.0, prompt=300.0) > time_of()


def test_all_ranks_wait_for_the_one_that_has_a_prompt() -> None:
    setting = setting_of()
    share, one = with_prompts(setting, server(tp=1, dp=8, ep=8, batch=2))
    assert 0 < share[0] < 1, "few sequences: not every step has a prompt"
    assert one.longest_chunk[0] > 2 * one.chunk[0]
    _, alone = with_prompts(setting, server(tp=8, batch=16))
    assert alone.longest_chunk[0] == alone.chunk[0], "of one worker the mean is the longest"


def test_prompts_take_time_from_tokens() -> None:
    one = server(tp=4, batch=64)
    longer = replace(REQUESTS, input_tokens=LengthSpec(median=900, sigma=0.6))
    times = [mixed_step(setting_of(workload), one) for workload in (REQUESTS, longer)]
    assert times[0].plain_s[0] < times[0].times.step_s[0] < times[1].times.step_s[0]
    assert times[0].fed[0] < times[1].fed[0], "a step's room for prompts is used more"


def test_a_server_serves_no_more_than_it_decodes() -> None:
    free = replace(REQUESTS, requests_per_s=None)
    best = {}
    for phase in ("decode", "serve"):
        table = evaluate_phase(setting_of(free, phase), ("tp_pp", "dp_ep"))
        index = table.best("per-gpu")
        assert index is not None
        best[phase] = float(table.per_gpu[index])
    assert 0.1 * best["decode"] < best["serve"] < best["decode"]


def test_the_plan_alone_says_what_the_search_said(found: PlanResult) -> None:
    plan = plan_from_json(plan_to_json(found.plan))
    assert plan == found.plan
    for name, phase in plan.phases.items():
        again = predict(found.settings[name], phase)
        assert again.tokens_per_s == pytest.approx(phase.predicted.tokens_per_s)
        assert again.ttft_s == pytest.approx(phase.predicted.ttft_s, nan_ok=True)
        assert again.tpot_s == pytest.approx(phase.predicted.tpot_s)


def test_servers_and_pools_are_compared(found: PlanResult) -> None:
    assert set(found.plan.phases) in ({"serve"}, {"prefill", "decode"})
    notes = next(iter(found.plan.phases.values())).notes
    assert any("would give" in note and "of its requests/s per device" in note for note in notes)
    if "serve" in found.plan.phases:
        phase = found.plan.phases["serve"]
        assert phase.step_tokens is not None
        assert phase.predicted.ttft_s is not None
        assert phase.predicted.ttft_s <= 2.0


def test_the_promise_is_kept_in_simulation_or_not_made(found: PlanResult) -> None:
    name = next(iter(found.plan.phases))
    kept = kept_promise(found.plan, found.settings[name], REQUESTS.slo)
    assert kept.slo_kept_ratio >= 0.85
    flood = replace(REQUESTS, requests_per_s=800.0)
    flooded = replace(found.settings[name], workload=flood)
    assert kept_promise(found.plan, flooded, REQUESTS.slo).slo_kept_ratio < 0.85

    tried: list[WorkloadSpec] = []

    def search(workload: WorkloadSpec) -> PlanResult:
        tried.append(workload)
        return replace(found, settings=dict.fromkeys(found.settings, flooded))

    with pytest.raises(ResourceError, match=r"keeps its promise for \d+% of requests in simulation, not for 90%"):
        checked(search, flood)
    assert len(tried) == 3
    targets = [(one.slo.ttft_s or 0.0, one.slo.tpot_s or 0.0) for one in tried]
    assert targets[0] > targets[1] > targets[2], "each search asks for more than the one that failed"


def test_servers_compute_their_own_prompts(found: PlanResult) -> None:
    phase = replace(next(iter(found.plan.phases.values())), step_tokens=2048)
    plan = replace(found.plan, phases={"serve": phase})
    with pytest.raises(UserError, match="compute the prompts in their own steps"):
        pools_of(plan, setting_of(), draw_demand(REQUESTS, num_requests=3), prefill="elsewhere")


def test_experts_of_one_attention_group_are_summed_not_sent() -> None:
    setting = setting_of(phase="decode")
    summed, slices = (step_times(setting, server(tp=8, ep=ep)).t_c_s[0] for ep in (8, 1))
    assert summed <= slices, "two all-reduces, whole experts or slices"
    own = replace(setting, limits=SearchLimits(servable=True))
    assert step_times(own, server(tp=8, ep=8)).t_c_s[0] != pytest.approx(summed), "this engine sends rows"


def test_more_ranks_than_experts_hold_copies() -> None:
    big = cluster_from_json({"name": "big", "groups": [{"device": "H100", "num_nodes": 20}]}, "big", Path())
    setting = settings_of(MODEL, big, replace(REQUESTS, requests_per_s=None), phases=("decode",))["decode"]
    wide = replace(server(tp=1, dp=160, ep=160, batch=64), piece_devices=np.array([8]))
    busiest = setting.busiest_each(wide.expert_ep, wide.slots)
    assert float(busiest[0]) == pytest.approx(1 / MODEL.router.num_experts, rel=0.3)
    assert np.isfinite(step_times(setting, wide).step_s).all()
