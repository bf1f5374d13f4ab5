"""Counters of a running engine, and the shares made from them. Written by the engine's thread, read by any.

Idle shares are relative to the time in which steps ran, over roughly the last half minute: when `_WINDOW_S` of step
time is full, everything that feeds a ratio is halved, so old behaviour fades. Totals only grow.

Plain numbers are read as they stand; what is iterated over is guarded by a lock.
"""

import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from antiphon.base.logging import get_logger
from antiphon.comm.ledger import Traffic
from antiphon.placement.split import FloatArray, balancedness
from antiphon.serve.engine_api import EventKind, HandoverCounts, PrefetchCounts, ShownEvent
from antiphon.serve.worker.messages import ExpertReport, StepResult

_log = get_logger("engine")
_WINDOW_S = 30.0
_MAX_EVENTS = 200
_MAX_QUEUE_TIMES = 10_000  # kept for the next reading of the metrics


class EngineStatistics:
    """One per engine."""

    def __init__(self, experts_of_pools: Sequence[int] = ()) -> None:
        """`experts_of_pools`: how many expert workers each pool has, if there are several."""
        self._experts_of_pools = experts_of_pools
        self.num_steps = 0
        self.prompt_tokens = 0
        self.num_worker_restarts = 0
        self.dispatch_bytes = 0
        self.exposed_communication_s = 0.0
        self.placement_changes = 0
        self.prefetch = PrefetchCounts()
        self.handovers = HandoverCounts()
        self._events: deque[ShownEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._lock = threading.Lock()
        self._queue_times_s: list[float] = []
        self._exchange: dict[str, Traffic] = {}
        self._attention_step_s = 0.0
        self._attention_wait_s = 0.0
        self._group_step_s = 0.0
        self._expert_step_s = 0.0
        self._expert_busy_s: dict[int, float] = defaultdict(float)
        self._rows: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._expert_rows: dict[int, dict[int, dict[int, float]]] = defaultdict(dict)  # layer, worker, expert
        self._prompt_rows: dict[int, FloatArray] = {}  # by layer, of each expert

    def record_step(self, result: StepResult, expert_layers: Sequence[int] = ()) -> None:
        """One attention worker finished its part of a step. `expert_layers`: those of its `prompt_rows`."""
        self.dispatch_bytes += result.dispatch_bytes
        self.exposed_communication_s += result.exposed_s
        self.handovers.exposed_s += result.hand_over_s
        self._attention_step_s += result.step_s
        self._attention_wait_s += result.wait_s
        if result.prefetch is not None:
            self.prefetch.add(result.prefetch)
        if result.prompt_rows:
            counts_LE = np.frombuffer(result.prompt_rows, "<u4").reshape(len(expert_layers), -1).astype(np.float64)
            with self._lock:
                for layer, counts_E in zip(expert_layers, counts_LE, strict=True):
                    self._prompt_rows[layer] = counts_E + self._prompt_rows.get(layer, 0.0)

    def record_group_step(self, step_s: float, num_experts: int) -> None:
        """A step of all workers that step together, `num_experts` expert workers among them, took this long."""
        self.num_steps += 1
        self._group_step_s += step_s
        self._expert_step_s += step_s * num_experts
        if self._group_step_s > _WINDOW_S:
            self._fade()

    def record_experts(self, number: int, report: ExpertReport) -> None:
        """`number`: of the expert worker, counted over all instances."""
        with self._lock:
            self._expert_busy_s[number] += report.busy_s
            for layer, rows in report.rows_per_layer.items():
                self._rows[layer][number] += rows
            for layer, counts in report.rows_per_expert.items():
                before = self._expert_rows[layer].get(number, {})
                self._expert_rows[layer][number] = {
                    expert: before.get(expert, 0.0) + rows for expert, rows in counts.items()
                }

    def record_placement(self, version: int, num_moved: int) -> None:
        """Rows go by another placement now, for which `num_moved` experts have moved or been copied."""
        self.placement_changes += 1
        text = f"placement {version}: {num_moved} experts have moved"
        _log.info("%s", text)
        self.note_event("placement", text)

    def note_event(self, kind: EventKind, text: str, worker: str = "") -> None:
        """It happened now to a worker, or to several. For the dashboard; the log says more."""
        with self._lock:
            self._num_events += 1
            event = ShownEvent(number=self._num_events, time_s=time.time(), kind=kind, worker=worker, text=text)
            self._events.append(event)

    def newest_events(self) -> tuple[ShownEvent, ...]:
        """Those that are kept, oldest first."""
        with self._lock:
            return tuple(self._events)

    def record_exchange(self, worker: str, traffic: Traffic) -> None:
        """What a worker's exchange has carried since its start; replaces its last report."""
        with self._lock:
            self._exchange[worker] = traffic

    def exchange(self) -> dict[str, Traffic]:
        """The last report of each worker."""
        with self._lock:
            return dict(self._exchange)

    def record_queue_time(self, waited_s: float) -> None:
        """A request was scheduled for the first time after `waited_s`."""
        with self._lock:
            self._queue_times_s.append(waited_s)
            del self._queue_times_s[:-_MAX_QUEUE_TIMES]

    def take_queue_times(self) -> list[float]:
        """Queue times since the last call."""
        with self._lock:
            taken, self._queue_times_s = self._queue_times_s, []
        return taken

    def _fade(self) -> None:
        with self._lock:
            self._group_step_s /= 2
            self._expert_step_s /= 2
            self._attention_step_s /= 2
            self._attention_wait_s /= 2
            for index in self._expert_busy_s:
                self._expert_busy_s[index] /= 2
            for per_worker in self._rows.values():
                for index in per_worker:
                    per_worker[index] /= 2
            for counts_E in self._prompt_rows.values():
                counts_E /= 2
            for experts_of in self._expert_rows.values():
                for held in experts_of.values():
                    for expert in held:
                        held[expert] /= 2

    @property
    def attention_idle_ratio(self) -> float:
        """Share of step time in which attention workers stood waiting for experts."""
        return self._attention_wait_s / self._attention_step_s if self._attention_step_s else 0.0

    @property
    def expert_idle_ratio(self) -> float:
        """Share of step time in which expert workers did not compute; 0 without expert workers."""
        with self._lock:
            busy_s, step_s = sum(self._expert_busy_s.values()), self._expert_step_s
        return min(1.0, max(0.0, 1.0 - busy_s / step_s)) if step_s else 0.0

    def rows_per_expert(self) -> dict[int, dict[int, dict[int, float]]]:
        """Rows of each expert lately, by layer, worker and expert; a worker has the experts it holds."""
        with self._lock:
            return {
                layer: {index: dict(held) for index, held in sorted(experts_of.items())}
                for layer, experts_of in sorted(self._expert_rows.items())
            }

    def prompt_rows_per_expert(self) -> dict[int, list[float]]:
        """Rows of prompts lately, by layer and expert; the other rows were of answers. Without any, a layer is left
        out."""
        with self._lock:
            return {layer: counts_E.tolist() for layer, counts_E in sorted(self._prompt_rows.items())}

    def rows_per_s(self) -> dict[int, float]:
        """Rows that each expert worker computes in a second of computing, measured lately: how fast it is."""
        with self._lock:
            busy_s = {number: seconds for number, seconds in self._expert_busy_s.items() if seconds > 0}
            return {
                number: sum(per_worker.get(number, 0.0) for per_worker in self._rows.values()) / seconds
                for number, seconds in sorted(busy_s.items())
            }

    def balancedness_per_layer(self) -> dict[int, float]:
        """Mean over maximum of the rows each expert worker was sent; 1 is perfect balance. The worst pool's."""
        ends = list(accumulate(self._experts_of_pools))
        with self._lock:
            rows_of: dict[int, dict[int, list[float]]] = {}
            for layer, per_worker in sorted(self._rows.items()):
                by_pool = rows_of.setdefault(layer, defaultdict(list))
                for index in self._expert_busy_s:
                    by_pool[bisect_right(ends, index)].append(per_worker.get(index, 0.0))
        shares = {
            layer: [float(balancedness(np.array([rows]))) for rows in by_pool.values() if any(rows)]
            for layer, by_pool in rows_of.items()
        }
        return {layer: min(found) for layer, found in shares.items() if found}
