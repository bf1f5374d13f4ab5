"""One piece of work of an event simulation: what it needs, what it waits for."""

from collections.abc import Callable
from dataclasses import dataclass

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
