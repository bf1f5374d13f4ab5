"""Sends a generation: as one JSON answer, or as server-sent events while it is made.

Completions and chat completions differ only in how an answer is spelled; `AnswerShape` is that difference. Every
event is one dictionary encoded by msgspec and one send: no models, no tasks, a few microseconds a token.
"""

from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import context_of
from antiphon.serve.api.disconnect import ClientGone, until_disconnect
from antiphon.serve.api.errors import ApiError, shutting_down
from antiphon.serve.api.generation import Generation
from antiphon.serve.api.requests import GenerationRequest

_encode = msgspec.json.Encoder().encode
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


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
    request: Request,
    generation: Generation,
    shape: AnswerShape,
    body: GenerationRequest,
) -> Response:
    """The response for a submitted generation, which is closed when the response is out or the client gone."""
    model_name = context_of(request).model_name
    header = {"id": generation.request_id, "created": generation.created_s, "model": model_name}
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(generation, shape, header, include_usage=include_usage)
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
            answer.entries += delta.entries
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
    for answer, text in zip(answers, texts, strict=True):
        answer.text = "".join(text)
    return answers


def _raise_failure(delta: ChoiceDelta) -> None:
    if delta.finish_reason == "abort":
        raise shutting_down()
    if delta.finish_reason == "error":
        message = delta.error or "the engine could not finish the request"
        raise ApiError(500, message, code="engine_error")


class EventStream(Response):
    """Server-sent events of one generation, ended by ``[DONE]``. A failure on the way is one event with `error`."""

    def __init__(
        self, generation: Generation, shape: AnswerShape, header: dict[str, Any], *, include_usage: bool
    ) -> None:
        super().__init__(None, headers=_EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._shape = shape
        self._header = header | {"object": shape.chunk_object_name}
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_answers(send)
        except ApiError as error:
            await self._send(send, error.body())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_answers(self, send: Send) -> None:
        for index in range(self._generation.num_choices):
            opening = self._shape.opening(index)
            if opening is not None:
                await self._send(send, self._event(opening))
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                _raise_failure(delta)
                await self._send(send, self._event(self._shape.piece(delta)))
        if self._include_usage:
            await self._send(send, self._header | {"choices": [], "usage": self._generation.usage()})

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._header | {"choices": [choice]}
        if self._include_usage:
            event["usage"] = None
        return event

    @staticmethod
    async def _send(send: Send, event: dict[str, Any]) -> None:
        body = b"data: " + _encode(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
