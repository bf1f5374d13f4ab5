"""Requests the engine has accepted, and the way of their outputs to the one that asked: an event loop or a thread.

A request is here from its submission until its last output, with what must survive any worker: sink, grammar state,
reported log-probabilities. Only the engine's thread writes; other threads may ask whether an id is known.

Outputs of one step travel together: one wake-up of the event loop per step, not one per token. They are handed out once
the next step is on its way: the loop that they wake takes the interpreter's lock from the engine's thread.

A request with a grammar has one mask at a time (`mask_pool`): asked for when its last token is out, kept until the next
one is, because a step that failed is sent again with the same masks.
"""

import asyncio
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import EngineOutput, FinishReason
from antiphon.serve.mask_pool import MaskJob, MaskPool
from antiphon.serve.policy.request import Request
from antiphon.serve.worker.messages import Sampled
from antiphon.specs.sampling import PackedLogprobs, PromptLogprobs

_MASK_PATIENCE_S = 0.004  # a step waits this long for quick masks; one sequence a step is worse than a short delay


class AsyncSink:
    """Outputs for requests of one event loop. Make it inside that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, OutputStream] = {}

    @staticmethod
    def of_running_loop(sinks: "dict[asyncio.AbstractEventLoop, AsyncSink]") -> "AsyncSink":
        """The sink of the loop that runs now, made at its first request; those of closed loops are dropped then."""
        loop = asyncio.get_running_loop()
        if loop not in sinks:
            for closed in [other for other in sinks if other.is_closed()]:
                del sinks[closed]
            sinks[loop] = AsyncSink()
        return sinks[loop]

    def deliver(self, outputs: list[EngineOutput]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the outputs are not read any more
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    def _distribute(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.take(output)

    def open(self, request_id: str, abort: Callable[[str], None]) -> "OutputStream":
        """Outputs until the last one. `aclose` before that aborts the request. `UserError` while the id is in use: an
        aborted one is until its last output has come, which would else end another request of the same id."""
        if request_id in self._streams:
            raise UserError(f"request id {request_id!r} is in use: choose another")
        stream = self._streams[request_id] = OutputStream(self, request_id, abort)
        return stream

    def close(self, request_id: str) -> None:
        """The id is free."""
        self._streams.pop(request_id, None)


class OutputStream:
    """The outputs of one request, read in its event loop. No generator: one resumed per token and layer adds up."""

    def __init__(self, sink: AsyncSink, request_id: str, abort: Callable[[str], None]) -> None:
        self._sink = sink
        self._request_id = request_id
        self._abort = abort
        self._queue: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._has_last = False
        self._is_closed = False  # nothing is read any more

    def take(self, output: EngineOutput) -> None:
        """An output has come. The last one frees the id of a stream that is read no more."""
        self._has_last = output.finish_reason is not None
        if not self._is_closed:
            self._queue.put_nowait(output)
        elif self._has_last:
            self._sink.close(self._request_id)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> EngineOutput:
        if self._is_closed:
            raise StopAsyncIteration
        output = await self._queue.get()
        if output.finish_reason is not None:
            self._is_closed = True
            self._sink.close(self._request_id)
        return output

    async def aclose(self) -> None:
        """Forget the request; the engine hears of it if it has not ended it. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._has_last:
            self._sink.close(self._request_id)
        else:
            self._abort(self._request_id)


class ThreadSink:
    """Outputs for a plain thread that reads them with `outputs`.

    The reader sleeps on a file descriptor, which is written to without the interpreter's lock. Rejected: a queue. Its
    reader wakes up while the engine's thread holds that lock. On a core that a worker needs, too, the reader takes the
    engine's place, waits for the lock, and the worker goes on instead: the outputs were read up to 5 ms late."""

    def __init__(self) -> None:
        self._delivered: deque[EngineOutput] = deque()
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._news)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self._delivered.extend(outputs)
        os.eventfd_write(self._news, 1)

    def outputs(self, num_requests: int) -> Iterator[EngineOutput]:
        """Yield outputs until `num_requests` requests have finished. Blocks; the engine always finishes requests,
        with an error if it must."""
        while num_requests > 0:
            while not self._delivered:
                os.eventfd_read(self._news)
            output = self._delivered.popleft()
            num_requests -= output.finish_reason is not None
            yield output


Sink = AsyncSink | ThreadSink  # where outputs go; called in the engine's thread, so `deliver` must not block


@dataclass(eq=False)
class TrackedRequest:
    """A request and where its outputs go. `mask`: of the next token, there or asked for; None for free text."""

    request: Request
    sink: Sink
    submitted: float = field(default_factory=time.monotonic)
    mask: MaskJob | None = None
    prompt_logprobs: list[PackedLogprobs] = field(default_factory=list)


class TrackedRequests:
    """All unfinished requests by id."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called by other threads when masks have come."""
        self._by_id: dict[str, TrackedRequest] = {}
        self._awaited: dict[str, MaskJob] = {}  # the masks that are asked for
        self._patience_s: dict[str, float] = {}  # how long masks that will come soon are still worth waiting for
        self._masks = MaskPool(wake)
        self._outgoing: dict[int, tuple[Sink, list[EngineOutput]]] = {}
        self._unscheduled: dict[str, TrackedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def ids(self) -> list[str]:
        return list(self._by_id)

    def add(self, tracked: TrackedRequest) -> None:
        self._by_id[tracked.request.request_id] = tracked
        self._unscheduled[tracked.request.request_id] = tracked
        if tracked.mask is not None:
            self._ask({tracked: tracked.mask})

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._by_id.get(request_id)

    @property
    def has_unscheduled(self) -> bool:
        """Some request has been in no step yet."""
        return bool(self._unscheduled)

    def note_scheduled(self, request_id: str) -> TrackedRequest | None:
        """It is in a step. The request, if that is its first one."""
        return self._unscheduled.pop(request_id, None)

    # --- masks -----------------------------------------------------------------------------------------------------

    def _ask(self, jobs: dict[TrackedRequest, MaskJob]) -> None:
        for tracked, job in jobs.items():
            tracked.mask = job
            tracked.request.awaits_mask = True
            self._awaited[tracked.request.request_id] = job
        self._masks.ask(list(jobs.values()))

    def take_masks(self) -> list[tuple[str, str]]:
        """Let requests whose masks have come take part in steps. Returns (id, error) of those that cannot go on: the
        mask of a grammar that broke off says nothing."""
        done = [(request_id, job) for request_id, job in self._awaited.items() if job.done]
        for request_id, job in done:
            del self._awaited[request_id]
            self._by_id[request_id].request.awaits_mask = job.error is not None
        now_s = time.monotonic()
        self._patience_s = {
            request_id: left_s
            for request_id, job in self._awaited.items()
            if not (job.is_slow or job.token_id is None) and (left_s := job.asked_s + _MASK_PATIENCE_S - now_s) > 0
        }
        errors = [(request_id, self._why_broken(request_id, job)) for request_id, job in done if job.error]
        return [(request_id, f"structured output broke off: {error}") for request_id, error in errors]

    def _why_broken(self, request_id: str, job: MaskJob) -> str | None:
        allowed_ids = self._by_id[request_id].request.params.allowed_token_ids
        if allowed_ids and job.token_id is not None and job.token_id not in allowed_ids:
            return "none of allowed_token_ids may come next; allow more, or leave one of the two out"
        return job.error

    @property
    def mask_patience_s(self) -> float | None:
        """When to look again: some masks were about to come at the last `take_masks`. None: none was."""
        return min(self._patience_s.values(), default=None)

    def is_mask_near(self, requests: Container[str]) -> bool:
        """A step with these requests had better wait for masks that were about to come at the last `take_masks`. First
        masks delay no step, nor do slow ones."""
        return any(request_id in requests for request_id in self._patience_s)

    def mask_of(self, request_id: str) -> bytes | None:
        """The tokens a request's grammar allows next; None for free text."""
        tracked = self._by_id.get(request_id)
        if tracked is None or tracked.mask is None:
            return None
        assert tracked.mask.done, "a request without its mask takes part in no step"
        return tracked.mask.mask

    def close(self) -> None:
        """Compute no more masks."""
        self._masks.close()

    # --- outputs ---------------------------------------------------------------------------------------------------

    def publish(self, progress: list[Request], sampled: dict[str, Sampled]) -> None:
        """Turn what a step did, and what the worker said of each request, into outputs, which wait for `hand_out`. Asks
        for the masks of the next tokens."""
        jobs: dict[TrackedRequest, MaskJob] = {}
        for request_id, entry in sampled.items():
            if entry.prompt_logprobs and (tracked := self._by_id.get(request_id)) is not None:
                tracked.prompt_logprobs.extend(entry.prompt_logprobs)
        for request in progress:
            request_id, token_id = request.request_id, request.newest_token_id
            tracked = self._by_id.get(request_id)
            if tracked is None:
                continue
            if request.finish_reason is not None:
                self._forget(request_id)
            elif tracked.mask is not None and token_id is not None:
                jobs[tracked] = MaskJob(tracked.mask.matcher, token_id)
            self._send(tracked.sink, _output(tracked, sampled.get(request_id)))
        if jobs:
            self._ask(jobs)

    def _send(self, sink: Sink, output: EngineOutput) -> None:
        self._outgoing.setdefault(id(sink), (sink, []))[1].append(output)

    def hand_out(self) -> None:
        """Deliver what waits, once to each sink."""
        while self._outgoing:  # one that fails takes only its own with it
            sink, outputs = self._outgoing.pop(next(iter(self._outgoing)))
            sink.deliver(outputs)

    def _forget(self, request_id: str) -> TrackedRequest | None:
        if (job := self._awaited.pop(request_id, None)) is not None:
            job.cancelled = True
        self._unscheduled.pop(request_id, None)
        return self._by_id.pop(request_id, None)

    def end(self, request_id: str, reason: FinishReason, error: str | None) -> bool:
        """Forget a request and tell its sink, with the next `hand_out`. False: it is not known (any more)."""
        tracked = self._forget(request_id)
        if tracked is None:
            return False
        output = EngineOutput(request_id=request_id, token_ids=[], finish_reason=reason, error=error)
        self._send(tracked.sink, output)
        return True


def _output(tracked: TrackedRequest, entry: Sampled | None) -> EngineOutput:
    request = tracked.request
    token_id = request.newest_token_id
    prompt_logprobs: PromptLogprobs | None = None
    if request.num_output <= 1 and request.params.prompt_logprobs is not None:
        prompt_logprobs = PromptLogprobs(tracked.prompt_logprobs)
    return EngineOutput(
        request_id=request.request_id,
        token_ids=[] if token_id is None else [token_id],
        logprobs=entry.logprob if entry is not None else None,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_token_id=token_id if request.finish_reason == "stop" else None,
        num_cached_tokens=request.num_cached_tokens,
    )
