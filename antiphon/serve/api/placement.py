"""`POST /placement`: move experts between workers while serving. The body is the file of a placement."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from antiphon.serve.api.context import context_of
from antiphon.serve.api.guard.body import read_bytes
from antiphon.serve.api.responses import BODY_ERRORS, PlacementResponse, described_errors
from antiphon.specs.placement import placement_from_json

router = APIRouter(tags=["placement"])
MAX_BYTES = 8 * 2**20  # 100 layers of 512 experts with 16 copies each


@router.post(
    "/placement",
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
