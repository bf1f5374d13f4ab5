"""A measured profile takes the roofline's place for the workers that it covers, and for no others."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import AttentionTable, ExpertTable, MachineFacts, MessageTable, Profile
from antiphon.planner.candidates import DP_EP, TP_PP, Candidates
from antiphon.planner.search import evaluate_phase
from antiphon.planner.step_times import step_times
from tests.planner.serving_specimens import candidates, setting

FLAT = Surface((1.0, 100.0), (1.0, 10_000.0), ((3e-3, 3e-3), (3e-3, 3e-3)))
EXPERTS = Surface((1.0, 8.0), (1.0, 1000.0), ((5e-3, 5e-3), (5e-3, 5e-3)))


def profile() -> Profile:
    return Profile(
        command="test",
        created="2025-01-01",
        machine=MachineFacts(name="one", num_cores=2, memory_bytes=8 * 10**9),
        model="small",
        dtype="bfloat16",
        attention=(AttentionTable(phase="decode", layer="moe", times=FLAT),),
        experts=(ExpertTable(times=EXPERTS),),
        messages=(MessageTable(transport="tcp", times=Curve((1.0, 1e9), (1e-3, 1e-3))),),
    )


def apart(tp: int) -> Candidates:
    return candidates(
        attention_tp=tp, attention_dp=2, expert_tp=tp, expert_ep=2, slots=4, micro_batches=3, batch=np.array([1, 50])
    )


def test_measured_times_are_used_where_they_cover_the_worker() -> None:
    measured = step_times(setting(profile=profile()), apart(1))
    assert measured.t_a_s.tolist() == pytest.approx([3e-3, 3e-3])
    assert measured.t_e_s.tolist() == pytest.approx([5e-3, 5e-3])
    assert measured.t_c_s.tolist() == pytest.approx([2e-3, 2e-3])  # two senders' messages, one after another


def test_other_degrees_keep_the_roofline() -> None:
    measured = step_times(setting(profile=profile()), apart(2))
    modelled = step_times(setting(), apart(2))
    assert measured.t_a_s.tolist() == modelled.t_a_s.tolist()
    assert measured.t_e_s.tolist() == modelled.t_e_s.tolist()


def test_a_process_with_both_sides_has_tables_of_its_own() -> None:
    """Replicas of one process take them; attention apart, stages, and replicas that share experts do not."""
    both = Surface((1.0, 100.0), (1.0, 10_000.0), ((2e-3, 2e-3), (2e-3, 2e-3)))
    whole = Surface((8.0,), (1.0, 1000.0), ((4e-3, 4e-3),))
    known = profile()
    with_both = replace(
        known,
        attention=(*known.attention, AttentionTable(phase="decode", layer="moe", times=both, both_sides=True)),
        experts=(*known.experts, ExpertTable(times=whole, both_sides=True)),
    )
    where = setting(profile=with_both)
    replica = candidates(layout=TP_PP, attention_dp=1, expert_ep=1, slots=8)
    found = step_times(where, replica)
    assert (found.t_a_s[0], found.t_e_s[0]) == pytest.approx((2e-3, 4e-3))
    staged = replace(replica, pp=np.full_like(replica.pp, 2))
    shared = candidates(layout=DP_EP, attention_dp=2, expert_ep=2, slots=4)
    for one in (staged, shared, apart(1)):
        assert step_times(where, one).t_a_s.tolist() == step_times(setting(profile=known), one).t_a_s.tolist()
        assert step_times(where, one).t_e_s.tolist() == step_times(setting(profile=known), one).t_e_s.tolist()


def test_a_whole_search_runs_on_a_profile() -> None:
    table = evaluate_phase(setting(profile=profile()))
    assert table.feasible.any()
    ones = (table.candidates.attention_tp == 1) & table.candidates.is_disaggregated
    assert table.outcome.t_a_s[ones] == pytest.approx(3e-3)


def test_the_engine_s_own_turn_is_part_of_every_step() -> None:
    quick = step_times(setting(profile=profile()), apart(1))
    slow = step_times(setting(profile=replace(profile(), step_s=2e-3, step_per_sequence_s=1e-5)), apart(1))
    added = [2e-3 + 1e-5 * 3 * batch for batch in (1, 50)]  # three micro-batches a worker
    assert (slow.step_s - quick.step_s).tolist() == pytest.approx(added)
