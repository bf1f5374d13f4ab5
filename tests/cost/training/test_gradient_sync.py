"""Synchronisation of gradients and parameters: bytes of appendix A.1, eq. 10, compression, Figure 15."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.network import network
from antiphon.cost.training.step import across_to_inside, sync_time
from tests.cost.specimens import round_cluster


def test_equation_10() -> None:
    assert across_to_inside(8, 10**9, 450e9, 50e9) == pytest.approx(9 / 7)
    assert across_to_inside(8, 10**9, 450e9, 50e9) == pytest.approx(1.29, abs=0.005)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 72), st.integers(2, 200), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_equation_10_is_the_ratio_of_its_bytes(degree: int, data: int, inside: float, across: float) -> None:
    slow = 1e9 / degree * 2 * (data - 1) / data / across  # all-reduce of a shard between nodes
    fast = 1e9 * 2 * (degree - 1) / degree / inside  # reduce-scatter and all-gather inside
    assert across_to_inside(degree, data, inside, across) == pytest.approx(slow / fast)


def test_by_hand() -> None:
    """4 ranks of 1 GB/s in a node, 0.1 GB/s across, 3 nodes: 12 MB replicated are 3 MB a rank across, 2/3 sent."""
    cluster = round_cluster()
    net = network(cluster, cluster.groups[0])
    gradients, parameters = sync_time(net, degree=4, data_parallel=3, gradients=(0.0, 12e6), parameters=(3e6, 0.0))
    across = 3e6 * 2 / 3 / 1e8
    assert float(gradients.total_s) == pytest.approx(across)  # the 9 ms inside are hidden
    assert float(parameters.total_s) == pytest.approx(across)


def test_one_copy_only_syncs_what_is_replicated() -> None:
    cluster = round_cluster()
    net = network(cluster, cluster.groups[0])
    size = (3e6, 12e6)
    gradients, _ = sync_time(net, degree=4, data_parallel=1, gradients=size, parameters=size)
    assert float(gradients.total_s) == pytest.approx(9e-3)


def test_bf16_on_the_wire_halves_the_time() -> None:
    cluster = round_cluster()
    net = network(cluster, cluster.groups[0])
    times = [
        float(
            sync_time(
                net,
                degree=4,
                data_parallel=3,
                gradients=(1e6 * size, 0.0),
                parameters=(0.0, 0.0),
                by_all_to_all=size == 2,
            )[0].total_s
        )
        for size in (4, 2)
    ]
    assert times[1] == pytest.approx(times[0] / 2)
