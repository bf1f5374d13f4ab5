"""`POST /v1/responses`, and the answers it keeps: a chat, in the words of OpenAI's newer API."""

import asyncio
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.serve.api.chat import submit_chat
from antiphon.serve.api.chat_messages import Message
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.generation import Generation, generation_for
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.openai_responses.events import ResponseEvents
from antiphon.serve.api.openai_responses.requests import ResponsesRequest, as_chat
from antiphon.serve.api.requests import ChatCompletionRequest
from antiphon.serve.api.respond import respond_in_items, take_whole
from antiphon.serve.api.responses import described, described_errors, described_path
from antiphon.serve.text.chat_rendering import settable_variables

router = APIRouter(tags=["Responses"])

_BACKGROUND_TIMEOUT_S = 3600.0
_BY_ID = described_path("response_id")
# What a refusal of the chat calls a parameter, and what this API calls it.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


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
    earlier = _earlier(context, client, body.previous_response_id)
    settable = settable_variables(await context.texts.template_names())
    try:
        chat, messages = as_chat(body, earlier, settable, context.limits)
    except ApiError as error:
        raise _in_these_words(error) from error
    async with generation_for(context, chat, "resp") as generation:
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


def _earlier(context: ApiContext, client: str, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    stored = context.response_store.get(client, response_id)
    if stored is None:
        raise ApiError(
            400,
            f"previous_response_id {response_id[:80]!r} is not kept here (any more): send the conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if (client, response_id) in context.response_store.working:
        raise bad_request(
            f"previous_response_id {response_id[:80]!r} is still being answered: wait until it is completed",
            param="previous_response_id",
        )
    return stored.messages


async def _submit(
    context: ApiContext, client: str, chat: ChatCompletionRequest, generation: Generation, *, truncates: bool
) -> None:
    """`submit_chat`, with errors in this API's words. `truncates`: without some of the oldest turns, if the
    conversation does not fit; twice as many each time that the rest is still too long."""
    shorter = _without_oldest(chat.messages) if truncates else iter(())
    while True:
        try:
            await submit_chat(context, client, [chat], generation)
            return
        except ApiError as error:
            rest = next(shorter, None) if error.code == "context_length_exceeded" else None
            if rest is None:
                raise _in_these_words(error) from error
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


def _in_these_words(error: ApiError) -> ApiError:
    param = error.param or ""
    name = next((name for name in _NAMES if param == name or param.startswith((f"{name}[", f"{name}."))), None)
    if name is None:
        return error
    new_name = _NAMES[name]
    message = error.message.replace(name, new_name)
    return ApiError(error.status, message, param=new_name, code=error.code, headers=error.headers)


@router.get(
    "/v1/responses/{response_id}",
    summary="An answer that is kept",
    responses=described_errors(401, 404),
    openapi_extra=_BY_ID,
)
async def get_response(request: Request) -> Response:
    response_id: str = request.path_params["response_id"]
    stored = context_of(request).response_store.get(client_of(request), response_id)
    if stored is None:
        raise _not_kept(response_id)
    return JSONResponse(stored.response)


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="End an answer that is made in the background",
    responses=described_errors(400, 401, 404),
    openapi_extra=_BY_ID,
)
async def cancel_response(request: Request) -> Response:
    response_id: str = request.path_params["response_id"]
    store, client = context_of(request).response_store, client_of(request)
    stored = store.get(client, response_id)
    if stored is None:
        raise _not_kept(response_id)
    if not stored.response["background"]:
        raise bad_request("Cannot cancel a synchronous response. Close its connection", param="response_id")
    await store.stop_working(client, response_id)
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
    message = f"Response with id {response_id[:80]!r} not found. It is not kept here (any more)"
    return ApiError(404, message, param="response_id")
