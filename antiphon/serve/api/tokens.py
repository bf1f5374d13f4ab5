"""`POST /tokenize` and `POST /detokenize`: what the model sees, for people who count or debug.

Both are held to the limits of other requests, in length and in number: what does not fit the context is refused.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from antiphon.serve.api.context import ApiContext, client_of, context_of
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.guard.body import read_request
from antiphon.serve.api.openapi_answers import (
    DetokenizeResponse,
    TokenizeResponse,
    TokenizerInfoResponse,
    described,
    described_errors,
)
from antiphon.serve.api.prompts import encode_texts, render_conversation
from antiphon.serve.api.requests import DetokenizeRequest, TokenizeRequest

router = APIRouter(tags=["tokens"])

_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_TOKENS_A_TURN = 256  # some hundred microseconds


@router.post(
    "/tokenize",
    summary="Token ids of a prompt or a conversation",
    **described(TokenizeRequest, answer=TokenizeResponse),
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, TokenizeRequest)
    with context.running():
        token_ids = await _token_ids(context, client_of(request), body)
        content = [
            b'{"count":%d,"max_model_len":%d,"tokens":' % (len(token_ids), context.engine.info.max_model_len),
            *await _json_list(token_ids, int),
            b',"token_strs":',
            *(
                await _json_list(token_ids, context.tokenizer.vocabulary_string)
                if body.return_token_strs
                else [b"null"]
            ),
            b"}",
        ]
    return Response(b"".join(content), media_type="application/json")


async def _token_ids(context: ApiContext, client: str, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send prompt or messages, one of the two", param="prompt")
    if body.messages is not None:
        text = await render_conversation(context, client, body.messages, body)
        special = bool(body.add_special_tokens)
        return (await encode_texts(context, client, [text], "messages", add_special_tokens=special))[0]
    for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} needs messages", param=name)
    special = body.add_special_tokens is not False
    return (await encode_texts(context, client, [body.prompt or ""], "prompt", add_special_tokens=special))[0]


async def _json_list(token_ids: list[int], described: Callable[[int], int | str]) -> list[bytes]:
    """What is said of each token, as pieces of a JSON list; some hundred at a time, with a turn for others in
    between."""
    pieces = [b"["]
    for begin in range(0, len(token_ids), _TOKENS_A_TURN):
        part = list(map(described, token_ids[begin : begin + _TOKENS_A_TURN]))
        pieces += [b"," * (begin > 0), msgspec.json.encode(part)[1:-1]]
        await asyncio.sleep(0)
    return [*pieces, b"]"]


@router.get(
    "/tokenizer_info",
    summary="The tokenizer's special tokens and the chat template",
    response_model=TokenizerInfoResponse,
    responses=described_errors(401),
)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    context = context_of(request)
    tokenizer = context.tokenizer
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # of transformers, which reads any tokenizer.json
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": context.engine.info.max_model_len,
        "chat_template": tokenizer.template_sources or None,
        "special_tokens": tokenizer.special_tokens,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content} | {name: getattr(token, name) for name in _TOKEN_FLAGS}
            for token_id, token in sorted(added.items())
        },
    }


@router.post(
    "/detokenize",
    summary="Text of token ids, special tokens included",
    **described(DetokenizeRequest, answer=DetokenizeResponse),
)
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_request(context, request, DetokenizeRequest)
    with context.running():
        context.limits.check_token_ids(body.tokens, "tokens")
        text = await context.texts.decode(body.tokens, skip_special_tokens=False, client=client_of(request))
    # Not through the described model, which would look at the text once more.
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
