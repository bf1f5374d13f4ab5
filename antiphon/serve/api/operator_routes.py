"""What an operator asks: what is served and how it is (models, health, version, metrics, and a page that draws what the
server does), and what its workers are to do while they serve.

Only the models and the page's data (`/dashboard/data`) need the API key. The page itself is open, for it holds no data;
it asks for the key, and for the data once a second. Page and script are one document: nothing else is loaded.

`POST /placement` moves experts between workers, the body is the file of a placement; `PUT /drain/WORKER` takes one out
of service without losing work, `PUT /undrain/WORKER` puts it back. Draining has no body: the method alone keeps pages
of other sites from asking. `GET /drain/WORKER` says how far it is: to ask for it again would drain what has taken the
place of a process that ended.
"""

import asyncio
import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from antiphon import __version__
from antiphon.serve.api.context import ApiContext, context_of
from antiphon.serve.api.dashboard import DashboardReading
from antiphon.serve.api.errors import RETRY_AFTER_S
from antiphon.serve.api.guard.body import check_model_name, read_bytes
from antiphon.serve.api.openapi_answers import (
    BODY_ERRORS,
    DrainResponse,
    HealthResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    PlacementResponse,
    VersionResponse,
    described_errors,
    described_path,
)
from antiphon.specs.placement import placement_from_json

router = APIRouter(tags=["status"])
workers_router = APIRouter()

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PLACEMENT_BYTES = 8 * 2**20  # 100 layers of 512 experts with 16 copies each


def _model_card(context: ApiContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_at_s,
        "owned_by": "antiphon",
        "root": context.settings.model_root or context.engine.info.model_name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(context.started_at_s, UTC).isoformat(),
        "max_input_tokens": context.limits.max_prompt_tokens,
        "max_tokens": context.engine.info.max_model_len,
    }


@router.get("/v1/models", summary="The served model", response_model=ModelList, responses=described_errors(401))
async def list_models(request: Request) -> dict[str, Any]:
    context = context_of(request)
    names = context.model_names
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [_model_card(context, name) for name in names], **ends}


@router.get(
    "/v1/models/{model:path}",
    summary="The served model by name",
    response_model=ModelCard,
    responses=described_errors(401, 404),
    openapi_extra=described_path("model"),
)
async def get_model(request: Request) -> dict[str, Any]:
    context = context_of(request)
    check_model_name(context, request.path_params["model"])
    return _model_card(context, request.path_params["model"])


@router.get(
    "/health",
    summary="200 while requests are served, if only by some of the workers",
    response_model=HealthResponse,
    responses={503: {"model": HealthResponse}},
)
async def health(request: Request) -> Response:
    context = context_of(request)
    stats = context.metrics.read_stats()
    status = "shutting down" if context.draining else stats.status
    serves = stats.healthy and not context.draining
    headers = {} if serves else {"retry-after": str(RETRY_AFTER_S)}
    body = {"status": status, "missing": stats.missing}
    return JSONResponse(body, status_code=200 if serves else 503, headers=headers)


@router.get("/ping", summary="200 while the server answers", response_class=Response)
async def ping() -> Response:
    return Response()


@router.get("/load", summary="How many requests run", response_model=LoadResponse)
async def load(request: Request) -> dict[str, int]:
    return {"server_load": context_of(request).num_active}


@router.get("/version", summary="Version and layout", response_model=VersionResponse)
async def version(request: Request) -> dict[str, Any]:
    context = context_of(request)
    info = context.engine.info
    return {
        "version": __version__,
        "model": context.model_name,
        "layout": info.layout,
        "num_attention": info.num_attention,
        "num_experts_workers": info.num_experts_workers,
        "num_micro_batches": info.num_micro_batches,
    }


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.exposition(), media_type=_METRICS_TYPE)


@cache
def dashboard_page() -> tuple[str, str]:
    """(HTML, its content security policy): this script and no other, data from this server and from nowhere else."""
    folder = files("antiphon.serve.api")
    html, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("dashboard.html", "dashboard.js"))
    page = html.replace("/* script */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


@router.get("/dashboard", summary="A page that shows what the server does", response_class=HTMLResponse)
async def dashboard() -> Response:
    page, policy = dashboard_page()
    return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-store"})


@router.get(
    "/dashboard/data",
    summary="What the dashboard shows, as JSON",
    response_model=DashboardReading,
    responses=described_errors(401),
)
async def dashboard_data(request: Request) -> Response:
    reading = await context_of(request).dashboard.reading()
    return Response(reading, media_type="application/json", headers={"cache-control": "no-store"})


@workers_router.post(
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
    body = await read_bytes(context, request, MAX_PLACEMENT_BYTES)
    async with context.large_body:  # a map of a hundred layers takes a while to read
        placement = await asyncio.to_thread(placement_from_json, bytes(body), "the body")
        num_moves = await asyncio.to_thread(context.engine.place, placement)
    return JSONResponse(
        {"status": "moving" if num_moves else "in place", "experts_to_load": num_moves}, status_code=202
    )


_DRAINING: dict[str, Any] = {
    "tags": ["workers"],
    "response_model": DrainResponse,
    "responses": described_errors(400, 401, 404),
    "openapi_extra": described_path("worker"),  # names may hold a slash, as in prefill/replica[0]
}


@workers_router.put(
    "/drain/{worker:path}",
    summary="Give a worker no more requests, and move those that it has to others",
    status_code=202,
    **_DRAINING,
)
async def drain(request: Request) -> dict[str, str]:
    """A worker is drained until its process ends, or until this is undone."""
    return _order(request, undo=False)


@workers_router.put(
    "/undrain/{worker:path}",
    summary="Let a worker that was drained have requests again",
    status_code=202,
    **_DRAINING,
)
async def undrain(request: Request) -> dict[str, str]:
    return _order(request, undo=True)


def _order(request: Request, *, undo: bool) -> dict[str, str]:
    worker = request.path_params["worker"]
    return {"worker": worker, "state": context_of(request).engine.drain_worker(worker, undo=undo)}


@workers_router.get("/drain/{worker:path}", summary="How far a worker is drained", **_DRAINING)
async def drain_state(request: Request) -> dict[str, str]:
    worker = request.path_params["worker"]
    return {"worker": worker, "state": context_of(request).engine.drain_state(worker)}
