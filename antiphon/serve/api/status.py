"""What is served, and how it is: models, health, version, metrics. All but the models are open without a key."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon import __version__
from antiphon.serve.api.body import check_model_name
from antiphon.serve.api.context import ApiContext, context_of
from antiphon.serve.api.descriptions import described_errors
from antiphon.serve.api.responses import HealthResponse, ModelCard, ModelList, VersionResponse

router = APIRouter(tags=["status"])

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _model_card(context: ApiContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.started_at_s,
        "owned_by": "antiphon",
        "max_model_len": context.engine.info.max_model_len,
    }


@router.get("/v1/models", summary="The served model", response_model=ModelList, responses=described_errors(401))
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(context_of(request))]}


@router.get(
    "/v1/models/{model:path}",
    summary="The served model by name",
    response_model=ModelCard,
    responses=described_errors(401, 404),
    openapi_extra={
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    },
)
async def get_model(request: Request) -> dict[str, Any]:
    context = context_of(request)
    check_model_name(context, request.path_params["model"])
    return _model_card(context)


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
    return JSONResponse({"status": status, "missing": stats.missing}, status_code=200 if serves else 503)


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
