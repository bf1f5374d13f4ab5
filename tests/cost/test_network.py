"""Collectives' times by hand on round numbers: 1 GB/s inside a domain of 4, 0.1 GB/s per device across."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.network import (
    Link,
    collective_bytes,
    network,
)
from tests.cost.specimens import PERFECT, ROUND, round_cluster, round_group

NETWORK = network(round_cluster(), round_group())
MB = 1e6


def test_a_device_gets_its_share_of_the_nics_and_of_the_fabric() -> None:
    assert NETWORK.scale_out.bytes_per_s == 1e8
    shared = network(round_cluster(oversubscription=4.0), round_group())
    assert shared.scale_out.bytes_per_s == 2.5e7
    half = round_cluster(efficiency=replace(PERFECT, scale_up=0.5, scale_out=0.25))
    assert network(half, round_group()).scale_up.bytes_per_s == 5e8
    assert network(half, round_group()).scale_out.bytes_per_s == 2.5e7


def test_what_fits_in_a_domain_uses_its_link() -> None:
    assert NETWORK.link(4).level == "scale_up"
    assert NETWORK.link(5).level == "scale_out"
    assert network(round_cluster(), round_group(scale_up_domain=1)).link(2).level == "scale_out"
    np.testing.assert_array_equal(
        NETWORK.ranks_per_domain(np.array([1, 3, 8, 8]), np.array([1, 1, 1, 3])), [1, 3, 4, 1]
    )


def test_inside_a_domain() -> None:
    # 4 ranks, 8 MB: a rank sends 3 chunks of 2 MB at 1 GB/s.
    assert NETWORK.reduce_scatter(8 * MB, 4).scale_up_s == pytest.approx(6e-3)
    assert NETWORK.all_gather(8 * MB, 4).scale_up_s == pytest.approx(6e-3)
    assert NETWORK.all_reduce(8 * MB, 4).scale_up_s == pytest.approx(12e-3)
    assert NETWORK.all_to_all(8 * MB, 4).scale_up_s == pytest.approx(6e-3)
    assert NETWORK.all_reduce(8 * MB, 4).scale_out_s == 0


def test_across_domains() -> None:
    # 8 ranks in 2 domains: 6 MB inside, then half of the 2 MB shard across at 0.1 GB/s.
    scattered = NETWORK.reduce_scatter(8 * MB, 8)
    assert (scattered.scale_up_s, scattered.scale_out_s) == (pytest.approx(6e-3), pytest.approx(10e-3))
    reduced = NETWORK.all_reduce(8 * MB, 8)
    assert (reduced.scale_up_s, reduced.scale_out_s) == (pytest.approx(12e-3), pytest.approx(20e-3))
    # To each rank 1 MB: 3 MB inside beside 4 MB across.
    exchanged = NETWORK.all_to_all(8 * MB, 8)
    assert (exchanged.scale_up_s, exchanged.scale_out_s) == (0.0, pytest.approx(40e-3))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_in_a_mesh_each_pair_has_a_wire_of_a_third_of_the_rate(degree: int) -> None:
    """Counted wire by wire; a whole domain is as fast as at a switch."""
    mesh = network(round_cluster(), round_group(device=replace(ROUND, scale_up_mesh=True)))
    on_a_wire = 8 * MB / degree  # a rank's part to each other rank, whichever the collective
    for name in ("reduce_scatter", "all_gather", "all_to_all"):
        assert getattr(mesh, name)(8 * MB, degree).scale_up_s == pytest.approx(on_a_wire / (1e9 / 3)), name
        faster = getattr(NETWORK, name)(8 * MB, degree).scale_up_s
        assert faster == pytest.approx((degree - 1) * on_a_wire / 1e9), name
    assert mesh.point_to_point(2 * MB, across=False).scale_up_s == pytest.approx(6e-3)
    assert mesh.all_reduce(8 * MB, 8) == NETWORK.all_reduce(8 * MB, 8)
    assert mesh.reduce_scatter(7 * MB, 7) == NETWORK.reduce_scatter(7 * MB, 7), "rings in all orders share the wires"


def test_latency_is_paid_by_dependent_rounds_and_half_by_messages() -> None:
    slow = network(round_cluster(scale_up_latency_s=1e-3, scale_out_latency_s=5e-3), round_group())
    assert slow.reduce_scatter(8 * MB, 4).scale_up_s == pytest.approx(7e-3)
    # 12 ranks in 3 domains: two rounds across, of a third of the 2 MB shard each.
    assert slow.reduce_scatter(8 * MB, 12).scale_out_s == pytest.approx(2 * 5e-3 + 2 * (2 * MB / 3) / 1e8)
    half = network(round_cluster(efficiency=replace(PERFECT, scale_up_half_bytes=1 * MB)), round_group())
    assert half.reduce_scatter(8 * MB, 4).scale_up_s == pytest.approx(3 * 3e-3)


def test_a_group_that_does_not_fill_its_domains_goes_round_in_a_ring() -> None:
    # 7 ranks, 4 to a domain: 6 rounds of 1 MB, each as slow as the slow link.
    parts = NETWORK.reduce_scatter(7 * MB, 7)
    assert (parts.scale_up_s, parts.scale_out_s) == (0.0, pytest.approx(60e-3))
    # All-to-all: a rank of the smaller domain, 3 of 7, sends 4 MB across.
    assert NETWORK.all_to_all(7 * MB, 7).scale_out_s == pytest.approx(40e-3)


def test_nothing_to_do_costs_nothing_and_else_the_fixed_time_once() -> None:
    fixed = network(round_cluster(efficiency=replace(PERFECT, collective_s=1e-5)), round_group())
    assert fixed.all_reduce(8 * MB, 1).total_s == 0
    assert fixed.all_reduce(0.0, 4).total_s == 0
    assert fixed.all_reduce(8 * MB, 4).fixed_s == 1e-5


def test_point_to_point() -> None:
    assert NETWORK.point_to_point(2 * MB, across=True).scale_out_s == pytest.approx(20e-3)
    assert NETWORK.point_to_point(2 * MB, across=False).scale_up_s == pytest.approx(2e-3)


def test_util_is_of_the_message() -> None:
    link = Link(level="scale_out", bytes_per_s=100.0, latency_s=0.0, half_bytes=10.0)
    assert link.util(10.0) == 0.5
    assert link.wire_s(30.0) == pytest.approx(30 / (100 * link.util(30.0)))
    assert link.send_s(0.0) == 0


def test_counted_bytes_by_hand() -> None:
    assert tuple(map(float, collective_bytes("all_reduce", 12, 4, 2))) == (12, 6)
    assert tuple(map(float, collective_bytes("all_to_all", 12, 4, 2))) == (3, 6)


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 1e9), st.integers(1, 70), st.integers(1, 16), st.integers(0, 3))
def test_more_bytes_or_less_bandwidth_never_faster(size: float, degree: int, together: int, which: int) -> None:
    name = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")[which]
    latencies = round_cluster(scale_up_latency_s=1e-6, scale_out_latency_s=5e-6)
    now = float(getattr(network(latencies, round_group()), name)(size, degree, together).total_s)
    assert float(getattr(network(latencies, round_group()), name)(size * 1.5, degree, together).total_s) >= now
    up = network(latencies, round_group(scale_up_bytes_per_s=2e9))
    out = network(latencies, round_group(node_scale_out_bytes_per_s=8e8))
    for faster in (up, out):
        assert float(getattr(faster, name)(size, degree, together).total_s) <= now * (1 + 1e-12)


def test_many_candidates_at_once_equal_one_by_one() -> None:
    sizes, degrees = np.array([0.0, 1e3, 1e6, 1e6, 1e9]), np.array([4, 1, 7, 12, 8])
    for name in ("all_reduce", "all_to_all"):
        together = getattr(NETWORK, name)(sizes, degrees)
        for index in range(5):
            alone = getattr(NETWORK, name)(float(sizes[index]), int(degrees[index]))
            assert together.at(index).total_s == pytest.approx(float(alone.total_s))


def test_the_round_device_is_what_the_numbers_say() -> None:
    assert round_group().scale_out_bytes_per_s == ROUND.scale_out_bytes_per_s
