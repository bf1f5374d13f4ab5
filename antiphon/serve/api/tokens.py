"""`POST /tokenize` and `POST /detokenize`: what the model sees, for people who count or debug.

Both are held to the limits of other requests, in length and in number: what does not fit the context is refused.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from antiphon.serve.api.body import read_request
from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.prompts import decode_ids, encode_text, render_conversation
from antiphon.serve.api.requests import DetokenizeRequest, TokenizeRequest
from antiphon.serve.api.responses import (
    GENERATION_ERRORS,
    DetokenizeResponse,
    TokenizeResponse,
    described_body,
    described_errors,
)

router = APIRouter(tags=["tokens"])

_TOKENS_A_TURN = 4096


@router.post(
    "/tokenize",
    summary="Token ids of a prompt or a conversation",
    responses={200: {"model": TokenizeResponse}, **described_errors(*GENERATION_ERRORS)},
    openapi_extra=described_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, TokenizeRequest)
    with context.running():
        token_ids = await _token_ids(context, client_of(request), body)
        strings = await _token_strings(context, token_ids) if body.return_token_strs else None
    return _answer(
        {
            "count": len(token_ids),
            "max_model_len": context.engine.info.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def _token_ids(context: ApiContext, client: str, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send prompt or messages, one of the two", param="prompt")
    if body.messages is not None:
        text = await render_conversation(context, client, body.messages, body)
        return await encode_text(context, client, text, "messages", add_special_tokens=bool(body.add_special_tokens))
    for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} needs messages", param=name)
    add_special_tokens = body.add_special_tokens is not False
    return await encode_text(context, client, body.prompt or "", "prompt", add_special_tokens=add_special_tokens)


async def _token_strings(context: ApiContext, token_ids: list[int]) -> list[str]:
    """Some thousand at a time, so that a long context holds up nobody."""
    strings: list[str] = []
    for begin in range(0, len(token_ids), _TOKENS_A_TURN):
        strings += map(context.tokenizer.token_string, token_ids[begin : begin + _TOKENS_A_TURN])
        await asyncio.sleep(0)
    return strings


@router.post(
    "/detokenize",
    summary="Text of token ids, special tokens included",
    responses={200: {"model": DetokenizeResponse}, **described_errors(*GENERATION_ERRORS)},
    openapi_extra=described_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, DetokenizeRequest)
    with context.running():
        context.limits.check_token_ids(body.tokens, "tokens")
        text = await decode_ids(context, client_of(request), body.tokens, skip_special_tokens=False)
    return _answer({"prompt": text})


def _answer(content: dict[str, Any]) -> Response:
    """Not through the described model, which would look at every token once more."""
    return Response(msgspec.json.encode(content), media_type="application/json")
