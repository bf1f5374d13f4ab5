"""`POST /v1/completions`: text or token ids in, their continuation out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.body import read_request
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.logprobs import completion_logprobs
from antiphon.serve.api.prompts import completion_prompts, split_prompts
from antiphon.serve.api.requests import CompletionRequest
from antiphon.serve.api.respond import respond
from antiphon.serve.api.responses import CompletionResponse, described_generation
from antiphon.serve.api.sampling import check_request, compile_grammar, completion_sampling
from antiphon.serve.text.tokenizer import TextTokenizer

router = APIRouter(tags=["generation"])


class CompletionShape:
    """Answers spelled as text completions. A streamed piece has the shape of a finished answer."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, tokenizer: TextTokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> None:
        return None

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.entries, self._tokenizer) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    whole = piece


@router.post(
    "/v1/completions",
    summary="Continue a text",
    **described_generation(CompletionRequest, CompletionResponse),
)
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(request, CompletionRequest)
    async with generation_for(context, body, "cmpl") as generation:
        check_request(context, body, len(split_prompts(body.prompt)))
        prompts = await completion_prompts(context, body)
        grammar = await compile_grammar(context, body)
        params = [completion_sampling(context, body, len(prompt.token_ids), grammar) for prompt in prompts]
        generation.submit(prompts, params, body, echo=bool(body.echo))
        shape = CompletionShape(context.tokenizer, with_logprobs=body.logprobs is not None)
        return await respond(request, generation, shape, body)
