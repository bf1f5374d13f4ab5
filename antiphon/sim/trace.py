"""Writes bars as a trace for Perfetto: Chrome's JSON, the format that `antiphon serve --timeline` writes, too.

One process per worker or endpoint (the first word of a track's name), one thread per track; complete events ("X") with
layer and micro-batch, times in microseconds from the first bar. Written piece by piece, so that a large trace needs no
second copy in memory. Rejected: Perfetto's binary format, which needs its own library.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.sim.gantt import Bar, span_s, tracks


def write_trace(path: Path, bars: Sequence[Bar]) -> None:
    """Write `bars` to `path`, replacing it."""
    write_events(path, _events(bars))


def write_events(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write events of Chrome's format to `path`, replacing it."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")


def _events(bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    origin_s, _ = span_s(bars)
    processes: dict[str, int] = {}
    places: dict[str, dict[str, int]] = {}
    for track in tracks(bars):
        owner, _, part = track.partition(" ")
        if owner not in processes:
            processes[owner] = len(processes) + 1
            yield _name("process_name", owner, {"pid": processes[owner]})
        places[track] = {"pid": processes[owner], "tid": len(places) + 1}
        yield _name("thread_name", part or "work", places[track])
    for bar in bars:
        yield _complete(bar, origin_s, places[bar.track])


def _name(kind: str, name: str, place: dict[str, int]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


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
