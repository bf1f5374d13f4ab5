"""Rows to their experts: both ways by hand, messages that exist, groups of experts, and what must never be slower."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import (
    Spread,
    direct,
    dispatch,
    expected_distinct,
    once_per_node,
    probability_of_none,
)
from antiphon.cost.network import Link, Network

WIRES = Network(
    scale_up=Link(level="scale_up", bytes_per_s=1000.0, latency_s=0.0, half_bytes=0.0),
    scale_out=Link(level="scale_out", bytes_per_s=100.0, latency_s=1.0, half_bytes=10.0),
    domain=4,
    exchange_s=0.5,
)


def test_direct_by_hand() -> None:
    # 8 ranks in 2 domains, 16 rows to 2 ranks each: 32 copies, half of them across in 4 messages: 160 + 40 bytes.
    spread = Spread(num_ranks=8, ranks_per_domain=4, ranks_per_row=2.0, domains_per_row=1.5)
    parts = direct(WIRES, spread, 16, 10)
    assert parts.scale_out_s == pytest.approx(1 + (16 * 10 + 4 * 10) / 100)
    assert parts.total_s == pytest.approx(float(parts.scale_out_s) + 0.5)


def test_once_per_node_by_hand() -> None:
    # 16 rows to 1.5 domains each, half of them the own one: 12 rows across in one message; inside 32 copies.
    spread = Spread(num_ranks=8, ranks_per_domain=4, ranks_per_row=2.0, domains_per_row=1.5)
    parts = once_per_node(WIRES, spread, 16, 10)
    assert parts.scale_out_s == pytest.approx(1 + (12 * 10 + 10) / 100)
    assert parts.total_s == pytest.approx(float(parts.scale_out_s) + 2 * 0.5)
    slow_inside = replace(WIRES, scale_up=replace(WIRES.scale_up, bytes_per_s=50.0))
    assert once_per_node(slow_inside, spread, 16, 10).scale_up_s == pytest.approx(32 * 10 / 50)


def test_in_a_mesh_rows_take_the_wire_of_their_pair() -> None:
    # 32 copies: three quarters to 3 other ranks on 3 wires; with 2 ranks to a domain, a quarter of 64 to one of them.
    mesh = replace(WIRES, scale_up=replace(WIRES.scale_up, num_wires=3, bytes_per_s=30.0))
    together = Spread(num_ranks=4, ranks_per_domain=4, ranks_per_row=2.0, domains_per_row=1.0)
    assert direct(mesh, together, 16, 10).scale_up_s == pytest.approx(16 * 2 * 10 * 3 / 4 / 30)
    apart = Spread(num_ranks=4, ranks_per_domain=2, ranks_per_row=4.0, domains_per_row=2.0)
    assert direct(mesh, apart, 16, 10).scale_up_s == pytest.approx(16 * 10 / (30 / 3))


def test_no_rows_and_no_peers_cost_nothing() -> None:
    alone = Spread(num_ranks=1, ranks_per_domain=1, ranks_per_row=1.0, domains_per_row=1.0)
    several = Spread(num_ranks=8, ranks_per_domain=4, ranks_per_row=2.0, domains_per_row=1.5)
    assert dispatch(WIRES, alone, 16, 10).total_s == 0
    assert dispatch(WIRES, several, 0, 10).total_s == 0


def test_one_token_costs_no_more_among_idle_peers() -> None:
    """Its eight copies are eight messages, whether 8 or 200 other domains listen."""

    def seconds(num_ranks: int) -> float:
        spread = Spread(num_ranks=num_ranks, ranks_per_domain=1, ranks_per_row=8.0, domains_per_row=8.0)
        return float(direct(WIRES, spread, 1, 10).scale_out_s)

    # the own rank is one of the eight with probability 8 / ranks, and costs nothing
    assert seconds(16) == pytest.approx(1 + (8 * 15 / 16) * 20 / 100)
    assert seconds(200) <= 1 + 8 * 20 / 100


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([8, 16, 64, 256]), st.integers(1, 4096), st.sampled_from([1, 2, 4]))
def test_better_wires_and_fewer_rows_never_cost_more(num_ranks: int, rows: int, groups: int) -> None:
    def touched(workers: int) -> float:
        return float(expected_distinct(256, 8, workers, num_groups=8, top_k_groups=2 * groups))

    spread = Spread(
        num_ranks=num_ranks,
        ranks_per_domain=8,
        ranks_per_row=touched(num_ranks),
        domains_per_row=touched(num_ranks // 8),
    )
    now = float(dispatch(WIRES, spread, rows, 7168).total_s)
    assert now <= float(direct(WIRES, spread, rows, 7168).total_s)
    assert now <= float(dispatch(WIRES, spread, rows + 1, 7168).total_s)
    for better in (
        replace(WIRES, scale_out=replace(WIRES.scale_out, bytes_per_s=200.0)),
        replace(WIRES, scale_up=replace(WIRES.scale_up, bytes_per_s=2000.0)),
    ):
        assert float(dispatch(better, spread, rows, 7168).total_s) <= now


def test_expected_distinct_by_hand() -> None:
    # 4 experts, top 2, 2 workers of 2: the second expert is on the first one's worker with probability 1/3.
    assert expected_distinct(4, 2, 2) == pytest.approx(1 / 3 * 1 + 2 / 3 * 2)
    assert expected_distinct(8, 2, 8) == pytest.approx(2), "one expert per worker: k destinations"
    assert expected_distinct(8, 2, 1) == pytest.approx(1)
    assert expected_distinct(8, 8, 4) == pytest.approx(4)
    # The closed form of DeepSeek-V3 on 32 workers.
    assert expected_distinct(256, 8, 32) == pytest.approx(32 * (1 - math.comb(248, 8) / math.comb(256, 8)))


@pytest.mark.parametrize(("experts", "top_k", "workers"), [(5, 2, 3), (7, 3, 2), (6, 2, 6), (5, 5, 3), (8, 3, 5)])
def test_expected_distinct_equals_enumeration(experts: int, top_k: int, workers: int) -> None:
    base, extra = divmod(experts, workers)
    owner = [w for w in range(workers) for _ in range(base + (w < extra))]
    counts = [len({owner[e] for e in chosen}) for chosen in itertools.combinations(range(experts), top_k)]
    mean = sum(counts) / len(counts)
    assert expected_distinct(experts, top_k, workers) == pytest.approx(mean)


def test_probability_of_none_for_many_at_once() -> None:
    both = probability_of_none(8, np.array([1.0, 2.0]), np.array([2.0, 7.0]))
    np.testing.assert_allclose(both, [6 / 8, 0.0])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.data())
def test_more_workers_never_fewer_destinations(experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    workers = np.arange(1, experts + 1, dtype=float)
    distinct = np.asarray(expected_distinct(experts, top_k, workers))
    assert np.all(np.diff(distinct) >= -1e-9)
    assert np.all(distinct <= np.minimum(workers, top_k) + 1e-9)
    assert np.all(distinct >= 1 - 1e-9)


@pytest.mark.parametrize(("workers", "groups", "taken"), [(2, 4, 2), (4, 4, 2), (8, 4, 1), (4, 2, 1), (8, 2, 2)])
def test_groups_of_experts_equal_enumeration(workers: int, groups: int, taken: int) -> None:
    experts, top_k = 8, 2
    each = experts // groups
    counts = [
        len({expert * workers // experts for expert in chosen})
        for picked in itertools.combinations(range(groups), taken)
        for chosen in itertools.combinations([g * each + i for g in picked for i in range(each)], top_k)
    ]
    mean = sum(counts) / len(counts)
    found = expected_distinct(experts, top_k, workers, num_groups=groups, top_k_groups=taken)
    assert found == pytest.approx(mean)


def test_groups_bound_the_nodes() -> None:
    """DeepSeek-V3 on 8 nodes: at most 4 of them, where free choice of 8 experts reaches 5.3."""
    free, bound = (float(expected_distinct(256, 8, 8, num_groups=8, top_k_groups=taken)) for taken in (8, 4))
    assert free == pytest.approx(5.3, abs=0.1)
    assert 3.5 < bound < 4
