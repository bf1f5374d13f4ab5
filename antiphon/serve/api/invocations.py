"""`POST /invocations`, which Amazon SageMaker sends to a container: a chat if it has `messages`, else a completion."""

from typing import Any

from fastapi import APIRouter, Request, Response

from antiphon.serve.api.chat import answer_chat
from antiphon.serve.api.completions import answer_completion
from antiphon.serve.api.context import context_of
from antiphon.serve.api.guard.body import read_any_request
from antiphon.serve.api.requests import ChatCompletionRequest, CompletionRequest
from antiphon.serve.api.responses import GENERATION_ERRORS, described_errors, described_stream

router = APIRouter(tags=["generation"])
_KINDS = {
    "oneOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (ChatCompletionRequest, CompletionRequest)]
}


def _kind_of(body: dict[str, Any]) -> type[ChatCompletionRequest] | type[CompletionRequest]:
    return ChatCompletionRequest if "messages" in body else CompletionRequest


@router.post(
    "/invocations",
    summary="Answer a conversation, or continue a text",
    responses={**described_stream(), **described_errors(*GENERATION_ERRORS)},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _KINDS}}}},
)
async def create_invocation(request: Request) -> Response:
    context = context_of(request)
    body = await read_any_request(context, request, _kind_of)
    if isinstance(body, ChatCompletionRequest):
        return await answer_chat(context, request, body)
    return await answer_completion(context, request, body)
