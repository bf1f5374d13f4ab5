"""Rates, promises that cannot be kept, memory that is missing, mistakes: a right answer or the nearest one."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.planner.candidates import Pins
from antiphon.planner.explain import NoPlan, account, total_weight_bytes
from antiphon.planner.predict import phase_plan
from antiphon.planner.search import evaluate_phase
from antiphon.planner.setting import SearchLimits, quantile
from antiphon.planner.step_times import step_times
from antiphon.specs.cluster import EfficiencySpec
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import LAYOUTS, Collectives
from antiphon.specs.workload import LengthSpec, SloSpec
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


def test_a_rate_takes_as_few_devices_as_it_needs() -> None:
    small = planned(workload=workload(requests_per_s=1.0)).plan.phases["decode"]
    large = planned(workload=workload(requests_per_s=300.0)).plan.phases["decode"]
    used = [sum(use.num_devices for use in phase.devices) for phase in (small, large)]
    assert used[0] < used[1]
    output = workload().output_tokens.mean
    assert small.predicted.tokens_per_s == pytest.approx(output)
    assert large.predicted.tokens_per_s == pytest.approx(300 * output)
    in_flight = 300 * output * (large.predicted.tpot_s or 0)
    assert in_flight <= large.batch * large.num_instances


def test_prefill_waits_for_its_queue() -> None:
    requests = workload(requests_per_s=20.0, slo=SloSpec(ttft_s=0.5))
    phase = planned(workload=requests, phases=("prefill",)).plan.phases["prefill"]
    assert 0 < (phase.predicted.queueing_s or 0) < (phase.predicted.ttft_s or 0) <= 0.5
    assert phase.predicted.tokens_per_s == pytest.approx(20 * requests.input_tokens.mean)


def test_both_pools_keep_each_other_busy() -> None:
    machines = cluster(group(num_nodes=6))
    result = planned(cluster=machines, phases=PHASES)
    check_counts(result, machines, 8)
    lengths = workload()
    rates = [
        result.plan.phases["prefill"].predicted.tokens_per_s / lengths.input_tokens.mean,
        result.plan.phases["decode"].predicted.tokens_per_s / lengths.output_tokens.mean,
    ]
    assert min(rates) / max(rates) > 0.8
    assert "requests/s" in result.plan.phases["prefill"].notes[0]


def test_the_transfer_of_the_cache_counts_in_the_time_to_the_first_token() -> None:
    alone = planned(phases=("prefill",), layouts=("tp_pp",)).settings["prefill"]
    both = planned(phases=PHASES, layouts=("tp_pp",)).settings["prefill"]
    assert (alone.transfers_kv, both.transfers_kv) == (False, True)
    times = [evaluate_phase(where, ("tp_pp",)).outcome.ttft_s.min() for where in (alone, both)]
    assert times[1] > times[0]


def test_the_nearest_promise_is_offered_and_can_be_kept() -> None:
    with pytest.raises(
        NoPlan, match=r"no layout keeps 10 µs per output token .* nearest feasible promise is"
    ) as raised:
        planned(workload=workload(slo=SloSpec(tpot_s=1e-5)))
    nearest = raised.value.nearest["tpot_s"]
    assert planned(workload=workload(slo=SloSpec(tpot_s=nearest))).plan.phases["decode"].predicted.tpot_s <= nearest
    with pytest.raises(NoPlan):
        planned(workload=workload(slo=SloSpec(tpot_s=nearest * 0.98)))


def test_the_nearest_first_token_is_offered_and_can_be_kept() -> None:
    with pytest.raises(NoPlan, match="to the first token") as raised:
        planned(workload=workload(slo=SloSpec(ttft_s=1e-4)), phases=("prefill",))
    nearest = raised.value.nearest["ttft_s"]
    phase = planned(workload=workload(slo=SloSpec(ttft_s=nearest)), phases=("prefill",)).plan.phases["prefill"]
    assert (phase.predicted.ttft_s or 1.0) <= nearest


def test_the_largest_rate_is_offered_and_can_be_kept() -> None:
    with pytest.raises(NoPlan, match="requests/s are too many for small: it takes") as raised:
        planned(workload=workload(requests_per_s=1e5))
    most = raised.value.nearest["requests_per_s"]
    assert planned(workload=workload(requests_per_s=most)).plan.phases["decode"].num_instances >= 1


def test_too_little_memory_says_how_much_is_missing() -> None:
    tiny = cluster(group(device(memory_bytes=10**8), 1, 2))
    with pytest.raises(
        NoPlan, match=r"too small for the weights: they take .* GB are missing: at least \d+ more"
    ) as raised:
        planned(cluster=tiny)
    missing = raised.value.nearest["missing_bytes"]
    more = int(raised.value.nearest["num_devices"])
    assert missing > 1e9
    assert more * 10**8 * 0.9 >= missing + 2 * 10**8 * 0.9 > (more - 1) * 10**8 * 0.9


def test_too_little_memory_names_the_widest_format_that_fits() -> None:
    needed = total_weight_bytes(setting(precision=PrecisionSpec(weights="int8")))
    room = cluster(group(device(memory_bytes=int(needed / 0.9) + 10**6), 1, 1))
    with pytest.raises(NoPlan, match=r"more .*, or --precision weights=int8, whose weights take"):
        planned(cluster=room)
    with pytest.raises(NoPlan, match=r"or fewer weights: even --precision weights=int4 takes"):
        planned(cluster=cluster(group(device(memory_bytes=10**8), 1, 1)))


def test_losers_say_what_beat_them() -> None:
    """On one small machine without NVLink nothing is gained by exchanging rows between processes."""
    machines = cluster(group(device(scale_up_bytes_per_s=1e9, scale_out_bytes_per_s=1e8), 1, 2))
    phase = planned(cluster=machines, workload=workload(slo=SloSpec())).plan.phases["decode"]
    assert phase.layout != "disaggregated"
    loser = next(loser for loser in phase.rejected if loser.layout == "disaggregated")
    assert loser.predicted is not None
    assert loser.predicted.t_c_s > max(loser.predicted.t_a_s, loser.predicted.t_e_s)
    assert re.search("the network sets the pace of a layer", loser.reason)
    alone = cluster(group(num_nodes=1, devices_per_node=1))
    reasons = {loser.layout: loser for loser in planned(cluster=alone).plan.phases["decode"].rejected}
    assert reasons["disaggregated"].predicted is None
    assert "devices are too few" in reasons["disaggregated"].reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phases": ()}, "phases are"),
        ({"layouts": ("pipeline",)}, "layouts are"),
        ({"objective": "per-joy"}, "objective is 'per-joy'"),
        ({"cluster": cluster(group(device(price=None))), "objective": "per-cost"}, "there is no price of one"),
        ({"workload": workload(expert_loads=(0.5, 0.5))}, "expert_loads has 2 shares, the model 8 experts"),
        ({"model": model(moe_layers=(False,) * 8)}, "no MoE layer"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        planned(**changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pins(attention_tp=0), "pins: attention_tp is 0: it must be at least 1"),
        (lambda: Pins(batch=2.5), "pins: batch is 2.5: it must be a valid integer"),  # type: ignore[arg-type]
        (lambda: SearchLimits(max_micro_batches=math.nan), "limits: max_micro_batches is nan"),  # type: ignore[arg-type]
        (lambda: SearchLimits(num_instances=-1), "limits: num_instances is -1: it must be at least 1"),
        (lambda: SearchLimits(extra_slots=()), "limits: extra_slots has no items: it must have at least 1 item"),
        (lambda: SearchLimits(collectives="both"), "limits: collectives is 'both'"),  # type: ignore[arg-type]
        (lambda: replace(setting(), phase="train"), "setting: phase is 'train': it must be 'prefill', 'decode' or"),
        (lambda: quantile(LengthSpec(median=5), 1.0), "percentile is 1.0: it must lie between 0 and 1"),
        (lambda: quantile(LengthSpec(median=5, trace=(5,)), 0.0), "percentile is 0.0: it must lie between 0 and 1"),
    ],
)
def test_a_search_is_described_by_numbers_that_can_be(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()
    assert Pins(attention_tp=np.int64(2)).attention_tp == 2


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[float, float | None]] = []
    result = planned(on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (result.plan.num_candidates, result.plan.num_candidates)
    assert result.tables["decode"].total_considered == result.plan.num_candidates


def test_a_limit_on_requests_in_flight_is_kept() -> None:
    phase = planned(workload=workload(max_batch=5)).plan.phases["decode"]
    assert phase.batch * phase.num_instances <= 5


def test_equal_lengths_need_no_tail() -> None:
    fixed = workload(input_tokens=LengthSpec(median=500), output_tokens=LengthSpec(median=1))
    assert setting(workload=fixed).lengths.context == 500.5
    assert setting(workload=fixed).lengths.context_cv == pytest.approx(0.0, abs=1e-3)


def test_the_account_of_a_token_adds_up_to_the_score() -> None:
    """What sentences about losers rest on: nothing of a token's share of the devices is left out or counted twice."""
    for phase in PHASES:
        where = setting(phase=phase, cluster=two_kinds(), objective="per-cost")
        table = evaluate_phase(where)
        scores = table.score("per-cost")
        for index in range(0, len(table), 17):
            if table.feasible[index]:
                items = account(where, table.one(index), int(table.outcome.num_instances[index]))
                assert min(items.values()) >= 0
                assert sum(items.values()) == pytest.approx(1 / scores[index], rel=1e-6)


@pytest.mark.parametrize("asked", ["fused", "synchronous", "auto"])
@pytest.mark.parametrize("round_s", [0.0, 1.0])
def test_a_plan_says_which_form_of_the_exchange_it_counts_on(asked: Collectives, round_s: float) -> None:
    """Two nodes of four devices: only what goes between nodes and is split inside one too has two levels to overlap."""
    calls = replace(cluster(), efficiency=EfficiencySpec(collective_s=round_s, exchange_s=round_s, round_s=round_s))
    here = setting(cluster=calls, limits=SearchLimits(collectives=asked), workload=workload(slo=SloSpec()))
    table = evaluate_phase(here, ("hybrid", "dp_ep"))
    forms = {}
    for index in range(len(table.candidates.layout)):
        phase = phase_plan(here, table, index)
        sizes = phase.parallel
        forms[sizes.attention_tp, sizes.expert_tp, sizes.attention_dp * sizes.attention_tp] = phase.collectives
    faster = "synchronous" if round_s else "fused"
    named = faster if asked == "auto" else asked
    assert [forms[2, tp, 8] for tp in (1, 2, 4, 8)] == ["auto", named, named, "auto"]
    assert {form for (_, _, num_devices), form in forms.items() if num_devices <= 4} == {"auto"}


@pytest.mark.parametrize(
    ("kind", "round_s", "asked", "told"),
    [("cpu", 0.0, "auto", 1), ("gpu", 0.0, "auto", 0), ("cpu", 1e-3, "auto", 0), ("cpu", 0.0, "fused", 0)],
)
def test_a_form_that_was_chosen_without_a_measurement_is_said_once(
    kind: str, round_s: float, asked: Collectives, told: int
) -> None:
    core = device(kind=kind, scale_up_domain=2)
    nodes = replace(cluster(group(core)), efficiency=EfficiencySpec(round_s=round_s))
    limits = SearchLimits(collectives=asked, pins=Pins(attention_tp=2, expert_tp=2, pp=1))
    found = planned(cluster=nodes, limits=limits, layouts=("hybrid",), workload=workload(slo=SloSpec()))
    notes = found.plan.phases["decode"].notes
    assert sum("antiphon profile MODEL --folder" in note for note in notes) == told


def test_the_faster_form_is_no_slower_than_either() -> None:
    for phase in ("prefill", "decode"):
        for round_s in (0.0, 1e-5, 1e-3):
            calls = replace(cluster(), efficiency=EfficiencySpec(round_s=round_s))
            exchanged = []
            for form in get_args(Collectives):
                here = setting(phase=phase, cluster=calls, limits=SearchLimits(collectives=form))
                tables = candidates(
                    layout=LAYOUTS.index("hybrid"),
                    attention_tp=2,
                    attention_dp=4,
                    expert_tp=4,
                    expert_ep=2,
                    slots=4,
                    piece_devices=4,
                    batch=np.array([1, 64, 4096]),
                )
                exchanged.append(step_times(here, tables).t_c_s)
            by_form = dict(zip(get_args(Collectives), exchanged, strict=True))
            assert by_form["auto"].tolist() == np.minimum(by_form["fused"], by_form["synchronous"]).tolist()
