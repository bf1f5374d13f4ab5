"""Sends a generation: as one JSON answer, or as server-sent events while it is made.

Completions and chat completions differ only in how an answer is spelled; `AnswerShape` is that difference. Every
event is one dictionary encoded by msgspec: no models, no task per event, a few microseconds a token. A stream's events
wait for the client in an `Outbox`, within a limit.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from antiphon.base.logging import get_logger
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, shutting_down
from antiphon.serve.api.generation import Generation
from antiphon.serve.api.requests import GenerationRequest, StreamOptions

_log = get_logger("serve.api")
_encode = msgspec.json.Encoder().encode
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_BATCH_BYTES = 64 * 1024
_Result = TypeVar("_Result")


class ClientGone(ApiError):
    """The client closed the connection; nobody will read this."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, or `ClientGone` with `work` cancelled and finished. The request's body must be read before.

    The web server reports a closed connection only to somebody who listens, and sending to one fails in silence. So one
    task works and one listens, for the whole request; whichever is first ends the other."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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


class AnswerShape(Protocol):
    """How one endpoint spells its answers."""

    object_name: str
    chunk_object_name: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice object of an event before any text, or None."""

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice object of one streamed piece."""

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice object of a finished answer; `delta` holds all of it."""


async def respond(
    context: ApiContext,
    request: Request,
    generation: Generation,
    shape: AnswerShape,
    body: GenerationRequest,
) -> Response:
    """The response for a submitted generation, which is closed when the response is out or the client gone."""
    header = {"id": generation.request_id, "created": generation.created_s, "model": context.model_name}
    if body.stream:
        return EventStream(context, generation, shape, header, body.stream_options)
    answers = await until_disconnect(request.receive, _collect(generation))
    whole = header | {
        "object": shape.object_name,
        "choices": [shape.whole(answer) for answer in answers],
        "usage": generation.usage(),
    }
    await generation.close()
    return Response(_encode(whole), media_type="application/json")


async def _collect(generation: Generation) -> list[ChoiceDelta]:
    """Every answer as one delta, in order; `ApiError` as soon as one fails."""
    answers = [ChoiceDelta(index) for index in range(generation.num_choices)]
    texts: list[list[str]] = [[] for _ in answers]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            _raise_failure(delta)
            answer = answers[delta.index]
            texts[delta.index].append(delta.text)
            answer.calls += delta.calls
            answer.entries += delta.entries
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
    for answer, text in zip(answers, texts, strict=True):
        answer.text = "".join(text)
    return answers


def _raise_failure(delta: ChoiceDelta) -> None:
    if delta.finish_reason == "abort":
        raise shutting_down()
    if delta.finish_reason == "grammar":
        message = delta.error or "the answer cannot follow response_format any further"
        raise ApiError(400, message, param="response_format", code="grammar_error")
    if delta.finish_reason == "error":
        message = delta.error or "the engine could not finish the request"
        raise ApiError(500, message, code="engine_error")


class EventStream(Response):
    """Server-sent events of one generation, ended by ``[DONE]``. A failure on the way is one event with `error`."""

    def __init__(
        self,
        context: ApiContext,
        generation: Generation,
        shape: AnswerShape,
        header: dict[str, Any],
        options: StreamOptions | None,
    ) -> None:
        super().__init__(None, headers=_EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._context = context
        self._generation = generation
        self._shape = shape
        self._header = header | {"object": shape.chunk_object_name}
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        outbox = Outbox(self._context.settings.max_unread_bytes)
        delivering = asyncio.ensure_future(outbox.deliver(send))
        try:
            last = b""
            try:
                await self._put_answers(outbox)
            except ApiError as error:
                if isinstance(error, SlowReader):
                    self._context.metrics.slow_readers.inc()
                    _log.warning("request %s is cancelled: %s", self._generation.request_id, error.message)
                last = _event(error.body())
            # The client may take its time over what waits for it, but nothing is computed for it any more.
            await self._generation.close()
            outbox.finish(last + b"data: [DONE]\n\n")
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _put_answers(self, outbox: Outbox) -> None:
        for index in range(self._generation.num_choices):
            opening = self._shape.opening(index)
            if opening is not None:
                await outbox.put(self._piece(opening))
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                _raise_failure(delta)
                await outbox.put(self._piece(self._shape.piece(delta)))
        if self._include_usage:
            await outbox.put(_event(self._header | {"choices": [], "usage": self._generation.usage()}))

    def _piece(self, choice: dict[str, Any]) -> bytes:
        event = self._header | {"choices": [choice]}
        if self._continuous_usage:
            event["usage"] = self._generation.usage_of(choice["index"])
        elif self._include_usage:
            event["usage"] = None
        return _event(event)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
