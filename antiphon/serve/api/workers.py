"""What is asked of the workers while they serve: `POST /placement` moves experts between them, the body is the file of
a placement; `PUT /drain/WORKER` takes one out of service without losing work, `PUT /undrain/WORKER` puts it back.

Draining has no body: the method alone keeps pages of other sites from asking."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from antiphon.serve.api.context import context_of
from antiphon.serve.api.guard.body import read_bytes
from antiphon.serve.api.responses import BODY_ERRORS, DrainResponse, PlacementResponse, described_errors, described_path
from antiphon.specs.placement import placement_from_json

router = APIRouter()
MAX_BYTES = 8 * 2**20  # 100 layers of 512 experts with 16 copies each


@router.post(
    "/placement",
    tags=["placement"],
    summary="Move experts to the workers that a placement names",
    status_code=202,
    response_model=PlacementResponse,
    responses=described_errors(*BODY_ERRORS),
)
async def place(request: Request) -> JSONResponse:
    """Refused whole if it does not fit model, workers or slots; else the move begins, and serving goes on."""
    context = context_of(request)
    body = await read_bytes(context, request, MAX_BYTES)
    async with context.large_body:  # a map of a hundred layers takes a while to read
        placement = await asyncio.to_thread(placement_from_json, bytes(body), "the body")
        num_moves = await asyncio.to_thread(context.engine.place, placement)
    return JSONResponse(
        {"status": "moving" if num_moves else "in place", "experts_to_load": num_moves}, status_code=202
    )


_DRAINING: dict[str, Any] = {
    "tags": ["workers"],
    "status_code": 202,
    "response_model": DrainResponse,
    "responses": described_errors(400, 401, 404),
    "openapi_extra": described_path("worker"),  # names may hold a slash, as in prefill/replica[0]
}


@router.put(
    "/drain/{worker:path}",
    summary="Give a worker no more requests, and move those that it has to others",
    **_DRAINING,
)
async def drain(request: Request) -> JSONResponse:
    """Asked again, it says how far it is. A worker is drained until its process ends, or until this is undone."""
    return _answer(request, undo=False)


@router.put("/undrain/{worker:path}", summary="Let a worker that was drained have requests again", **_DRAINING)
async def undrain(request: Request) -> JSONResponse:
    return _answer(request, undo=True)


def _answer(request: Request, *, undo: bool) -> JSONResponse:
    worker = request.path_params["worker"]
    state = context_of(request).engine.drain_worker(worker, undo=undo)
    return JSONResponse({"worker": worker, "state": state}, status_code=202)
