"""Collects the spans that workers recorded, and turns them into a Perfetto trace and into the four numbers that tell
whether ping-pong works.

Any thread asks for spans; the engine's carries it out, for it owns the channels. A worker answers between two steps, so
an answer may take as long as a step.

The numbers, over the time in which steps ran:
- idle share of attention: an attention worker stood in `combine`, waiting for experts
- idle share of experts: an expert worker neither computed nor had rows to gather
- exposed communication: an attention worker waited while no expert worker computed; nothing hid the exchange
- rows per expert worker: how evenly the experts are placed

Trace format: Chrome's JSON ("X" complete events), which Perfetto and chrome://tracing open.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.serve.fleet import Fleet
from antiphon.serve.worker.messages import TakeSpans
from antiphon.serve.worker.spans import COMBINE, EXPERTS, STEP, Spans
from antiphon.serve.worker_handle import WorkerName

Intervals = NDArray[np.int64]  # [n, 2] start and end in ns, sorted, disjoint


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


@dataclass(frozen=True)
class TimelineSummary:
    """Shares are of the time in which steps ran, `step_s`. Of several pools: of each its own, and `step_s` of the
    longest."""

    step_s: float
    attention_idle_ratio: dict[str, float]
    expert_idle_ratio: dict[str, float]
    exposed_communication_s: float
    rows_per_expert_worker: dict[str, int]


def write_trace(path: Path, spans: Mapping[WorkerName, Spans]) -> None:
    """One track per worker; every span carries its layer, micro-batch, rows and step."""
    origin = min((min(s.starts_ns) for s in spans.values() if s.starts_ns), default=0)
    events: list[dict[str, Any]] = []
    for process, (name, recorded) in enumerate(sorted(spans.items(), key=lambda item: str(item[0])), start=1):
        events += process_named(str(name), process), thread_named("steps", process, 1), thread_named("work", process, 2)
        events.extend(_event(recorded, index, process, origin) for index in range(len(recorded.starts_ns)))
    write_events(path, events)


def _event(spans: Spans, index: int, process: int, origin: int) -> dict[str, Any]:
    name = spans.name_index[index]
    start, end = spans.starts_ns[index], spans.ends_ns[index]
    arguments = {"rows": spans.rows[index], "step": spans.steps[index]}
    if spans.layers[index] >= 0:
        arguments |= {"layer": spans.layers[index], "micro_batch": spans.micro_batches[index]}
    return {
        "ph": "X",
        "name": spans.names[name],
        "pid": process,
        "tid": 1 if name == STEP else 2,
        "ts": (start - origin) / 1000,
        "dur": (end - start) / 1000,
        "args": arguments,
    }


def summarise(spans: Mapping[WorkerName, Spans]) -> TimelineSummary:
    """The four numbers. Workers without spans are left out; pools, which step each for itself, are looked at apart."""
    pools = [
        _summarise_pool({name: s for name, s in spans.items() if name.pool == pool})
        for pool in sorted({name.pool for name in spans})
    ]
    return TimelineSummary(
        step_s=max((each.step_s for each in pools), default=0.0),
        attention_idle_ratio=dict(item for each in pools for item in each.attention_idle_ratio.items()),
        expert_idle_ratio=dict(item for each in pools for item in each.expert_idle_ratio.items()),
        exposed_communication_s=sum(each.exposed_communication_s for each in pools),
        rows_per_expert_worker=dict(item for each in pools for item in each.rows_per_expert_worker.items()),
    )


def _summarise_pool(spans: Mapping[WorkerName, Spans]) -> TimelineSummary:
    attention = {name: s for name, s in spans.items() if name.role != "experts" and s.starts_ns}
    experts = {name: s for name, s in spans.items() if name.role == "experts" and s.starts_ns}
    stepping = _union([_intervals(s, STEP) for s in attention.values()])
    step_ns = _length(stepping)
    computing = _union([_intervals(s, EXPERTS) for s in experts.values()])
    exposed_ns = 0
    attention_idle = {}
    for name, recorded in attention.items():
        waiting = _intervals(recorded, COMBINE)
        attention_idle[str(name)] = _length(waiting) / max(1, _length(_intervals(recorded, STEP)))
        exposed_ns += _length(waiting) - _length(_intersection(waiting, computing))
    expert_idle = {}
    for name, recorded in experts.items():
        busy = _intersection(_union([_intervals(recorded, EXPERTS)]), stepping)
        expert_idle[str(name)] = 1 - _length(busy) / max(1, step_ns)
    rows = {
        str(name): sum(r for r, kind in zip(s.rows, s.name_index, strict=True) if kind == EXPERTS)
        for name, s in experts.items()
    }
    return TimelineSummary(
        step_s=step_ns * 1e-9,
        attention_idle_ratio=attention_idle,
        expert_idle_ratio=expert_idle,
        exposed_communication_s=exposed_ns * 1e-9,
        rows_per_expert_worker=rows,
    )


def _intervals(spans: Spans, kind: int) -> Intervals:
    chosen = np.asarray(spans.name_index) == kind
    bounds = np.stack([np.asarray(spans.starts_ns), np.asarray(spans.ends_ns)], axis=1)[chosen]
    ordered: Intervals = bounds[np.argsort(bounds[:, 0], kind="stable")]
    return ordered


def _union(parts: list[Intervals]) -> Intervals:
    """Merge intervals, overlapping ones becoming one."""
    merged: list[list[int]] = []
    stacked = np.concatenate(parts) if parts else np.empty((0, 2), dtype=np.int64)
    for start, end in stacked[np.argsort(stacked[:, 0], kind="stable")].tolist():
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.asarray(merged, dtype=np.int64).reshape(-1, 2)


def _intersection(left: Intervals, right: Intervals) -> Intervals:
    """Parts common to both; each argument's own intervals must be disjoint."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i, 0], right[j, 0]), min(left[i, 1], right[j, 1])
        if start < end:
            common.append((start, end))
        if left[i, 1] < right[j, 1]:
            i += 1
        else:
            j += 1
    return np.asarray(common, dtype=np.int64).reshape(-1, 2)


def _length(intervals: Intervals) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum()) if len(intervals) else 0
