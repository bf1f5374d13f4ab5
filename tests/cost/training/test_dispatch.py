"""All-to-all against all-gather: bytes, the crossover of Figure 7, groups wider than a domain."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.network import Network, network
from antiphon.cost.training.operators import (
    crossover_top_k,
    exchange,
    gather,
    prefers_all_gather,
)
from antiphon.specs.cluster import ClusterSpec, EfficiencySpec
from tests.cost.specimens import round_cluster
from tests.cost.training.specimens import megascale_cluster


def perfect() -> Network:
    cluster = round_cluster()
    return network(cluster, cluster.groups[0])


def test_times_by_hand() -> None:
    """1 GB/s, 4 ranks: of 4 MB a ring moves 3 MB, and of the 4 MB that a rank holds it sends 3."""
    assert float(gather(perfect(), 4e6, 4).total_s) == pytest.approx(3e-3)
    assert float(exchange(perfect(), 4e6, 4).total_s) == pytest.approx(3e-3)
    assert float(gather(perfect(), 4e6, 1).total_s) == 0
    assert float(exchange(perfect(), 4e6, 1).total_s) == 0


def test_in_a_mesh_two_of_four_have_one_wire_of_three() -> None:
    cluster = round_cluster()
    group = replace(cluster.groups[0], device=replace(cluster.groups[0].device, scale_up_mesh=True))
    mesh = network(cluster, group)
    for move in (gather, exchange):
        assert float(move(mesh, 4e6, 2).total_s) == pytest.approx(2e6 / (1e9 / 3))
        assert float(move(mesh, 4e6, 4).total_s) == pytest.approx(float(move(perfect(), 4e6, 4).total_s))


def test_messages_pay_their_start() -> None:
    cluster = round_cluster(efficiency=replace(round_cluster().efficiency, scale_up_half_bytes=1e6))
    net = network(cluster, cluster.groups[0])
    assert float(gather(net, 4e6, 4).total_s) == pytest.approx(3e-3 + 1e-3)
    assert float(exchange(net, 4e6, 4).total_s) == pytest.approx(3e-3 + 3 * 1e-3)


def test_wider_than_a_domain_takes_the_slow_wire() -> None:
    net = perfect()
    assert float(exchange(net, 8e6, 8).total_s) == pytest.approx(4e6 / 1e8)
    assert float(gather(net, 8e6, 8).scale_out_s) > 0


def crossover_of_figure_7(cluster: ClusterSpec) -> int:
    """The largest top-k at which all-to-all beats all-gather: 8,192 tokens of 4,096 bf16 values on 8 devices."""
    return crossover_top_k(network(cluster, cluster.groups[0]), 8192, 2 * 4096, 8)


def test_figure_7() -> None:
    assert crossover_of_figure_7(megascale_cluster()) == 6


def test_without_a_start_all_gather_wins_from_as_many_copies_as_ranks() -> None:
    for top_k in (1, 3, 4, 5, 9):
        assert bool(prefers_all_gather(perfect(), 4096, 256, 4, top_k)) == (top_k > 4)


@pytest.mark.parametrize(("half_bytes", "last"), [(1.1e6, 7), (1.3e6, 6), (2.4e6, 6), (2.5e6, 5)])
def test_the_calibrated_constant_has_room(half_bytes: float, last: int) -> None:
    cluster = megascale_cluster()
    changed = replace(cluster, efficiency=replace(cluster.efficiency, scale_up_half_bytes=half_bytes))
    assert crossover_of_figure_7(changed) == last


def test_the_crossover_comes_earlier_for_small_micro_batches() -> None:
    cluster = megascale_cluster()
    net = network(cluster, cluster.groups[0])
    found = [crossover_top_k(net, tokens, 8192, 8) for tokens in (512, 2048, 8192, 65536)]
    assert found == sorted(found)
    assert found[0] < found[-1] <= 8


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(1, 16), st.floats(1, 1e5), st.floats(0, 4e6))
def test_more_copies_never_cost_less(degree: int, copies: int, tokens: float, half: float) -> None:
    cluster = round_cluster(efficiency=EfficiencySpec(scale_up_half_bytes=half))
    net = network(cluster, cluster.groups[0])
    columns = exchange(net, tokens / degree * np.asarray([copies, copies + 1]) * 256, degree).total_s
    assert 0 < columns[0] <= columns[1]
    assert float(gather(net, tokens * 256, degree).total_s) > 0
