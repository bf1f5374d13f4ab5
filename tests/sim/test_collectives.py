"""MixServe's exchanges: equal rounds against the formulas of `cost`, unequal ones against loops, charts by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.exchange import fused_combine_s, fused_dispatch_s
from antiphon.sim.collectives import Exchange, simulate_exchange

nodes = st.integers(1, 6)
seconds = st.floats(0, 10)


@settings(max_examples=50, deadline=None)
@given(nodes, seconds, seconds, seconds, st.booleans())
def test_equal_rounds_equal_the_formulas(
    num_nodes: int, inter: float, intra: float, gather: float, fused: bool
) -> None:
    dispatch = Exchange(num_nodes=num_nodes, combine=False, inter_s=inter, intra_s=intra)
    one_by_one = (num_nodes - 1) * (inter + intra)
    dispatch_s = float(fused_dispatch_s(num_nodes, inter, intra)) if fused else one_by_one
    expected = pytest.approx(dispatch_s, rel=1e-9, abs=1e-12)
    assert simulate_exchange(dispatch, fused=fused).end_s == expected
    combine = Exchange(num_nodes=num_nodes, combine=True, inter_s=inter, intra_s=intra, gather_s=gather)
    one_by_one = num_nodes * intra + (num_nodes - 1) * inter + gather
    combine_s = float(fused_combine_s(num_nodes, inter, intra, gather)) if fused else one_by_one
    expected = pytest.approx(combine_s, rel=1e-9, abs=1e-12)
    assert simulate_exchange(combine, fused=fused).end_s == expected


def naive_end(exchange: Exchange, fused: bool) -> float:
    """The definition, written out: wires first come, first served; inside a node in the order of rounds."""
    n = exchange.num_nodes
    arrived: dict[tuple[int, int], float] = {}
    sends: list[tuple[float, int, int, int]] = []
    last_send = [0.0] * n
    for node in range(n):
        for r in range(1, n):
            sends.append((last_send[node], r, node, (node + r) % n))
            last_send[node] += exchange.message_s(node, r)
    wire = [0.0] * n
    for start, r, node, target in sorted(sends):
        wire[target] = max(wire[target], start) + exchange.message_s(node, r)
        arrived[target, r] = max(wire[target], start + exchange.message_s(node, r))
    end = 0.0
    for node in range(n):
        over = max([last_send[node], *(arrived[node, r] for r in range(1, n))])
        waits = [arrived[node, r] if fused else over for r in range(1, n)]
        if exchange.combine:
            waits = [0.0 if fused else over, *waits]
        inside = weights = 0.0
        for position, wait in enumerate(waits):
            inside = max(inside, wait) + exchange.inside_s(node, position)
            weights = max(weights, inside) + exchange.weight_s
        end = max(end, max(inside, weights) + exchange.gather_s, last_send[node])
    return end


@settings(max_examples=100, deadline=None)
@given(nodes, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_unequal_rounds(num_nodes: int, combine: bool, fused: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    exchange = Exchange(
        num_nodes=num_nodes,
        combine=combine,
        inter_s=random.random((num_nodes, num_nodes - 1)),
        intra_s=random.random((num_nodes, num_nodes - (not combine))),
        weight_s=0.2 * combine,
        gather_s=0.3 * combine,
    )
    result = simulate_exchange(exchange, fused=fused)
    assert result.end_s == pytest.approx(naive_end(exchange, fused), rel=1e-12)
    assert result.end_s <= simulate_exchange(exchange, fused=False).end_s + 1e-12
    work = result.busy_s()
    for node in range(num_nodes):
        sent = sum(exchange.message_s(node, r) for r in range(1, num_nodes))
        inside = sum(exchange.inside_s(node, i) for i in range(num_nodes - (not combine))) + exchange.gather_s
        assert work.get(f"node[{node}] out", 0.0) == pytest.approx(sent)
        assert work.get(f"node[{node}] inside", 0.0) == pytest.approx(inside)


def chart(exchange: Exchange, fused: bool) -> list[tuple[str, str, float, float]]:
    shown = ("node[0] out", "node[0] inside")
    return [
        (bar.track.removeprefix("node[0] "), bar.label, bar.start_s, bar.end_s)
        for bar in simulate_exchange(exchange, fused=fused).bars()
        if bar.track in shown
    ]


def test_figure_9a_by_hand() -> None:
    """Four nodes: 3 rounds between nodes beside 4 reduce-scatters inside, then the all-gather."""
    exchange = Exchange(num_nodes=4, combine=True, inter_s=5.0, intra_s=2.0, gather_s=2.0)
    assert chart(exchange, fused=True) == [
        ("inside", "reduce-scatter 1", 0, 2),
        ("out", "round 1 to 1", 0, 5),
        ("inside", "reduce-scatter 2", 5, 7),
        ("out", "round 2 to 2", 5, 10),
        ("inside", "reduce-scatter 3", 10, 12),
        ("out", "round 3 to 3", 10, 15),
        ("inside", "reduce-scatter 4", 15, 17),
        ("inside", "all-gather", 17, 19),
    ]


def test_figure_9b_by_hand() -> None:
    """Four nodes: 3 rounds and 3 all-gathers; only the first round and the last all-gather stand alone."""
    exchange = Exchange(num_nodes=4, combine=False, inter_s=5.0, intra_s=2.0)
    assert chart(exchange, fused=True) == [
        ("out", "round 1 to 1", 0, 5),
        ("inside", "all-gather 1", 5, 7),
        ("out", "round 2 to 2", 5, 10),
        ("inside", "all-gather 2", 10, 12),
        ("out", "round 3 to 3", 10, 15),
        ("inside", "all-gather 3", 15, 17),
    ]
    assert simulate_exchange(exchange, fused=False).end_s == 21


def test_figure_12_fused_takes_little_more_than_the_wires_between_nodes() -> None:
    """910B: 200 Gb/s between nodes, 480 Gb/s inside. Fused is a little above the inter-node time, synchronous far."""
    inter, intra = 1 / 25e9, 1 / 60e9
    combine = Exchange(num_nodes=4, combine=True, inter_s=inter, intra_s=intra)
    fused, synchronous = (simulate_exchange(combine, fused=fused).end_s for fused in (True, False))
    assert 1 < fused / (3 * inter) < 1.15
    assert synchronous / (3 * inter) > 1.5


def test_bad_exchanges_are_refused() -> None:
    with pytest.raises(UserError, match=r"between 0 nodes"):
        Exchange(num_nodes=0, combine=True, inter_s=1.0, intra_s=1.0)
    with pytest.raises(UserError, match=r"belong to combine"):
        Exchange(num_nodes=2, combine=False, inter_s=1.0, intra_s=1.0, gather_s=1.0)
    with pytest.raises(UserError, match=r"intra_s has shape \(2, 2\): give one time or an array of shape \(3, 3\)"):
        Exchange(num_nodes=3, combine=True, inter_s=1.0, intra_s=[[1.0, 1.0]] * 2)
