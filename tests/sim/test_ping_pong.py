"""The ping-pong recurrence against the event core, against longest paths written out, and against the closed forms."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost import ping_pong as closed
from antiphon.sim.destinations import Destinations
from antiphon.sim.gantt import busy_s
from antiphon.sim.ping_pong import ATTENTION_TIMES, EXPERT_TIMES, PingPong, PingPongResult, simulate_ping_pong
from tests.sim.ping_pong_events import simulate_ping_pong_events


@st.composite
def pipelines(draw: st.DrawFn, sparse: bool | None = None) -> PingPong:
    """Up to 4 of everything, odd numbers included; some links free, some not; pairs of workers by layer or all."""
    num_layers, num_micro_batches, num_attention, num_experts = (draw(st.integers(1, 4)) for _ in range(4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_layers, num_micro_batches)
    times = {
        name: random.random((*shape, num_attention if name in ATTENTION_TIMES else num_experts))
        * (name in ("attention_s", "experts_s") or draw(st.booleans()))
        for name in (*ATTENTION_TIMES, *EXPERT_TIMES)
    }
    pairs = random.random((*shape, num_attention, num_experts)) < 0.6
    chosen = {
        (layer, i): Destinations([np.flatnonzero(row).tolist() for row in pairs[layer, i]], num_experts)
        for layer in range(num_layers)
        for i in range(num_micro_batches)
    }
    use_pairs = draw(st.booleans()) if sparse is None else sparse
    return PingPong(
        num_layers=num_layers,
        num_micro_batches=num_micro_batches,
        num_attention_workers=num_attention,
        num_expert_workers=num_experts,
        latency_s=draw(st.sampled_from([0.0, 0.2, 1.5])),
        destinations=(lambda layer, i: chosen[layer, i]) if use_pairs else None,
        **times,
    )


def same_links(**changes: object) -> PingPong:
    """All workers alike; `changes` as for `PingPong`."""
    base = {"num_layers": 5, "num_micro_batches": 3, "num_attention_workers": 2, "num_expert_workers": 3}
    return PingPong(**(base | {"attention_s": 1.0, "experts_s": 1.0} | changes))


def longest_paths(p: PingPong) -> np.ndarray:
    """`replied_s` by the definition, one number at a time: no arrays, no order but its own."""
    times = {name: p.times(name) for name in (*ATTENTION_TIMES, *EXPERT_TIMES)}
    num_cells = p.num_layers * p.num_micro_batches

    def senders(name: str, cell: int, worker: int) -> list[int]:
        pairs = p.destinations_of(*divmod(cell, p.num_micro_batches))
        if name == "experts_receive_s":
            return list(range(p.num_attention_workers)) if pairs is None else pairs.sources(worker)
        return list(range(p.num_expert_workers)) if pairs is None else pairs.targets(worker)

    def involved(name: str, cell: int, worker: int) -> bool:
        incoming = "attention_receive_s" if name in ATTENTION_TIMES else "experts_receive_s"
        return name == "attention_s" or bool(senders(incoming, cell, worker))

    @cache
    def end(name: str, cell: int, worker: int) -> float:
        layer, i = divmod(cell, p.num_micro_batches)
        return start(name, cell, worker) + times[name][layer, i, worker]

    @cache
    def start(name: str, cell: int, worker: int) -> float:
        earlier = [end(name, c, worker) for c in range(cell) if involved(name, c, worker)][-1:]
        return max([ready(name, cell, worker), *earlier])

    def ready(name: str, cell: int, worker: int) -> float:
        before = {"attention_send_s": "attention_s", "experts_send_s": "experts_s"}
        if name in before:
            return end(before[name], cell, worker)
        if name == "experts_s":
            return complete("experts_receive_s", "attention_send_s", cell, worker)
        if name == "attention_s":
            return replied(cell - p.num_micro_batches, worker) if cell >= p.num_micro_batches else 0.0
        sending = "attention_send_s" if name == "experts_receive_s" else "experts_send_s"
        return min(start(sending, cell, sender) for sender in senders(name, cell, worker)) + p.latency_s

    def complete(receiving: str, sending: str, cell: int, worker: int) -> float:
        last = max(end(sending, cell, sender) for sender in senders(receiving, cell, worker)) + p.latency_s
        return max(end(receiving, cell, worker), last)

    def replied(cell: int, worker: int) -> float:
        if not senders("attention_receive_s", cell, worker):
            return end("attention_s", cell, worker)
        return complete("attention_receive_s", "experts_send_s", cell, worker)

    result = [max(replied(cell, a) for a in range(p.num_attention_workers)) for cell in range(num_cells)]
    return np.asarray(result).reshape(p.num_layers, p.num_micro_batches)


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_recurrence_equals_the_event_core(pipeline: PingPong) -> None:
    result, events = simulate_ping_pong(pipeline), simulate_ping_pong_events(pipeline)
    cells = [(layer, i) for layer in range(pipeline.num_layers) for i in range(pipeline.num_micro_batches)]
    replied_s = np.array([events.replied_s(*cell) for cell in cells]).reshape(result.replied_s.shape)
    np.testing.assert_allclose(result.replied_s, replied_s, rtol=1e-12, atol=0)


@settings(max_examples=50, deadline=None)
@given(pipelines())
def test_recurrence_equals_longest_paths(pipeline: PingPong) -> None:
    np.testing.assert_allclose(simulate_ping_pong(pipeline).replied_s, longest_paths(pipeline), rtol=1e-12, atol=0)


@settings(max_examples=30, deadline=None)
@given(pipelines(sparse=False))
def test_first_come_is_in_order_where_all_send_to_all(pipeline: PingPong) -> None:
    assert (
        simulate_ping_pong_events(pipeline, first_come=True).run.end_s == simulate_ping_pong_events(pipeline).run.end_s
    )


@settings(max_examples=30, deadline=None)
@given(pipelines())
def test_all_work_is_done_once(pipeline: PingPong) -> None:
    """Busy time is the sum of durations, in the totals, in the bars and in the event core; no track overlaps itself."""
    attention, experts = range(pipeline.num_attention_workers), range(pipeline.num_expert_workers)
    result = simulate_ping_pong(pipeline, record_attention=attention, record_experts=experts)
    np.testing.assert_allclose(result.attention_busy_s, pipeline.times("attention_s").sum((0, 1)), rtol=1e-12)
    shown, events = busy_s(result.bars), simulate_ping_pong_events(pipeline).run.busy_s()
    totals = {f"attention[{a}]": result.attention_busy_s[a] for a in attention}
    totals |= {f"experts[{e}]": result.experts_busy_s[e] for e in experts}
    for name, per_worker in result.links_busy_s.items():
        role, way = name.removesuffix("_s").split("_")
        short = {"send": "out", "receive": "in"}[way]
        totals |= {f"{role}[{worker}] {short}": busy for worker, busy in enumerate(per_worker)}
    for track, total_s in totals.items():
        assert shown.get(track, 0.0) == pytest.approx(total_s, rel=1e-9, abs=1e-12)
        assert events.get(track, 0.0) == pytest.approx(total_s, rel=1e-9, abs=1e-12)
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
    np.testing.assert_allclose(np.diff(result.replied_s[:, 0]), layer_s, rtol=1e-9)
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
        first_s = result.replied_s[num_layers - 1]
        eq_5 = (t_a + t_e + 2 * t_c) + t_f * (m * num_layers - 1)
        assert first_s[-1] == pytest.approx(eq_5, rel=1e-9)
        low_s, high_s = closed.micro_batch_bounds(m, num_layers, t_a, t_e, t_c)
        assert first_s[0] == pytest.approx(low_s, rel=1e-9)
        second_s = result.replied_s[-1] - first_s
        assert (second_s >= low_s * (1 - 1e-9)).all()
        assert (second_s <= high_s * (1 + 1e-9)).all()


def test_figure_4_of_megascale_infer_by_hand() -> None:
    """m = 3, T_a = T_e = 4, T_c = 1, two layers: no side ever waits after its first cell; 10 + 4 * 5 = 30."""
    result = simulate_ping_pong(
        same_links(num_layers=2, attention_s=4.0, experts_s=4.0, latency_s=1.0),
        record_attention=[0],
        record_experts=[2],
    )
    bars = [(bar.track, bar.label, bar.start_s, bar.end_s) for bar in result.bars]
    assert bars == [
        ("attention[0]", "0.0", 0, 4),
        ("attention[0]", "0.1", 4, 8),
        ("experts[2]", "0.0", 5, 9),
        ("attention[0]", "0.2", 8, 12),
        ("experts[2]", "0.1", 9, 13),
        ("attention[0]", "1.0", 12, 16),
        ("experts[2]", "0.2", 13, 17),
        ("attention[0]", "1.1", 16, 20),
        ("experts[2]", "1.0", 17, 21),
        ("attention[0]", "1.2", 20, 24),
        ("experts[2]", "1.1", 21, 25),
        ("experts[2]", "1.2", 25, 29),
    ]
    assert result.end_s == 30
    assert result.attention_idle_ratio == pytest.approx(1 - 24 / 30)


@settings(max_examples=30, deadline=None)
@given(pipelines(), st.sampled_from(["latency_s", *ATTENTION_TIMES, *EXPERT_TIMES]))
def test_slower_parts_never_help(pipeline: PingPong, name: str) -> None:
    slower = PingPong(**(vars(pipeline) | {name: np.asarray(getattr(pipeline, name)) * 1.5 + 0.1}))
    assert (simulate_ping_pong(slower).replied_s >= simulate_ping_pong(pipeline).replied_s - 1e-12).all()


def test_a_slow_worker_holds_up_all() -> None:
    """The barrier: with one attention worker of ten at double time, a layer takes what the slow one takes."""
    times = np.ones((1, 1, 10))
    times[0, 0, 3] = 2.0
    result = simulate_ping_pong(same_links(num_layers=50, num_attention_workers=10, attention_s=times, experts_s=0.5))
    assert float(result.replied_s[-1, 0] - result.replied_s[-2, 0]) == pytest.approx(3 * 2.0)


def ten_thousand(random: np.random.Generator) -> PingPong:
    attention, experts = (60, 3, 6000), (60, 3, 4000)
    return PingPong(
        num_layers=60,
        num_micro_batches=3,
        num_attention_workers=6000,
        num_expert_workers=4000,
        attention_s=random.gamma(100, 1e-5, attention),
        experts_s=random.gamma(100, 1e-5, experts),
        latency_s=5e-6,
        attention_send_s=random.gamma(100, 3e-6, attention),
        experts_receive_s=random.gamma(100, 3e-6, experts),
        experts_send_s=random.gamma(100, 3e-6, experts),
        attention_receive_s=random.gamma(100, 3e-6, attention),
    )


def test_ten_thousand_devices() -> None:
    """One iteration of 60 layers on 6,000 + 4,000 workers is simulated whole, between the bounds physics gives."""
    pipeline = ten_thousand(np.random.default_rng(0))
    result: PingPongResult = simulate_ping_pong(pipeline)
    slowest_s = max(pipeline.times("attention_s").sum((0, 1)).max(), pipeline.times("experts_s").sum((0, 1)).max())
    barriers_s = sum(pipeline.times(name).max(axis=2).sum() for name in (*ATTENTION_TIMES, *EXPERT_TIMES))
    assert slowest_s < result.end_s < barriers_s + 2 * 180 * 5e-6
    assert len(result.attention_busy_s) + len(result.experts_busy_s) == 10_000


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_micro_batches is 0: give at least 1"):
        same_links(num_micro_batches=0)
    with pytest.raises(UserError, match=r"attention_s holds -1.0: give finite times"):
        same_links(attention_s=-1.0)
    with pytest.raises(UserError, match=r"experts_s has shape \(2,\): give one that broadcasts to \(5, 3, 3\)"):
        same_links(experts_s=np.ones(2))
    with pytest.raises(UserError, match=r"destinations are for \(2, 4\) .* the pipeline has \(2, 3\)"):
        same_links(destinations=Destinations([[0], [3]], 4))
    with pytest.raises(UserError, match=r"destinations are for \(1, 3\)"):
        simulate_ping_pong(same_links(destinations=lambda layer, i: Destinations([[0]], 3)))


def test_destinations() -> None:
    pairs = Destinations([[2, 0], [], [2]], 4)
    assert [pairs.targets(a) for a in range(3)] == [[0, 2], [], [2]]
    assert [pairs.sources(e) for e in range(4)] == [[0], [], [0, 2], []]
    values = np.array([5.0, 1.0, 7.0])
    np.testing.assert_array_equal(pairs.over_sources(np.maximum, values, -1.0), [5, -1, 7, -1])
    np.testing.assert_array_equal(pairs.over_targets(np.minimum, np.array([3.0, 9, 2, 9]), -1.0), [2, -1, 2])
    same = Destinations.from_pairs(np.array([2, 0, 0]), np.array([2, 0, 2]), 3, 4)
    assert [same.targets(a) for a in range(3)] == [[0, 2], [], [2]]
    with pytest.raises(UserError, match=r"expert worker 4: use 0 to 3"):
        Destinations([[4]], 4)
    with pytest.raises(UserError, match=r"a pair of workers twice"):
        Destinations([[1, 1]], 4)
