"""What happened to an engine's workers, the newest first forgotten last: for people who watch it.

The log of the process says the same and more. This is kept in memory, bounded, and read over HTTP.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

_MAX_EVENTS = 200

# "standstill": the step was given up and the group's workers begin anew; "going on": they step again.
EventKind = Literal["ready", "lost", "failed", "standstill", "going on", "placement"]


@dataclass(frozen=True, kw_only=True)
class EngineEvent:
    """`number` counts from 1; `time_s` is Unix time; `worker` is empty if it concerns several."""

    number: int
    time_s: float
    kind: EventKind
    worker: str
    text: str


class EventLog:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._events: deque[EngineEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_noted = 0
        self._lock = threading.Lock()

    def note(self, kind: EventKind, text: str, worker: str = "") -> None:
        """It happened now."""
        with self._lock:
            self._num_noted += 1
            self._events.append(
                EngineEvent(number=self._num_noted, time_s=time.time(), kind=kind, worker=worker, text=text)
            )

    def newest(self) -> tuple[EngineEvent, ...]:
        """Those that are kept, oldest first."""
        with self._lock:
            return tuple(self._events)
