"""A few rounds as a trace that Perfetto and chrome://tracing open: who sent, waited and released when.

One process of the trace per contestant and case, one track per process of the contestant. Every contestant's first
round begins at zero, so that they lie beneath each other. Not shared with the timeline of serving, whose spans carry
layers and micro-batches; the two have only Chrome's event format in common.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.bench.m2n.group import Recording, Track


def write_trace(path: Path, recordings: Iterable[Recording]) -> None:
    """Chrome's JSON with complete events in µs; every span carries its round."""
    events: list[dict[str, Any]] = []
    for process, recording in enumerate(recordings, start=1):
        name = f"{recording.contestant.name}, {recording.traffic}"
        events.append(process_named(name, process))
        origin_ns = min(int(track.marks[0, 0]) for track in recording.tracks)
        for thread, track in enumerate(recording.tracks, start=1):
            events.append(thread_named(str(track.seat), process, thread))
            events.extend({"pid": process, "tid": thread} | event for event in _spans(track, origin_ns))
    write_events(path, events)


def _spans(track: Track, origin_ns: int) -> Iterable[dict[str, Any]]:
    for number, marks in enumerate(track.marks.tolist()):
        for phase, start_ns, end_ns in zip(track.phases, marks, marks[1:], strict=False):
            yield {
                "ph": "X",
                "name": phase,
                "ts": (start_ns - origin_ns) / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "args": {"round": number},
            }
