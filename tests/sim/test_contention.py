"""Lina on collectives that share a link, and on pipelining: simulated timelines against closed forms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sim.events import EventGraph
from antiphon.sim.resources import Shared
from antiphon.sim.schedules import Contention

seconds = st.floats(0.01, 10)


def fair_sharing_end(first_s: float, second_s: float, start_s: float) -> tuple[float, float]:
    """When two transfers end that take this long alone, the second starting later, each with half of the link while
    both run."""
    if first_s <= start_s:
        return first_s, start_s + second_s
    left = first_s - start_s
    both = min(left, second_s)
    return start_s + both + max(left, both), start_s + both + max(second_s, both)


def pipelined_layer(all_to_all_s: float, ffn_s: float, num_chunks: int) -> float:
    """All-to-all, feed-forward on what has come, chunk by chunk: T = max(a, f) + min(a, f) / c. One way."""
    return max(all_to_all_s, ffn_s) + min(all_to_all_s, ffn_s) / num_chunks


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, st.floats(0, 10))
def test_fair_sharing(first_s: float, second_s: float, start_s: float) -> None:
    graph = EventGraph()
    graph.resource("wire", Shared(Contention().rates))
    first = graph.add("first", first_s, "wire", kind="all_reduce")
    second = graph.add("second", second_s, "wire", kind="all_to_all", latency_s=start_s)
    result = graph.run()
    expected = fair_sharing_end(first_s, second_s, start_s)
    assert (result.ends_s[first], result.ends_s[second]) == (
        pytest.approx(expected[0], rel=1e-9),
        pytest.approx(expected[1], rel=1e-9),
    )


@settings(max_examples=50, deadline=None)
@given(seconds, seconds, st.integers(1, 12))
def test_pipelined_all_to_all(all_to_all_s: float, ffn_s: float, num_chunks: int) -> None:
    graph = EventGraph()
    for chunk in range(num_chunks):
        arrived = graph.add(f"all-to-all {chunk}", all_to_all_s / num_chunks, "wire")
        graph.add(f"FFN {chunk}", ffn_s / num_chunks, "compute", after=[arrived])
    expected = pipelined_layer(all_to_all_s, ffn_s, num_chunks)
    assert graph.run().end_s == pytest.approx(expected, rel=1e-9)
