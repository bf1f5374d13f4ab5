"""Records what a worker did and when, cheaply enough to leave in the hot path.

Times are `time.monotonic_ns`, one clock for all processes of a machine, so spans of different workers line up.
Off, a recorder costs one branch per span.
"""

import time

from antiphon.serve.worker.messages import Spans

MAX_SPANS = 2_000_000  # about 200 MB; beyond it, recording stops and `Spans` says so by its length

NAMES = ["attention", "dispatch", "experts", "combine", "reply", "sample", "receive", "step"]
ATTENTION, DISPATCH, EXPERTS, COMBINE, REPLY, SAMPLE, RECEIVE, STEP = range(len(NAMES))


class SpanRecorder:
    """Collects (name, layer, micro-batch, rows, step, start, end)."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.step = 0
        self._records: list[tuple[int, int, int, int, int, int, int]] = []

    def add(self, name: int, start_ns: int, layer: int = -1, micro_batch: int = -1, rows: int = 0) -> None:
        """Record a span that began at `start_ns` and ends now."""
        if self.enabled and len(self._records) < MAX_SPANS:
            self._records.append((name, layer, micro_batch, rows, self.step, start_ns, time.monotonic_ns()))

    def take(self) -> Spans:
        """All spans since the last `take`."""
        records, self._records = self._records, []
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
