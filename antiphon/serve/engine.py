"""The engine: one thread that plans steps, talks to workers, and turns their answers into outputs.

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
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.engine_api import EngineInfo, EngineOutput, EngineStats, FinishReason, QueueFull, ShuttingDown
from antiphon.serve.fleet import Event, Fleet, WorkerName
from antiphon.serve.group import Commit, StepGroup
from antiphon.serve.policy.limits import SchedulerConfig, check_request
from antiphon.serve.policy.request import Request, new_request
from antiphon.serve.policy.routing import choose_attention_worker
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.streams import AsyncSink, Sink
from antiphon.serve.worker.messages import Failure, Progress, Ready, Sampled, Spans, TakeSpans
from antiphon.specs.sampling import SamplingParams, TokenLogprob

_log = get_logger("engine")
_TICK_S = 0.5
_MAX_QUEUE_TIMES = 10_000  # kept for the next reading of the metrics
_MAX_RESTARTS = 5  # of one worker without a step in between; then the engine gives up


class Matcher(Protocol):
    """One sequence's place in its grammar (see `serve/text/structured`)."""

    def fill_bitmask(self) -> NDArray[np.int32]: ...

    def accept(self, token_id: int) -> bool: ...

    @property
    def error(self) -> str | None: ...


@dataclass
class _Tracked:
    """A request and where its outputs go."""

    request: Request
    sink: Sink
    submitted: float
    matcher: Matcher | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    scheduled: bool = False


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
        self._new: list[_Tracked] = []
        self._aborts: list[str] = []
        self._tracked: dict[str, _Tracked] = {}
        self._unrouted: list[Request] = []
        self._arrivals = 0
        self._num_waiting = 0
        self._sinks: dict[int, AsyncSink] = {}
        self._draining = False
        self._stopping = False
        self._fatal: str | None = None
        self._spans: dict[WorkerName, Spans] = {}
        self._spans_wanted: set[WorkerName] = set()
        self._spans_arrived = threading.Event()
        self._failures: dict[WorkerName, int] = {}
        self._ready: dict[WorkerName, Ready] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._random = random.SystemRandom()

    def bitmask_of(self, request_id: str) -> bytes | None:
        """The tokens a request's grammar allows next; None for free text."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.matcher is None:
            return None
        return tracked.matcher.fill_bitmask().tobytes()

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

    def loading_progress(self) -> tuple[int, int]:
        """(bytes loaded, bytes to load) over all workers that have said so."""
        reports = list(self._loading.values())
        return sum(report.done for report in reports), sum(report.total for report in reports)

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
        """Queue a request whose outputs go to `sink`. Raises as `AsyncEngine.submit` does, before anything is queued."""
        if self._draining or self._stopping:
            raise ShuttingDown("the server is shutting down: send the request to another one")
        if self._fatal is not None:
            raise ShuttingDown(f"the engine has stopped: {self._fatal}")
        if params.grammar is not None and self.make_matcher is None:
            raise UserError("structured output needs a tokenizer: this engine was started without one")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        with self._lock:
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
            if request_id in self._tracked:
                raise UserError(f"request id {request_id!r} is in use: choose another")
            self._arrivals += 1
            self._new.append(_Tracked(request, sink, time.monotonic()))
        self._fleet.wake()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborts.append(request_id)
        self._fleet.wake()

    async def drain(self, timeout_s: float) -> None:
        """See `AsyncEngine.drain`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while (self._tracked or self._new) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for request_id in list(self._tracked):
            self.abort(request_id)

    def stats(self) -> EngineStats:
        statistics = self.statistics
        with self._lock:
            queue_times, statistics.queue_times_s = statistics.queue_times_s, []
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
            queue_times_s=queue_times,
            healthy=self._fatal is None and any(group.ready for group in self._groups),
            status=self._fatal or ("draining" if self._draining else "ok"),
        )

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, for those who measure or stop them."""
        return [worker.pid for worker in self._fleet.workers.values()]

    def kernels(self) -> set[str]:
        """The kernel back-ends the workers chose."""
        return {ready.kernels for ready in self._ready.values()}

    def take_spans(self, timeout_s: float = 10.0) -> dict[WorkerName, Spans]:
        """Collect the recorded spans of all live workers (and make them forget). For `--timeline`."""
        self._spans = {}
        self._spans_wanted = {name for name, worker in self._fleet.workers.items() if worker.ready}
        self._spans_arrived.clear()
        for name in list(self._spans_wanted):
            self._fleet.send(self._fleet.workers[name], TakeSpans())
        self._spans_arrived.wait(timeout_s)
        return dict(self._spans)

    def stop(self) -> None:
        """End all requests, the thread and the workers."""
        self._stopping = True
        self._fleet.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=60.0)
        self._fleet.stop()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_orders()
                for group in self._groups:
                    group.start_step()
                self._note_first_schedules()
                for event in self._fleet.poll(_TICK_S):
                    self._handle(event)
                for group in self._groups:
                    group.on_tick()
        except UserError as error:
            self._fatal = str(error)
        except Exception as error:
            _log.exception("the engine thread failed")
            self._fatal = f"{type(error).__name__}: {error}"
        self._end_all("abort" if self._fatal is None else "error", self._fatal)

    def _take_orders(self) -> None:
        with self._lock:
            arrived, self._new = self._new, []
            aborts, self._aborts = self._aborts, []
            for tracked in arrived:
                self._tracked[tracked.request.request_id] = tracked
        for tracked in arrived:
            request = tracked.request
            if request.params.grammar is not None and self.make_matcher is not None:
                tracked.matcher = self.make_matcher(request.params.grammar)
            self._unrouted.append(request)
        for request_id in aborts:
            self._end(request_id, "abort", None)
        self._route()
        self._num_waiting = sum(s.num_waiting for s in self._schedulers.values()) + len(self._unrouted)

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
                    with self._lock:
                        self.statistics.queue_times_s.append(time.monotonic() - tracked.submitted)
                        del self.statistics.queue_times_s[:-_MAX_QUEUE_TIMES]

    def _handle(self, event: Event) -> None:
        worker = event.worker
        group = self._group_of[worker.name]
        if event.message is None:
            self._on_death(event)
            return
        if isinstance(event.message, Spans):
            self._spans[worker.name] = event.message
            if set(self._spans) >= self._spans_wanted:
                self._spans_arrived.set()
            return
        if isinstance(event.message, Progress):
            self._loading[worker.name] = event.message
            return
        if isinstance(event.message, Failure):
            _log.error("%s cannot start: %s", worker.name, event.message.message)
            if worker.name not in self._ready:
                self._fatal = event.message.message
                raise UserError(self._fatal)
            return  # it worked before: its death, which follows, starts it again
        if isinstance(event.message, Ready):
            self._ready[worker.name] = event.message
        outcome = group.on_message(worker, event.message)
        if isinstance(outcome, Commit):
            self._failures.pop(worker.name, None)
            self._publish(outcome)
        elif outcome is not None:
            for request_id in outcome:
                self._end(request_id, "error", f"{worker.name} could not compute this request")

    def _on_death(self, event: Event) -> None:
        name = event.worker.name
        group = self._group_of[name]
        group.on_death(event.worker)
        if name in self._schedulers and (group.live_attention or len(self._groups) > 1):
            self._unrouted.extend(self._schedulers[name].evacuate())
            self._unrouted.sort(key=lambda request: request.arrival)
        if self._stopping:
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] > _MAX_RESTARTS:
            self._fatal = f"{name} died {self._failures[name]} times in a row, the last time {event.reason}"
            raise RuntimeError(self._fatal)
        self.statistics.num_worker_restarts += 1
        self._relaunch(name)

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _publish(self, commit: Commit) -> None:
        """Turn a commit into outputs, one delivery per sink."""
        outputs: dict[int, tuple[Sink, list[EngineOutput]]] = {}
        broken: list[tuple[str, str]] = []
        for request_id, sampled in commit.sampled.items():
            if sampled.prompt_logprobs and (tracked := self._tracked.get(request_id)) is not None:
                tracked.prompt_logprobs.extend(sampled.prompt_logprobs)
        for progress in commit.progress:
            request = progress.request
            tracked = self._tracked.get(request.request_id)
            if tracked is None:
                continue
            output = self._output(tracked, progress.token_id, progress.finish_reason, commit.sampled)
            outputs.setdefault(id(tracked.sink), (tracked.sink, []))[1].append(output)
            if progress.finish_reason is not None:
                del self._tracked[request.request_id]
            elif tracked.matcher is not None and tracked.matcher.error is not None:
                broken.append((request.request_id, f"structured output broke off: {tracked.matcher.error}"))
        for sink, batch in outputs.values():
            sink.deliver(batch)
        for request_id, error in broken:
            self._end(request_id, "error", error)

    def _output(
        self, tracked: _Tracked, token_id: int | None, reason: FinishReason | None, sampled: dict[str, Sampled]
    ) -> EngineOutput:
        request = tracked.request
        if tracked.matcher is not None and token_id is not None:
            tracked.matcher.accept(token_id)
        first = request.num_output <= 1
        entry = sampled.get(request.request_id)
        prompt_logprobs: list[TokenLogprob | None] | None = None
        if first and request.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *tracked.prompt_logprobs]
        return EngineOutput(
            request_id=request.request_id,
            token_ids=[] if token_id is None else [token_id],
            logprobs=[entry.logprob] if entry is not None and entry.logprob is not None else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token_id if reason == "stop" else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """Take a request out of wherever it is and tell its sink."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        for scheduler in self._schedulers.values():
            scheduler.abort(request_id)
        self._unrouted = [request for request in self._unrouted if request.request_id != request_id]
        output = EngineOutput(request_id=request_id, token_ids=[], finish_reason=reason, error=error)
        tracked.sink.deliver([output])

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        self._take_orders()
        for request_id in list(self._tracked):
            self._end(request_id, reason, error)
