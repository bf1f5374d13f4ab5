"""The backward pass: Lina's Figures 7 and 8 to the printed digit, and what must hold for any layers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.reproduce.lina import LAYER, figure_7, figure_8b
from antiphon.sim.gantt import Bar
from antiphon.sim.schedules import SCHEDULES, Contention, Schedule
from antiphon.sim.training_step import (
    BackwardLayer,
    BackwardOptions,
    BackwardTimeline,
    Gradient,
    simulate_backward,
)

EXACT = 1e-9


def ends_ms(timeline: BackwardTimeline, kind: str) -> list[float]:
    return [bar.end_s * 1e3 for bar in timeline.bars if bar.kind == kind]


@pytest.mark.parametrize(
    ("schedule", "all_to_all", "all_reduce", "ffn", "gate"),
    [
        ("baseline", [17.7, 26.9], [14.7], 19.3, 29.0),
        ("priority", [19.6, 28.8], [12.0], 21.2, 30.9),
        ("deferral", [13.3, 22.5], [30.4], 14.9, 24.6),
        ("known", [13.3, 22.5], [5.7, 14.9, 23.8], 14.9, 24.6),
    ],
)
def test_lina_figure_7(
    schedule: Schedule, all_to_all: list[float], all_reduce: list[float], ffn: float, gate: float
) -> None:
    """Every time printed in (a) to (d)."""
    timeline = figure_7()[schedule]
    assert ends_ms(timeline, "gradients") == pytest.approx([4.1], rel=EXACT)
    assert ends_ms(timeline, "combine") == pytest.approx([5.7], rel=EXACT)
    assert ends_ms(timeline, "all_to_all") == pytest.approx(all_to_all, rel=EXACT)
    assert ends_ms(timeline, "all_reduce") == pytest.approx(all_reduce, rel=EXACT)
    assert ends_ms(timeline, "FFN") == pytest.approx([ffn], rel=EXACT)
    assert timeline.compute_end_s * 1e3 == pytest.approx(gate, rel=EXACT)


def test_figure_7a_with_fair_sharing_ends_like_7b() -> None:
    """The paper: in theory the completion time of (b) is that of (a)."""
    fair = simulate_backward([LAYER], BackwardOptions(schedule="baseline"))
    assert fair.compute_end_s * 1e3 == pytest.approx(30.9, rel=EXACT)


def test_lina_figure_8a() -> None:
    """Three micro-ops before the first all-to-all, one in the gap, one after; 6.6 ms or 21.7% before the deferral."""
    timelines = figure_7()
    ours = timelines["micro_ops"]
    pieces = [(bar.start_s * 1e3, bar.end_s * 1e3) for bar in ours.bars if bar.kind == "all_reduce"]
    assert sum(end < 5.7 + EXACT for _, end in pieces) == 3
    assert pieces[3:] == [pytest.approx((13.3, 14.9)), pytest.approx((22.5, 23.8))]
    assert ours.compute_end_s * 1e3 == pytest.approx(24.6, rel=EXACT)
    saved_s = timelines["deferral"].all_reduce_end_s - ours.all_reduce_end_s
    assert saved_s * 1e3 == pytest.approx(6.6, rel=EXACT)
    assert saved_s / timelines["deferral"].all_reduce_end_s == pytest.approx(0.217, abs=5e-4)


def test_lina_figure_8b() -> None:
    """All-to-all in parts hides the FFN's 1.6 ms: 20.9 and 23.0 as printed."""
    timeline = figure_8b()
    assert max(ends_ms(timeline, "all_to_all")) == pytest.approx(20.9, rel=EXACT)
    assert timeline.compute_end_s * 1e3 == pytest.approx(23.0, rel=EXACT)
    assert timeline.pipelining_efficiency() == pytest.approx(1.6 / 15.2, rel=EXACT)


millis = st.integers(0, 9).map(lambda value: value * 1e-3)


@st.composite
def layers(draw: st.DrawFn) -> list[BackwardLayer]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        gradient_s = draw(millis)
        gradients = tuple(
            Gradient(
                name=f"g{number}",
                size_bytes=draw(st.integers(1, 100_000_000)),
                all_reduce_s=draw(millis),
                ready_s=gradient_s * draw(st.sampled_from([0.0, 0.5, 1.0])),
            )
            for number in range(draw(st.integers(0, 3)))
        )
        made.append(
            BackwardLayer(
                gradient_s=gradient_s,
                gradients=gradients,
                combine_s=draw(millis),
                all_to_all_s=draw(millis),
                ffn_s=draw(millis),
                gate_s=draw(millis),
                all_to_all_bytes=draw(st.integers(0, 200_000_000)),
            )
        )
    return made


def alone_s(passed: list[BackwardLayer]) -> float:
    """Computation and all-to-all without any all-reduce."""
    return sum(
        layer.gradient_s + layer.combine_s + 2 * layer.all_to_all_s + layer.ffn_s + layer.gate_s for layer in passed
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=30, deadline=None)
@given(passed=layers())
def test_what_holds_for_every_schedule(schedule: Schedule, passed: list[BackwardLayer]) -> None:
    timeline = simulate_backward(passed, BackwardOptions(schedule=schedule))
    assert timeline.compute_end_s >= alone_s(passed) - EXACT
    reduced_s = sum(gradient.all_reduce_s for layer in passed for gradient in layer.gradients)
    spans = [bar for bar in timeline.bars if bar.track == "all-reduce"]
    if schedule == "baseline":  # contention stretches, at most to twice the time under fair sharing
        assert reduced_s - EXACT <= sum(bar.duration_s for bar in spans) <= 2 * reduced_s + EXACT
    else:
        assert sum(bar.duration_s for bar in spans) == pytest.approx(reduced_s, rel=EXACT)
        assert_exclusive([bar for bar in timeline.bars if bar.kind in ("all_to_all", "all_reduce")])
    assert_exclusive([bar for bar in timeline.bars if bar.track == "compute"])
    if schedule == "known":
        assert timeline.compute_end_s == pytest.approx(alone_s(passed), rel=EXACT)


def assert_exclusive(bars: list[Bar]) -> None:
    ordered = sorted(bars, key=lambda bar: (bar.start_s, bar.end_s))
    assert all(left.end_s <= right.start_s + 1e-12 for left, right in itertools.pairwise(ordered))


@settings(max_examples=50, deadline=None)
@given(passed=layers(), chunk=st.sampled_from([3_000_000, 30_000_000]))
def test_micro_ops_delay_an_all_to_all_by_less_than_one_chunk(passed: list[BackwardLayer], chunk: int) -> None:
    timeline = simulate_backward(passed, BackwardOptions(schedule="micro_ops", chunk_bytes=chunk))
    longest = max((bar.duration_s for bar in timeline.bars if bar.kind == "all_reduce"), default=0.0)
    assert timeline.compute_end_s <= alone_s(passed) + 2 * len(passed) * longest + EXACT


@settings(max_examples=30, deadline=None)
@given(passed=layers())
def test_pipelining_never_delays_computation_without_gradients(passed: list[BackwardLayer]) -> None:
    bare = [BackwardLayer(**(vars(layer) | {"gradients": ()})) for layer in passed]
    plain, piped = (
        simulate_backward(bare, BackwardOptions(schedule="micro_ops", pipeline=pipeline)) for pipeline in (False, True)
    )
    assert piped.compute_end_s <= plain.compute_end_s + EXACT
    assert 0 <= piped.pipelining_efficiency() <= 1
    assert sum(piped.all_to_all_s()) == pytest.approx(sum(plain.all_to_all_s()), rel=EXACT, abs=EXACT)


def test_orderings_over_a_whole_step() -> None:
    """Twelve layers: micro-ops come close to knowing all times; deferral and plain priority do not."""
    ends = {
        schedule: simulate_backward([LAYER] * 12, BackwardOptions(schedule=schedule)).end_s for schedule in SCHEDULES
    }
    assert ends["known"] <= ends["micro_ops"] + EXACT
    assert ends["micro_ops"] < min(ends["deferral"], ends["priority"], ends["baseline"])


def test_same_twice() -> None:
    assert figure_7() == figure_7()
    assert np.isfinite([timeline.end_s for timeline in figure_7().values()]).all()


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"pipeline with schedule 'baseline': only 'micro_ops'"):
        BackwardOptions(schedule="baseline", pipeline=True)
    with pytest.raises(UserError, match=r"all_reduce_rate is 0: give a fraction above 0, at most 1"):
        Contention(all_reduce_rate=0)
    with pytest.raises(UserError, match=r"gradient 'G_i': 0 bytes"):
        BackwardLayer(
            **(vars(LAYER) | {"gradients": (Gradient(name="G_i", size_bytes=0, all_reduce_s=1.0, ready_s=0.0),)})
        )
