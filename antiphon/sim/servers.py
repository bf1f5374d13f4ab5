"""Resources of the event core: one activity at a time by a discipline, or all at once at shared rates.

The core tells a server of arrivals and asks it to `dispatch`; the server answers what started, and when to wake it. A
version number makes wake-ups of the past worthless. Rejected: completion events that are searched for and removed from
the heap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.sim.disciplines import Activity, Discipline, Slice

RateOf = Callable[[Sequence[str]], Sequence[float]]
RELATIVE_TIE = 1e-12  # activities of a shared resource whose ends differ by less than rounding end together


@dataclass(slots=True)
class Moment:
    """What a server did at one moment: started activities, next wake-up."""

    started: list[int] = field(default_factory=list)
    wake_s: float | None = None
    version: int = 0


class Server(Protocol):
    """A resource as the core sees it."""

    def register(self, index: int, activity: Activity) -> None: ...

    def arrive(self, now_s: float, index: int, activity: Activity) -> None: ...

    def dispatch(self, now_s: float) -> Moment: ...

    def wake(self, now_s: float, version: int) -> list[tuple[Slice, float]]:
        """Slices whose work ends now, each with its start; none if the wake-up is out of date."""


class Exclusive:
    """One slice at a time, chosen by `discipline`."""

    def __init__(self, discipline: Discipline) -> None:
        self._discipline = discipline
        self._running: Slice | None = None
        self._start_s: float = 0
        self._version = 0

    def register(self, index: int, activity: Activity) -> None:
        self._discipline.register(index, activity)

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        self._discipline.arrive(now_s, index, activity)

    def dispatch(self, now_s: float) -> Moment:
        moment = Moment()
        if self._running is not None:
            return moment
        if (chosen := self._discipline.next_slice(now_s)) is not None:
            self._running, self._start_s = chosen, now_s
            self._version += 1
            moment.started.append(chosen.activity)
            moment.wake_s, moment.version = now_s + chosen.duration_s, self._version
        return moment

    def wake(self, now_s: float, version: int) -> list[tuple[Slice, float]]:
        if version != self._version or self._running is None:
            return []
        done, self._running = self._running, None
        self._discipline.served(now_s, done)
        return [(done, self._start_s)]


class Shared:
    """All that arrived run at once. `rate_of` maps their kinds to rates; 1 is the rate of one that runs alone.

    Two transfers that share a link fairly have rates (1/2, 1/2); measured rates may add up to more than 1 when one
    transfer alone cannot fill the link.
    """

    def __init__(self, rate_of: RateOf) -> None:
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

    def dispatch(self, now_s: float) -> Moment:
        self._advance(now_s)
        kinds = [self._active[index][0].kind for index in self._remaining_s]
        rates = self._rate_of(kinds) if kinds else []
        self._rates = dict(zip(self._remaining_s, rates, strict=True))
        self._version += 1
        moment = Moment(started=self._new, version=self._version)
        self._new = []
        left = [self._remaining_s[index] / rate for index, rate in self._rates.items() if rate > 0]
        moment.wake_s = now_s + max(0.0, min(left)) if left else None
        return moment

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
