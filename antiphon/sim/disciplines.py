"""Activities of an event simulation, and in which order a resource that does one thing at a time serves them.

A `Discipline` is asked for the next `Slice` whenever its resource is free: a whole activity, or a piece of one where
work is cut into chunks. First come first served, given order, priority; nothing is interrupted. All ties fall to the
activity that was added first, so that a simulation has one outcome. Rejected: generator processes as in SimPy, whose
order of same-time events depends on how the processes were written.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from antiphon.base.errors import UserError


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


class Discipline(Protocol):
    """Who is next. Stateful: one object serves one resource in one run."""

    def register(self, index: int, activity: Activity) -> None:
        """The activity will arrive at some time; called in the order in which activities were added."""

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        """The activity may start from now on."""

    def next_slice(self, now_s: float) -> Slice | None:
        """The resource is free: what it does next, or None to leave it idle until the next arrival or end."""

    def served(self, now_s: float, done: Slice) -> None:
        """The slice was served in full."""


class _Queue:
    """Common ground: a heap of waiting activities, most urgent first; whole activities are served."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float, int, float]] = []  # (priority, arrival, index, remaining_s)

    def register(self, index: int, activity: Activity) -> None:
        pass

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        heapq.heappush(self._waiting, (self._urgency(activity), now_s, index, activity.duration_s))

    def next_slice(self, now_s: float) -> Slice | None:
        if not self._waiting:
            return None
        _, _, index, remaining_s = heapq.heappop(self._waiting)
        return Slice(index, remaining_s)

    def served(self, now_s: float, done: Slice) -> None:
        pass

    def _urgency(self, activity: Activity) -> float:
        return 0.0


class Fifo(_Queue):
    """First come, first served."""


class Priority(_Queue):
    """The smallest `priority` first; what runs is never interrupted, as a collective call of NCCL is not."""

    def _urgency(self, activity: Activity) -> float:
        return activity.priority


class InOrder(_Queue):
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
