"""A workload's cached prefixes and accepted proposals in the simulation, held against the planner's formulas."""

import pytest

from antiphon.planner.predict import candidate_of
from antiphon.sim.expert_load import ExpertLoad, Popularity, fractions_of
from antiphon.sim.serve_results import ServingResult, serving_result
from antiphon.sim.step_price import Rows, StepPricer
from antiphon.sim.step_tables import step_tables
from antiphon.specs.plan import PhasePlan
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec
from tests.sim.serving_specimens import apart, plan, serve, setting, together, workload

DRAFTS = {"draft_tokens": 2, "accept_rate": 0.8}
LAYOUTS = {"apart": apart(), "together": together(), "stages": together(pp=3, dp=2)}


def simulated(of: WorkloadSpec, phase: PhasePlan, prefill: str = "mixed") -> ServingResult:
    return serving_result(serve(plan(of, decode=phase), of, prefill=prefill, num_requests=200), SloSpec())


def test_a_workloads_prefixes_are_found() -> None:
    plain, cached = (
        simulated(workload(rate=50.0, input_tokens=LengthSpec(median=1000), prefix_hit=hit), apart())
        for hit in (0.0, 0.6)
    )
    assert plain.pools[0].prefix_hit_ratio == 0
    assert cached.pools[0].prefix_hit_ratio == pytest.approx(0.6, abs=0.05)
    assert cached.ttft_s["mean"] < plain.ttft_s["mean"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_that_propose_tokens_take_what_the_planner_says(layout: str) -> None:
    of = workload(sigma=0.1, input_tokens=LengthSpec(median=500), **DRAFTS)
    found = simulated(of, LAYOUTS[layout], "elsewhere")
    assert found.num_finished == 200
    (pool,) = found.pools
    assert pool.step_s == pytest.approx(pool.predicted_step_at_batch_s, rel=0.05)


def test_pieces_of_prompts_cost_in_full_beside_proposals() -> None:
    def price(of: WorkloadSpec, *batches: Rows) -> float:
        one_setting = setting(of)
        one = candidate_of(one_setting, apart())
        load = ExpertLoad(one_setting, one, fractions_of(apart(), 2), Popularity(one_setting.shares, 0), 0)
        tables = step_tables(one_setting, one, most_rows=2000, most_context=4000)
        return StepPricer(one_setting, one, tables).price({0: list(batches)}, load).duration_s

    decoding, prompt = Rows(8, 8, 4000, 8), Rows(1000, 0, 0, 1, [(1000, 0)])
    both = Rows(1008, 8, 4000, 9, [(1000, 0)])
    assert price(workload(**DRAFTS), prompt) == pytest.approx(price(workload(), prompt), rel=1e-6)
    plain, drafted = (price(workload(**more), decoding) for more in ({}, DRAFTS))
    assert drafted < 0.9 * plain, "few rows wait for weights, which more rows share"
    assert price(workload(**DRAFTS), both) > 0.98 * (price(workload(), both) - plain) + drafted
