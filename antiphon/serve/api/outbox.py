"""Encoded events on their way to one client, between the generation, which never waits, and the connection, which may.

A client that reads more slowly than the engine writes must not hold up the engine, and must not fill the server's
memory either. So events wait here as the bytes that will be sent, and their number has a limit; past it the answer is
given up. Rejected: letting the generation wait for its client, because its KV blocks would be taken for as long; a
limit on the number of events, because one event with logprobs is as large as a hundred without.
"""

import asyncio
from collections import deque

from starlette.types import Send

from antiphon.serve.api.errors import ApiError

_BATCH_BYTES = 64 * 1024


class SlowReader(ApiError):
    """More waits for the client than the server keeps for one."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            408,
            f"the answer is read too slowly: {num_bytes} bytes wait to be sent and the limit is {limit_bytes}; read"
            " faster, or ask for fewer answers or logprobs",
            code="slow_reader",
        )


class Outbox:
    """One stream's events. `put` them, `finish`, and let `deliver` run beside it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._finished = False
        self._sending = False
        self._news = asyncio.Event()

    async def put(self, event: bytes) -> None:
        """Add an event; `SlowReader` when it does not fit. A single event fits whatever its size. Does not wait for
        the client, but lets `deliver` run when much has come at once and nothing holds it up."""
        if self._num_bytes > _BATCH_BYTES and not self._sending:
            await asyncio.sleep(0)
        num_bytes = self._num_bytes + len(event)
        if self._events and num_bytes > self._limit_bytes:
            raise SlowReader(num_bytes, self._limit_bytes)
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
        while self._events and num_taken < _BATCH_BYTES:
            batch.append(self._events.popleft())
            num_taken += len(batch[-1])
        self._num_bytes -= num_taken
        if not self._events:
            self._news.clear()
        return b"".join(batch)
