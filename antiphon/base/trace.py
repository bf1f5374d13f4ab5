"""Writes Chrome's trace format, which Perfetto and chrome://tracing open, event by event."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_events(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write events of Chrome's format to `path`, replacing it."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")
