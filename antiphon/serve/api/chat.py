"""`POST /v1/chat/completions`: a conversation in, the assistant's turn out."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.body import read_request
from antiphon.serve.api.choice import ChoiceDelta, TokenEntry, finite
from antiphon.serve.api.context import client_of, context_of
from antiphon.serve.api.generation import generation_for
from antiphon.serve.api.parameters import chat_sampling, check_request, compile_grammar, tool_use
from antiphon.serve.api.prompts import chat_prompt
from antiphon.serve.api.requests import ChatCompletionRequest
from antiphon.serve.api.respond import respond
from antiphon.serve.api.responses import ChatCompletionResponse, described_generation
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tool_calls import CallPiece

router = APIRouter(tags=["generation"])


class ChatShape:
    """Answers spelled as chat messages."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        news: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            news["tool_calls"] = [_streamed_call(piece) for piece in delta.calls]
        return self._choice(delta, "delta", news)

    def whole(self, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message |= {"content": delta.text or None, "tool_calls": _whole_calls(delta.calls)}
        return self._choice(delta, "message", message)

    def _choice(self, delta: ChoiceDelta, key: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.index,
            key: content,
            "logprobs": _logprobs(delta.entries, self._tokenizer) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }


def _logprobs(entries: list[TokenEntry], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Token logprobs: each token with its bytes and its alternatives, best first."""
    content = []
    for entry in entries:
        assert entry.logprob is not None, "chat has no echo"
        described = _chat_token(entry.token_id, entry.logprob.logprob, tokenizer)
        described["top_logprobs"] = [_chat_token(*alternative, tokenizer) for alternative in entry.logprob.top]
        content.append(described)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: TextTokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_string(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes.of(token_id)),
    }


def _streamed_call(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _whole_calls(pieces: list[CallPiece]) -> list[dict[str, Any]]:
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        {"id": p.id, "type": "function", "function": {"name": p.name, "arguments": "".join(arguments[p.index])}}
        for p in pieces
        if p.id is not None
    ]


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    **described_generation(ChatCompletionRequest, ChatCompletionResponse),
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, ChatCompletionRequest)
    async with generation_for(context, body, "chatcmpl") as generation:
        check_request(context, body, 1)
        tools = tool_use(context, body)
        prompt = await chat_prompt(context, client_of(request), body, offers_tools=tools is not None)
        grammar = await compile_grammar(context, body, client_of(request), tools)
        params = chat_sampling(context, body, len(prompt.token_ids), grammar)
        generation.submit([prompt], [params], body, tools=tools)
        shape = ChatShape(context.tokenizer, with_logprobs=bool(body.logprobs))
        return await respond(context, request, generation, shape, body)
