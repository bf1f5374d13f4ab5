"""Sends a generation: as one JSON answer, or as server-sent events while it is made.

Completions and chat completions differ only in how an answer is spelled; `AnswerShape` is that difference. Answers of
other APIs are lists of items (`ItemEvents`). Every event is one dictionary encoded by msgspec: no models, no task per
event, a few microseconds a token. A stream's events wait for the client in a `StreamOutbox`, within a limit. A whole
answer grows as JSON (`answer_json`), because its status is known only at its end, and is sent in pieces. Its size is
counted while it grows. Whatever takes long takes turns with other requests (`Pace`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from antiphon.base.logging import get_logger
from antiphon.serve.api.answer_json import (
    AnswerInTheMaking,
    Encoded,
    LogprobsJson,
    TokenJson,
    encode_json,
    encoded_list,
    encoded_object,
    prompt_logprob,
)
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, shutting_down
from antiphon.serve.api.generation import Generation
from antiphon.serve.api.outbox import (
    BATCH_BYTES,
    SLOW_READER,
    StreamOutbox,
    WholeAnswer,
    send_until_disconnect,
    until_disconnect,
)
from antiphon.serve.api.parameters import answer_too_large
from antiphon.serve.api.requests import GenerationRequest
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.specs.sampling import PromptLogprobs

_log = get_logger("serve.api")
_ENTRIES_A_TURN = 32  # half a millisecond with twenty alternatives each
_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, kw_only=True)
class AnswerShape:
    """How one endpoint spells its answers: choice objects of a streamed piece and of a whole answer, whose values may
    be `Encoded`, but for their log-probabilities. `logprobs` makes those of one answer; None when they were not asked
    for. `opening`: the choice object, by its index, of an event before any text. `prompt_ids_beside_choices`: where the
    answer has `prompt_token_ids`."""

    object_name: str
    chunk_object_name: str
    piece: Callable[[ChoiceDelta], dict[str, Any]]
    whole: Callable[[AnswerInTheMaking], dict[str, Any]]
    logprobs: Callable[[], LogprobsJson | None]
    opening: Callable[[int], dict[str, Any]] | None = None
    prompt_ids_beside_choices: bool = False


def token_json(context: ApiContext, body: GenerationRequest) -> TokenJson:
    """How this answer writes tokens."""
    as_ids = body.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = context.settings.return_tokens_as_token_ids
    return TokenJson(context.tokenizer, as_ids=True) if as_ids else context.token_json


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
        return EventStream(context, generation, ChoiceEvents(context, generation, shape, header, body))
    whole = await until_disconnect(request.receive, _whole(context, generation, shape, header, body))
    await generation.close()
    if len(whole) < BATCH_BYTES:
        return Response(whole.joined(), media_type="application/json")
    return WholeAnswer(whole, context.trimmer.note_large_input)


async def _whole(
    context: ApiContext, generation: Generation, shape: AnswerShape, header: dict[str, Any], body: GenerationRequest
) -> Encoded:
    """The answer, made in turns with other requests; `ApiError` as soon as one of its choices fails."""
    answers = [AnswerInTheMaking(index, shape.logprobs()) for index in range(generation.num_choices)]
    num_bytes = 0
    of_prompts: dict[int, Encoded] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            raise_failure(delta)
            answer = answers[delta.index]
            if delta.prompt_logprobs is not None and body.prompt_logprobs is not None:
                tokens = token_json(context, body)
                of_prompts[delta.index] = await _prompt_logprobs(generation, tokens, delta.prompt_logprobs)
                num_bytes += len(of_prompts[delta.index])
            num_bytes -= answer.num_bytes
            parts = delta.slices()
            while True:
                async with generation.pace:
                    part = next(parts, None)
                    if part is None:
                        break
                    answer.add(part)
            num_bytes += answer.num_bytes
            if num_bytes > 2 * context.settings.max_answer_bytes:
                raise answer_too_large(context, f"has {num_bytes} bytes already")
    choices = []
    for answer in answers:
        async with generation.pace:
            choices.append(_whole_choice(shape, answer, body, of_prompts.get(answer.index)))
    fields = header | {"object": shape.object_name, "choices": encoded_list(choices), "usage": generation.usage()}
    if shape.prompt_ids_beside_choices:
        fields["prompt_token_ids"] = answers[0].prompt_token_ids if body.return_token_ids else None
        fields["prompt_logprobs"] = of_prompts.get(0)
    return encoded_object(fields)


async def _prompt_logprobs(generation: Generation, tokens: TokenJson, logprobs: PromptLogprobs) -> Encoded:
    """A prompt's log-probabilities, a list with an item for each token, some at a time."""
    made = bytearray()
    entries = iter(logprobs)
    while part := list(islice(entries, _ENTRIES_A_TURN)):
        async with generation.pace:
            made += "".join([f"{prompt_logprob(tokens, entry)}," for entry in part]).encode()
    return Encoded([b"[", made[:-1], b"]"])


def _whole_choice(
    shape: AnswerShape, answer: AnswerInTheMaking, body: GenerationRequest, of_prompt: Encoded | None
) -> Encoded:
    choice = shape.whole(answer)
    choice["logprobs"] = None if answer.logprobs is None else answer.logprobs.take()
    choice["token_ids"] = answer.token_ids if body.return_token_ids else None
    if not shape.prompt_ids_beside_choices:
        choice["prompt_token_ids"] = answer.prompt_token_ids if body.return_token_ids else None
        choice["prompt_logprobs"] = of_prompt
    return encoded_object(choice)


def choice_object(answer: ChoiceDelta | AnswerInTheMaking, key: str, content: object) -> dict[str, Any]:
    """A choice whose `content`, plain or `Encoded`, stands under `key`."""
    return {
        "index": answer.index,
        key: content,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def raise_failure(delta: ChoiceDelta) -> None:
    if delta.finish_reason == "abort":
        raise shutting_down()
    if delta.finish_reason == "grammar":
        message = delta.error or "the answer cannot follow response_format any further"
        raise ApiError(400, message, param="response_format", code="grammar_error")
    if delta.finish_reason == "error":
        message = delta.error or "the engine could not finish the request"
        raise ApiError(500, message, code="engine_error")


class ChoiceEvents:
    """Streams of completions and chats: an event for each piece of a choice, ``[DONE]`` at the end. Methods as those of
    `ItemEvents`."""

    last = b"data: [DONE]\n\n"

    def __init__(
        self,
        context: ApiContext,
        generation: Generation,
        shape: AnswerShape,
        header: dict[str, Any],
        body: GenerationRequest,
    ) -> None:
        self._generation = generation
        self._shape = shape
        self._logprobs = shape.logprobs()
        self._header = header | {"object": shape.chunk_object_name}
        options = body.stream_options
        forced = context.settings.force_include_usage
        self._include_usage = forced or bool(options and options.include_usage)
        self._continuous_usage = forced or bool(
            options and options.continuous_usage_stats and options.include_usage is not False
        )
        self._reports_ids = bool(body.return_token_ids)

    def opening(self) -> list[bytes]:
        if self._shape.opening is None:
            return []
        return [self._opening(index, self._shape.opening(index)) for index in range(self._generation.num_choices)]

    def ending(self) -> list[bytes]:
        if not self._include_usage:
            return []
        return [_event(self._header | {"choices": [], "usage": self._generation.usage()})]

    def failure(self, error: ApiError) -> bytes:
        return _event(error.body())

    def _opening(self, index: int, choice: dict[str, Any]) -> bytes:
        event = self._header | {"choices": [choice]}
        if self._reports_ids:
            choice["token_ids"] = []
            if self._shape.prompt_ids_beside_choices:
                event["prompt_token_ids"] = self._generation.prompt_ids_of(index) if index == 0 else None
        return self._with_usage(event, index)

    def piece(self, delta: ChoiceDelta) -> list[bytes]:
        choice = self._shape.piece(delta)
        if self._logprobs is not None:
            for entry in delta.entries:
                self._logprobs.add(entry)
            choice["logprobs"] = msgspec.Raw(self._logprobs.take().joined())
        if self._reports_ids:
            choice["token_ids"] = delta.token_ids
            if not self._shape.prompt_ids_beside_choices:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        return [self._with_usage(self._header | {"choices": [choice]}, delta.index)]

    def _with_usage(self, event: dict[str, Any], index: int) -> bytes:
        if self._continuous_usage:
            event["usage"] = self._generation.usage_of(index)
        elif self._include_usage:
            event["usage"] = None
        return _event(event)


class ItemEvents(ABC):
    """Streams of answers that are lists of items: reasoning, text, calls. An item is open at a time; whatever is of
    another kind closes it. The whole `answer` is what the events add up to, so the two cannot differ.

    An endpoint says how it spells them: where the answer has them, and the `type` of each. Methods return events as
    they are sent; `last` ends every stream, failed or not."""

    last = b""
    items_key: str
    reasoning_type: str
    text_type: str
    call_type: str

    def __init__(self, generation: Generation, answer: dict[str, Any]) -> None:
        self.answer = answer
        self._generation = generation
        self._items: list[dict[str, Any]] = answer[self.items_key]
        self._text: list[str] | None = None  # of the open item

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Before anything has come."""

    @abstractmethod
    def ending(self) -> list[bytes]:
        """Once all answers are complete."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """What comes in place of the ending."""

    def piece(self, delta: ChoiceDelta) -> list[bytes]:
        """What a piece of an answer adds."""
        events: list[bytes] = []
        for kind, text in ((self.reasoning_type, delta.reasoning), (self.text_type, delta.text)):
            if text and (self._text is None or self._items[-1]["type"] != kind):
                events += self._open(self._new_item(kind, None))
            if text:
                events.append(self._add(text))
        for call in delta.calls:
            if call.id is not None:
                events += self._open(self._new_item(self.call_type, call))
            if call.arguments:
                events.append(self._add(call.arguments))
        if delta.finish_reason is not None:
            self._note_finish(delta.finish_reason, delta.stop_reason)
            events += self._close()
        return events

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        events = self._close()
        self._items.append(item)
        self._text = []
        return [*events, *self._opened(item)]

    def _add(self, text: str) -> bytes:
        assert self._text is not None
        self._text.append(text)
        return self._grown(self._items[-1], text)

    def _close(self) -> list[bytes]:
        """Complete the open item, if there is one."""
        if self._text is None:
            return []
        text, self._text = "".join(self._text), None
        return self._closed(self._items[-1], text)

    @abstractmethod
    def _new_item(self, kind: str, call: CallPiece | None) -> dict[str, Any]:
        """What an item of this type begins with; a call's has the name and id of its first piece."""

    @abstractmethod
    def _opened(self, item: dict[str, Any]) -> list[bytes]:
        """The events when the item is there."""

    @abstractmethod
    def _grown(self, item: dict[str, Any], text: str) -> bytes:
        """The event when it has grown by `text`."""

    @abstractmethod
    def _closed(self, item: dict[str, Any], text: str) -> list[bytes]:
        """The events when it is complete with all its `text`, which is put into it."""

    @abstractmethod
    def _note_finish(self, reason: str, stop_reason: str | int | None) -> None:
        """Why the answer is complete, before its last item closes; `stop_reason`: the stop string or token."""


async def respond_in_items(
    context: ApiContext, request: Request, generation: Generation, events: ItemEvents, *, streams: bool | None
) -> Response:
    """The response of an endpoint whose answer is a list of items; as `respond`."""
    if streams:
        return EventStream(context, generation, events)
    await until_disconnect(request.receive, take_whole(context, generation, events))
    await generation.close()
    return JSONResponse(events.answer)


async def take_whole(context: ApiContext, generation: Generation, events: ItemEvents) -> None:
    """Let `events` take in a whole answer, whether or not the client waits. `ApiError` as soon as it fails or is too
    large."""
    num_bytes = 0
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            raise_failure(delta)
            async with generation.pace:
                num_bytes += sum(map(len, events.piece(delta)))
            if num_bytes > 2 * context.settings.max_answer_bytes:
                raise answer_too_large(context, f"has {num_bytes} bytes already")
    events.ending()


class EventStream(Response):
    """Server-sent events of one generation. A failure on the way is an event, too."""

    def __init__(self, context: ApiContext, generation: Generation, events: ChoiceEvents | ItemEvents) -> None:
        super().__init__(None, headers=_EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._context = context
        self._generation = generation
        self._events = events
        self._was_large = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send_until_disconnect(receive, self._send_all(send))
        finally:
            await self._generation.close()
            if self._was_large:
                self._context.trimmer.note_large_input()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        outbox = StreamOutbox(self._context.settings.max_unread_bytes)
        delivering = asyncio.ensure_future(outbox.deliver(send))
        try:
            last = b""
            try:
                await self._put_answers(outbox)
            except ApiError as error:
                if error.code == SLOW_READER:
                    self._context.metrics.slow_readers.inc()
                    _log.warning("request %s is cancelled: %s", self._generation.request_id, error.message)
                last = self._events.failure(error)
            # The client may take its time over what waits for it, but nothing is computed for it any more.
            await self._generation.close()
            outbox.finish(last + self._events.last)
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _put_answers(self, outbox: StreamOutbox) -> None:
        for event in self._events.opening():
            await outbox.put(event)
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                raise_failure(delta)
                is_large = delta.echoed is not None or delta.prompt_token_ids is not None
                self._was_large |= is_large
                parts = delta.slices()
                while True:
                    async with self._generation.pace:
                        part = next(parts, None)
                        if part is None:
                            break
                        made = self._events.piece(part)
                    if is_large:
                        await outbox.room()
                    for event in made:
                        await outbox.put(event)
        for event in self._events.ending():
            await outbox.put(event)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"
