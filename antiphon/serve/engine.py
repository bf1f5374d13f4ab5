"""The engine: one thread plans steps and talks to the workers; other threads ask it, under one lock.

    loop:  take new requests and aborts
           take the masks of grammars that have come                (computed by other threads: `mask_pool`)
           start a step in every group that stands still            (policy, microseconds to milliseconds)
           hand outputs to their sinks                              (workers compute)
           wait for messages and deaths
           commit results

Requests live here (`request_router`): prompt, sampled tokens, grammar state. Workers (`workforce`) hold what can be
computed again from them, so the loss of any worker loses no request and repeats no token. Rejected: asyncio for this
loop; a step's planning would delay every HTTP connection, and every connection would delay the next step.
"""

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from antiphon.base.errors import ResourceError, StartFailed, UserError
from antiphon.base.logging import Occasional, get_logger
from antiphon.placement.moves import num_moves
from antiphon.placement.routing_trace import RoutingRecord
from antiphon.serve.engine_api import EngineInfo, EngineOutput, EngineStats, FinishReason, QueueFull, ShuttingDown
from antiphon.serve.fleet import Event, Fleet
from antiphon.serve.group import StepFailure, StepGroup
from antiphon.serve.handovers import Handovers, KVEnds
from antiphon.serve.mask_pool import MakeMatcher, MaskJob
from antiphon.serve.outputs import AsyncSink, Sink, TrackedRequest, TrackedRequests
from antiphon.serve.policy.handover import KVNews
from antiphon.serve.policy.request import SchedulerConfig, check_request, new_request
from antiphon.serve.request_router import RequestRouter
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.timeline import SpanCollections
from antiphon.serve.worker.spans import Spans
from antiphon.serve.worker_handle import WorkerName
from antiphon.serve.workforce import Workforce
from antiphon.specs.placement import ExpertPlacement
from antiphon.specs.sampling import SamplingParams

_log = get_logger("engine")
_TICK_S = 0.2
_MAX_SHOWN = 8  # workers of a role, in `last_steps`
_GIVE_UP_S = 30.0  # of rounds that the system refuses
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_SAY_S = 10.0


class Engine:
    """Implements `AsyncEngine`; `submit_to` serves plain threads too. `start` before, `stop` after all else.

    The `groups` hand out what their steps make to the `tracked` requests they were built with."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        fleet: Fleet,
        groups: list[StepGroup],
        tracked: TrackedRequests,
        scheduler_config: SchedulerConfig,
        statistics: EngineStatistics,
        launch: Callable[[WorkerName], None],
        make_matcher: MakeMatcher | None = None,
        kv_ends: KVEnds | None = None,
        record: RoutingRecord | None = None,
    ) -> None:
        """`launch` starts a worker, at first and again after a death. `make_matcher`: the place of a new sequence in
        the grammar of that text; None: requests with a grammar are refused. `kv_ends`: workers hand keys and
        values to each other. `record`: what the groups write to, closed at the end."""
        self.info = info
        self._record = record
        self._make_matcher = make_matcher
        self.workforce = Workforce(fleet=fleet, groups=groups, statistics=statistics, launch=launch)
        self._fleet = fleet
        self._scheduler_config = scheduler_config
        self._handovers: Handovers | None = None
        if kv_ends is not None:
            self._handovers = Handovers(self.workforce, fleet, tracked, statistics, kv_ends)
        self._router = RequestRouter(self.workforce, statistics, tracked, self._handovers)
        self._spans = SpanCollections(fleet)
        self._lock = threading.Lock()
        self._new: dict[str, TrackedRequest] = {}
        self._aborts: list[str] = []
        self._placements: list[ExpertPlacement] = []  # asked for, newest last
        self._drains: dict[WorkerName, bool] = {}  # asked for: begin, or end
        self._arrivals = 0
        self._events: deque[Event] = deque()
        self._setbacks = _Setbacks()
        self._sinks: dict[asyncio.AbstractEventLoop, AsyncSink] = {}
        self._draining = False
        self._stopping = False
        self.fatal: str | None = None  # why the engine has given up; None while it runs
        self._fatal_exit_code = 1
        self._given_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._random = random.SystemRandom()

    # --- called from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and the thread. `ResourceError` if the system has no room for a worker, or if the address
        where others join cannot be had."""
        self._fleet.start()
        self.workforce.start()
        self._thread.start()

    def failure(self) -> StartFailed:
        """`fatal` as the error of a command that could not start the engine, or whose engine has given up."""
        return StartFailed(self.fatal or "the engine has not failed", self._fatal_exit_code)

    @property
    def complete(self) -> bool:
        """All workers can step."""
        return self.workforce.complete

    def submit(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, owner: str | None = None
    ) -> AsyncIterator[EngineOutput]:
        """See `AsyncEngine.submit`. Call inside the event loop that reads the outputs."""
        sink = AsyncSink.of_running_loop(self._sinks)
        stream = sink.open(request_id, self.abort)
        try:
            self.submit_to(sink, request_id, prompt_token_ids, params, owner=owner)
        except BaseException:  # whatever it is, nothing was queued: the id must be free again
            sink.close(request_id)
            raise
        return stream

    def submit_to(
        self,
        sink: Sink,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        owner: str | None = None,
    ) -> None:
        """Queue a request whose outputs go to `sink`. Raises as `AsyncEngine.submit` does, with nothing queued."""
        mask = None
        if params.grammar is not None:
            if self._make_matcher is None:
                raise UserError("structured output needs a tokenizer: this engine was started without one")
            mask = MaskJob(self._make_matcher(params.grammar)) if params.max_tokens else None
            params = replace(params, grammar=None)  # workers get masks; the text may be large
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
                owner=owner,
            )
            check_request(request, self._scheduler_config)
            num_waiting = self._router.num_waiting + len(self._new)
            if num_waiting >= self.info.max_waiting:
                raise QueueFull(
                    f"{num_waiting} requests are waiting, the limit is {self.info.max_waiting}: try again later", 1.0
                )
            if self._knows(request_id):
                raise UserError(f"request id {request_id!r} is in use: choose another")
            self._arrivals += 1
            self._new[request_id] = TrackedRequest(request, sink, mask=mask)
        self._fleet.wake()

    def _refuse_if_ending(self) -> None:
        """Asked under the lock: the engine's thread takes it once more after the end is decided, so that no request
        can slip in behind its last look."""
        if self.fatal is not None:
            raise ShuttingDown(f"the engine has stopped: {self.fatal}")
        if self._draining or self._stopping:
            raise ShuttingDown("the server is shutting down: send the request to another one")

    def _knows(self, request_id: str) -> bool:
        """The id is in use, if only by a request that was aborted and holds its blocks until the step has ended."""
        held = any(request_id in scheduler.requests for scheduler in self.workforce.schedulers.values())
        return held or request_id in self._new or request_id in self._router.tracked

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborts.append(request_id)
        self._fleet.wake()

    async def drain(self, timeout_s: float) -> None:
        """See `AsyncEngine.drain`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while (unfinished := self.unfinished()) and time.monotonic() < deadline and not self.workforce.stuck:
            await asyncio.sleep(0.05)  # asked once in an engine's life: not worth a signal from its thread
        for request_id in unfinished:
            self.abort(request_id)

    def unfinished(self) -> list[str]:
        """Ids of all requests that have not had their last output."""
        with self._lock:
            return [*self._new, *self._router.tracked.ids()]

    def stats(self) -> EngineStats:
        """See `AsyncEngine.stats`."""
        return self.workforce.stats(
            num_waiting=self._router.num_waiting + len(self._new), fatal=self.fatal, draining=self._draining
        )

    def place(self, placement: ExpertPlacement) -> int:
        """See `AsyncEngine.place`."""
        placing = self.workforce.placing_for(placement)
        for each in placing:
            each.check(placement)
        with self._lock:
            self._refuse_if_ending()
            self._placements.append(placement)
        self._fleet.wake()
        return sum(num_moves(each.current, placement) for each in placing)

    def drain_worker(self, worker: str, *, undo: bool) -> str:
        """See `AsyncEngine.drain_worker`."""
        with self._lock:
            self._refuse_if_ending()
            name, drained = self.workforce.find_drainable(worker), _changed(self.workforce.drained, self._drains)
            if not undo and name not in drained:
                self.workforce.check_can_drain(name, drained)
            self._drains[name] = not undo
        self._fleet.wake()
        return self.drain_state(worker)

    def drain_state(self, worker: str) -> str:
        """See `AsyncEngine.drain_state`."""
        with self._lock:
            drained = _changed(self.workforce.drained, self._drains)
        return self.workforce.drain_state(self.workforce.find_drainable(worker), drained)

    def call_when_given_up(self, callback: Callable[[], None]) -> None:
        """See `AsyncEngine.call_when_given_up`."""
        self._given_up.add_done_callback(lambda _: callback())

    def pause_workers(self) -> None:
        """Stop the worker processes, so that they leave the cores to others; nothing is found hanging meanwhile."""
        self._fleet.pause()

    def resume_workers(self) -> None:
        """Undo `pause_workers`; without one nothing happens."""
        self._fleet.resume()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, to measure or to stop them."""
        return [worker.pid for worker in list(self._fleet.workers.values())]

    def worker_pid(self, name: WorkerName) -> int:
        """Process id of one worker's present incarnation."""
        return self._fleet.workers[name].pid

    def take_spans(self) -> dict[WorkerName, Spans]:
        """Collect the recorded spans of all live workers (and make them forget). For `--timeline`."""
        return self._spans.collect(0, None, timeout_s=10.0) if self._thread.is_alive() else {}

    def last_steps(self, num_steps: int, timeout_s: float) -> dict[str, Spans]:
        """See `AsyncEngine.last_steps`. Clocks of other machines do not agree with this one's."""
        if not self._thread.is_alive():
            return {}
        local = [worker.name for worker in list(self._fleet.workers.values()) if not worker.is_remote]
        names = {name for name in local if name.index < _MAX_SHOWN and not name.rank}
        num_numbers = num_steps * max(group.num_side_by_side for group in self.workforce.groups)
        return {str(name): spans for name, spans in self._spans.collect(num_numbers, names, timeout_s).items()}

    def stop(self) -> None:
        """End all requests, the thread and the workers. Safe to call again."""
        self._stopping = True
        self._fleet.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=60.0)
        self._router.tracked.close()
        self._fleet.stop()
        if self._record is not None:
            self._record.close()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._go_round()
                except (OSError, MemoryError) as error:
                    self._setbacks.note(error)
                else:
                    self._setbacks.note_progress()
        except UserError as error:
            self._fatal_exit_code = error.exit_code
            self.fatal = str(error)
        except Exception as error:  # a bug ends the engine; every request that waits must hear of it
            _log.exception("the engine thread failed")
            self.fatal = f"a bug ended the engine ({type(error).__name__}: {error}); the log has its traceback"
        try:
            self._end_all("abort" if self.fatal is None else "error", self.fatal)
        finally:
            if self.fatal is not None:
                self._given_up.set_result(None)

    def _go_round(self) -> None:
        self._take_orders()
        self._router.take_masks()
        self._router.add_to_workers()
        for group in self.workforce.request_groups:
            group.start_steps()
        if self._handovers is not None:
            self._handovers.begin()
        # Prefill workers also without a hand-over: a step that failed may be left, of requests that have ended.
        for group in self.workforce.groups if self._handovers else self.workforce.prefill_groups:
            group.start_steps()
        self._router.tracked.hand_out()
        self._router.note_first_schedules()
        self._router.count_waiting()
        self._events.extend(self._fleet.poll(0.0 if self._events else self._router.tracked.mask_patience_s or _TICK_S))
        while self._events:  # what an error leaves here is handled in the next round
            self._handle(self._events.popleft())
            self._setbacks.note_progress()
        if self._handovers is not None:
            self._router.add(self._handovers.settle())
        self.workforce.on_tick()

    def _take_orders(self) -> None:
        """New requests and aborts, and requests for spans."""
        with self._lock:
            arrived, self._new = list(self._new.values()), {}
            self._router.num_waiting += len(arrived)  # until they are counted: the queue's limit holds in between, too
            aborts, self._aborts = self._aborts, []
            placements, self._placements = self._placements, []
            self.workforce.drained, self._drains = _changed(self.workforce.drained, self._drains), {}
            for tracked in arrived:
                self._router.tracked.add(tracked)
        self._router.add([tracked.request for tracked in arrived])
        for request_id in aborts:
            self._router.end(request_id, "abort", None)
        for placement in placements:
            for placing in self.workforce.placing_for(placement):
                placing.aim_at_owners(placement)
        self._spans.begin()

    def _handle(self, event: Event) -> None:
        try:
            if event.message is None:
                self._on_death(event)
            elif isinstance(event.message, Spans):
                self._spans.add(event.worker.name, event.message)
            elif isinstance(event.message, KVNews):
                if self._handovers is not None:
                    self._handovers.hear(event.worker, event.message)
            else:
                failure = self.workforce.on_message(event.worker, event.message)
                self._router.on_progress()
                self._on_failure(failure)
        except (OSError, MemoryError):  # half of it may be done: what the worker computes is computed again
            event.worker.kill("what it said could not be dealt with")
            raise

    def _on_death(self, event: Event) -> None:
        with self._lock:
            self._drains.pop(event.worker.name.leader, None)  # it was asked of the process that is gone
        try:
            failure, homeless = self.workforce.on_death(event)
            self._spans.forget([event.worker.name])
            self._router.add([request for request in homeless if request.origin is None])
            if self._handovers is not None:
                self._handovers.on_death(event.worker.name, failure)
        finally:
            if not self._stopping:
                self.workforce.replace(event)
        if event.worker.name.pool != "prefill":  # a death there has ended the hand-overs
            self._on_failure(failure)

    def _on_failure(self, failure: StepFailure | None) -> None:
        """A step has failed: the group that computed its requests decides what becomes of them."""
        if failure is None:
            return
        if self._handovers is not None and failure.worker.pool == "prefill":
            self._handovers.on_failure(failure)
        else:
            self._router.on_failure(failure)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """The thread is about to end: every request gets its last output. Nothing else is asked: after a bug, what
        schedulers hold may contradict itself."""
        tracked = self._router.tracked
        with self._lock:
            arrived, self._new = list(self._new.values()), {}
        for each in arrived:
            tracked.add(each)
        for request_id in tracked.ids():
            tracked.end(request_id, reason, error)
        tracked.hand_out()
        self._router.num_waiting = 0
        self._spans.begin()
        self._spans.forget(self.workforce.names)


def _changed(drained: set[WorkerName], orders: Mapping[WorkerName, bool]) -> set[WorkerName]:
    """The workers that are drained once these orders, to begin or to end that, are obeyed."""
    return {name for name in (*drained, *orders) if orders.get(name, True)}


class _Setbacks:
    """What the system refused the engine's thread where no code expects it: one round is lost, and the next begins.

    The calls that are known to fail have their own answers, near them (`fleet`, `workforce`). This is for the others:
    an error with no answer costs the round in which it came. If no worker can be heard any more, because every round
    ends that way, the engine gives up after `_GIVE_UP_S`. Rejected: to end with the first such error, as with a bug. A
    system that has no descriptor or no memory for a moment would then take all streams with it."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # the first one after the last progress
        self._pause_s = 0.0
        self._saying = Occasional(_SAY_S)

    def note(self, error: OSError | MemoryError) -> None:
        """Call while it is handled. Pauses when there were others before, at most half a second. `ResourceError` when
        it has gone on for too long."""
        now_s = time.monotonic()
        if (num_unsaid := self._saying.count()) is not None:
            others = f", and {num_unsaid} others since the last that was said" if num_unsaid else ""
            _log.exception("the system refused the engine something: the round is lost, the next begins%s", others)
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > _GIVE_UP_S:
            raise ResourceError(
                f"for {_GIVE_UP_S:.0f} s the system has refused what the engine needs ({error or type(error).__name__})"
            ) from error
        time.sleep(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def note_progress(self) -> None:
        """A round ended well, or a worker was heard in it."""
        self._since_s, self._pause_s = None, 0.0
