"""`POST /v1/completions`: text or token ids in, their continuation out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.body import read_request
from antiphon.serve.api.choice import ChoiceDelta, TokenEntry, finite
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.parameters import check_request, compile_grammar, completion_sampling
from antiphon.serve.api.prompts import completion_prompts
from antiphon.serve.api.requests import CompletionRequest, split_prompts
from antiphon.serve.api.respond import respond
from antiphon.serve.api.responses import CompletionResponse, described_generation
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
            "logprobs": _logprobs(delta.entries, self._tokenizer) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    whole = piece


def _logprobs(entries: list[TokenEntry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Token logprobs as parallel lists. The sampled token is always among `top_logprobs`, as in OpenAI's API, so that a
    client can see whether it was the most likely one; tokens that read the same keep the likelier value."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        pairs = [*entry.logprob.top, (entry.logprob.token_id, entry.logprob.logprob)]
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(tokenizer.token_string(token_id), finite(logprob))
        tops.append(top)
    return {
        "tokens": [tokenizer.token_string(entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.text_offset for entry in entries],
    }


@router.post(
    "/v1/completions",
    summary="Continue a text",
    **described_generation(CompletionRequest, CompletionResponse),
)
async def create_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, CompletionRequest)
    async with generation_for(context, body, "cmpl") as generation:
        check_request(context, body, len(split_prompts(body.prompt)))
        prompts = await completion_prompts(context, client_of(request), body)
        grammar = await compile_grammar(context, body, client_of(request))
        params = [completion_sampling(context, body, len(prompt.token_ids), grammar) for prompt in prompts]
        generation.submit(prompts, params, body, echo=bool(body.echo))
        shape = CompletionShape(context.tokenizer, with_logprobs=body.logprobs is not None)
        return await respond(context, request, generation, shape, body)
