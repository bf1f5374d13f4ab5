"""Writes bars as a trace for Perfetto: Chrome's JSON, the format that `antiphon serve --timeline` writes, too.

One process per worker or endpoint (the first word of a track's name), one thread per track; complete events ("X") with
layer and micro-batch, times in microseconds from the first bar. Written piece by piece, so that a large trace needs no
second copy in memory. Rejected: Perfetto's binary format, which needs its own library.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.sim.gantt import Bar, span_s, tracks


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
