"""The event core against a simulator that advances tick by tick, and against longest paths."""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.sim.events import EventGraph, Run
from antiphon.sim.resources import Discipline, InOrder, Priority, Shared


@dataclass
class Job:
    """A job of the naive simulator; `duration` at least one tick."""

    duration: int
    track: int
    priority: int
    after: list[int]
    left: int = 0
    arrived: int | None = None
    start: int | None = None
    end: int | None = None
    held: list[int] = field(default_factory=list)  # ticks in which it held its resource


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs: list[Job] = []
    for number in range(draw(st.integers(1, 8))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        jobs.append(Job(draw(st.integers(1, 4)), draw(st.integers(0, 1)), draw(st.integers(0, 2)), after))
    return jobs


def naive(jobs: list[Job], discipline: str) -> None:
    """Tick by tick: who holds each resource in [tick, tick + 1)?"""
    for job in jobs:
        job.left, job.arrived, job.start, job.end, job.held = job.duration, None, None, None, []
    current: dict[int, int | None] = {0: None, 1: None}
    for tick in itertools.count():
        for job in jobs:
            if job.arrived is None and all(jobs[a].end is not None and jobs[a].end <= tick for a in job.after):
                job.arrived = tick
        for track, holder in list(current.items()):
            if holder is not None and jobs[holder].left == 0:
                holder = None
            waiting = [i for i, job in enumerate(jobs) if job.track == track and job.arrived is not None and job.left]
            if discipline == "in_order":
                rest = [i for i, job in enumerate(jobs) if job.track == track and job.left]
                waiting = rest[:1] if rest and rest[0] in waiting else []
            key = {
                "fifo": lambda i: (jobs[i].arrived, i),
                "in_order": lambda i: (i,),
            }.get(discipline, lambda i: (jobs[i].priority, jobs[i].arrived, i))
            best = min(waiting, key=key, default=None)
            current[track] = best if holder is None else holder
        for holder in current.values():
            if holder is not None:
                job = jobs[holder]
                job.start = tick if job.start is None else job.start
                job.held.append(tick)
                job.left -= 1
                if job.left == 0:
                    job.end = tick + 1
        if all(job.end is not None for job in jobs):
            return


def run(jobs: list[Job], make: type) -> Run:
    graph = EventGraph()
    for track in (0, 1):
        discipline: Discipline = make()
        graph.resource(str(track), discipline)
    for number, job in enumerate(jobs):
        graph.add(str(number), job.duration, str(job.track), after=job.after, priority=job.priority)
    return graph.run()


@pytest.mark.parametrize(("name", "make"), [("fifo", Discipline), ("in_order", InOrder), ("priority", Priority)])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_disciplines_against_ticks(name: str, make: type, data: st.DataObject) -> None:
    jobs = data.draw(job_lists())
    naive(jobs, name)
    result = run(jobs, make)
    assert result.starts_s == [job.start for job in jobs]
    assert result.ends_s == [job.end for job in jobs]
    held = [[tick for start, end in slices for tick in range(int(start), int(end))] for slices in result.slices_s]
    assert held == [job.held for job in jobs]


@settings(max_examples=50, deadline=None)
@given(jobs=job_lists())
def test_same_twice(jobs: list[Job]) -> None:
    first, second = (run(jobs, Priority) for _ in range(2))
    assert (first.starts_s, first.ends_s, first.slices_s) == (second.starts_s, second.ends_s, second.slices_s)


@settings(max_examples=50, deadline=None)
@given(jobs=job_lists(), latency=st.integers(0, 3))
def test_unlimited_resources_give_the_longest_path(jobs: list[Job], latency: int) -> None:
    graph = EventGraph()
    for number, job in enumerate(jobs):
        graph.add(str(number), job.duration, after=job.after, latency_s=latency)
    ends: list[int] = []
    for job in jobs:
        ends.append(latency + max((ends[a] for a in job.after), default=0) + job.duration)
    assert graph.run().ends_s == ends


def test_integers_stay_exact() -> None:
    graph = EventGraph()
    first = graph.add("a", 10**17 + 1, "x")
    graph.add("b", 3, "x", after=[first])
    assert graph.run().end_s == 10**17 + 4


def test_starts_with_the_first_start() -> None:
    """A receiver's wire is busy from the first sender's first byte."""
    graph = EventGraph()
    late = graph.add("late", 5, "a", latency_s=7)
    early = graph.add("early", 5, "b", latency_s=2)
    received = graph.add("received", 1, "c", after_first_start=[late, early], latency_s=1)
    assert graph.run().starts_s[received] == 3


def test_all_events_of_a_moment_come_before_the_next_start() -> None:
    """What becomes ready when the resource becomes free competes for it, although it was added last."""
    graph = EventGraph()
    graph.resource("wire", Priority())
    graph.add("running", 4, "wire", priority=1)
    waiting = graph.add("waiting", 4, "wire", priority=1)
    computed = graph.add("compute", 4, "core")
    urgent = graph.add("urgent", 1, "wire", after=[computed], priority=0)
    result = graph.run()
    assert (result.starts_s[urgent], result.starts_s[waiting]) == (4, 5)


def test_on_start_is_called_once_and_nothing_is_interrupted() -> None:
    calls: list[str] = []
    graph = EventGraph()
    graph.resource("core", Priority())
    graph.add("low", 4, "core", priority=1, on_start=lambda: calls.append("low"))
    graph.add("high", 1, "core", latency_s=2, on_start=lambda: calls.append("high"))
    result = graph.run()
    assert calls == ["low", "high"]
    assert result.slices_s == [[(0, 4)], [(4, 5)]]
    assert [(bar.label, bar.start_s) for bar in result.bars()] == [("low", 0), ("high", 4)]


def test_fair_sharing_by_hand() -> None:
    """Works 4 and 2, the second from time 1: rates 1, then halves to 5, then the first alone for its last 1."""
    graph = EventGraph()
    graph.resource("wire", Shared(lambda kinds: [1 / len(kinds)] * len(kinds)))
    first = graph.add("first", 4, "wire")
    second = graph.add("second", 2, "wire", latency_s=1)
    result = graph.run()
    assert result.ends_s[second] == pytest.approx(5, rel=1e-12)
    assert result.ends_s[first] == pytest.approx(6, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=6))
def test_sharing_conserves_work(transfers: list[tuple[float, float]]) -> None:
    """A shared wire ends when one that serves them one by one would: it is never idle while there is work."""
    graph, serial = EventGraph(), EventGraph()
    graph.resource("wire", Shared(lambda kinds: [1 / len(kinds)] * len(kinds)))
    for number, (arrival_s, work_s) in enumerate(transfers):
        graph.add(str(number), work_s, "wire", latency_s=arrival_s)
        serial.add(str(number), work_s, "wire", latency_s=arrival_s)
    shared = graph.run()
    assert shared.end_s == pytest.approx(serial.run().end_s, rel=1e-9)
    for (arrival_s, work_s), end_s in zip(transfers, shared.ends_s, strict=True):
        assert end_s >= (arrival_s + work_s) * (1 - 1e-9)


def test_an_activity_that_can_never_run_is_named() -> None:
    class Never(Discipline):
        def next_slice(self, now_s: float) -> None:
            return None

    graph = EventGraph()
    graph.resource("wire", Never())
    graph.add("stuck", 1, "wire")
    with pytest.raises(UserError, match=r"1 of 1 activities never end, 'stuck' among them"):
        graph.run()


def test_bad_graphs_are_refused() -> None:
    graph = EventGraph()
    with pytest.raises(UserError, match=r"'a': duration_s is -1: give a finite time, zero or more"):
        graph.add("a", -1)
    with pytest.raises(UserError, match=r"'a': latency_s is nan"):
        graph.add("a", 1, latency_s=float("nan"))
    with pytest.raises(UserError, match=r"'a' refers to activity 0: use one of the 0 added before it"):
        graph.add("a", 1, after=[0])
    graph.add("a", 1, "wire")
    with pytest.raises(UserError, match=r"'wire' is declared already"):
        graph.resource("wire")
    graph.run()
    with pytest.raises(UserError, match=r"has run already"):
        graph.run()


def test_nothing_takes_no_time() -> None:
    assert EventGraph().run().end_s == 0
