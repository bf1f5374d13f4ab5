"""The ping-pong recurrence against the event core, against longest paths written out, and against the closed forms."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost import ping_pong as closed
from antiphon.sim.gantt import Bar
from antiphon.sim.ping_pong import LINES, PingPong, simulate_ping_pong
from tests.sim.ping_pong_events import simulate_ping_pong_events


@st.composite
def pipelines(draw: st.DrawFn) -> PingPong:
    """Up to 4 layers and micro-batches; some links free, some not."""
    times = {
        name: draw(st.floats(0.01, 1)) * (name in ("attention_s", "experts_s") or draw(st.booleans())) for name in LINES
    }
    return PingPong(
        num_layers=draw(st.integers(1, 4)),
        num_micro_batches=draw(st.integers(1, 4)),
        latency_s=draw(st.sampled_from([0.0, 0.2, 1.5])),
        **times,
    )


def same_links(**changes: object) -> PingPong:
    """`changes` as for `PingPong`."""
    base = {"num_layers": 5, "num_micro_batches": 3}
    return PingPong(**(base | {"attention_s": 1.0, "experts_s": 1.0} | changes))


def longest_paths(p: PingPong) -> np.ndarray:
    """`replied_s` by the definition, one number at a time, in no order but its own."""
    num_cells = p.num_layers * p.num_micro_batches

    @cache
    def end(name: str, cell: int) -> float:
        return start(name, cell) + getattr(p, name)

    @cache
    def start(name: str, cell: int) -> float:
        return max(ready(name, cell), end(name, cell - 1) if cell else 0.0)

    def ready(name: str, cell: int) -> float:
        before = {"attention_send_s": "attention_s", "experts_send_s": "experts_s"}
        if name in before:
            return end(before[name], cell)
        if name == "experts_s":
            return complete("experts_receive_s", "attention_send_s", cell)
        if name == "attention_s":
            return replied(cell - p.num_micro_batches) if cell >= p.num_micro_batches else 0.0
        return start("attention_send_s" if name == "experts_receive_s" else "experts_send_s", cell) + p.latency_s

    def complete(receiving: str, sending: str, cell: int) -> float:
        return max(end(receiving, cell), end(sending, cell) + p.latency_s)

    def replied(cell: int) -> float:
        return complete("attention_receive_s", "experts_send_s", cell)

    return np.asarray([replied(cell) for cell in range(num_cells)]).reshape(p.num_layers, p.num_micro_batches)


@settings(max_examples=50, deadline=None)
@given(pipelines(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_recurrence_equals_the_event_core(pipeline: PingPong, attention: int, experts: int, first_come: bool) -> None:
    """With any number of workers on each side, which are alike; served in order or first come, first served."""
    result = simulate_ping_pong(pipeline)
    events = simulate_ping_pong_events(pipeline, attention, experts, first_come=first_come)
    cells = [(layer, i) for layer in range(pipeline.num_layers) for i in range(pipeline.num_micro_batches)]
    replied_s = np.array([events.replied_s(*cell) for cell in cells]).reshape(np.shape(result.replied_s))
    np.testing.assert_allclose(result.replied_s, replied_s, rtol=1e-12, atol=0)


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_recurrence_equals_longest_paths(pipeline: PingPong) -> None:
    np.testing.assert_allclose(simulate_ping_pong(pipeline).replied_s, longest_paths(pipeline), rtol=1e-12, atol=0)


def busy_s(bars: list[Bar]) -> dict[str, float]:
    """By track."""
    found: dict[str, float] = {}
    for bar in bars:
        found[bar.track] = found.get(bar.track, 0.0) + bar.duration_s
    return found


@settings(max_examples=30, deadline=None)
@given(pipelines())
def test_all_work_is_done_once(pipeline: PingPong) -> None:
    """Busy time is the sum of durations, in the bars of all workers and in the event core; no track overlaps itself."""
    result = simulate_ping_pong(pipeline)
    num_cells = pipeline.num_layers * pipeline.num_micro_batches
    shown, events = busy_s(result.bars_of(2, 3)), busy_s(simulate_ping_pong_events(pipeline, 2, 3).run.bars())
    for name, (track, _) in LINES.items():
        for worker in range(2 if track.startswith("attention") else 3):
            total_s = num_cells * getattr(pipeline, name)
            of_worker = track.replace("[]", f"[{worker}]")
            assert shown.get(of_worker, 0.0) == pytest.approx(total_s, rel=1e-9, abs=1e-12)
            assert events.get(of_worker, 0.0) == pytest.approx(total_s, rel=1e-9, abs=1e-12)
    for track in shown:
        bars = [bar for bar in result.bars_of(2, 3) if bar.track == track]
        assert all(one.end_s <= after.start_s for one, after in itertools.pairwise(bars))
    assert all(bar.end_s <= result.end_s * (1 + 1e-12) for bar in result.bars)


seconds = st.floats(0.01, 10)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), seconds, seconds, seconds)
def test_closed_form_with_links_of_one_message(m: int, num_layers: int, t_a: float, t_e: float, t_c: float) -> None:
    """T_c occupies the links: `cost.ping_pong.iteration`, equal and unequal T_a, T_e, any T_c, any m."""
    links = dict.fromkeys(("attention_send_s", "experts_receive_s", "experts_send_s", "attention_receive_s"), t_c)
    pipeline = same_links(num_layers=num_layers, num_micro_batches=m, attention_s=t_a, experts_s=t_e, **links)
    assert simulate_ping_pong(pipeline).end_s == pytest.approx(closed.iteration(m, num_layers, t_a, t_e, t_c), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(2, 8), seconds, seconds, seconds)
def test_layer_time_with_free_links(m: int, num_layers: int, t_a: float, t_e: float, t_c: float) -> None:
    """T_c as a delay only: a layer takes max(m T_f, T_a + T_e + 2 T_c), whatever T_c (issue's general form)."""
    result = simulate_ping_pong(
        same_links(num_layers=num_layers, num_micro_batches=m, attention_s=t_a, experts_s=t_e, latency_s=t_c)
    )
    layer_s, round_s = max(m * max(t_a, t_e), t_a + t_e + 2 * t_c), t_a + t_e + 2 * t_c
    np.testing.assert_allclose(np.diff(np.asarray(result.replied_s)[:, 0]), layer_s, rtol=1e-9)
    assert result.end_s == pytest.approx(layer_s * (num_layers - 1) + round_s + (m - 1) * max(t_a, t_e), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), seconds, st.floats(0.5, 1), st.floats(0, 0.99))
def test_equations_4_and_5_where_3_holds(m: int, num_layers: int, t_f: float, ratio: float, share: float) -> None:
    """Eq. 5 for the first iteration; eq. 4 for each micro-batch of the second, from reply to reply."""
    t_a, t_e, t_c = t_f, t_f * ratio, t_f * share
    if m * t_f < 2 * (t_f + t_c):
        m = int(closed.min_micro_batches(t_c, t_f))
    for attention_s, experts_s in ((t_a, t_e), (t_e, t_a)):
        pipeline = same_links(
            num_layers=2 * num_layers,
            num_micro_batches=m,
            attention_s=attention_s,
            experts_s=experts_s,
            latency_s=t_c,
        )
        result = simulate_ping_pong(pipeline)
        first_s = np.asarray(result.replied_s[num_layers - 1])
        eq_5 = (t_a + t_e + 2 * t_c) + t_f * (m * num_layers - 1)
        assert first_s[-1] == pytest.approx(eq_5, rel=1e-9)
        low_s, high_s = closed.micro_batch_bounds(m, num_layers, t_a, t_e, t_c)
        assert first_s[0] == pytest.approx(low_s, rel=1e-9)
        second_s = result.replied_s[-1] - first_s
        assert (second_s >= low_s * (1 - 1e-9)).all()
        assert (second_s <= high_s * (1 + 1e-9)).all()


def test_figure_4_of_megascale_infer_by_hand() -> None:
    """m = 3, T_a = T_e = 4, T_c = 1, two layers: no side ever waits after its first cell; 10 + 4 * 5 = 30."""
    result = simulate_ping_pong(same_links(num_layers=2, attention_s=4.0, experts_s=4.0, latency_s=1.0))
    bars = [(bar.track, bar.label, bar.start_s, bar.end_s) for bar in result.bars]
    assert bars == [
        ("attention[0]", "0.0", 0, 4),
        ("attention[0]", "0.1", 4, 8),
        ("experts[0]", "0.0", 5, 9),
        ("attention[0]", "0.2", 8, 12),
        ("experts[0]", "0.1", 9, 13),
        ("attention[0]", "1.0", 12, 16),
        ("experts[0]", "0.2", 13, 17),
        ("attention[0]", "1.1", 16, 20),
        ("experts[0]", "1.0", 17, 21),
        ("attention[0]", "1.2", 20, 24),
        ("experts[0]", "1.1", 21, 25),
        ("experts[0]", "1.2", 25, 29),
    ]
    assert result.end_s == 30
    assert result.attention_idle_ratio == pytest.approx(1 - 24 / 30)


@settings(max_examples=30, deadline=None)
@given(pipelines(), st.sampled_from(["latency_s", *LINES]))
def test_slower_parts_never_help(pipeline: PingPong, name: str) -> None:
    slower = PingPong(**(vars(pipeline) | {name: getattr(pipeline, name) * 1.5 + 0.1}))
    after, before = (np.asarray(simulate_ping_pong(one).replied_s) for one in (slower, pipeline))
    assert (after >= before - 1e-12).all()


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_micro_batches is 0: give at least 1"):
        same_links(num_micro_batches=0)
    with pytest.raises(UserError, match=r"attention_s is -1.0: give a finite time"):
        same_links(attention_s=-1.0)
