"""Records what a worker did and when, cheaply enough to leave in the hot path.

Times are `time.monotonic_ns`, one clock for all processes of a machine, so spans of different workers line up.
The last spans are always kept, for those who watch the server; all of them only for `--timeline`. A span costs about
0.2 microseconds; those of a native call are kept as the times that it took, and become spans when they are taken.
Rejected: recording only while somebody watches. The steps before a failure would be missing.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

MAX_SPANS = 2_000_000  # about 200 MB
RECENT_SPANS = 4_096  # about 0.5 MB: two steps of 61 layers in three micro-batches

NAMES = [
    *("attention", "dispatch", "experts", "combine", "reply", "sample", "receive", "step", "predict", "hand-over"),
    *("inputs", "answer"),
]
(ATTENTION, DISPATCH, EXPERTS, COMBINE, REPLY, SAMPLE, RECEIVE, STEP, PREDICT, HAND_OVER, INPUTS, ANSWER) = range(
    len(NAMES)
)


_Record = tuple[int, int, int, int, int, int, int]  # name, layer, micro-batch, rows, step, start, end


class _NativeRecord(NamedTuple):
    """The parts of one native call: a name and a layer each, and the bytes of an int64 for the start and each end."""

    parts: Sequence[tuple[int, int]]
    rows: int
    step: int
    times_ns: bytes

    def records(self) -> Iterator[_Record]:
        times_ns = memoryview(self.times_ns).cast("q").tolist()
        for (name, layer), start_ns, end_ns in zip(self.parts, times_ns[:-1], times_ns[1:], strict=True):
            yield name, layer, -1 if layer < 0 else 0, self.rows, self.step, start_ns, end_ns


class Spans(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Recorded spans of a worker: parallel lists, times in nanoseconds of the machine's monotonic clock.

    `processor_ns`: see `counting_recorder`, since the worker began; `kernels_elapsed_ns`: of kernels, by the clock."""

    names: list[str]
    name_index: list[int]
    layers: list[int]
    micro_batches: list[int]
    rows: list[int]
    steps: list[int]
    starts_ns: list[int]
    ends_ns: list[int]
    processor_ns: dict[str, int] = {}
    kernels_elapsed_ns: int = 0


class SpanRecorder:
    """The newest `MAX_SPANS` spans if it `keeps_all`, else the newest `RECENT_SPANS`."""

    def __init__(self, keeps_all: bool) -> None:
        self.step = 0
        self._records: deque[_Record | _NativeRecord] = deque(maxlen=MAX_SPANS if keeps_all else RECENT_SPANS)

    def add(self, name: int, start_ns: int, layer: int = -1, micro_batch: int = -1, rows: int = 0) -> None:
        """Record a span that began at `start_ns` and ends now."""
        self._records.append((name, layer, micro_batch, rows, self.step, start_ns, time.monotonic_ns()))

    def add_all(self, parts: Sequence[tuple[int, int]], times_ns: bytes, rows: int) -> None:
        """Record the parts of one native call of micro-batch 0, a name and a layer (-1: none) each, from its start and
        their ends, each an int64. They are spans only when they are taken."""
        self._records.append(_NativeRecord(parts, rows, self.step, times_ns))

    def watch(self, name: str, thread: int) -> None:
        """Count that thread's processor time too, where it is counted."""

    def take(self, last_steps: int = 0) -> Spans:
        """All spans since the last `take`, which are forgotten; or those of the `last_steps` steps, which stay."""
        if last_steps:
            return _columns(self._of_last(last_steps))
        records = list(deque(chain.from_iterable(map(_spans_of, self._records)), maxlen=MAX_SPANS))
        self._records.clear()
        return _columns(records)

    def _of_last(self, num_steps: int) -> list[_Record]:
        chosen: list[_Record | _NativeRecord] = []
        steps: set[int] = set()
        for record in reversed(self._records):
            steps.add(record.step if isinstance(record, _NativeRecord) else record[4])
            if len(steps) > num_steps:
                break
            chosen.append(record)
        return list(chain.from_iterable(map(_spans_of, reversed(chosen))))


def _spans_of(record: _Record | _NativeRecord) -> Iterator[_Record]:
    return record.records() if isinstance(record, _NativeRecord) else iter((record,))


def _columns(records: list[_Record]) -> Spans:
    columns = [list(column) for column in zip(*records, strict=True)] if records else [[] for _ in range(7)]
    name_index, layers, micro_batches, rows, steps, starts_ns, ends_ns = columns
    return Spans(
        names=NAMES,
        name_index=name_index,
        layers=layers,
        micro_batches=micro_batches,
        rows=rows,
        steps=steps,
        starts_ns=starts_ns,
        ends_ns=ends_ns,
    )
