"""`POST /v1/completions`: text or token ids in, their continuation out; and `POST /invocations`, which Amazon SageMaker
sends to a container: a chat if it has `messages`, else a completion."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.answer_json import completion_logprobs
from antiphon.serve.api.chat import answer_chat
from antiphon.serve.api.chat_reading import compile_grammar
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.guard.body import read_any_request, read_request
from antiphon.serve.api.parameters import check_answer_size, check_request, sampling_params
from antiphon.serve.api.prompts import bad_word_ids, completion_prompts
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest, split_prompts
from antiphon.serve.api.respond import AnswerShape, choice_object, respond, token_json
from antiphon.serve.api.responses import CompletionResponse, described

router = APIRouter(tags=["generation"])


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
    async with generation_for(context, body, "cmpl") as generation:
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
