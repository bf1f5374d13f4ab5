"""`POST /tokenize` and `POST /detokenize`: what the model sees, for people who count or debug."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from antiphon.serve.api.context import context_of
from antiphon.serve.api.endpoint import BODY_ERRORS, described_body, described_errors, receive_body
from antiphon.serve.api.errors import bad_request
from antiphon.serve.api.prompts import check_token_ids, encode_text, render_messages
from antiphon.serve.api.requests import DetokenizeRequest, TokenizeRequest
from antiphon.serve.api.responses import DetokenizeResponse, TokenizeResponse

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    summary="Token ids of a prompt or a conversation",
    response_model=TokenizeResponse,
    responses=described_errors(*BODY_ERRORS),
    openapi_extra=described_body(TokenizeRequest),
)
async def tokenize(request: Request) -> dict[str, Any]:
    context = context_of(request)
    body = await receive_body(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send prompt or messages, one of the two", param="prompt")
    if body.messages is not None:
        generation_prompt = body.add_generation_prompt is not False
        text = render_messages(context, body.messages, add_generation_prompt=generation_prompt)
        add_special_tokens = bool(body.add_special_tokens)
    else:
        if body.add_generation_prompt is not None:
            raise bad_request("add_generation_prompt needs messages", param="add_generation_prompt")
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
    token_ids = await encode_text(context, text, add_special_tokens=add_special_tokens)
    strings = [context.tokenizer.token_string(token_id) for token_id in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": context.engine.info.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


@router.post(
    "/detokenize",
    summary="Text of token ids, special tokens included",
    response_model=DetokenizeResponse,
    responses=described_errors(*BODY_ERRORS),
    openapi_extra=described_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> dict[str, Any]:
    context = context_of(request)
    body = await receive_body(request, DetokenizeRequest)
    check_token_ids(context, body.tokens, "tokens")
    text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}
