"""Cached prefixes and proposed tokens: what they save, and what they cost."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.planner.candidate_table import Outcome
from antiphon.planner.outcome import outcome_at
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import Setting
from antiphon.planner.worker_times import expert_times
from antiphon.specs.cluster import load_cluster
from antiphon.specs.plan import PhaseName
from antiphon.specs.workload import LengthSpec, WorkloadSpec, workload_from_json, workload_to_json
from tests.cost.specimens import mixtral_8x22b
from tests.planner.serving_specimens import candidates, planned, setting, workload

PLAIN = WorkloadSpec(input_tokens=LengthSpec(median=2000), output_tokens=LengthSpec(median=200))


def setting_of(workload: WorkloadSpec, phase: PhaseName) -> Setting:
    return settings_of(mixtral_8x22b(), load_cluster("one-h100-server"), workload, phases=(phase,))[phase]


def at(workload: WorkloadSpec, phase: PhaseName, batch: int) -> Outcome:
    setting = setting_of(workload, phase)
    one = evaluate_phase(setting_of(PLAIN, phase), ("tp_pp",)).candidates.take(np.array([0]))
    return outcome_at(setting, one.having(batch=np.array([batch])), np.array([1]))


def test_tokens_of_a_step() -> None:
    assert PLAIN.tokens_per_step == 1
    drafted = replace(PLAIN, draft_tokens=2, accept_rate=0.5)
    assert (drafted.rows_per_step, drafted.tokens_per_step) == (3, 1.75)


def test_a_cached_prefix_saves_its_tokens_and_not_attention_over_them() -> None:
    plain, cached = (at(replace(PLAIN, prefix_hit=hit), "prefill", 8000) for hit in (0.0, 0.5))
    assert cached.step_s[0] > plain.step_s[0], "a pass of as many new tokens sees more tokens before them"
    assert plain.capacity[0] < cached.capacity[0] < 2 * plain.capacity[0]


def test_drafts_pay_where_steps_wait_for_weights_and_cost_where_they_compute() -> None:
    def gain(batch: int, accept_rate: float) -> float:
        drafted = at(replace(PLAIN, draft_tokens=1, accept_rate=accept_rate), "decode", batch)
        return float(drafted.capacity[0] / at(PLAIN, "decode", batch).capacity[0])

    assert 1.3 < gain(4, 0.9) < 1.9, "twice the rows touch more experts"
    assert gain(2000, 0.1) < 1
    assert gain(64, 0.9) > gain(64, 0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefix_hit": 1.0}, "prefix_hit is 1.0"),
        ({"draft_tokens": 1}, "give both above 0"),
        ({"accept_rate": 0.5}, "give both above 0"),
        ({"draft_tokens": 1, "accept_rate": 1.5}, "accept_rate is 1.5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(PLAIN, **changes)


def test_drafts_are_accepted_by_position() -> None:
    alike = workload(draft_tokens=2, accept_rate=0.8)
    by_position = workload(draft_tokens=2, accept_rates=(0.8, 0.5))
    assert alike.tokens_per_step == pytest.approx(1 + 0.8 + 0.64)
    assert by_position.tokens_per_step == pytest.approx(1 + 0.8 + 0.4)
    assert workload_from_json(workload_to_json(by_position), "here") == by_position
    rates = [planned(workload=one).plan.phases["decode"].predicted.tokens_per_s for one in (alike, by_position)]
    assert rates[1] < rates[0]


@pytest.mark.parametrize("more", [{"draft_tokens": 1}, {"draft_tokens": 2, "accept_rate": 0.5}])
def test_rates_by_position_are_one_for_each_draft(more: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"accept_rates has 2 values, draft_tokens is .* give one for each"):
        workload(accept_rates=(0.8, 0.5), **more)


def test_verifying_drafts_touches_more_experts() -> None:
    """A few sequences with drafts read the weights of more experts than without."""
    one = candidates(attention_tp=1, attention_dp=1, expert_ep=1, slots=8, batch=np.array([1]))
    drafts = (workload(), workload(draft_tokens=2, accept_rate=0.5))
    plain, drafted = (expert_times(setting(workload=load), one, 0).memory_s for load in drafts)
    assert drafted > 1.5 * plain
