"""The papers' own clusters and models: which plan wins, and where the numbers have to lie."""

import math
from dataclasses import replace

import pytest

from antiphon.models.config import load_model_spec
from antiphon.planner.candidates import Pins
from antiphon.planner.predict import candidate_of
from antiphon.planner.rate_match import pools_fit
from antiphon.planner.search import PlanResult, SearchLimits, evaluate_phase, make_plan, settings_of
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import load_cluster
from antiphon.specs.plan import LAYOUTS, Layout
from antiphon.specs.workload import SloSpec, WorkloadSpec, load_workload

WORKLOAD = "msi-production"


def planned(
    name: str,
    cluster: str,
    workload: str | WorkloadSpec = WORKLOAD,
    layouts: tuple[Layout, ...] = LAYOUTS,
    **options: object,
) -> PlanResult:
    settings = settings_of(
        load_model_spec(shipped_file("model", name)),
        load_cluster(cluster),
        load_workload(workload) if isinstance(workload, str) else workload,
        **options,  # type: ignore[arg-type]
    )
    return make_plan(settings, model_name=name, layouts=layouts)


@pytest.mark.parametrize("name", ["mixtral-8x22b", "dbrx", "scaled-moe"])
def test_disaggregated_plans_on_the_ampere_cluster_are_balanced(name: str) -> None:
    """MegaScale-Infer section 7.2: T_a and T_e nearly equal, communication hidden, 150 ms kept."""
    phase = planned(name, "msi-ampere", layouts=("disaggregated",)).plan.phases["decode"]
    predicted = phase.predicted
    assert (predicted.tpot_s or 1) <= 0.15
    t_a, t_e, t_c = predicted.t_a_s or 0, predicted.t_e_s or 0, predicted.t_c_s or 0
    assert min(t_a, t_e) / max(t_a, t_e) > 0.6
    assert t_c < max(t_a, t_e)
    assert phase.micro_batches >= 2


@pytest.mark.parametrize("name", ["mixtral-8x22b", "dbrx", "scaled-moe"])
def test_h20_for_attention_and_l40s_for_experts_win_by_cost(name: str) -> None:
    """MegaScale-Infer section 7.2, Figure 9: against either kind alone, and against the other way round."""
    result = planned(name, "msi-hetero", layouts=("disaggregated",), objective="per-cost")
    phase = result.plan.phases["decode"]
    assert [(use.role, use.device) for use in phase.devices] == [("attention", "H20"), ("experts", "L40S")]


def dp_scores(name: str, counts: tuple[int, ...], tp: int, batch: int) -> tuple[list[float], list[float]]:
    """(TPOT, tokens/s per device) by number of attention workers, at m = 3 and one batch per worker."""
    model = load_model_spec(shipped_file("model", name))
    steps, scores = [], []
    for count in counts:
        limits = SearchLimits(pins=Pins(attention_dp=count, micro_batches=3, attention_tp=tp, expert_tp=1))
        workload = replace(load_workload("offline"), max_batch=3 * count * batch)
        where = settings_of(model, load_cluster("msi-ampere"), workload, limits=limits)["decode"]
        table = evaluate_phase(where, ("disaggregated",))
        index = table.best("per-gpu", table.candidates.expert_ep == model.router.num_experts)
        assert index is not None
        steps.append(float(table.outcome.tpot_s[index]))
        scores.append(float(table.per_gpu[index]))
    return steps, scores


def test_dbrx_latency_is_flat_then_throughput_peaks_then_falls() -> None:
    """MegaScale-Infer Figure 13: attention is the bottleneck up to DP 4, the two balance near 8, then experts are."""
    counts = (1, 2, 4, 8, 16)
    steps, scores = dp_scores("dbrx", counts, tp=2, batch=160)
    assert steps[2] / steps[0] < 1.25
    assert scores[0] < scores[1] < scores[2] < scores[3]
    assert steps[4] / steps[2] > 1.3
    assert counts[scores.index(max(scores))] in (8, 16)


@pytest.mark.parametrize("name", ["mixtral-8x22b", "dbrx", "scaled-moe"])
def test_two_micro_batches_nearly_double_and_three_add_less(name: str) -> None:
    """MegaScale-Infer Figure 12, at the best plan's degrees and micro-batch."""
    best = planned(name, "msi-ampere", layouts=("disaggregated",)).plan.phases["decode"]
    sizes, rates = best.parallel, []
    each = best.batch // (best.micro_batches * sizes.attention_dp)
    for count in (1, 2, 3):
        pins = Pins(
            micro_batches=count,
            attention_dp=sizes.attention_dp,
            attention_tp=sizes.attention_tp,
            expert_tp=sizes.expert_tp,
            expert_ep=sizes.expert_workers,
        )
        limits = SearchLimits(pins=pins)
        batch = each * count * sizes.attention_dp
        requests = replace(load_workload(WORKLOAD), slo=SloSpec(), max_batch=batch)
        found = planned(name, "msi-ampere", requests, layouts=("disaggregated",), limits=limits)
        phase = found.plan.phases["decode"]
        assert phase.batch == batch
        rates.append(phase.predicted.per_gpu)
    assert 1.6 < rates[1] / rates[0] <= 2.0
    assert 1.0 <= rates[2] / rates[1] < 1.5


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("mixtral-8x22b", "msi-ampere"),
        ("dbrx", "msi-hetero"),
        ("deepseek-r1", "mix-ascend"),
        ("qwen3-235b-a22b", "mix-h20"),
        ("qwen3-235b-a22b", "mix-ascend"),
    ],
)
def test_every_layout_is_chosen_or_explained(name: str, cluster: str) -> None:
    result = planned(name, cluster, "offline")
    phase = result.plan.phases["decode"]
    layouts = [phase.layout, *(loser.layout for loser in phase.rejected)]
    assert sorted(layouts) == ["disaggregated", "dp_ep", "hybrid", "tp_pp"]
    for loser in phase.rejected:
        assert loser.reason
        if loser.predicted is not None:
            gain = loser.predicted.per_gpu / phase.predicted.per_gpu - 1
            bands = [each.band for each in (loser.predicted, phase.predicted) if each.band is not None]
            assert gain <= (math.hypot(*bands) if "a tie" in loser.reason else 1e-6)
    assert pools_fit(load_cluster(cluster), [(candidate_of(result.settings["decode"], phase), 0, phase.num_instances)])


def test_many_candidates_are_looked_at() -> None:
    result = planned("deepseek-v3", "h800-h20-64", "chat", phases=("prefill", "decode"))
    assert result.plan.num_candidates >= 100_000
    used = [use for phase in result.plan.phases.values() for use in phase.devices]
    for kind in ("H800", "H20"):
        assert sum(use.num_devices for use in used if use.device == kind) <= 256


def test_one_server_that_is_too_small_says_how_much_is_missing() -> None:
    with pytest.raises(
        Exception, match=r"too small for the weights: they take 1342 GB.*766.1 GB are missing: at least 11"
    ):
        planned("deepseek-v3", "one-h100-server")
