"""An exact discrete-event core: activities that wait for each other and for resources; the result is when each ran.

1. `EventGraph.add` names an activity, its work, its resource (`track`) and what it waits for.
2. Events are taken in order of time; all events of one moment are handled before any resource starts something new.
3. A resource is a `Discipline`, which chooses what to serve when it is free, or `Shared` by all, each at its rate.
4. Times are only added and compared: integers (nanoseconds) stay exact, floats round once per addition.

Rejected: SimPy (a dependency, slower, and same-time order depends on process code); a fixed time step (not exact).
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from antiphon.base.errors import UserError
from antiphon.sim.gantt import Bar
from antiphon.sim.resources import Activity, Discipline, Shared


@dataclass(frozen=True)
class Run:
    """When everything happened. `slices_s[a]` are the intervals in which activity a held its resource."""

    activities: tuple[Activity, ...]
    starts_s: list[float]
    ends_s: list[float]
    slices_s: list[list[tuple[float, float]]]

    @property
    def end_s(self) -> float:
        """The end of the last activity; 0 if there is none."""
        return max(self.ends_s, default=0.0)

    def bars(self) -> list[Bar]:
        """All slices on resources, in order of start."""
        found = [
            Bar(
                track=activity.track,
                label=activity.label,
                start_s=start,
                end_s=end,
                kind=activity.kind,
                layer=activity.layer,
                micro_batch=activity.micro_batch,
            )
            for activity, slices in zip(self.activities, self.slices_s, strict=True)
            if activity.track is not None
            for start, end in slices
        ]
        return sorted(found, key=lambda bar: (bar.start_s, bar.end_s))


class EventGraph:
    """Activities and resources, filled by `resource` and `add`, then run once (disciplines keep state)."""

    def __init__(self) -> None:
        self._activities: list[Activity] = []
        self._servers: dict[str, Discipline | Shared] = {}
        self._has_run = False

    def resource(self, track: str, discipline: Discipline | Shared | None = None) -> str:
        """Declare a resource; undeclared ones are first come, first served. Returns `track`."""
        if track in self._servers:
            raise UserError(f"resource {track!r} is declared already: declare it once, before its first activity")
        self._servers[track] = discipline or Discipline()
        return track

    def add(
        self,
        label: str,
        duration_s: float,
        track: str | None = None,
        *,
        after: Iterable[int] = (),
        after_first_start: Iterable[int] = (),
        latency_s: float = 0,
        kind: str = "",
        priority: int = 0,
        layer: int = -1,
        micro_batch: int = -1,
        on_start: Callable[[], None] | None = None,
    ) -> int:
        """Add an `Activity` and return its number. `UserError` for a negative time or a reference to a later one."""
        activity = Activity(
            label=label,
            duration_s=duration_s,
            track=track,
            kind=kind,
            priority=priority,
            after=tuple(dict.fromkeys(after)),
            after_first_start=tuple(dict.fromkeys(after_first_start)),
            latency_s=latency_s,
            layer=layer,
            micro_batch=micro_batch,
            on_start=on_start,
        )
        index = len(self._activities)
        for other in (*activity.after, *activity.after_first_start):
            if not 0 <= other < index:
                raise UserError(f"{label!r} refers to activity {other}: use one of the {index} added before it")
        self._activities.append(activity)
        if track is not None:
            if track not in self._servers:
                self.resource(track)
            self._servers[track].register(index, activity)
        return index

    def run(self) -> Run:
        """Simulate until all activities have ended. `UserError` if a resource never lets some begin."""
        if self._has_run:
            raise UserError("this graph has run already: build a new one, its disciplines keep state")
        self._has_run = True
        return _Simulation(tuple(self._activities), self._servers).run()


_END, _WAKE, _READY = 0, 1, 2  # at one moment: delays end, then resources finish, then activities arrive


@dataclass(slots=True)
class _State:
    """What is still missing before an activity may start (`waits`), and who waits for it."""

    waits: int
    ready_s: float = 0
    started: bool = False
    first_start_seen: bool = False
    ended: bool = False
    wait_for_end: list[int] = field(default_factory=list)
    wait_for_start: list[int] = field(default_factory=list)


class _Simulation:
    def __init__(self, activities: tuple[Activity, ...], servers: dict[str, Discipline | Shared]) -> None:
        self._activities = activities
        self._servers = list(servers.values())
        numbers = {track: number for number, track in enumerate(servers)}
        self._server_of = [None if a.track is None else numbers[a.track] for a in activities]
        self._states = [_State(waits=len(a.after) + bool(a.after_first_start)) for a in activities]
        for index, activity in enumerate(activities):
            for other in activity.after:
                self._states[other].wait_for_end.append(index)
            for other in activity.after_first_start:
                self._states[other].wait_for_start.append(index)
        self._heap: list[tuple[float, int, int, int]] = []  # (time, what, activity or server, version)
        self._dirty: set[int] = set()
        self._result = Run(activities, [0] * len(activities), [0] * len(activities), [[] for _ in activities])

    def run(self) -> Run:
        for index, state in enumerate(self._states):
            if state.waits == 0:
                heapq.heappush(self._heap, (self._activities[index].latency_s, _READY, index, 0))
        while self._heap:
            now_s = self._heap[0][0]
            while self._heap and self._heap[0][0] == now_s:
                _, what, index, version = heapq.heappop(self._heap)
                self._handle(now_s, what, index, version)
            for number in sorted(self._dirty):
                self._dispatch(now_s, number)
            self._dirty.clear()
        left = [a.label for a, state in zip(self._activities, self._states, strict=True) if not state.ended]
        if left:
            raise UserError(
                f"{len(left)} of {len(self._states)} activities never end, {left[0]!r} among them: "
                "its resource, or that of one it waits for, never lets it begin"
            )
        return self._result

    def _handle(self, now_s: float, what: int, index: int, version: int) -> None:
        if what == _WAKE:
            for done, start_s in self._servers[index].wake(now_s, version):
                self._result.slices_s[done.activity].append((start_s, now_s))
                if done.is_last:
                    self._end(now_s, done.activity)
            self._dirty.add(index)
        elif what == _END:
            self._end(now_s, index)
        elif (number := self._server_of[index]) is None:
            self._start(now_s, index)
            heapq.heappush(self._heap, (now_s + self._activities[index].duration_s, _END, index, 0))
        else:
            self._servers[number].arrive(now_s, index, self._activities[index])
            self._dirty.add(number)

    def _dispatch(self, now_s: float, number: int) -> None:
        """Let a resource start what it can; note starts and when to wake it again."""
        started, wake_s, wake_version = self._servers[number].dispatch(now_s)
        for index in started:
            if not self._states[index].started:
                self._start(now_s, index)
        if wake_s is not None:
            heapq.heappush(self._heap, (wake_s, _WAKE, number, wake_version))

    def _start(self, now_s: float, index: int) -> None:
        state, activity = self._states[index], self._activities[index]
        state.started = True
        self._result.starts_s[index] = now_s
        if activity.on_start is not None:
            activity.on_start()
        for follower in state.wait_for_start:
            if not self._states[follower].first_start_seen:
                self._states[follower].first_start_seen = True
                self._unblock(now_s, follower)

    def _end(self, now_s: float, index: int) -> None:
        state = self._states[index]
        state.ended = True
        self._result.ends_s[index] = now_s
        for follower in state.wait_for_end:
            self._unblock(now_s, follower)

    def _unblock(self, now_s: float, index: int) -> None:
        """One thing less that the activity waits for before it may start."""
        state = self._states[index]
        state.waits -= 1
        state.ready_s = max(state.ready_s, now_s + self._activities[index].latency_s)
        if state.waits == 0:
            heapq.heappush(self._heap, (state.ready_s, _READY, index, 0))
