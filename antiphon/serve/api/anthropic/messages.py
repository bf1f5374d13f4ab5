"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a chat, in the words of Anthropic's API.

An answer is blocks of thinking, text and calls, whole or as events. A block is open at a time; whatever is of another
kind closes it. The whole answer is what the events add up to, so the two cannot differ. Arguments of a call that are no
JSON object, which only a model without a grammar writes, are the input ``{"INVALID_JSON": text}``, as Anthropic's
documentation has it.
"""

import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.serve.api.answer_json import named_event
from antiphon.serve.api.anthropic.requests import CountTokensRequest, MessagesRequest, as_chat
from antiphon.serve.api.chat import submit_chat
from antiphon.serve.api.chat_reading import can_end_reasoning
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.errors import ApiError
from antiphon.serve.api.generation import Generation, generation_for
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.respond import respond_in_items
from antiphon.serve.api.responses import (
    GENERATION_ERRORS,
    AnthropicErrorResponse,
    described_body,
    described_errors,
    described_stream,
)
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.chat_rendering import settable_variables

router = APIRouter(tags=["Anthropic"])

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TEXT_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageEvents:
    """The events of one answer, and the message that they make up."""

    last = b""

    def __init__(self, generation: Generation, model: str, *, block_size: int) -> None:
        """`block_size`: tokens in a unit of the cache of prompts."""
        self._generation = generation
        self._block_size = block_size
        self.message: dict[str, Any] = {
            "id": generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": sum(len(prompt.token_ids) for prompt in generation.prompts), "output_tokens": 0},
        }
        self._text: list[str] | None = None  # of the open block

    def opening(self) -> list[bytes]:
        return [named_event("message_start", message=self.message)]

    def piece(self, delta: ChoiceDelta) -> list[bytes]:
        events: list[bytes] = []
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                events += self._add(kind, text)
        for call in delta.calls:
            events += self._add_call(call)
        if delta.finish_reason is not None:
            events += self._close()
            reason = _STOP_REASONS[delta.finish_reason]
            if isinstance(delta.stop_reason, str) and reason == "end_turn":
                reason = "stop_sequence"
                self.message["stop_sequence"] = delta.stop_reason
            self.message["stop_reason"] = reason
        return events

    def ending(self) -> list[bytes]:
        usage: Any = self._generation.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_kept = max(0, usage["prompt_tokens"] // self._block_size * self._block_size - num_cached)
        self.message["usage"] = {
            "input_tokens": usage["prompt_tokens"] - num_cached - num_kept,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": num_kept,
            "output_tokens": usage["completion_tokens"],
        }
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [named_event("message_delta", delta=delta, usage=self.message["usage"]), named_event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=error.anthropic_body()["error"])

    def _add(self, kind: str, text: str) -> list[bytes]:
        events = []
        if self._text is None or self.message["content"][-1]["type"] != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = self._open(block)
        assert self._text is not None
        self._text.append(text)
        name, key = _DELTAS[kind]
        return [*events, self._delta({"type": name, key: text})]

    def _add_call(self, call: CallPiece) -> list[bytes]:
        events = []
        if call.id is not None:
            events = self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            assert self._text is not None
            self._text.append(call.arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        events = self._close()
        self.message["content"].append(block)
        self._text = []
        return [*events, named_event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        """Complete the open block, if there is one."""
        if self._text is None:
            return []
        block, text = self.message["content"][-1], "".join(self._text)
        block[_TEXT_KEYS[block["type"]]] = _input(text) if block["type"] == "tool_use" else text
        self._text = None
        return [named_event("content_block_stop", index=self._index)]

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=delta)


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


@router.post(
    "/v1/messages",
    summary="Answer a conversation, as Anthropic's API does",
    responses={**described_stream(), **described_errors(*GENERATION_ERRORS, model=AnthropicErrorResponse)},
    openapi_extra=described_body(MessagesRequest),
)
async def create_message(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, MessagesRequest)
    settable = settable_variables(await context.texts.template_names())
    chat = as_chat(body, settable, context.limits, ends_thinking=can_end_reasoning(context))
    async with generation_for(context, chat, "msg") as generation:
        await submit_chat(context, client_of(request), [chat], generation)
        events = MessageEvents(generation, context.model_name, block_size=context.engine.info.block_size)
        return await respond_in_items(context, request, generation, events, events.message, streams=body.stream)


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a conversation has",
    responses={**described_errors(*GENERATION_ERRORS, model=AnthropicErrorResponse)},
    openapi_extra=described_body(CountTokensRequest),
)
async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, CountTokensRequest)
    with context.running():
        chat = as_chat(body, settable_variables(await context.texts.template_names()), context.limits)
        offers_tools = bool(chat.tools) and chat.tool_choice != "none"
        prompt = await chat_prompt(context, client_of(request), chat, offers_tools=offers_tools)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
