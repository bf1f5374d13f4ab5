"""Bars of a Gantt chart: what every simulation hands to reports, and how they become a trace for Perfetto.

A simulation says what happened as a list of `Bar`; who draws or writes it needs to know nothing else. Rejected: each
simulation drawing its own chart.

A trace is Chrome's JSON, the format that `antiphon serve --timeline` writes, too. One process per worker or endpoint
(the first word of a track's name), one thread per track; complete events ("X") with layer and micro-batch, times in
microseconds from the first bar. Written piece by piece, so that a large trace needs no second copy in memory. Rejected:
Perfetto's binary format, which needs its own library.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.trace import process_named, thread_named, write_events


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that occupied `track` from `start_s` to `end_s`.

    `kind` groups bars of one colour, such as ``attention`` or ``all_to_all``. `layer`, `micro_batch`: where they mean
    something, else -1.
    """

    track: str
    label: str
    start_s: float
    end_s: float
    kind: str = ""
    layer: int = -1
    micro_batch: int = -1

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            raise UserError(f"bar {self.label!r} on {self.track!r} ends at {self.end_s} s, before {self.start_s} s")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def tracks(bars: Iterable[Bar]) -> list[str]:
    """The tracks in order of first appearance."""
    return list(dict.fromkeys(bar.track for bar in bars))


def covered_s(bars: Sequence[Bar], start_s: float = float("-inf"), end_s: float = float("inf")) -> float:
    """Length of the union of the bars inside [start_s, end_s]."""
    covered, reached = 0.0, start_s
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        begin, end = max(bar.start_s, reached), min(bar.end_s, end_s)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def span_s(bars: Iterable[Bar]) -> tuple[float, float]:
    """Start of the first bar and end of the last; (0, 0) without bars."""
    listed = list(bars)
    if not listed:
        return 0.0, 0.0
    return min(bar.start_s for bar in listed), max(bar.end_s for bar in listed)


def write_trace(path: Path, bars: Sequence[Bar]) -> None:
    """Write `bars` to `path`, replacing it."""
    write_events(path, _events(bars))


def _events(bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    origin_s, _ = span_s(bars)
    processes: dict[str, int] = {}
    places: dict[str, dict[str, int]] = {}
    for track in tracks(bars):
        owner, _, part = track.partition(" ")
        if owner not in processes:
            processes[owner] = len(processes) + 1
            yield process_named(owner, processes[owner])
        places[track] = {"pid": processes[owner], "tid": len(places) + 1}
        yield thread_named(part or "work", **places[track])
    for bar in bars:
        yield _complete(bar, origin_s, places[bar.track])


def _complete(bar: Bar, origin_s: float, place: dict[str, int]) -> dict[str, Any]:
    arguments = {"layer": bar.layer, "micro_batch": bar.micro_batch}
    return {
        "ph": "X",
        "name": bar.label,
        "cat": bar.kind or "work",
        "ts": (bar.start_s - origin_s) * 1e6,
        "dur": bar.duration_s * 1e6,
        **place,
        "args": {name: value for name, value in arguments.items() if value >= 0},
    }
