"""How the routes are described for OpenAPI: FastAPI sees neither bodies, which are read by hand, nor event streams."""

from typing import Any

from pydantic import BaseModel

from antiphon.serve.api.requests import AnyRequest
from antiphon.serve.api.responses import ErrorResponse


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
