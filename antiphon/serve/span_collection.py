"""Requests for the workers' recorded spans. Any thread asks; the engine's carries it out, for it owns the channels.

A worker answers between two steps, so an answer may take as long as a step.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from antiphon.serve.fleet import Fleet
from antiphon.serve.worker.messages import TakeSpans
from antiphon.serve.worker.spans import Spans
from antiphon.serve.worker_process import WorkerName


@dataclass(eq=False)
class _Collection:
    """One request. `missing`: workers that were asked and have not answered; `done`: none is left."""

    last_steps: int
    names: Collection[WorkerName] | None
    missing: set[WorkerName] = field(default_factory=set)
    spans: dict[WorkerName, Spans] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def cross_off(self, names: Iterable[WorkerName]) -> None:
        self.missing.difference_update(names)
        if not self.missing:
            self.done.set()


class SpanCollections:
    """All requests under way. `collect` in any thread, the rest in the engine's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._asked: deque[_Collection] = deque()
        self._begun: list[_Collection] = []

    def collect(
        self, last_steps: int, names: Collection[WorkerName] | None, timeout_s: float
    ) -> dict[WorkerName, Spans]:
        """Ask workers `names` (None: all) for spans, `last_steps` as in `TakeSpans`, and wait for their answers.
        Returns what has arrived; after `timeout_s` possibly not from all."""
        collection = _Collection(last_steps, names)
        self._asked.append(collection)
        self._fleet.wake()
        collection.done.wait(timeout_s)
        return dict(collection.spans)

    def begin(self) -> None:
        """Ask the workers that are up for what was requested since the last call."""
        while self._asked:
            collection = self._asked.popleft()
            ready = {name for name, worker in self._fleet.workers.items() if worker.ready}
            collection.missing = ready if collection.names is None else ready.intersection(collection.names)
            for name in list(collection.missing):
                self._fleet.send(self._fleet.workers[name], TakeSpans(collection.last_steps))
            collection.cross_off(())
            self._begun.append(collection)
        self._begun = [collection for collection in self._begun if not collection.done.is_set()]

    def add(self, name: WorkerName, spans: Spans) -> None:
        """A worker's answer belongs to the oldest request that waits for it."""
        collection = next((each for each in self._begun if name in each.missing), None)
        if collection is not None:
            collection.spans[name] = spans
            collection.cross_off([name])

    def forget(self, names: Collection[WorkerName]) -> None:
        """These workers are gone, and with them what they recorded."""
        for collection in self._begun:
            collection.cross_off(names)
