"""Carries outputs from the engine's thread to the one that asked: an event loop, or a plain thread.

Outputs of one step travel together: one wake-up of the event loop per step, not one per token.
"""

import asyncio
import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Protocol

from antiphon.base.errors import UserError
from antiphon.serve.engine_api import EngineOutput


class Sink(Protocol):
    """Where outputs go. Called in the engine's thread; must not block."""

    def deliver(self, outputs: list[EngineOutput]) -> None: ...


class AsyncSink:
    """Outputs for requests of one event loop. Make it inside that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[EngineOutput]] = {}

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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._distribute, outputs)

    def _distribute(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if (pending := self._queues.get(output.request_id)) is not None:
                pending.put_nowait(output)

    def open(self, request_id: str) -> None:
        if request_id in self._queues:
            raise UserError(f"request id {request_id!r} is in use: choose another")
        self._queues[request_id] = asyncio.Queue()

    def close(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    def stream(self, request_id: str, abort: Callable[[str], None]) -> "OutputStream":
        """Outputs until the last one. `aclose` before that aborts the request."""
        return OutputStream(self, request_id, self._queues[request_id], abort)


class OutputStream:
    """The outputs of one request, read in its event loop. No generator: one resumed per token and layer adds up."""

    def __init__(
        self, sink: AsyncSink, request_id: str, queue: asyncio.Queue[EngineOutput], abort: Callable[[str], None]
    ) -> None:
        self._sink = sink
        self._request_id = request_id
        self._queue = queue
        self._abort = abort
        self._finished = False

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> EngineOutput:
        if self._finished:
            raise StopAsyncIteration
        output = await self._queue.get()
        if output.finish_reason is not None:
            self._finished = True
            self._sink.close(self._request_id)
        return output

    async def aclose(self) -> None:
        """Forget the request; the engine hears of it if it has not ended it. Safe to call again."""
        if not self._finished:
            self._finished = True
            self._sink.close(self._request_id)
            self._abort(self._request_id)


class ThreadSink:
    """Outputs for a plain thread that reads them with `outputs`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[EngineOutput]] = queue.SimpleQueue()

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self._queue.put(outputs)

    def outputs(self, num_requests: int) -> Iterator[EngineOutput]:
        """Yield outputs until `num_requests` requests have finished. Blocks; the engine always finishes requests,
        with an error if it must."""
        while num_requests > 0:
            for output in self._queue.get():
                num_requests -= output.finish_reason is not None
                yield output
