"""Random routing and planned pipelines: rows conserved, chance as expected, plans as predicted."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost import m2n, ping_pong, skew
from antiphon.sim.ping_pong import simulate_ping_pong
from antiphon.sim.plan_pipeline import chance_factors, plan_pipeline
from antiphon.sim.routing import Routing, WorkerTimes, route, routed_pipeline
from antiphon.specs.plan import Parallel, PhasePlan, Predicted


def even(num_experts: int, num_workers: int, top_k: int, exponent: float = 0.0) -> Routing:
    return Routing(
        shares=skew.zipf_shares(num_experts, exponent),
        placement=[[(expert * num_workers // num_experts, 1.0)] for expert in range(num_experts)],
        num_expert_workers=num_workers,
        top_k=top_k,
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.data())
def test_rows_are_conserved(num_experts: int, data: st.DataObject) -> None:
    """Odd counts, idle attention workers, replicas: every token's experts are computed once, sent rows arrive."""
    num_workers = data.draw(st.integers(1, num_experts))
    top_k = data.draw(st.integers(1, num_experts))
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    base = even(num_experts, num_workers, top_k)
    split = [[((owner + i) % num_workers, 0.5) for i in range(2)] for ((owner, _),) in base.placement]
    routing = base if num_workers == 1 else Routing(**(vars(base) | {"placement": split}))
    routed = route(routing, tokens, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert routed.computed_rows.sum() == sum(tokens) * top_k
    assert routed.sent_rows.sum() == routed.received_rows.sum()
    assert (routed.sent_rows <= np.array(tokens) * min(top_k, num_workers)).all()
    assert (routed.sent_rows >= np.array(tokens)).all()
    for worker, count in enumerate(tokens):
        assert bool(routed.destinations.targets(worker)) == (count > 0)


def test_distinct_workers_as_expected() -> None:
    """The mean number of workers a token goes to is `cost.m2n.expected_distinct` (64 experts, top 6, 8 workers)."""
    routed = route(even(64, 8, 6), [20_000], np.random.default_rng(0))
    assert routed.sent_rows[0] / 20_000 == pytest.approx(float(m2n.expected_distinct(64, 6, 8)), rel=0.01)


def test_shares_and_fractions_are_followed() -> None:
    routing = Routing(
        shares=np.array([0.7, 0.3]), placement=[[(0, 0.25), (2, 0.75)], [(1, 1.0)]], num_expert_workers=3, top_k=1
    )
    rows = route(routing, [50_000], np.random.default_rng(1)).computed_rows / 50_000
    np.testing.assert_allclose(rows, [0.7 * 0.25, 0.3, 0.7 * 0.75], atol=0.01)


def test_sampling_without_replacement_is_exact() -> None:
    """Two of three experts with shares 1/2, 1/3, 1/6: the pairs' probabilities by hand."""
    shares = np.array([1 / 2, 1 / 3, 1 / 6])
    routing = Routing(shares=shares, placement=[[(e, 1.0)] for e in range(3)], num_expert_workers=3, top_k=2)
    rows = route(routing, [60_000], np.random.default_rng(2)).computed_rows / 60_000
    expected = np.zeros(3)
    for first, second in itertools.permutations(range(3), 2):
        expected[[first, second]] += shares[first] * shares[second] / (1 - shares[first])
    np.testing.assert_allclose(rows, expected, atol=0.01)


TIMES = WorkerTimes(attention_s=1e-3, expert_fixed_s=1e-4, expert_row_s=2e-6, link_rows_per_s=1e6, latency_s=1e-5)


def test_skew_costs_time() -> None:
    """Popular experts make one worker slow and all others wait; same tokens, same seed."""
    ends = [
        simulate_ping_pong(
            routed_pipeline(
                even(32, 4, 4, exponent), TIMES, num_layers=6, num_micro_batches=3, num_tokens=[64] * 5, seed=3
            )
        ).end_s
        for exponent in (0.0, 0.6, 1.2)
    ]
    assert ends == sorted(ends)
    assert ends[2] > 1.3 * ends[0]


def test_same_seed_same_pipeline() -> None:
    made = [
        routed_pipeline(even(8, 3, 2), TIMES, num_layers=2, num_micro_batches=2, num_tokens=[5, 0, 7], seed=s)
        for s in (1, 1, 2)
    ]
    ends = [simulate_ping_pong(pipeline).end_s for pipeline in made]
    assert ends[0] == ends[1] != ends[2]


def phase(layout: str = "disaggregated", **predicted: float) -> PhasePlan:
    return PhasePlan(
        layout=layout,  # type: ignore[arg-type]
        parallel=Parallel(attention_dp=4, expert_workers=3),
        num_instances=1,
        micro_batches=3,
        batch=12,
        devices=(),
        placement=(),
        predicted=Predicted(**({"t_a_s": 1e-3, "t_e_s": 8e-4, "t_c_s": 3e-4} | predicted)),
    )


def test_a_plan_without_chance_takes_what_it_predicts() -> None:
    result = simulate_ping_pong(plan_pipeline(phase(), 7))
    assert result.end_s == pytest.approx(float(ping_pong.iteration(3, 7, 1e-3, 8e-4, 3e-4)), rel=1e-9)
    assert len(result.attention_busy_s) == 4
    assert len(result.experts_busy_s) == 3


def test_chance_costs_time_at_the_barrier() -> None:
    still, shaken = (simulate_ping_pong(plan_pipeline(phase(), 20, variation=cv, seed=5)).end_s for cv in (0.0, 0.3))
    assert shaken > 1.1 * still


def test_chance_factors() -> None:
    factors = chance_factors((100_000,), 0.5, np.random.default_rng(0))
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.5, abs=0.01)
    assert (chance_factors((3,), 0.0, np.random.default_rng(0)) == 1).all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match=r"a coefficient of variation of -1"):
        chance_factors((1,), -1, np.random.default_rng(0))
    with pytest.raises(UserError, match=r"a tp_pp phase with times .* has no ping-pong pipeline"):
        plan_pipeline(phase("tp_pp"), 2)
    with pytest.raises(UserError, match=r"top_k is 9: give 1 to 8"):
        even(8, 2, 9)
    with pytest.raises(UserError, match=r"expert 0 is placed as \[\(5, 1.0\)\]: use workers 0 to 1"):
        Routing(shares=np.ones(1), placement=[[(5, 1.0)]], num_expert_workers=2, top_k=1)
    with pytest.raises(UserError, match=r"shares must be positive"):
        Routing(shares=np.array([0.5, 0.4]), placement=[[(0, 1.0)]] * 2, num_expert_workers=1, top_k=1)
    with pytest.raises(UserError, match=r"1 placed experts for 2 shares"):
        Routing(shares=np.array([0.5, 0.5]), placement=[[(0, 1.0)]], num_expert_workers=1, top_k=1)
