"""`POST /v1/responses`, and the answers it keeps: a chat, in the words of OpenAI's newer API.

An answer is items of reasoning, messages and calls, whole or as events. Each event has a number, and the stream ends
with the event that holds the whole response.
"""

import asyncio
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.base.errors import shortened
from antiphon.serve.api.answer_json import named_event
from antiphon.serve.api.chat_messages import Message
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.completions import submit_chat
from antiphon.serve.api.context import ApiContext, StoredResponse, client_of, context_of
from antiphon.serve.api.errors import ApiError, bad_request, in_client_words
from antiphon.serve.api.generation import Generation, open_generation
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.openai_responses_requests import ResponsesRequest, as_chat, encrypted_content, flat_name
from antiphon.serve.api.openapi_answers import described, described_errors, described_path
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.requests import ChatCompletionRequest
from antiphon.serve.api.respond import ItemEvents, respond_in_items, take_whole, token_json
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.serve.text.call_values import call_arguments
from antiphon.serve.text.text_service import settable_variables

_PART = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
router = APIRouter(tags=["Responses"])

_BACKGROUND_TIMEOUT_S = 3600.0
_BY_ID = described_path("response_id")


class ResponseEvents(ItemEvents):
    """The events of one answer, and the response that they make up, which is kept when it is complete unless the
    client does not want that."""

    items_key = "output"
    reasoning_type, text_type, call_type = "reasoning", "message", "function_call"

    def __init__(
        self,
        context: ApiContext,
        generation: Generation,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        client: str,
        messages: list[dict[str, Any]],
    ) -> None:
        """`messages`: the chat up to this answer, without instructions."""
        self._client = client
        self._messages = messages
        self._context = context
        self._tokens = token_json(context, chat)
        self._included = frozenset(body.include or ())
        self._number = -1
        self._logprobs: list[dict[str, Any]] = []
        self._pending: list[dict[str, Any]] = []  # logprobs of tokens whose text has not come
        self._is_complete = True
        self._names: dict[str, dict[str, str | None]] = {  # of a function, by its name for the model
            flat_name(tool.name, namespace): {"name": tool.name, "namespace": namespace}
            for namespace, tool in body.functions()
            if namespace is not None
        }
        self._raw_ids: list[int] | None = [] if body.enable_response_messages else None
        super().__init__(generation, _new_response(context, generation, body, chat))

    # --- what a stream consists of ---

    def opening(self) -> list[bytes]:
        return [self._event(f"response.{name}", response=self.answer) for name in ("created", "in_progress")]

    def piece(self, delta: ChoiceDelta) -> list[bytes]:
        if "message.output_text.logprobs" in self._included:
            self._pending += [msgspec.json.decode(self._tokens.chat_entry(entry)) for entry in delta.entries]
        if self._raw_ids is not None:
            self._raw_ids += delta.token_ids
        return super().piece(delta)

    def ending(self) -> list[bytes]:
        usage: Any = self._generation.usage()
        reasoning: dict[str, int] = usage.get("completion_tokens_details") or {}
        self.answer["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning.get("reasoning_tokens", 0)},
            "total_tokens": usage["total_tokens"],
        }
        self.answer["status"] = "completed" if self._is_complete else "incomplete"
        if not self._is_complete:
            self.answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._raw_ids is not None:
            (prompt,) = self._generation.prompts
            detokenizer = self._context.tokenizer.detokenizer(skip_special_tokens=False)
            text = "".join(map(detokenizer.feed, self._raw_ids)) + detokenizer.flush()
            self.answer["input_messages"] = [_raw_message(prompt.text, prompt.token_ids)]
            self.answer["output_messages"] = [_raw_message(text, self._raw_ids)]
        events = [self._event(f"response.{self.answer['status']}", response=self.answer)]
        if self.answer["store"]:
            self.keep()
        return events

    def failure(self, error: ApiError) -> bytes:
        kind = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else kind
        details = {"code": code, "message": error.message, "param": error.param, "type": error.code}
        self.answer |= {"status": "failed", "error": details}
        return self._event("response.failed", response=self.answer)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, sequence_number=self._number, **fields)

    def keep(self) -> None:
        """Keep the response as it is now, with the answer as the next request's history has it."""
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.answer["output"]:
            if item["type"] == "function_call":
                function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
                turn.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
                continue
            said = "".join(part["text"] for part in item["content"])  # none yet where it was cancelled within the item
            field = "reasoning_content" if item["type"] == "reasoning" else "content"
            turn[field] = turn.get(field, "") + said
        answered = [turn] if self.answer["output"] else []
        self._context.response_store.add(self._client, [*self._messages, *answered], self.answer)

    # --- items ---

    def _new_item(self, kind: str, call: CallPiece | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"summary": [], "content": []}
        if call is not None:
            names = self._names.get(call.name or "", {"name": call.name})
            fields = {"call_id": call.id, **names, "arguments": ""}
        elif kind == "message":
            fields = {"role": "assistant", "content": []}
        return {"id": f"{_PREFIX[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({} if item["type"] == "function_call" else {"content_index": 0})

    def _opened(self, item: dict[str, Any]) -> list[bytes]:
        self._logprobs = []
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]
        if item["type"] != "function_call":
            part = self._part(item, "")
            events.append(self._event("response.content_part.added", **self._place(item), part=part))
        return events

    def _grown(self, item: dict[str, Any], text: str) -> bytes:
        if item["type"] == "function_call":
            return self._event("response.function_call_arguments.delta", **self._place(item), delta=text)
        news: dict[str, Any] = {"delta": text}
        if item["type"] == "message":
            news["logprobs"], self._pending = self._pending, []
            self._logprobs += news["logprobs"]
        return self._event(f"response.{_PART[item['type']]}.delta", **self._place(item), **news)

    def _closed(self, item: dict[str, Any], text: str) -> list[bytes]:
        place, kind = self._place(item), item["type"]
        item["status"] = "completed" if self._is_complete else "incomplete"
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        else:
            item["content"] = [self._part(item, text)]
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            events = [
                self._event(f"response.{_PART[kind]}.done", **place, text=text, **logprobs),
                self._event("response.content_part.done", **place, part=item["content"][0]),
            ]
        if kind == "reasoning" and "reasoning.encrypted_content" in self._included:
            item["encrypted_content"] = encrypted_content(text)
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _note_finish(self, reason: str, stop_reason: str | int | None) -> None:
        self._is_complete = reason != "length"

    def _part(self, item: dict[str, Any], text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART[item["type"]], "text": text}
        if item["type"] == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part


def _raw_message(text: str, token_ids: list[int]) -> dict[str, Any]:
    """What the model read or wrote, as vLLM spells it."""
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


def _new_response(
    context: ApiContext, generation: Generation, body: ResponsesRequest, chat: ChatCompletionRequest
) -> dict[str, Any]:
    """Before anything has come. It repeats what was asked for, with defaults; as OpenAI's clients read it."""
    form = body.text.format if body.text is not None else None
    effort = chat.reasoning_effort
    return {
        "id": generation.request_id,
        "object": "response",
        "created_at": generation.created_s,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": context.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium",
        },
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [({"strict": None} if tool.type == "function" else {}) | _dumped(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _dumped(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else value.model_dump(exclude_none=True)


async def _answer_in_background(context: ApiContext, generation: Generation, events: ResponseEvents) -> None:
    """Take in the answer, and keep what became of it."""
    events.answer["status"] = "in_progress"
    try:
        async with asyncio.timeout(_BACKGROUND_TIMEOUT_S):
            await take_whole(context, generation, events)
    except ApiError as error:
        events.failure(error)
    except TimeoutError:
        events.failure(ApiError(500, f"the answer took longer than {_BACKGROUND_TIMEOUT_S:.0f} s: lower its tokens"))
    except asyncio.CancelledError:
        events.answer["status"] = "cancelled"
    finally:
        await generation.close()
        events.keep()


@router.post(
    "/v1/responses",
    summary="Answer a conversation, as OpenAI's Responses API does",
    **described(ResponsesRequest, streams=True),
)
async def create_response(request: Request) -> Response:
    context, client = context_of(request), client_of(request)
    body = await read_request(context, request, ResponsesRequest)
    if body.top_logprobs and "message.output_text.logprobs" not in (body.include or ()):
        raise bad_request("top_logprobs needs message.output_text.logprobs in include", param="top_logprobs")
    if body.background and body.store is False:
        raise bad_request("background can only be used when `store` is true: leave store out", param="background")
    if body.background and body.stream:
        raise bad_request("background answers are not streamed: leave out stream or background", param="background")
    chat, messages, names = await _chat(context, client, body)
    async with open_generation(context, chat, "resp") as generation:
        with in_client_words(names):
            await _submit(context, client, chat, generation, truncates=body.truncation == "auto")
        events = ResponseEvents(context, generation, body, chat, client, messages)
        if body.background:
            events.answer["status"] = "queued"
            events.keep()
            queued = JSONResponse(events.answer)
            working = asyncio.create_task(_answer_in_background(context, generation, events))
            context.response_store.working[client, generation.request_id] = working
            working.add_done_callback(
                lambda _: context.response_store.working.pop((client, generation.request_id), None)
            )
            return queued
        return await respond_in_items(context, request, generation, events, streams=body.stream)


@router.post(
    "/v1/responses/input_tokens",
    summary="How many tokens a conversation has",
    **described(ResponsesRequest),
)
async def count_input_tokens(request: Request) -> Response:
    context, client = context_of(request), client_of(request)
    body = await read_request(context, request, ResponsesRequest)
    chat, _, names = await _chat(context, client, body)
    with context.running(), in_client_words(names):
        offers_tools = bool(chat.tools) and chat.tool_choice != "none"
        prompt = await chat_prompt(context, client, chat, offers_tools=offers_tools)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def _chat(
    context: ApiContext, client: str, body: ResponsesRequest
) -> tuple[ChatCompletionRequest, list[dict[str, Any]], dict[str, str]]:
    """The chat that goes on from an earlier answer, its messages without instructions, and what the client calls its
    parameters."""
    earlier = _earlier(context, client, body.previous_response_id)
    settable = settable_variables(await context.texts.template_names())
    return as_chat(body, earlier, partial(context.response_store.item, client), settable, context.limits)


def _earlier(context: ApiContext, client: str, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    stored = context.response_store.get(client, response_id)
    if stored is None:
        raise ApiError(
            400,
            f"previous_response_id {shortened(response_id)!r} is not kept here (any more): send the conversation as "
            "input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if (client, response_id) in context.response_store.working:
        raise bad_request(
            f"previous_response_id {shortened(response_id)!r} is still being answered: wait until it is completed",
            param="previous_response_id",
        )
    for call in stored.messages[-1].get("tool_calls", ()) if stored.messages else ():
        if call_arguments(call["function"]["arguments"]) is None:
            raise bad_request(
                f"previous_response_id {shortened(response_id)!r} has a call of {call['function']['name']} whose "
                "arguments are no JSON object, as when max_output_tokens cut it off: go on from an earlier answer",
                param="previous_response_id",
            )
    return stored.messages


async def _submit(
    context: ApiContext, client: str, chat: ChatCompletionRequest, generation: Generation, *, truncates: bool
) -> None:
    """`submit_chat`. `truncates`: without some of the oldest turns, if the
    conversation does not fit; twice as many each time that the rest is still too long."""
    shorter = _without_oldest(chat.messages) if truncates else iter(())
    while True:
        try:
            await submit_chat(context, client, [chat], generation)
            return
        except ApiError as error:
            rest = next(shorter, None) if error.code == "context_length_exceeded" else None
            if rest is None:
                raise
            chat.messages = rest


def _without_oldest(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation from its second user's turn on, from its third, fifth, and at last from its last one;
    instructions are kept."""
    begins = [number for number, message in enumerate(messages) if message.role == "user"]
    num_cut = 1
    while num_cut < len(begins):
        begin = begins[num_cut]
        yield [each for each in messages[:begin] if each.role in ("system", "developer")] + messages[begin:]
        num_cut = len(begins) if num_cut == len(begins) - 1 else min(2 * num_cut, len(begins) - 1)


@router.get(
    "/v1/responses/{response_id}",
    summary="An answer that is kept",
    responses=described_errors(400, 401, 404),
    openapi_extra=_BY_ID,
)
async def get_response(request: Request) -> Response:
    stored = _kept(request)
    if request.query_params.get("stream", "false") != "false":
        raise bad_request(
            "stream: an answer that is kept is not streamed; ask again until it is completed", param="stream"
        )
    return JSONResponse(stored.response)


def _kept(request: Request) -> StoredResponse:
    response_id: str = request.path_params["response_id"]
    stored = context_of(request).response_store.get(client_of(request), response_id)
    if stored is None:
        raise _not_kept(response_id)
    return stored


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="End an answer that is made in the background",
    responses=described_errors(400, 401, 404),
    openapi_extra=_BY_ID,
)
async def cancel_response(request: Request) -> Response:
    stored = _kept(request)
    if not stored.response["background"]:
        raise bad_request("Cannot cancel a synchronous response. Close its connection", param="response_id")
    await context_of(request).response_store.stop_working(client_of(request), stored.response["id"])
    return JSONResponse(stored.response)


@router.delete(
    "/v1/responses/{response_id}",
    summary="Forget an answer",
    responses=described_errors(401, 404),
    openapi_extra=_BY_ID,
)
async def delete_response(request: Request) -> Response:
    response_id: str = request.path_params["response_id"]
    store, client = context_of(request).response_store, client_of(request)
    await store.stop_working(client, response_id)
    if not store.remove(client, response_id):
        raise _not_kept(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _not_kept(response_id: str) -> ApiError:
    message = f"Response with id {shortened(response_id)!r} not found. It is not kept here (any more)"
    return ApiError(404, message, param="response_id")
