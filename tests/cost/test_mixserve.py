"""MixServe eq. 1 to 13 and section III-D, each worked by hand, and what the counted exchange adds to them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import Degrees, Spread, fused_combine_s, fused_dispatch_s, layer_exchange
from antiphon.cost.memory import mix_memory_bytes
from antiphon.cost.network import network
from antiphon.planner.mixed_steps import mg1_wait
from antiphon.reproduce import mix as printed
from tests.cost.specimens import PERFECT, round_cluster, round_group


def spread_over(degrees: Degrees, ranks_per_domain: int, ranks_per_row: float = 2) -> Spread:
    """Each row to two ranks, in two domains where there are two."""
    num_domains = math.ceil(degrees.expert_ep / ranks_per_domain)
    return Spread(
        num_ranks=degrees.expert_ep,
        ranks_per_domain=ranks_per_domain,
        ranks_per_row=ranks_per_row,
        domains_per_row=min(ranks_per_row, num_domains),
    )


NETWORK = network(round_cluster(), round_group())  # 1 GB/s inside a domain of 4, 0.1 GB/s per device across


def test_equations_1_to_3() -> None:
    assert printed.eq1_reduce_scatter(12, 4) == 3
    assert printed.eq2_all_reduce(12, 4) == 2 * (12 / 4) / 4
    assert printed.eq3_all_to_all(12, 4) == 9


def test_equation_4() -> None:
    # 100 parameters, TP 2 x EP 5, DP 4, batch 8, sh = 3: 10 * 2 * 3.
    assert printed.eq4_compute(100, 2, 5, 4, 8, 3) == 60


def test_equation_5_and_its_three_cases() -> None:
    # b = 8, sh = 3, k = 2, TP 1 (no AR: RS of a group of one is its own size twice, 2 * 2 * b/d_DP * 3).
    def without_all_reduce(ep: int, dp: int) -> float:
        return float(printed.eq5_communicated(8, 3, 2, 1, ep, dp)) - 2 * 2 * 8 / dp * 3

    assert without_all_reduce(4, 4) == 2 * (8 / 4 * 6) / 4 * 3
    assert without_all_reduce(2, 4) == 2 * (8 / 4 * 6) / 2 * 1, "d_DP > d_EP: groups of d_EP"
    assert without_all_reduce(4, 2) == 2 * (8 / 4 * 6) / 2 * 1, "d_DP < d_EP: groups of d_DP, batch by d_EP"
    # With TP 2: 2 * AR(6, 2) = 2 * 2 * (6 / 2) / 2 = 6, and the exchange of the balanced case, 18.
    assert printed.eq5_communicated(8, 3, 2, 2, 4, 4) == 6 + 18


def test_equation_6() -> None:
    # 10 layers of 2 + 3 s, 4 stages, 0.5 s a hop.
    assert printed.eq6_service_s(10, 2, 3, 4, 0.5) == 51.5
    assert printed.eq6_service_s(10, 2, 3) == 50


def test_equation_7_and_the_general_service() -> None:
    # 3 arrivals against 4 services a second: rho = 3/4, wait 3/4 / (4 * 1/4) = 3 / (4 * 1).
    assert printed.mm1_wait(3, 4) == pytest.approx(0.75)
    assert mg1_wait(3, 1 / 4, 2 / 16) == pytest.approx(0.75), "exponential: E[S^2] = 2 E[S]^2"
    assert mg1_wait(3, 1 / 4, 1 / 16) == pytest.approx(0.375), "constant: half of it"


@pytest.mark.parametrize("arrivals", [4, 5])
def test_at_saturation_the_wait_has_no_end(arrivals: int) -> None:
    assert printed.mm1_wait(arrivals, 4) == math.inf
    assert mg1_wait(arrivals, 0.25, 0.1) == math.inf
    assert printed.mm1_wait(0, 4) == 0
    assert printed.throughput(100, 10, math.inf, 1.0, 0.1) == 0


def test_equation_8() -> None:
    # 100 / 2 + 600 / (3 * 2) + 2 * 4 * 5 * 8 * 10 / 2.
    assert mix_memory_bytes(100, 600, tp=2, ep=3, pp=2, batch=4, sequence=5, hidden=8, num_layers=10) == 50 + 100 + 1600


def test_equations_9_and_11() -> None:
    assert printed.ttft(0.5, 1.5) == 2
    # (100 + 20) tokens in 0.5 + 1.5 + 20 * 0.1 s.
    assert printed.throughput(100, 20, 0.5, 1.5, 0.1) == pytest.approx(30)


def test_fused_rounds_of_figure_9() -> None:
    # 4 nodes, 3 s between nodes, 2 s inside. Dispatch: 3 + 3 + 3 and the last all-gather.
    assert fused_dispatch_s(4, 3, 2) == 11
    assert fused_dispatch_s(4, 2, 3) == 11, "the first messages, then three all-gathers"
    assert fused_dispatch_s(1, 3, 2) == 0
    # Combine: the own reduce-scatter starts at once; 9 s of messages, the last one's reduce-scatter, the all-gather.
    assert fused_combine_s(4, 3, 2, 1) == 12
    assert fused_combine_s(4, 2, 3, 1) == 13
    assert fused_combine_s(1, 3, 2, 1) == 3


def rounds_by_clock(num_nodes: int, inter: float, intra: float, *, combine: bool) -> float:
    """Both algorithms as events: two wires, each round of the inner one waits for its messages."""
    arrived = [0.0] if combine else []
    arrived += [inter * (number + 1) for number in range(num_nodes - 1)]
    clock = 0.0
    for ready in arrived:
        clock = max(clock, ready) + intra
    return clock


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))
def test_fused_time_equals_the_rounds_by_clock(num_nodes: int, inter: int, intra: int) -> None:
    assert fused_dispatch_s(num_nodes, inter, intra) == rounds_by_clock(num_nodes, inter, intra, combine=False)
    assert fused_combine_s(num_nodes, inter, intra) == rounds_by_clock(num_nodes, inter, intra, combine=True)


def test_exchange_of_a_hybrid_layer_by_hand() -> None:
    """3 nodes of 4, TP 4 inside, DP = EP = 3 between; 100 rows of 30 kB per node, each to 2 nodes."""
    degrees = Degrees(attention_tp=4, attention_dp=3, expert_tp=4, expert_ep=3)
    parts = layer_exchange(NETWORK, degrees, spread_over(degrees, 1), rows=100, row_bytes=30e3, fused=False)
    # AR of 3 MB: 2 * 3/4 * 3 ms. Each way: a device sends 25 rows twice, 1.5 MB, of which 2/3 leave the node;
    # 200 rows arrive at a node, 6 MB gathered: 4.5 ms.
    assert parts.scale_out_s == pytest.approx(2 * 1.0 * 10e-3)
    assert parts.scale_up_s == pytest.approx(4.5e-3 + 2 * 4.5e-3)
    # Fused dispatch, 2 rounds: 5 ms a round outside, 2.25 inside: hides 2.25. Combine, 3 inside of 1.5: hides 3.
    fused = layer_exchange(NETWORK, degrees, spread_over(degrees, 1), rows=100, row_bytes=30e3, fused=True)
    assert fused.total_s == pytest.approx(float(parts.total_s) - 2.25e-3 - 3e-3)
    half = replace(NETWORK, overlap=0.5)
    partly = layer_exchange(half, degrees, spread_over(degrees, 1), rows=100, row_bytes=30e3, fused=True)
    assert partly.total_s == pytest.approx(float(parts.total_s) - 1.125e-3 - 1.5e-3)


def test_fusing_small_rounds_is_left_to_whom_it_helps() -> None:
    """With 1 ms of latency a round, three small inner rounds cost more than fusing hides."""
    wires = network(round_cluster(scale_up_latency_s=1e-3), round_group())
    degrees = Degrees(attention_tp=4, attention_dp=3, expert_tp=4, expert_ep=3)
    fused, apart = (
        layer_exchange(wires, degrees, spread_over(degrees, 1), rows=1, row_bytes=3e3, fused=choice)
        for choice in (True, False)
    )
    assert fused.total_s == apart.total_s


def test_formats_of_dispatch_and_combine_count_separately() -> None:
    degrees = Degrees(attention_tp=1, attention_dp=3, expert_tp=1, expert_ep=3)
    network_of_ones = network(round_cluster(), round_group(devices_per_node=1, scale_up_domain=1, num_nodes=3))
    both, fp8 = (
        layer_exchange(
            network_of_ones, degrees, spread_over(degrees, 1), rows=9, row_bytes=2e3, dispatch_row_bytes=there
        )
        for there in (None, 1e3)
    )
    assert both.scale_out_s == pytest.approx(2 * 9 * 2 * 2e3 * 2 / 3 / 4e8)
    assert fp8.scale_out_s == pytest.approx(0.75 * float(both.scale_out_s))


def test_unsliced_ranks_send_all_their_rows() -> None:
    degrees = Degrees(attention_tp=4, attention_dp=3, expert_tp=1, expert_ep=12)
    sliced, whole = (
        layer_exchange(
            NETWORK, degrees, spread_over(degrees, 4), rows=100, row_bytes=30e3, sliced=choice, per_node=False
        )
        for choice in (True, False)
    )
    # Of 12 ranks 8 are in other nodes: 25 (100) rows twice, 2/3 of them across.
    assert sliced.scale_out_s == pytest.approx(2 * 1.5e6 * 8 / 12 / 1e8)
    assert whole.scale_out_s == pytest.approx(4 * float(sliced.scale_out_s))


SHAPES = [(4, 3, 4, 3), (2, 6, 4, 3), (4, 3, 2, 6), (4, 3, 1, 12), (1, 12, 12, 1), (3, 4, 2, 6), (1, 1, 1, 1)]


def seconds_of(
    degrees: tuple[int, int, int, int], rows: int, fused: bool, *, round_s: float = 0.0, **group_changes: float
) -> float:
    """One layer's exchange of 8 KiB rows, with wires' latency."""
    tp, dp, expert_tp, ep = degrees
    shape = Degrees(attention_tp=tp, attention_dp=dp, expert_tp=expert_tp, expert_ep=ep)
    efficiency = replace(PERFECT, overlap=0.9, collective_s=round_s, exchange_s=round_s, round_s=round_s)
    cluster = round_cluster(scale_up_latency_s=1e-6, scale_out_latency_s=5e-6, efficiency=efficiency)
    wires = network(cluster, round_group(**group_changes))
    spread = spread_over(shape, max(min(4 // expert_tp, ep), 1), min(2.5, ep))
    return float(layer_exchange(wires, shape, spread, rows=rows, row_bytes=8192, fused=fused).total_s)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 4096))
def test_fusing_in_one_kernel_and_bandwidth_never_slow_down(degrees: tuple[int, int, int, int], rows: int) -> None:
    fused_s = seconds_of(degrees, rows, True)
    assert 0 <= fused_s <= seconds_of(degrees, rows, False) * (1 + 1e-12)
    for faster in ({"scale_up_bytes_per_s": 2e9}, {"node_scale_out_bytes_per_s": 8e8}):
        assert seconds_of(degrees, rows, True, **faster) <= fused_s * (1 + 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([shape for shape in SHAPES if min(shape[2:]) > 1]), st.floats(0, 1e-2), st.floats(0, 1e-2))
def test_calls_of_rounds_cost_what_they_take(degrees: tuple[int, int, int, int], first: float, second: float) -> None:
    """The more a call takes, the worse for the fused form, of one row: above some time synchronous wins."""
    less, more = sorted((first, second))

    def lead(round_s: float) -> float:
        return seconds_of(degrees, 1, True, round_s=round_s) - seconds_of(degrees, 1, False, round_s=round_s)

    assert lead(less) <= lead(more) + 1e-12
    assert lead(0) <= 0 < lead(1.0)


def test_calls_of_rounds_by_hand() -> None:
    """3 nodes of 4, TP 4 inside: dispatch gathers twice and combine reduces three times where the synchronous form has
    one call each; the messages are one call a way in both."""
    shape = (4, 3, 4, 3)
    added = {
        fused: seconds_of(shape, 100, fused, round_s=0.5) - seconds_of(shape, 100, fused) for fused in (True, False)
    }
    all_reduce = 0.5
    assert added[False] == pytest.approx(all_reduce + 2 * (0.5 + 0.5))
    assert added[True] == pytest.approx(all_reduce + (0.5 + 2 * 0.5) + (0.5 + 3 * 0.5))


def test_cores_that_copy_hide_only_what_the_wire_takes() -> None:
    """A core's link of 0.1 GB/s beside copies at 1 GB/s: a tenth of a message's time is the core's own work."""
    group = round_group()
    cpu = replace(group, device=replace(group.device, kind="cpu"))
    cluster = round_cluster(efficiency=replace(PERFECT, overlap=0.8))
    assert network(cluster, group).overlap == 0.8
    assert network(cluster, cpu).overlap == pytest.approx(0.8 * 0.9)
    assert network(cluster, replace(cpu, node_scale_out_bytes_per_s=1e10)).overlap == 0
