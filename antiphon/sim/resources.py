"""Activities of an event simulation, and the resources that serve them: one activity at a time, or all at shared rates.

1. The core tells a server (a `Discipline` or `Shared`) of arrivals and asks it to `dispatch`; the server answers what
   started, and when to wake it. A version number makes wake-ups of the past worthless.
2. A `Discipline` chooses the next `Slice` whenever it is free: a whole activity, or a piece of one where work is cut
   into chunks. First come first served, given order, priority; nothing is interrupted.
3. All ties fall to the activity that was added first, so that a simulation has one outcome.

Rejected: generator processes as in SimPy, whose order of same-time events depends on how the processes were written;
completion events that are searched for and removed from the heap.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError

RELATIVE_TIE = 1e-12  # activities of a shared resource whose ends differ by less than rounding end together


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """`duration_s` of work on `track` (None: a delay that needs no resource). Numbers are those of earlier activities.

    It may start `latency_s` after the last end of `after` and after the first start of `after_first_start` (bytes begin
    to arrive); with neither it may start at time `latency_s`. A smaller `priority` is more urgent. `on_start` is called
    once when it starts, before any resource looks for its next activity.
    """

    label: str
    duration_s: float
    track: str | None = None
    kind: str = ""
    priority: int = 0
    after: tuple[int, ...] = ()
    after_first_start: tuple[int, ...] = ()
    latency_s: float = 0
    layer: int = -1
    micro_batch: int = -1
    on_start: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        for name in ("duration_s", "latency_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{self.label!r}: {name} is {getattr(self, name)}: give a finite time, zero or more")


@dataclass(frozen=True, slots=True)
class Slice:
    """`duration_s` of work on activity number `activity`; after the last slice the activity's work is done."""

    activity: int
    duration_s: float
    is_last: bool = True


class Discipline:
    """A resource that serves one slice at a time, and which is next; this one: first come, first served, whole
    activities. Stateful: one object serves one resource in one run."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float, int, float]] = []  # (urgency, arrival, index, remaining_s), a heap
        self._running: Slice | None = None
        self._start_s: float = 0
        self._version = 0

    def register(self, index: int, activity: Activity) -> None:
        """The activity will arrive at some time; called in the order in which activities were added."""

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        """The activity may start from now on."""
        heapq.heappush(self._waiting, (self._urgency(activity), now_s, index, activity.duration_s))

    def next_slice(self, now_s: float) -> Slice | None:
        """The resource is free: what it does next, or None to leave it idle until the next arrival or end."""
        if not self._waiting:
            return None
        _, _, index, remaining_s = heapq.heappop(self._waiting)
        return Slice(index, remaining_s)

    def served(self, now_s: float, done: Slice) -> None:
        """The slice was served in full."""

    def dispatch(self, now_s: float) -> tuple[list[int], float | None, int]:
        """(activities that start now, when to wake it next, the version to wake it with)."""
        chosen = None if self._running is not None else self.next_slice(now_s)
        if chosen is None:
            return [], None, 0
        self._running, self._start_s = chosen, now_s
        self._version += 1
        return [chosen.activity], now_s + chosen.duration_s, self._version

    def wake(self, now_s: float, version: int) -> list[tuple[Slice, float]]:
        """Slices whose work ends now, each with its start; none if the wake-up is out of date."""
        if version != self._version or self._running is None:
            return []
        done, self._running = self._running, None
        self.served(now_s, done)
        return [(done, self._start_s)]

    def _urgency(self, activity: Activity) -> float:
        return 0.0


class Priority(Discipline):
    """The smallest `priority` first; what runs is never interrupted, as a collective call of NCCL is not."""

    def _urgency(self, activity: Activity) -> float:
        return activity.priority


class InOrder(Discipline):
    """Strictly in the order in which the activities were added: the resource waits for the next one, even if another
    is ready. Workers of the serving engine take micro-batches so."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[int] = []
        self._position = 0

    def register(self, index: int, activity: Activity) -> None:
        self._order.append(index)

    def next_slice(self, now_s: float) -> Slice | None:
        if not self._waiting or self._waiting[0][2] != self._order[self._position]:
            return None
        self._position += 1
        return super().next_slice(now_s)

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        heapq.heappush(self._waiting, (0.0, 0.0, index, activity.duration_s))


class Shared:
    """All that arrived run at once; methods as of `Discipline`. `rate_of` maps their kinds to rates; 1 is the rate of
    one that runs alone.

    Two transfers that share a link fairly have rates (1/2, 1/2); measured rates may add up to more than 1 when one
    transfer alone cannot fill the link.
    """

    def __init__(self, rate_of: Callable[[Sequence[str]], Sequence[float]]) -> None:
        self._rate_of = rate_of
        self._active: dict[int, tuple[Activity, float]] = {}  # index -> (activity, start)
        self._remaining_s: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._updated_s: float = 0
        self._version = 0
        self._new: list[int] = []

    def register(self, index: int, activity: Activity) -> None:
        pass

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        self._advance(now_s)
        self._active[index] = (activity, now_s)
        self._remaining_s[index] = activity.duration_s
        self._new.append(index)

    def dispatch(self, now_s: float) -> tuple[list[int], float | None, int]:
        self._advance(now_s)
        kinds = [self._active[index][0].kind for index in self._remaining_s]
        rates = self._rate_of(kinds) if kinds else []
        self._rates = dict(zip(self._remaining_s, rates, strict=True))
        self._version += 1
        started, self._new = self._new, []
        left = [self._remaining_s[index] / rate for index, rate in self._rates.items() if rate > 0]
        return started, now_s + max(0.0, min(left)) if left else None, self._version

    def wake(self, now_s: float, version: int) -> list[tuple[Slice, float]]:
        if version != self._version:
            return []
        self._advance(now_s)
        ended = []
        for index in list(self._remaining_s):
            activity, start_s = self._active[index]
            if self._rates.get(index, 0) > 0 and self._remaining_s[index] <= RELATIVE_TIE * max(
                now_s, activity.duration_s
            ):
                del self._active[index], self._remaining_s[index], self._rates[index]
                ended.append((Slice(index, activity.duration_s), start_s))
        return ended

    def _advance(self, now_s: float) -> None:
        for index, rate in self._rates.items():
            self._remaining_s[index] -= rate * (now_s - self._updated_s)
        self._updated_s = now_s
