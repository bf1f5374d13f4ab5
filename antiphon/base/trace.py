"""Writes Chrome's trace format, which Perfetto and chrome://tracing open, event by event.

A process (`pid`) is a group of tracks, a thread (`tid`) a track; times are microseconds.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def process_named(name: str, pid: int) -> dict[str, Any]:
    """The event that names a process."""
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def thread_named(name: str, pid: int, tid: int) -> dict[str, Any]:
    """The event that names a thread."""
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def write_events(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write events of Chrome's format to `path`, replacing it."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")
