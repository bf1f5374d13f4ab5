"""Closed forms of `cost.training.contention` (Lina) against simulated timelines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.training import contention
from antiphon.sim.events import EventGraph
from antiphon.sim.schedules import Contention
from antiphon.sim.servers import Shared

seconds = st.floats(0.01, 10)


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, st.floats(0, 10))
def test_fair_sharing(first_s: float, second_s: float, start_s: float) -> None:
    graph = EventGraph()
    graph.resource("wire", Shared(Contention().rates))
    first = graph.add("first", first_s, "wire", kind="all_reduce")
    second = graph.add("second", second_s, "wire", kind="all_to_all", latency_s=start_s)
    result = graph.run()
    expected = contention.fair_sharing_end(first_s, second_s, start_s)
    assert (result.ends_s[first], result.ends_s[second]) == (
        pytest.approx(float(expected[0]), rel=1e-9),
        pytest.approx(float(expected[1]), rel=1e-9),
    )


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, st.integers(1, 12))
def test_pipelined_all_to_all(all_to_all_s: float, ffn_s: float, num_chunks: int) -> None:
    graph = EventGraph()
    for chunk in range(num_chunks):
        arrived = graph.add(f"all-to-all {chunk}", all_to_all_s / num_chunks, "wire")
        graph.add(f"FFN {chunk}", ffn_s / num_chunks, "compute", after=[arrived])
    expected = float(contention.pipelined_layer(all_to_all_s, ffn_s, num_chunks))
    assert graph.run().end_s == pytest.approx(expected, rel=1e-9)
