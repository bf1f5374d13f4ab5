"""`PUT /drain/WORKER` and `PUT /undrain/WORKER`: take a worker out of service without losing work, or put it back.

No body: the method alone keeps pages of other sites from asking."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from antiphon.serve.api.context import context_of
from antiphon.serve.api.responses import described_errors

router = APIRouter(tags=["workers"])
_DESCRIBED = {  # names may hold a slash, as in prefill/replica[0]
    "parameters": [{"name": "worker", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
}


class DrainResponse(BaseModel):
    """`state`: "ready", "draining, 3 requests left" or "drained"."""

    worker: str
    state: str


@router.put(
    "/drain/{worker:path}",
    summary="Give a worker no more requests, and move those that it has to others",
    status_code=202,
    response_model=DrainResponse,
    responses=described_errors(400, 401, 404),
    openapi_extra=_DESCRIBED,
)
async def drain(request: Request) -> JSONResponse:
    """Asked again, it says how far it is. A worker is drained until its process ends, or until this is undone."""
    return _answer(request, undo=False)


@router.put(
    "/undrain/{worker:path}",
    summary="Let a worker that was drained have requests again",
    status_code=202,
    response_model=DrainResponse,
    responses=described_errors(400, 401, 404),
    openapi_extra=_DESCRIBED,
)
async def undrain(request: Request) -> JSONResponse:
    return _answer(request, undo=True)


def _answer(request: Request, *, undo: bool) -> JSONResponse:
    worker = request.path_params["worker"]
    state = context_of(request).engine.drain_worker(worker, undo=undo)
    return JSONResponse({"worker": worker, "state": state}, status_code=202)
