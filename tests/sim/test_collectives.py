"""MixServe's exchanges: against the formulas of `cost`, charts by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import fused_combine_s, fused_dispatch_s
from antiphon.sim.collectives import simulate_exchange
from antiphon.sim.events import Run

nodes = st.integers(1, 6)
seconds = st.floats(0, 10)


@settings(max_examples=50, deadline=None)
@given(nodes, seconds, seconds, seconds, st.booleans())
def test_rounds_equal_the_formulas(num_nodes: int, inter: float, intra: float, gather: float, fused: bool) -> None:
    one_by_one = (num_nodes - 1) * (inter + intra)
    dispatch_s = float(fused_dispatch_s(num_nodes, inter, intra)) if fused else one_by_one
    expected = pytest.approx(dispatch_s, rel=1e-9, abs=1e-12)
    assert simulate_exchange(num_nodes, inter, intra, fused=fused).end_s == expected
    one_by_one = num_nodes * intra + (num_nodes - 1) * inter + gather
    combine_s = float(fused_combine_s(num_nodes, inter, intra, gather)) if fused else one_by_one
    expected = pytest.approx(combine_s, rel=1e-9, abs=1e-12)
    assert simulate_exchange(num_nodes, inter, intra, gather, fused=fused).end_s == expected


def chart(exchange: Run) -> list[tuple[str, str, float, float]]:
    shown = ("node[0] out", "node[0] inside")
    return [
        (bar.track.removeprefix("node[0] "), bar.label, bar.start_s, bar.end_s)
        for bar in exchange.bars()
        if bar.track in shown
    ]


def test_figure_9a_by_hand() -> None:
    """Four nodes: 3 rounds between nodes beside 4 reduce-scatters inside, then the all-gather."""
    assert chart(simulate_exchange(4, 5.0, 2.0, 2.0, fused=True)) == [
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
    assert chart(simulate_exchange(4, 5.0, 2.0, fused=True)) == [
        ("out", "round 1 to 1", 0, 5),
        ("inside", "all-gather 1", 5, 7),
        ("out", "round 2 to 2", 5, 10),
        ("inside", "all-gather 2", 10, 12),
        ("out", "round 3 to 3", 10, 15),
        ("inside", "all-gather 3", 15, 17),
    ]
    assert simulate_exchange(4, 5.0, 2.0, fused=False).end_s == 21


def test_figure_12_fused_takes_little_more_than_the_wires_between_nodes() -> None:
    """910B: 200 Gb/s between nodes, 480 Gb/s inside. Fused is a little above the inter-node time, synchronous far."""
    inter, intra = 1 / 25e9, 1 / 60e9
    fused, synchronous = (simulate_exchange(4, inter, intra, 0.0, fused=fused).end_s for fused in (True, False))
    assert 1 < fused / (3 * inter) < 1.15
    assert synchronous / (3 * inter) > 1.5
