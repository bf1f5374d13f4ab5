"""What every POST endpoint does first, and how the routes are described for OpenAPI."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from antiphon.serve.api.body import read_request
from antiphon.serve.api.context import ApiContext, context_of
from antiphon.serve.api.errors import ApiError
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from antiphon.serve.api.responses import ErrorResponse

AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)


async def receive_body(request: Request, model: type[AnyRequest]) -> AnyRequest:
    """The validated body of `request`, for this server's model."""
    context = context_of(request)
    body = await read_request(request, model, context)
    check_model_name(context, body.model)
    return body


def check_model_name(context: ApiContext, name: str | None) -> None:
    """`ApiError` 404 unless `name` is the served model or absent."""
    if name is not None and name != context.model_name:
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist here: this server serves {context.model_name!r}",
            param="model",
            code="model_not_found",
        )


def described_body(model: type[AnyRequest]) -> dict[str, Any]:
    """OpenAPI's description of a JSON body (`create_app` adds the schemas these references point to)."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def described_answer(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of a 200 that is one JSON answer, or the same in pieces as server-sent events."""
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "description": "A piece of the answer as JSON; [DONE] at the end."}},
    }
    return {200: {"model": model, "content": {"text/event-stream": {"schema": event}}}}


def described_generation(request: type[AnyRequest], answer: type[BaseModel]) -> dict[str, Any]:
    """What the route of a generating endpoint says of itself: its body, its answer, its errors."""
    return {
        "responses": {**described_answer(answer), **described_errors(*GENERATION_ERRORS)},
        "openapi_extra": described_body(request),
    }


def described_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of the error answers of a route."""
    return {status: {"model": ErrorResponse} for status in statuses}


BODY_ERRORS = (400, 401, 404, 408, 413, 415)
GENERATION_ERRORS = (*BODY_ERRORS, 429, 500, 503)
