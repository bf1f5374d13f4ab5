"""Bands: their constants are those of the published tables, and they hold what was measured; ties go to the simple."""

import math
from dataclasses import replace

import numpy as np
import pytest

from antiphon.planner import predict
from antiphon.planner.search import evaluate_phase, make_plan, settings_of
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import step_times
from antiphon.reproduce.published import MeasuredKind, compared, deployments, measured, spread_of_errors
from antiphon.specs.cluster import ClusterSpec, NodeGroup, load_cluster, load_device
from antiphon.specs.workload import LengthSpec, WorkloadSpec
from tests.cost.specimens import deepseek_v3


def setting_of(**changes: float) -> Setting:
    """DeepSeek-V3 in decode on 4 nodes of H200."""
    device = load_device("H200")
    group = NodeGroup(
        device=device,
        num_nodes=4,
        devices_per_node=8,
        scale_up_domain=8,
        scale_up_bytes_per_s=device.scale_up_bytes_per_s,
        node_scale_out_bytes_per_s=8 * device.scale_out_bytes_per_s,
    )
    workload = WorkloadSpec(input_tokens=LengthSpec(median=1000), output_tokens=LengthSpec(median=200), max_batch=4096)
    cluster = ClusterSpec(name="four nodes", groups=(replace(group, **changes),))
    return settings_of(deepseek_v3(), cluster, workload)["decode"]


def spread_of(kind: MeasuredKind) -> float:
    return spread_of_errors([row for table in measured() if table.kind == kind for row in compared(table)])


def test_constants_are_those_of_the_published_tables() -> None:
    assert pytest.approx(spread_of("products"), abs=0.005) == predict.PRODUCTS_SPREAD
    attention = max(spread_of("absorbed attention"), spread_of("whole attention"))
    assert pytest.approx(attention, abs=0.005) == predict.ATTENTION_SPREAD
    exchange = max(spread_of("rows sent direct"), spread_of("rows sent once per node"))
    assert pytest.approx(exchange, abs=0.005) == predict.EXCHANGE_SPREAD
    errors = [math.log(ours / one.theirs) for one, ours in deployments() if not one.id.startswith("sglang")]
    spread = math.sqrt(np.mean(np.square(errors)))  # of those that chose nothing, which are few
    assert spread <= predict.WHOLE_SPREAD <= 1.3 * spread


def test_bands_hold_what_was_measured_and_left_out() -> None:
    """Each deployment in the band that the others give: at least four of five."""
    rows = [(one, math.log(ours / one.theirs)) for one, ours in deployments()]
    inside = 0
    for left_out, error in rows:
        others = [other for one, other in rows if one is not left_out]
        whole = math.sqrt(sum(other**2 for other in others) / len(others))
        inside += abs(error) <= predict.NORMAL_80_PERCENT * math.hypot(predict.PRODUCTS_SPREAD / 2, whole)
    assert inside >= 0.8 * len(rows)


def test_overlap_is_never_slower_than_serial_at_equal_batch() -> None:
    overlapped = setting_of()
    serial = replace(overlapped, limits=replace(overlapped.limits, overlapped=False))
    candidates = evaluate_phase(serial, ("dp_ep", "hybrid", "tp_pp")).candidates
    for batch in (1, 7, 64, 300):
        at_batch = candidates.having(batch=np.full(len(candidates), batch))
        with_it, without = (step_times(each, at_batch).step_s for each in (overlapped, serial))
        assert np.all(with_it <= without * (1 + 1e-12))


def test_a_slower_wire_never_makes_wide_expert_parallelism_better() -> None:
    slow, fast = setting_of(node_scale_out_bytes_per_s=1e11), setting_of(node_scale_out_bytes_per_s=4e11)
    candidates = evaluate_phase(fast, ("dp_ep",)).candidates
    wide = candidates.take(candidates.expert_ep == 32)
    wide = wide.having(batch=np.full(len(wide), 64))
    assert len(wide)
    assert np.all(step_times(slow, wide).step_s >= step_times(fast, wide).step_s)


@pytest.mark.parametrize("skew", [0.0, 0.6])
def test_more_redundancy_is_never_more_imbalance(skew: float) -> None:
    setting = setting_of()
    setting = replace(setting, workload=replace(setting.workload, expert_skew=skew))
    for num_workers in (3, 24, 32, 72, 144):
        least = -(-256 // num_workers)
        slots = np.arange(least, min(least + 3, 257))
        shares = setting.busiest_each(np.full(slots.size, num_workers), slots)
        assert np.all(np.diff(shares) <= 1e-12)
        assert np.all(shares >= 1 / num_workers - 1e-12)


def test_copies_level_out_what_does_not_divide() -> None:
    """256 equal experts on 144 workers: two on some, one on others; three slots each suffice for an even load."""
    shares = setting_of().busiest_each(np.array([144, 144]), np.array([2, 3]))
    assert shares[0] <= 2 / 256
    assert shares[1] <= 1.03 / 144


def test_a_tie_goes_to_the_simpler_layout_and_says_so() -> None:
    setting = setting_of()
    table = evaluate_phase(setting, ("dp_ep", "hybrid"))
    best = table.best("per-gpu")
    assert best is not None
    chosen, said = predict.simplest_of_ties(setting, table, best)
    scores = table.score("per-gpu")
    assert scores[chosen] <= scores[best]
    assert (said == "") == (chosen == best)
    if said:
        assert said.startswith(("a tie", "equal"))
        assert table.candidates.layout_of(chosen) == "dp_ep"


def test_predictions_carry_their_band() -> None:
    workload = WorkloadSpec(input_tokens=LengthSpec(median=500), output_tokens=LengthSpec(median=100))
    settings = settings_of(deepseek_v3(), load_cluster("h800-h20-64"), workload)
    plan = make_plan(settings, model_name="v3", layouts=("dp_ep",)).plan
    band = plan.phases["decode"].predicted.band
    assert band is not None
    assert 0.15 < band < 0.3
