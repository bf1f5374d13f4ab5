"""The serving simulation: nothing is lost, same seed same run, closed forms where there are some, failures."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import ResourceError, UserError
from antiphon.planner.mixed_steps import mg1_wait
from antiphon.reproduce.mix import mm1_wait
from antiphon.sim.demand import draw_demand
from antiphon.sim.pools import Kill, ServingOptions, pools_of
from antiphon.sim.serve_log import ServingRun
from antiphon.sim.serve_results import ServingResult, serving_result
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import PhasePlan
from antiphon.specs.workload import LengthSpec, SloSpec
from tests.serve.policy_harness import check_scheduler
from tests.sim.serving_specimens import apart, plan, serve, setting, together, workload


def assert_conserved(run: ServingRun) -> None:
    """Each request ends once with exactly its tokens, and no block stays in use."""
    for record in run.records:
        if record.refused:
            assert record.num_output == 0
            continue
        assert record.num_output == record.output_tokens
        assert record.finished_s is not None
        assert record.first_token_s is not None
        assert record.arrival_s < record.first_token_s <= record.finished_s == record.last_token_s <= run.end_s
    for live in run.pools:
        assert not live.waiting
        for instance in live.instances:
            for scheduler in instance.schedulers.values():
                check_scheduler(scheduler)
                assert not scheduler.requests
                assert scheduler.book.pool.num_used == 0


def result_of(run: ServingRun, slo: SloSpec | None = None) -> ServingResult:
    return serving_result(run, slo or SloSpec())


PHASES: dict[str, dict[str, PhasePlan]] = {
    "apart": {"decode": apart()},
    "apart, two instances": {"decode": apart(instances=2, attention=2, experts=1)},
    "apart, one worker, one micro-batch": {"decode": apart(attention=1, experts=1, m=1, batch=1)},
    "apart, five expert workers": {"decode": apart(experts=5, m=3)},
    "dp_ep": {"decode": together()},
    "stages": {"decode": together(pp=3, dp=2)},
    "replicas": {"decode": together("tp_pp", dp=1, instances=3)},
    "two pools": {"prefill": together(dp=2, batch=512), "decode": apart()},
    "two pools, all apart": {"prefill": apart(attention=2, batch=300), "decode": apart(instances=2)},
    "prefill alone": {"prefill": apart(batch=200, attention=2)},
}


@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("rate", [None, 300.0])
def test_every_request_ends_once_with_its_tokens(name: str, rate: float | None) -> None:
    of = workload(rate=rate)
    run = serve(plan(of, **PHASES[name]), of)
    if name == "prefill alone":
        assert all(record.num_output == 1 and record.finished_s is not None for record in run.records)
    else:
        assert_conserved(run)
    assert len(run.records) == 60
    result = result_of(run)
    assert result.num_finished == 60
    assert result.output_tokens == sum(record.num_output for record in run.records)
    gaps = sum(run.log.gap_counts)
    assert gaps == result.output_tokens - 60
    assert run.log.num_output == result.output_tokens


@settings(max_examples=25, deadline=None)
@given(
    attention=st.integers(1, 4),
    experts=st.integers(1, 5),
    m=st.integers(1, 4),
    batch=st.integers(1, 9),
    seed=st.integers(0, 3),
    rate=st.sampled_from([None, 20.0, 2000.0]),
    sigma=st.sampled_from([0.0, 1.2]),
)
def test_odd_sizes(
    attention: int, experts: int, m: int, batch: int, seed: int, rate: float | None, sigma: float
) -> None:
    of = workload(rate=rate, sigma=sigma)
    made = plan(of, decode=apart(attention=attention, experts=experts, m=m, batch=batch * attention * m))
    assert_conserved(serve(made, of, num_requests=12, options=ServingOptions(seed=seed)))


def test_the_same_seed_gives_the_same_run() -> None:
    of = workload(rate=200.0, skew=1.0)
    made = plan(of, prefill=together(dp=2, batch=512), decode=apart())
    options = ServingOptions(
        seed=7,
        kills=(Kill(pool=1, role="attention", worker=1, time_s=0.05),),
        restart_s=0.1,
        shift_every_s=0.05,
        rebalance_every_s=0.04,
    )
    first, second = (serve(made, of, options=options) for _ in range(2))
    assert result_of(first) == result_of(second)
    other = serve(made, of, options=replace(options, seed=8))
    assert result_of(other).ttft_s != result_of(first).ttft_s


def test_a_step_takes_what_the_planner_says_it_takes() -> None:
    """At the planned batch, equal lengths: the simulated step is the predicted one, for every layout."""
    of = workload(sigma=0.0, output_tokens=LengthSpec(median=200), input_tokens=LengthSpec(median=300))
    # one expert on each of five workers: what is planned for fewer may hold copies, which this placement has not
    phases = (
        apart(experts=5, batch=600),
        apart(attention=1, experts=5, m=3, batch=90),
        together(batch=300),
        together(pp=2),
    )
    for phase in phases:
        made = plan(of, decode=phase)
        run = serve(made, of, num_requests=phase.batch, prefill="elsewhere")
        assert_conserved(run)
        predicted = made.phases["decode"].predicted
        (pool,) = result_of(run).pools
        assert pool.batch == pytest.approx(phase.batch)
        assert pool.step_s == pytest.approx(predicted.tpot_s, rel=0.03)
        assert pool.t_a_s == pytest.approx(predicted.t_a_s, rel=0.03)
        assert pool.t_e_s == pytest.approx(predicted.t_e_s, rel=0.03)
        assert pool.t_c_s == pytest.approx(predicted.t_c_s, rel=0.03)
        assert pool.predicted_step_at_batch_s == pytest.approx(predicted.tpot_s)


def test_with_spread_lengths_it_is_still_close() -> None:
    """The promise of the issue: a run without failures is within a fifth of the predicted time per token."""
    of = workload(sigma=0.8, output_tokens=LengthSpec(median=120, sigma=0.5))
    made = plan(of, decode=apart(batch=96))
    run = serve(made, of, num_requests=500, prefill="elsewhere")
    tpot_s = made.phases["decode"].predicted.tpot_s
    assert result_of(run).tpot_s["p50"] == pytest.approx(tpot_s, rel=0.2)


def test_one_server_waits_as_queueing_theory_says() -> None:
    """Batch 1, exponential and constant output lengths: M/M/1 and M/D/1."""
    phase = apart(attention=1, experts=1, m=1, batch=1)
    random = np.random.default_rng(1)
    num, mean = 2000, 12
    lengths = np.maximum(np.rint(random.exponential(mean, num)), 1).astype(int)
    for outputs, wait in ((lengths, mm1_wait), (np.full(num, mean), None)):
        trace = tuple(int(length) for length in outputs)
        of = workload(
            input_tokens=LengthSpec(median=1, trace=(1,) * num), output_tokens=LengthSpec(median=1, trace=trace)
        )
        made = plan(of, decode=phase)
        alone = serve(made, of, num_requests=1, prefill="elsewhere")
        step_s = alone.end_s / alone.records[0].output_tokens
        mean_s = step_s * float(np.mean(outputs))
        rate = 0.6 / mean_s
        run = serve(made, of, demand=draw_demand(of, rate=rate), prefill="elsewhere")
        assert_conserved(run)
        waits = [(record.ttft_s or 0.0) - step_s for record in run.records]
        expected = wait(rate, 1 / mean_s) if wait else mg1_wait(rate, mean_s, mean_s**2)
        assert float(np.mean(waits)) == pytest.approx(float(expected), rel=0.2)


def test_a_higher_rate_never_answers_sooner() -> None:
    of = workload(sigma=0.8)
    made = plan(of, decode=apart(batch=12))
    means = []
    for rate in (20.0, 200.0, 1000.0, 5000.0):
        per_seed = [
            result_of(serve(made, of, demand=draw_demand(of, rate=rate, num_requests=150, seed=seed))).ttft_s["mean"]
            for seed in range(3)
        ]
        means.append(float(np.mean(per_seed)))
    assert all(later >= earlier * 0.98 for earlier, later in pairwise(means))
    assert means[-1] > 2 * means[0]


KILLS = [
    ("decode", "attention", 0, 0),
    ("decode", "attention", 2, 0),
    ("decode", "experts", 1, 0),
    ("two pools", "attention", 1, 0),
    ("two pools", "attention", 1, 1),
    ("two pools", "experts", 0, 1),
    ("colocated", "attention", 1, 0),
    ("elsewhere", "attention", 0, 0),
]


@pytest.mark.parametrize(("kind", "role", "worker", "pool"), KILLS)
@pytest.mark.parametrize("when", [0.0, 0.5, 0.9])
def test_failures_lose_no_request(kind: str, role: str, worker: int, pool: int, when: float) -> None:
    of = workload(rate=400.0, output_tokens=LengthSpec(median=60))
    phases = {"two pools": PHASES["two pools"], "colocated": {"decode": together()}}.get(kind, {"decode": apart()})
    made = plan(of, **phases)
    prefill = "elsewhere" if kind == "elsewhere" else "mixed"
    quiet = serve(made, of, prefill=prefill)
    kill = Kill(pool=pool, role=role, worker=worker, time_s=when * quiet.end_s)  # type: ignore[arg-type]
    run = serve(made, of, prefill=prefill, options=ServingOptions(kills=(kill,), restart_s=0.2))
    assert_conserved(run)
    assert run.end_s >= quiet.end_s * 0.98
    (failure,) = run.log.failures
    assert failure["until_s"] == pytest.approx(kill.time_s + 0.2)
    if role == "attention" and when == 0.5 and pool + 1 == len(phases):
        assert failure["num_moved"] > 0
        assert sum(record.num_losses for record in run.records) == failure["num_moved"]
        computed, quietly = (sum(live.totals.num_rows for live in found.pools) for found in (run, quiet))
        assert computed > quietly or kind == "elsewhere"


@pytest.mark.parametrize("name", ["two pools", "two pools, all apart"])
def test_pools_hand_over_by_the_engines_protocol(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts of more than a block arrive, keys and values leave while the prompt is computed, and prefill workers
    that die cost hand-overs, not requests."""
    of = workload(input_tokens=LengthSpec(median=600, sigma=0.3), output_tokens=LengthSpec(median=30))
    made = plan(of, **PHASES[name])
    roomy = serve(made, of).handovers
    assert roomy is not None
    assert roomy.exposed_s == 0  # slots hold what is left at the end of a step
    monkeypatch.setattr("antiphon.sim.pools.SLOTS", 0)
    quiet = serve(made, of)
    counts = quiet.handovers
    assert counts is not None
    assert counts.num_done == counts.num_begun == 60
    assert counts.num_tokens == sum(record.input_tokens for record in quiet.records)
    assert counts.num_failed == counts.num_recomputed == 0
    at_end = serve(made, of, options=ServingOptions(hand_over="end"))
    assert_conserved(at_end)
    assert at_end.handovers is not None
    assert 0 < counts.exposed_s < at_end.handovers.exposed_s
    kills = tuple(Kill(pool=0, role="attention", worker=0, time_s=share * quiet.end_s) for share in (0.01, 0.1, 0.2))
    run = serve(made, of, options=ServingOptions(kills=kills, restart_s=0.05 * quiet.end_s))
    assert_conserved(run)
    assert run.handovers is not None
    assert run.handovers.num_failed > 0
    assert sum(record.num_losses for record in run.records) > 0


def test_without_prefill_workers_decode_workers_compute_prompts() -> None:
    of = workload(rate=400.0)
    made = plan(of, prefill=together("tp_pp", dp=1), decode=apart())
    kill = Kill(pool=0, role="attention", worker=0, time_s=0.01)
    run = serve(made, of, options=ServingOptions(kills=(kill,), restart_s=1000.0))
    assert_conserved(run)
    assert run.handovers is not None
    assert run.end_s < 1000
    (prefill, decode) = run.pools
    assert decode.totals.num_rows > sum(record.output_tokens for record in run.records)
    assert not prefill.waiting


def test_the_last_worker_dies_and_everybody_waits_for_it() -> None:
    of = workload()
    made = plan(of, decode=apart(attention=1, batch=64))
    kills = (
        Kill(pool=0, role="attention", worker=0, time_s=0.002),
        Kill(pool=0, role="attention", worker=0, time_s=0.3),
    )
    run = serve(made, of, options=ServingOptions(kills=kills, restart_s=5.0))
    assert_conserved(run)
    assert run.end_s > 5.3
    assert all((record.finished_s or 0.0) > 5.3 for record in run.records)


def test_experts_down_is_a_pause_and_costs_no_tokens() -> None:
    of = workload(sigma=0.0)
    made = plan(of, decode=apart(batch=60))
    quiet = serve(made, of)
    kill = Kill(pool=0, role="experts", worker=0, time_s=quiet.end_s / 2)
    run = serve(made, of, options=ServingOptions(kills=(kill,), restart_s=1.0))
    step_s = max(step.end_s - step.start_s for *_, step in serve(made, of, record_steps=True).log.steps)
    assert quiet.end_s + 1.0 <= run.end_s <= quiet.end_s + 1.0 + step_s * 1.001
    assert sum(record.num_losses for record in run.records) == 0


def test_moving_experts_helps_where_popularity_shifts() -> None:
    """Two workers, five experts: balanced anew, the busiest worker has less to do."""
    of = workload(skew=1.5, output_tokens=LengthSpec(median=150))
    made = plan(of, decode=apart(experts=2, batch=48))
    still = serve(made, of, num_requests=150, options=ServingOptions(shift_every_s=0.2))
    moving = serve(made, of, num_requests=150, options=ServingOptions(shift_every_s=0.2, rebalance_every_s=0.05))
    assert_conserved(moving)
    assert moving.log.replacements
    for replacement in moving.log.replacements:
        move = replacement["move"]
        assert move["busiest_after"] < move["busiest_before"]
        assert (move["num_moved"] > 0) == (move["pause_s"] > 0), "other shares of copies that are there need no move"
    assert any(replacement["move"]["num_moved"] > 0 for replacement in moving.log.replacements)
    balanced = [result_of(run).pools[0].expert_balancedness for run in (still, moving)]
    assert balanced[0] < balanced[1] <= 1


def test_skew_costs_time() -> None:
    uniform, skewed = workload(), workload(skew=1.5)
    phase = apart(experts=5, batch=300)
    even, uneven = (serve(plan(of, decode=phase), of, num_requests=300) for of in (uniform, skewed))
    assert result_of(uneven).pools[0].t_e_s > result_of(even).pools[0].t_e_s
    assert result_of(uneven).pools[0].expert_balancedness < 0.7


def test_a_shared_prefix_is_found_by_the_engines_cache() -> None:
    of = workload(rate=50.0, input_tokens=LengthSpec(median=1000))
    made = plan(of, decode=apart(batch=48))
    without, with_prefix = (serve(made, of, options=ServingOptions(shared_prefix_tokens=num)) for num in (0, 960))
    assert result_of(without).pools[0].prefix_hit_ratio == 0
    assert result_of(with_prefix).pools[0].prefix_hit_ratio > 0.8
    assert result_of(with_prefix).ttft_s["mean"] < result_of(without).ttft_s["mean"]


def test_requests_at_once_are_limited_by_the_workload() -> None:
    of = workload(max_batch=7)
    run = serve(plan(of, decode=apart(batch=48)), of)
    assert_conserved(run)
    assert max(sample.pools[0].running + sample.pools[0].waiting for sample in run.log.samples) <= 7


def test_what_the_engine_would_refuse_is_refused() -> None:
    of = workload(input_tokens=LengthSpec(median=60, trace=(60, 9000, 60)), output_tokens=LengthSpec(median=5))
    run = serve(plan(of, decode=apart()), of, num_requests=3)
    assert_conserved(run)
    assert [bool(record.refused) for record in run.records] == [False, True, False]
    result = result_of(run)
    assert result.num_refused == 1
    assert result.first_refusal == (
        "prompt (9000) plus max_tokens (5) is 9005 tokens, above the context length of 8192: "
        "shorten the prompt or lower max_tokens"
    )


def test_little_memory_preempts_and_still_serves_all() -> None:
    of = workload(output_tokens=LengthSpec(median=120))
    made = plan(of, decode=apart(attention=1, batch=40))
    demand = draw_demand(of, num_requests=40)
    (pool,) = pools_of(made, setting(of), demand)
    small = replace(pool, config=replace(pool.config, num_blocks=120, watermark_blocks=2))
    run = simulate_serving([small], demand, ServingOptions())
    assert_conserved(run)
    assert result_of(run).pools[0].num_preemptions > 0


def test_promises() -> None:
    of = workload(rate=100.0)
    run = serve(plan(of, decode=apart()), of)
    free, loose, tight = (result_of(run, SloSpec(tpot_s=tpot)) for tpot in (None, 1.0, 1e-6))
    assert free.slo_kept_ratio == loose.slo_kept_ratio == 1
    assert loose.goodput_requests_per_s == pytest.approx(loose.requests_per_s)
    assert tight.slo_kept_ratio < 0.1
    middle = result_of(run, SloSpec(ttft_s=free.ttft_s["p50"]))
    assert 0.45 <= middle.slo_kept_ratio <= 0.55
    assert middle.ttft_at_percentile_s == free.ttft_s["p50"]


def test_wrong_questions() -> None:
    of = workload()
    both = plan(of, **PHASES["two pools"])
    demand = draw_demand(of, num_requests=3)
    with pytest.raises(UserError, match=r"prefill elsewhere: the plan has a prefill phase of its own"):
        pools_of(both, setting(of), demand, prefill="elsewhere")
    wrong = replace(both, phases={"decode": replace(apart(), placement=apart().placement[:3])})
    with pytest.raises(UserError, match=r"the plan places 3 experts, the model has 5: give the model"):
        pools_of(wrong, setting(of), demand)
    tiny = replace(load := setting(of).cluster.groups[0], device=replace(load.device, memory_bytes=10**8))
    starved = replace(setting(of), cluster=replace(setting(of).cluster, groups=(tiny,)))
    with pytest.raises(ResourceError, match=r"a H20 lacks [0-9.]+ GiB for weights in bfloat16"):
        pools_of(both, starved, demand)
    assert pools_of(both, replace(setting(of), precision=PrecisionSpec(weights="fp8")), demand)
    for options, message in (
        ({"restart_s": -1.0}, "restart_s is -1.0: it must be at least 0"),
        ({"rebalance_every_s": 0.0}, "rebalance_every_s is 0.0: it must be at least 0.001"),
        ({"shared_prefix_tokens": -1}, "shared_prefix_tokens is -1: it must be at least 0"),
        ({"shift_every_s": math.nan}, "shift_every_s is nan: it must be a finite number"),
        ({"hand_over": "soon"}, "hand_over is 'soon': it must be 'layers' or 'end'"),
    ):
        with pytest.raises(UserError, match=message):
            ServingOptions(**options)  # type: ignore[arg-type]
    late = replace(demand, arrivals_s=np.array([0.0, 1.0, 1e9]))
    with pytest.raises(UserError, match=r"something every 1 s while requests come for 1e\+09 s: at most 10,000,000"):
        simulate_serving(pools_of(both, setting(of), late), late, ServingOptions(shift_every_s=1.0))
