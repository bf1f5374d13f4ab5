"""Records spans and counts processor time beside them, for `--timeline` and `antiphon bench step`.

A file of its own: what the engine imports of spans loads no native code.
"""

import time
from collections.abc import Sequence

import msgspec

from antiphon import _native
from antiphon.serve.worker.spans import ATTENTION, NAMES, SpanRecorder, Spans


class CountingRecorder(SpanRecorder):
    """Keeps all spans, and counts the processor time of the thread that records, by name: what it took since the span
    before. Native kernels are left out and are a part of their own, `kernels`; watched threads are others. A span costs
    a microsecond."""

    def __init__(self) -> None:
        super().__init__(keeps_all=True)
        _native.count_kernel_time(True)
        self._processor_ns = dict.fromkeys(NAMES, 0)
        self._counted_until_ns: int | None = None
        self._watched: dict[str, int] = {}

    def add(self, name: int, start_ns: int, layer: int = -1, micro_batch: int = -1, rows: int = 0) -> None:
        super().add(name, start_ns, layer, micro_batch, rows)
        self._count(name)

    def add_all(self, parts: Sequence[tuple[int, int]], times_ns: bytes, rows: int) -> None:
        super().add_all(parts, times_ns, rows)
        self._count(ATTENTION)

    def watch(self, name: str, thread: int) -> None:
        self._watched[name] = time.pthread_getcpuclockid(thread)

    def take(self, last_steps: int = 0) -> Spans:
        kernels_ns, elapsed_ns, _ = _native.kernel_time()
        others = {name: time.clock_gettime_ns(clock) for name, clock in self._watched.items()}
        processor_ns = self._processor_ns | others | {"kernels": kernels_ns}
        spans = super().take(last_steps)
        return msgspec.structs.replace(spans, processor_ns=processor_ns, kernels_elapsed_ns=elapsed_ns)

    def _count(self, name: int) -> None:
        now_ns = time.thread_time_ns() - _native.kernel_time()[0]
        if self._counted_until_ns is not None:
            self._processor_ns[NAMES[name]] += now_ns - self._counted_until_ns
        self._counted_until_ns = now_ns
