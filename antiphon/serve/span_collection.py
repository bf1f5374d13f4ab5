"""Requests for the workers' recorded spans. Any thread asks; the engine's carries it out, for it owns the channels.

A worker answers between two steps, so an answer may take as long as a step.
"""

import contextlib
import queue
import threading
from collections.abc import Collection, Iterable

from antiphon.serve.fleet import Fleet
from antiphon.serve.worker.messages import TakeSpans
from antiphon.serve.worker.spans import Spans
from antiphon.serve.worker_process import WorkerName


class SpanCollection:
    """`wait` in the thread that asks; `begin`, `add` and `forget` in the engine's thread.

    Of `names`, None: of all workers. `last_steps` as in `TakeSpans`."""

    def __init__(self, last_steps: int, names: Collection[WorkerName] | None) -> None:
        self._last_steps = last_steps
        self._names = names
        self._wanted: set[WorkerName] = set()
        self._spans: dict[WorkerName, Spans] = {}
        self._done = threading.Event()

    def begin(self, fleet: Fleet) -> None:
        """Ask the workers that are up."""
        ready = {name for name, worker in fleet.workers.items() if worker.ready}
        self._wanted = ready if self._names is None else ready.intersection(self._names)
        for name in list(self._wanted):
            fleet.send(fleet.workers[name], TakeSpans(self._last_steps))
        self._finish_if_complete()

    def add(self, name: WorkerName, spans: Spans) -> bool:
        """Take a worker's answer; False: it was not asked for here, or has come before."""
        if name not in self._wanted or name in self._spans:
            return False
        self._spans[name] = spans
        self._finish_if_complete()
        return True

    def forget(self, names: Iterable[WorkerName]) -> None:
        """These workers are gone, and with them what they recorded."""
        self._wanted.difference_update(names)
        self._finish_if_complete()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> dict[WorkerName, Spans]:
        """What has arrived; after `timeout_s` possibly not from all."""
        self._done.wait(timeout_s)
        return dict(self._spans)

    def _finish_if_complete(self) -> None:
        if self._wanted <= set(self._spans):
            self._done.set()


class SpanCollections:
    """All requests under way. `ask` in any thread, the rest in the engine's."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[SpanCollection] = queue.SimpleQueue()
        self._begun: list[SpanCollection] = []

    def ask(self, last_steps: int = 0, names: Collection[WorkerName] | None = None) -> SpanCollection:
        """A new request; the engine's thread must be woken to see it."""
        collection = SpanCollection(last_steps, names)
        self._asked.put(collection)
        return collection

    def begin(self, fleet: Fleet) -> None:
        """Carry out what was asked since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                collection = self._asked.get_nowait()
                collection.begin(fleet)
                self._begun.append(collection)
        self._begun = [collection for collection in self._begun if not collection.done]

    def add(self, name: WorkerName, spans: Spans) -> None:
        """A worker's answer belongs to the oldest request that waits for it."""
        any(collection.add(name, spans) for collection in self._begun)

    def forget(self, names: Iterable[WorkerName]) -> None:
        """See `SpanCollection.forget`."""
        for collection in self._begun:
            collection.forget(names)
