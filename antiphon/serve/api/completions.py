"""`POST /v1/completions`: text or token ids in, their continuation out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.answer_json import AnswerInTheMaking, CompletionLogprobsJson, TokenJson
from antiphon.serve.api.answer_limits import check_answer_size
from antiphon.serve.api.chat_reading import compile_grammar
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.parameters import check_request, completion_sampling
from antiphon.serve.api.prompts import bad_word_ids, completion_prompts
from antiphon.serve.api.requests import CompletionRequest, split_prompts
from antiphon.serve.api.respond import choice_object, respond, token_json
from antiphon.serve.api.responses import CompletionResponse, described_generation

router = APIRouter(tags=["generation"])


class CompletionShape:
    """Answers spelled as text completions. A streamed piece has the shape of a finished answer."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    prompt_ids_beside_choices = False

    def __init__(self, tokens: TokenJson, *, with_logprobs: bool) -> None:
        self._tokens = tokens
        self._with_logprobs = with_logprobs

    def logprobs(self) -> CompletionLogprobsJson | None:
        return CompletionLogprobsJson(self._tokens) if self._with_logprobs else None

    def opening(self, index: int) -> None:
        return None

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        return choice_object(delta, "text", delta.text)

    def whole(self, answer: AnswerInTheMaking) -> dict[str, Any]:
        return choice_object(answer, "text", answer.text.encoded())


@router.post(
    "/v1/completions",
    summary="Continue a text",
    **described_generation(CompletionRequest, CompletionResponse),
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
        params = [completion_sampling(context, body, len(prompt.token_ids), grammar, bad_words) for prompt in prompts]
        check_answer_size(context, body, prompts, params)
        await generation.submit(prompts, params, body, echo=bool(body.echo))
        shape = CompletionShape(token_json(context, body), with_logprobs=body.logprobs is not None)
        return await respond(context, request, generation, shape, body)
