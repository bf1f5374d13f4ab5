"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a chat, in the words of Anthropic's API."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.serve.api.anthropic.events import MessageEvents
from antiphon.serve.api.anthropic.requests import CountTokensRequest, MessagesRequest, as_chat
from antiphon.serve.api.chat import submit_chat
from antiphon.serve.api.chat_reading import can_end_reasoning
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.respond import EventStream, whole_of
from antiphon.serve.api.responses import (
    GENERATION_ERRORS,
    AnthropicErrorResponse,
    described_body,
    described_errors,
    described_stream,
)
from antiphon.serve.text.chat_rendering import settable_variables

router = APIRouter(tags=["Anthropic"])


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
        await submit_chat(context, client_of(request), chat, generation)
        events = MessageEvents(generation, context.model_name, block_size=context.engine.info.block_size)
        if body.stream:
            return EventStream(context, generation, events)
        await whole_of(context, request, generation, events)
        await generation.close()
        return JSONResponse(events.message)


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
