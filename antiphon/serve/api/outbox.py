"""Sends to a client that may read slowly or go away: a stream's events, within a limit, or a whole answer in pieces."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from antiphon.serve.api.answer_json import Encoded
from antiphon.serve.api.errors import ApiError

BATCH_BYTES = 64 * 1024
SLOW_READER = "slow_reader"  # the code of the error
_Result = TypeVar("_Result")
_PATIENCE_S = 10.0  # for one batch to be sent, when more is ready


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. If the client hangs up first, `work` is cancelled and finished, and `ApiError` 499 stands
    for an answer that is not read. The body must be read before."""
    working = asyncio.ensure_future(work)
    if not await _is_first(working, receive):
        raise ApiError(499, "the client closed the connection")
    return working.result()


async def send_until_disconnect(receive: Receive, sending: Coroutine[Any, Any, None]) -> None:
    """Send an answer as long as there is a client. The connection also counts as closed once the answer is out."""
    working = asyncio.ensure_future(sending)
    if await _is_first(working, receive):
        working.result()


async def _is_first(working: "asyncio.Future[_Result]", receive: Receive) -> bool:
    """Whether `working` ends before the connection does; else it is cancelled and finished.

    The web server reports a closed connection only to a task that listens, and sending to one fails in silence. So one
    task works and one listens, for the whole request; whichever is first ends the other."""
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _slow_reader(num_bytes: int, limit_bytes: int) -> ApiError:
    """More waits for the client than the server keeps for one."""
    return ApiError(
        408,
        f"the answer is read too slowly: {num_bytes} bytes wait to be sent and the limit is {limit_bytes}; read"
        " faster, or ask for fewer answers or logprobs",
        code=SLOW_READER,
    )


class WholeAnswer(Response):
    """A JSON answer that is sent in pieces, each of them forgotten once it is sent. Waits for the client, as the
    connection's send timeout allows."""

    def __init__(self, content: Encoded, on_end: Callable[[], None]) -> None:
        super().__init__(None, headers={"content-length": str(len(content))}, media_type="application/json")
        self._parts = deque(content.parts)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_until_disconnect(receive, self._send_all(send))
        finally:
            self._parts.clear()
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        batch = bytearray()
        while self._parts:
            part = memoryview(self._parts.popleft())
            for begin in range(0, len(part), BATCH_BYTES):
                batch += part[begin : begin + BATCH_BYTES]
                if len(batch) >= BATCH_BYTES:
                    await send({"type": "http.response.body", "body": bytes(batch), "more_body": True})
                    await asyncio.sleep(0)  # a client that takes all it gets would have the loop for itself
                    batch.clear()
        await send({"type": "http.response.body", "body": bytes(batch)})


class StreamOutbox:
    """One stream's encoded events, between the generation, which never waits, and the connection, which may.

    A client that reads more slowly than the engine writes must not hold up the engine, and must not fill the server's
    memory either. So events wait here as the bytes that will be sent, and their number has a limit; past it the answer
    is given up. Rejected: letting the generation wait for its client, because its KV blocks would be taken for as long;
    a limit on the number of events, because one event with logprobs is as large as a hundred without. `put` them,
    `finish`, and let `deliver` run beside it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._finished = False
        self._sending = False
        self._news = asyncio.Event()
        self._sent = asyncio.Event()

    async def room(self) -> None:
        """Wait until most of it is sent, before an event that is ready earlier than any client could read: one of many
        about a prompt. `ApiError` 408 after ten seconds."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while self._num_bytes > BATCH_BYTES:
                    self._sent.clear()
                    await self._sent.wait()
        except TimeoutError:
            raise _slow_reader(self._num_bytes, BATCH_BYTES) from None

    async def put(self, event: bytes) -> None:
        """Add an event; `ApiError` 408 when it does not fit. A single event fits whatever its size. Does not wait for
        the client, but lets `deliver` run when much has come at once and nothing holds it up."""
        if self._num_bytes > BATCH_BYTES and not self._sending:
            await asyncio.sleep(0)
        num_bytes = self._num_bytes + len(event)
        if self._events and num_bytes > self._limit_bytes:
            raise _slow_reader(num_bytes, self._limit_bytes)
        self._append(event)

    def finish(self, last: bytes) -> None:
        """The last event, which always fits."""
        self._finished = True
        self._append(last)

    def _append(self, event: bytes) -> None:
        self._events.append(event)
        self._num_bytes += len(event)
        self._news.set()

    async def deliver(self, send: Send) -> None:
        """Send everything up to the last event, as many at once as have come. Waits for the client; the connection's
        send timeout ends that (`connections`)."""
        more = True
        while more:
            await self._news.wait()
            body = self._take()
            more = bool(self._events) or not self._finished
            self._sending = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._sending = False

    def _take(self) -> bytes:
        """The next events together, to about one batch: what is sent lies in the connection's buffer as well."""
        batch: list[bytes] = []
        num_taken = 0
        while self._events and num_taken < BATCH_BYTES:
            batch.append(self._events.popleft())
            num_taken += len(batch[-1])
        self._num_bytes -= num_taken
        self._sent.set()
        if not self._events:
            self._news.clear()
        return b"".join(batch)
