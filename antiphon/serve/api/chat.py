"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.answer_json import (
    AnswerInTheMaking,
    ChatLogprobsJson,
    Encoded,
    GrowingText,
    TokenJson,
    encoded_list,
    encoded_object,
)
from antiphon.serve.api.answer_limits import check_answer_size
from antiphon.serve.api.chat_reading import chat_reading, compile_grammar
from antiphon.serve.api.choice import ChoiceDelta
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.generation import Generation, generation_for
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.parameters import chat_sampling, check_request
from antiphon.serve.api.prompts import bad_word_ids, chat_prompt
from antiphon.serve.api.requests import ChatCompletionRequest
from antiphon.serve.api.respond import choice_object, respond, token_json
from antiphon.serve.api.responses import ChatCompletionResponse, described_generation
from antiphon.serve.text.answer_fields import CallPiece

router = APIRouter(tags=["generation"])


class ChatShape:
    """Answers spelled as chat messages."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    prompt_ids_beside_choices = True

    def __init__(self, tokens: TokenJson, *, with_logprobs: bool) -> None:
        self._tokens = tokens
        self._with_logprobs = with_logprobs

    def logprobs(self) -> ChatLogprobsJson | None:
        return ChatLogprobsJson(self._tokens) if self._with_logprobs else None

    def opening(self, index: int) -> dict[str, Any]:
        return choice_object(ChoiceDelta(index), "delta", {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        news: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            news["reasoning"] = news["reasoning_content"] = delta.reasoning
        if delta.calls:
            news["tool_calls"] = [_streamed_call(piece) for piece in delta.calls]
        return choice_object(delta, "delta", news)

    def whole(self, answer: AnswerInTheMaking) -> dict[str, Any]:
        has_fields = answer.calls or not answer.reasoning.is_empty
        text = None if has_fields and answer.text.is_empty else answer.text.encoded()
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


async def submit_chat(context: ApiContext, client: str, body: ChatCompletionRequest, generation: Generation) -> None:
    """From the request to answers under way, for all endpoints that speak with the model in turns."""
    check_request(context, body, 1)
    reading = chat_reading(context, body)
    prompt = await chat_prompt(context, client, body, offers_tools=reading.offers_tools)
    reading = reading.after(prompt.text)
    grammar = await compile_grammar(context, body, client, reading)
    bad_words = await bad_word_ids(context, client, body.bad_words)
    params = chat_sampling(context, body, len(prompt.token_ids), grammar, bad_words)
    check_answer_size(context, body, [prompt], [params])
    await generation.submit([prompt], [params], body, reading=reading)


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    **described_generation(ChatCompletionRequest, ChatCompletionResponse),
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, ChatCompletionRequest)
    async with generation_for(context, body, "chatcmpl") as generation:
        await submit_chat(context, client_of(request), body, generation)
        shape = ChatShape(token_json(context, body), with_logprobs=bool(body.logprobs))
        return await respond(context, request, generation, shape, body)
