"""Spans of training steps as a trace for Perfetto: a process a rank, a row of steps and a row of operators.

Each rank writes `FILE.rankN`; when all have, `join_parts` makes FILE of them. Times in a part are on the wall clock, so
that ranks of several machines line up as well as their clocks do.
Rejected: sending spans to rank 0. A rank that dies would take the others' part with it.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.train.spans import Span

STEPS, FORWARD, BACKWARD = 1, 2, 3  # the rows of a process
_ROWS = {STEPS: "steps", FORWARD: "forward", BACKWARD: "backward"}


def part_of(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank{rank}")


def write_part(file: Path, rank: int, spans: list[Span]) -> None:
    """What `rank` adds to the trace `file`."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    rows = [
        (span.label.name, span.label.layer, span.label.backward, span.step, span.start_ns + offset_ns, _length(span))
        for span in spans
    ]
    part_of(file, rank).write_text(json.dumps(rows), encoding="utf-8")


def join_parts(file: Path, num_ranks: int) -> None:
    """Write `file` from the parts of ranks 0 to `num_ranks` - 1, and remove them. `UserError` if one is missing."""
    parts: dict[int, list[list[Any]]] = {}
    for rank in range(num_ranks):
        try:
            parts[rank] = json.loads(part_of(file, rank).read_text(encoding="utf-8"))
        except OSError as error:
            path = part_of(file, rank)
            raise UserError(f"{path}: cannot be read ({error.strerror}): rank {rank} did not write it") from error
    write_events(file, _events(parts))
    for rank in parts:
        part_of(file, rank).unlink()


def _length(span: Span) -> int:
    return span.end_ns - span.start_ns


def _events(parts: dict[int, list[list[Any]]]) -> Iterator[dict[str, Any]]:
    origin_ns = min((start_ns for rows in parts.values() for *_, start_ns, _ in rows), default=0)
    for rank, rows in parts.items():
        yield process_named(f"rank {rank}", rank)
        for thread, name in _ROWS.items():
            yield thread_named(name, rank, thread)
        steps: dict[int, tuple[int, int]] = {}
        for name, layer, backward, step, start_ns, length_ns in sorted(rows, key=lambda row: row[4]):
            first_ns, last_ns = steps.get(step, (start_ns, start_ns))
            steps[step] = (first_ns, max(last_ns, start_ns + length_ns))
            arguments = {"step": step} | ({"layer": layer} if layer >= 0 else {})
            place = {"pid": rank, "tid": BACKWARD if backward else FORWARD}
            yield _event(name, start_ns - origin_ns, length_ns, place, arguments)
        for step, (first_ns, last_ns) in steps.items():
            place = {"pid": rank, "tid": STEPS}
            yield _event(f"step {step}", first_ns - origin_ns, last_ns - first_ns, place, {"step": step})


def _event(
    name: str, start_ns: int, length_ns: int, place: dict[str, int], arguments: dict[str, int]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, **place, "ts": start_ns / 1000, "dur": length_ns / 1000, "args": arguments}
