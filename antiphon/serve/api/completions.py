"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out; `POST /v1/completions`: text or token ids
in, their continuation out; and `POST /invocations`, which Amazon SageMaker sends to a container: a chat if it has
`messages`, else a completion.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.answer_json import (
    AnswerInTheMaking,
    Encoded,
    GrowingText,
    chat_logprobs,
    completion_logprobs,
    encoded_list,
    encoded_object,
)
from antiphon.serve.api.choice import ChoiceDelta, TokenizedPrompt
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.errors import ApiError, bad_request
from antiphon.serve.api.generation import Generation, open_generation
from antiphon.serve.api.guard.body import read_any_request, read_request
from antiphon.serve.api.openapi_answers import ChatCompletionResponse, CompletionResponse, described
from antiphon.serve.api.parameters import (
    ChatReading,
    chat_reading,
    check_answer_size,
    check_request,
    compile_grammar,
    sampling_params,
)
from antiphon.serve.api.prompts import bad_word_ids, chat_prompt, completion_prompts, text_of
from antiphon.serve.api.requests import ChatBatchRequest, ChatCompletionRequest, CompletionRequest, split_prompts
from antiphon.serve.api.respond import AnswerShape, choice_object, respond, token_json
from antiphon.serve.text.answer_fields import CallPiece
from antiphon.specs.sampling import SamplingParams

router = APIRouter(tags=["generation"])


def _shape(
    context: ApiContext,
    body: ChatCompletionRequest | ChatBatchRequest,
    *,
    prompt_ids_beside_choices: bool = True,
    echoed: str = "",
) -> AnswerShape:
    """Answers spelled as chat messages; `echoed` stands before each."""
    tokens = token_json(context, body)
    return AnswerShape(
        object_name="chat.completion",
        chunk_object_name="chat.completion.chunk",
        piece=_piece,
        whole=partial(_whole, echoed),
        logprobs=lambda: chat_logprobs(tokens) if body.logprobs else None,
        opening=lambda index: choice_object(ChoiceDelta(index), "delta", {"role": "assistant", "content": echoed}),
        prompt_ids_beside_choices=prompt_ids_beside_choices,
    )


def _piece(delta: ChoiceDelta) -> dict[str, Any]:
    news: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.reasoning:
        news["reasoning"] = news["reasoning_content"] = delta.reasoning
    if delta.calls:
        news["tool_calls"] = [_streamed_call(piece) for piece in delta.calls]
    return choice_object(delta, "delta", news)


def _whole(echoed: str, answer: AnswerInTheMaking) -> dict[str, Any]:
    has_fields = answer.calls or not answer.reasoning.is_empty
    is_empty = has_fields and answer.text.is_empty and not echoed
    text = None if is_empty else answer.text.encoded(echoed)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not answer.reasoning.is_empty:
        message["reasoning"] = message["reasoning_content"] = answer.reasoning.encoded()
    if answer.calls:
        message["tool_calls"] = encoded_list(_whole_call(*call) for call in answer.calls)
    return choice_object(answer, "message", encoded_object(message))


def _whole_call(begin: CallPiece, arguments: GrowingText) -> Encoded:
    function = encoded_object({"name": begin.name, "arguments": arguments.encoded()})
    return encoded_object({"id": begin.id, "type": "function", "function": function})


def _streamed_call(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


async def submit_chat(
    context: ApiContext, client: str, chats: list[ChatCompletionRequest], generation: Generation
) -> None:
    """From the request to answers under way, for all endpoints that speak with the model in turns. `chats` differ in
    their messages only."""
    body = chats[0]
    check_request(context, body, len(chats))
    if body.echo and not body.continue_final_message:
        raise bad_request("echo needs continue_final_message: an answer of its own has nothing before it", param="echo")
    offered = chat_reading(context, body)
    bad_words = await bad_word_ids(context, client, body.bad_words)
    prompts: list[TokenizedPrompt] = []
    readings: list[ChatReading] = []
    params: list[SamplingParams] = []
    for number, chat in enumerate(chats):
        try:
            prompts.append(await chat_prompt(context, client, chat, offers_tools=offered.offers_tools))
        except ApiError as error:
            if len(chats) > 1:
                error.message = f"conversation {number}: {error.message}"
            raise
        readings.append(replace(offered, prompt=prompts[-1].text))
        grammar = await compile_grammar(context, body, client, readings[-1])
        params.append(sampling_params(context, body, len(prompts[-1].token_ids), grammar, bad_words))
    check_answer_size(context, body, prompts, params)
    await generation.submit(prompts, params, body, readings=readings)


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    **described(ChatCompletionRequest, answer=ChatCompletionResponse, streams=True),
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    return await answer_chat(context, request, await read_request(context, request, ChatCompletionRequest))


async def answer_chat(context: ApiContext, request: Request, body: ChatCompletionRequest) -> Response:
    """The response to a request that was read."""
    async with open_generation(context, body, "chatcmpl") as generation:
        await submit_chat(context, client_of(request), [body], generation)
        echoed = text_of(body.messages[-1].content) if body.echo else ""
        return await respond(context, request, generation, _shape(context, body, echoed=echoed), body)


@router.post(
    "/v1/chat/completions/batch",
    summary="Answer several conversations",
    **described(ChatBatchRequest, answer=ChatCompletionResponse, streams=True),
)
async def create_chat_batch(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, ChatBatchRequest)
    if body.echo:
        raise bad_request("echo is for single conversations: leave it out", param="echo")
    chats = body.conversations()
    async with open_generation(context, body, "chatcmpl") as generation:
        await submit_chat(context, client_of(request), chats, generation)
        shape = _shape(context, body, prompt_ids_beside_choices=False)
        return await respond(context, request, generation, shape, body)


@router.post(
    "/v1/completions",
    summary="Continue a text",
    **described(CompletionRequest, answer=CompletionResponse, streams=True),
)
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    return await answer_completion(context, request, await read_request(context, request, CompletionRequest))


async def answer_completion(context: ApiContext, request: Request, body: CompletionRequest) -> Response:
    """The response to a request that was read."""
    async with open_generation(context, body, "cmpl") as generation:
        check_request(context, body, len(split_prompts(body.prompt)))
        prompts = await completion_prompts(context, client_of(request), body)
        grammar = await compile_grammar(context, body, client_of(request))
        bad_words = await bad_word_ids(context, client_of(request), body.bad_words)
        params = [sampling_params(context, body, len(prompt.token_ids), grammar, bad_words) for prompt in prompts]
        check_answer_size(context, body, prompts, params)
        await generation.submit(prompts, params, body, echo=bool(body.echo))
        tokens = token_json(context, body)
        shape = AnswerShape(
            object_name="text_completion",
            chunk_object_name="text_completion",
            piece=lambda delta: choice_object(delta, "text", delta.text),
            whole=lambda answer: choice_object(answer, "text", answer.text.encoded()),
            logprobs=lambda: completion_logprobs(tokens) if body.logprobs is not None else None,
        )
        return await respond(context, request, generation, shape, body)


def _kind_of(body: dict[str, Any]) -> type[ChatCompletionRequest] | type[CompletionRequest]:
    return ChatCompletionRequest if "messages" in body else CompletionRequest


@router.post(
    "/invocations",
    summary="Answer a conversation, or continue a text",
    **described(ChatCompletionRequest, CompletionRequest, streams=True),
)
async def create_invocation(request: Request) -> Response:
    context = context_of(request)
    body = await read_any_request(context, request, _kind_of)
    if isinstance(body, ChatCompletionRequest):
        return await answer_chat(context, request, body)
    return await answer_completion(context, request, body)
