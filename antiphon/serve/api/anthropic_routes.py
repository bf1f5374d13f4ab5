"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a chat, in the words of Anthropic's API.

A request is made a chat (`anthropic_requests`).

An answer is blocks of thinking, text and calls, whole or as events. Arguments of a call that are no JSON object, which
only a model without a grammar writes, are the input ``{"INVALID_JSON": text}``, as Anthropic's documentation has it.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.serve.api.answer_json import named_event
from antiphon.serve.api.anthropic_requests import CountTokensRequest, MessagesRequest, as_chat
from antiphon.serve.api.completions import submit_chat
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.errors import ApiError, bad_request, in_client_words
from antiphon.serve.api.generation import Generation, open_generation
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.openapi_answers import AnthropicErrorResponse, described
from antiphon.serve.api.parameters import can_end_reasoning
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.respond import ItemEvents, respond_in_items
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.call_values import call_arguments
from antiphon.serve.text.text_service import settable_variables

router = APIRouter(tags=["Anthropic"])

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageEvents(ItemEvents):
    """The events of one answer, and the message that they make up."""

    items_key = "content"
    reasoning_type, text_type, call_type = "thinking", "text", "tool_use"

    def __init__(self, generation: Generation, model: str, *, max_tokens: int) -> None:
        """`max_tokens`: that the client asked for."""
        self._max_tokens = max_tokens
        answer: dict[str, Any] = {
            "id": generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": sum(len(prompt.token_ids) for prompt in generation.prompts), "output_tokens": 0},
        }
        super().__init__(generation, answer)

    def opening(self) -> list[bytes]:
        return [named_event("message_start", message=self.answer)]

    def ending(self) -> list[bytes]:
        usage: Any = self._generation.usage()
        of_prompt = usage["prompt_tokens_details"]
        self.answer["usage"] = {
            "input_tokens": usage["prompt_tokens"] - of_prompt["cached_tokens"] - of_prompt["cache_write_tokens"],
            "cache_read_input_tokens": of_prompt["cached_tokens"],
            "cache_creation_input_tokens": of_prompt["cache_write_tokens"],
            "output_tokens": usage["completion_tokens"],
        }
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        return [named_event("message_delta", delta=delta, usage=self.answer["usage"]), named_event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=error.anthropic_body()["error"])

    def _new_item(self, kind: str, call: CallPiece | None) -> dict[str, Any]:
        if call is not None:
            return {"type": kind, "id": call.id, "name": call.name, "input": {}}
        return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})

    def _opened(self, item: dict[str, Any]) -> list[bytes]:
        return [named_event("content_block_start", index=len(self._items) - 1, content_block=item)]

    def _grown(self, item: dict[str, Any], text: str) -> bytes:
        kind, key = _DELTAS[item["type"]]
        return named_event("content_block_delta", index=len(self._items) - 1, delta={"type": kind, key: text})

    def _closed(self, item: dict[str, Any], text: str) -> list[bytes]:
        if item["type"] == "tool_use":
            value = call_arguments(text)
            item["input"] = {"INVALID_JSON": text} if value is None else value
        else:
            item[item["type"]] = text
        return [named_event("content_block_stop", index=len(self._items) - 1)]

    def _note_finish(self, reason: str, stop_reason: str | int | None) -> None:
        self.answer["stop_reason"] = _STOP_REASONS[reason]
        usage: Any = self._generation.usage()
        if reason == "length" and usage["completion_tokens"] < self._max_tokens:
            self.answer["stop_reason"] = "model_context_window_exceeded"
        if isinstance(stop_reason, str) and reason == "stop":
            self.answer |= {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}


@router.post(
    "/v1/messages",
    summary="Answer a conversation, as Anthropic's API does",
    **described(MessagesRequest, streams=True, errors=AnthropicErrorResponse),
)
async def create_message(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, MessagesRequest)
    if body.thread is not None:
        raise bad_request(
            "thread: this server keeps no conversations; leave it out and send all messages"
            ' (unsupported_request_behavior="continue_unthreaded")',
            param="thread",
            code="thread_unsupported_request",
        )
    settable = settable_variables(await context.texts.template_names())
    chat, names = as_chat(body, settable, context.limits, ends_thinking=can_end_reasoning(context))
    async with open_generation(context, chat, "msg") as generation:
        with in_client_words(names):
            await submit_chat(context, client_of(request), [chat], generation)
        events = MessageEvents(generation, context.model_name, max_tokens=body.max_tokens)
        return await respond_in_items(context, request, generation, events, streams=body.stream)


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a conversation has",
    **described(CountTokensRequest, errors=AnthropicErrorResponse),
)
async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, CountTokensRequest)
    with context.running():
        chat, names = as_chat(body, settable_variables(await context.texts.template_names()), context.limits)
        offers_tools = bool(chat.tools) and chat.tool_choice != "none"
        with in_client_words(names):
            prompt = await chat_prompt(context, client_of(request), chat, offers_tools=offers_tools)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
