"""The engine (long because all that shares its lock is here): one thread plans steps and talks to the workers.

    loop:  take new requests and aborts
           start a step in every group that stands still            (policy, microseconds to milliseconds)
           wait for messages and deaths                             (workers compute)
           commit results, hand outputs to their sinks

Requests live here: prompt, sampled tokens, grammar state. Workers hold what can be computed again from them, so the
loss of any worker loses no request and repeats no token. Rejected: asyncio for this loop; a step's planning would
delay every HTTP connection, and every connection would delay the next step.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable

from antiphon.base.errors import StartFailed, UserError
from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import EngineInfo, EngineOutput, EngineStats, FinishReason, QueueFull, ShuttingDown
from antiphon.serve.fleet import Event, Fleet, WorkerName
from antiphon.serve.group import Commit, StepGroup
from antiphon.serve.policy.limits import SchedulerConfig, check_request
from antiphon.serve.policy.request import Request, new_request
from antiphon.serve.policy.routing import choose_attention_worker
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.span_collection import SpanCollection
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.streams import AsyncSink, Sink
from antiphon.serve.tracked import Matcher, TrackedRequest, TrackedRequests
from antiphon.serve.worker.messages import Failure, Progress, Ready, Spans
from antiphon.specs.sampling import SamplingParams

_log = get_logger("engine")
_TICK_S = 0.5
_MAX_RESTARTS = 5  # of one worker without a step in between; then the engine gives up


class Engine:
    """Implements `AsyncEngine`; `submit_to` serves plain threads too. `start` launches the thread, `stop` ends it."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        fleet: Fleet,
        groups: list[StepGroup],
        scheduler_config: SchedulerConfig,
        statistics: EngineStatistics,
        relaunch: Callable[[WorkerName], None],
        make_matcher: Callable[[str], Matcher] | None = None,
    ) -> None:
        self.info = info
        self.statistics = statistics
        self._fleet = fleet
        self._groups = groups
        self._group_of: dict[WorkerName, StepGroup] = {}
        self._schedulers: dict[WorkerName, Scheduler] = {}
        self._loading: dict[WorkerName, Progress] = {}
        self._scheduler_config = scheduler_config
        self._relaunch = relaunch
        self.make_matcher = make_matcher
        self._lock = threading.Lock()
        self._new: dict[str, TrackedRequest] = {}
        self._aborts: list[str] = []
        self._tracked = TrackedRequests()
        self._unrouted: list[Request] = []
        self._arrivals = 0
        self._num_waiting = 0
        self._sinks: dict[int, AsyncSink] = {}
        self._draining = False
        self._stopping = False
        self._fatal: str | None = None
        self._fatal_exit_code = 1
        self._new_span_collections: list[SpanCollection] = []
        self._span_collections: list[SpanCollection] = []
        self._failures: dict[WorkerName, int] = {}
        self._ready: dict[WorkerName, Ready] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._random = random.SystemRandom()

    def bitmask_of(self, request_id: str) -> bytes | None:
        """The tokens a request's grammar allows next; None for free text."""
        return self._tracked.bitmask_of(request_id)

    def adopt_groups(self) -> None:
        """Take note of the groups' workers; they were made after the engine because they ask it for bit masks."""
        self._group_of = {name: group for group in self._groups for name in (*group.attention, *group.experts)}
        self._schedulers = {name: scheduler for group in self._groups for name, scheduler in group.schedulers.items()}

    # --- called from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def fatal(self) -> str | None:
        """Why the engine has given up; None while it runs."""
        return self._fatal

    def failure(self) -> StartFailed:
        """`fatal` as the error of a command that could not start the engine."""
        return StartFailed(self._fatal or "the engine has not failed", self._fatal_exit_code)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return all(group.complete for group in self._groups)

    def loading_progress(self) -> tuple[int, int]:
        """(bytes loaded, bytes to load) over all workers; the second is 0 until each has said its part."""
        reports = list(self._loading.values())
        total = sum(report.total for report in reports) if len(reports) == len(self._group_of) else 0
        return sum(report.done for report in reports), total

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[EngineOutput]:
        """See `AsyncEngine.submit`. Call inside the event loop that reads the outputs."""
        sink = AsyncSink.of_running_loop(self._sinks)
        sink.open(request_id)
        try:
            self.submit_to(sink, request_id, prompt_token_ids, params)
        except BaseException:
            sink.close(request_id)
            raise
        return sink.stream(request_id, self.abort)

    def submit_to(self, sink: Sink, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queue a request whose outputs go to `sink`. Raises as `AsyncEngine.submit` does, with nothing queued."""
        if params.grammar is not None and self.make_matcher is None:
            raise UserError("structured output needs a tokenizer: this engine was started without one")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        with self._lock:
            self._refuse_if_ending()
            request = new_request(
                request_id,
                prompt_token_ids,
                params,
                arrival=self._arrivals,
                seed=seed,
                eos_token_ids=self.info.eos_token_ids,
            )
            check_request(request, self._scheduler_config)
            num_waiting = self._num_waiting + len(self._new)
            if num_waiting >= self.info.max_waiting:
                raise QueueFull(
                    f"{num_waiting} requests are waiting, the limit is {self.info.max_waiting}: try again later", 1.0
                )
            if self._knows(request_id):
                raise UserError(f"request id {request_id!r} is in use: choose another")
            self._arrivals += 1
            self._new[request_id] = TrackedRequest(request, sink)
        self._fleet.wake()

    def _refuse_if_ending(self) -> None:
        """Asked under the lock: the engine's thread takes it once more after the end is decided, so that no request
        can slip in behind its last look."""
        if self._fatal is not None:
            raise ShuttingDown(f"the engine has stopped: {self._fatal}")
        if self._draining or self._stopping:
            raise ShuttingDown("the server is shutting down: send the request to another one")

    def _knows(self, request_id: str) -> bool:
        """The id is in use, if only by a request that was aborted and holds its blocks until the step has ended."""
        held = any(request_id in scheduler.requests for scheduler in self._schedulers.values())
        return held or request_id in self._new or request_id in self._tracked

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborts.append(request_id)
        self._fleet.wake()

    async def drain(self, timeout_s: float) -> None:
        """See `AsyncEngine.drain`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while (unfinished := self._unfinished()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for request_id in unfinished:
            self.abort(request_id)

    def _unfinished(self) -> list[str]:
        with self._lock:
            return [*self._new, *self._tracked.ids()]

    def stats(self) -> EngineStats:
        statistics = self.statistics
        counters = [scheduler.counters for scheduler in self._schedulers.values()]
        pools = [scheduler.occupancy.pool for scheduler in self._schedulers.values()]
        return EngineStats(
            num_running=sum(s.num_running for s in self._schedulers.values()),
            num_waiting=self._num_waiting + len(self._new),
            kv_blocks_used=sum(pool.num_used for pool in pools),
            kv_blocks_total=self._scheduler_config.num_blocks * len(pools),
            prefix_cache_hit_tokens=sum(c.prefix_hit_tokens for c in counters),
            prefix_cache_query_tokens=sum(c.prefix_query_tokens for c in counters),
            num_preemptions=sum(c.num_preemptions for c in counters),
            prompt_tokens=statistics.prompt_tokens,
            generation_tokens=sum(c.generation_tokens for c in counters),
            num_steps=statistics.num_steps,
            num_worker_restarts=statistics.num_worker_restarts,
            attention_idle_ratio=statistics.attention_idle_ratio,
            expert_idle_ratio=statistics.expert_idle_ratio,
            exposed_communication_s=statistics.exposed_communication_s,
            dispatch_bytes=statistics.dispatch_bytes,
            balancedness_per_layer=statistics.balancedness_per_layer(),
            queue_times_s=statistics.take_queue_times(),
            healthy=self._fatal is None and any(group.ready for group in self._groups),
            status=self._fatal or ("draining" if self._draining else "ok"),
        )

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, for those who measure or stop them."""
        return [worker.pid for worker in list(self._fleet.workers.values())]

    def worker_pid(self, name: WorkerName) -> int:
        """Process id of one worker's present incarnation."""
        return self._fleet.workers[name].pid

    def kernels(self) -> set[str]:
        """The kernel back-ends the workers chose."""
        return {ready.kernels for ready in list(self._ready.values())}

    def take_spans(self, timeout_s: float = 10.0) -> dict[WorkerName, Spans]:
        """Collect the recorded spans of all live workers (and make them forget). For `--timeline`."""
        if not self._thread.is_alive():
            return {}
        collection = SpanCollection()
        with self._lock:
            self._new_span_collections.append(collection)
        self._fleet.wake()
        return collection.wait(timeout_s)

    def stop(self) -> None:
        """End all requests, the thread and the workers. Safe to call again."""
        self._stopping = True
        self._fleet.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=60.0)
        self._fleet.stop()
        for group in self._groups:
            group.close()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_orders()
                for group in self._groups:
                    group.start_step()
                self._note_first_schedules()
                self._count_waiting()
                for event in self._fleet.poll(_TICK_S):
                    self._handle(event)
                for group in self._groups:
                    group.on_tick()
        except UserError as error:
            self._fatal_exit_code = error.exit_code
            self._fatal = str(error)
        except Exception as error:
            _log.exception("the engine thread failed")
            self._fatal = f"{type(error).__name__}: {error}"
        self._end_all("abort" if self._fatal is None else "error", self._fatal)

    def _take_orders(self) -> None:
        with self._lock:
            arrived, self._new = list(self._new.values()), {}
            self._num_waiting += len(arrived)  # until they are counted below: the queue's limit holds in between, too
            aborts, self._aborts = self._aborts, []
            collections, self._new_span_collections = self._new_span_collections, []
            for tracked in arrived:
                self._tracked.add(tracked)
        for tracked in arrived:
            self._accept(tracked)
        for request_id in aborts:
            self._end(request_id, "abort", None)
        for collection in collections:
            collection.begin(self._fleet)
        self._span_collections = [c for c in (*self._span_collections, *collections) if not c.done]
        self._route()
        self._count_waiting()

    def _count_waiting(self) -> None:
        self._num_waiting = sum(s.num_waiting for s in self._schedulers.values()) + len(self._unrouted)

    def _accept(self, tracked: TrackedRequest) -> None:
        """Put a new request in line; one whose grammar cannot be used ends at once."""
        grammar = tracked.request.params.grammar
        if grammar is not None and self.make_matcher is not None:
            try:
                tracked.matcher = self.make_matcher(grammar)
            except ValueError as error:
                self._end(tracked.request.request_id, "error", str(error))
                return
        self._unrouted.append(tracked.request)

    def _route(self) -> None:
        """Give requests without a worker to the best live one; without any, they wait here."""
        live = [name for group in self._groups for name in group.live_attention]
        if not live or not self._unrouted:
            return
        schedulers = {index: self._schedulers[name] for index, name in enumerate(live)}
        unrouted, self._unrouted = self._unrouted, []
        for request in unrouted:
            index = choose_attention_worker(request, schedulers)
            assert index is not None, "there is a live worker"
            schedulers[index].adopt(request)

    def _note_first_schedules(self) -> None:
        """Queue times of requests that left the queue since the last look."""
        for scheduler in self._schedulers.values():
            for request in scheduler.occupancy.running:
                tracked = self._tracked.get(request.request_id)
                if tracked is not None and not tracked.scheduled:
                    tracked.scheduled = True
                    self.statistics.prompt_tokens += request.num_prompt
                    self.statistics.record_queue_time(time.monotonic() - tracked.submitted)

    def _handle(self, event: Event) -> None:
        worker = event.worker
        group = self._group_of[worker.name]
        if event.message is None:
            self._on_death(event)
            return
        if isinstance(event.message, Spans):
            any(collection.add(worker.name, event.message) for collection in self._span_collections)
            return
        if isinstance(event.message, Progress):
            self._loading[worker.name] = event.message
            return
        if isinstance(event.message, Failure):
            if worker.name not in self._ready:
                raise StartFailed(event.message.message, event.message.exit_code)
            _log.error("%s cannot start: %s", worker.name, event.message.message)
            return  # it worked before: its death, which follows, starts it again
        if isinstance(event.message, Ready):
            self._ready[worker.name] = event.message
        outcome = group.on_message(worker, event.message)
        if isinstance(outcome, Commit):
            for name in (worker.name, *group.experts):
                self._failures.pop(name, None)
            for request_id, error in self._tracked.publish(outcome):
                self._end(request_id, "error", error)
        elif outcome is not None:
            for request_id in outcome:
                self._end(request_id, "error", f"{worker.name} could not compute this request")

    def _on_death(self, event: Event) -> None:
        name = event.worker.name
        group = self._group_of[name]
        group.on_death(event.worker)
        for collection in self._span_collections:
            collection.forget([name])
        if name in self._schedulers:
            self._unrouted.extend(self._schedulers[name].evacuate())
            self._unrouted.sort(key=lambda request: request.arrival)
        if self._stopping:
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] > _MAX_RESTARTS:
            raise UserError(f"{name} died {self._failures[name]} times in a row, the last time {event.reason}")
        self.statistics.num_worker_restarts += 1
        self._relaunch(name)

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """Take a request out of wherever it is and tell its sink."""
        if not self._tracked.end(request_id, reason, error):
            return
        for scheduler in self._schedulers.values():
            scheduler.abort(request_id)
        self._unrouted = [request for request in self._unrouted if request.request_id != request_id]

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """The thread is about to end: nobody who waits may wait for ever."""
        self._take_orders()
        for request_id in self._tracked.ids():
            self._end(request_id, reason, error)
        for collection in self._span_collections:
            collection.forget(self._group_of)
