"""Puts the server together: one engine, one tokenizer, the routes, the key check, the OpenAPI description."""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from antiphon import __version__
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.serve.api import anthropic_routes, completions, openai_responses_routes, operation, tokens
from antiphon.serve.api.anthropic_routes import CountTokensRequest, MessagesRequest
from antiphon.serve.api.chat_messages import RequestModel
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import install_error_handlers
from antiphon.serve.api.guard.harmless import harmless_properties
from antiphon.serve.api.guard.middlewares import OPEN_PATHS, AccessMiddleware, EntryMiddleware
from antiphon.serve.api.openai_responses_requests import ResponsesRequest
from antiphon.serve.api.requests import (
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.engine_api import AsyncEngine, EngineInfo
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TextTokenizer

_log = get_logger("serve.api")

_REQUEST_MODELS: tuple[type[RequestModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ChatBatchRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def create_app(
    engine: AsyncEngine,
    tokenizer: TextTokenizer,
    settings: ServerSettings,
    grammars: GrammarCompiler | None = None,
) -> FastAPI:
    """The ASGI application. Engine and tokenizer live and end with the caller. What works on texts in other processes
    starts with the first request that needs it, unless the server started it before, and ends with the server.

    `grammars`: the compiler the engine takes its matchers from, see `build_grammars`; None: this model cannot follow
    grammars, and requests for structured output are refused.
    """
    if settings.own_chat_template is not None:
        tokenizer.template_sources = settings.own_chat_template
    for name in settings.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.chat_template):
            raise UserError(f"--chat-template-kwargs sets {name!r}: the model's chat template does not read it")
    app = FastAPI(title="Antiphon", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = ApiContext(engine=engine, tokenizer=tokenizer, settings=settings, grammars=grammars)
    install_error_handlers(app)
    for routes in (
        completions.router,
        anthropic_routes.router,
        openai_responses_routes.router,
        tokens.router,
        operation.workers_router,
        operation.router,
    ):
        app.include_router(routes)
    app.add_middleware(AccessMiddleware, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(EntryMiddleware, root_path=settings.root_path)  # the outermost: the last that is added
    description = _describe(app, with_keys=bool(settings.api_keys))
    if settings.root_path:
        description = {**description, "servers": [{"url": settings.root_path}]}
    app.openapi = lambda: description  # type: ignore[method-assign]
    return app


def build_grammars(info: EngineInfo, tokenizer: TextTokenizer) -> GrammarCompiler | None:
    """The compiler for a model, in about a second for a large vocabulary; None if the model cannot follow grammars."""
    if tokenizer.grammar_problem is not None:
        _log.warning("no structured output: %s", tokenizer.grammar_problem)
        return None
    try:
        return GrammarCompiler(tokenizer.backend, info.vocab_size, info.eos_token_ids)
    except UserError as error:
        _log.warning("no structured output: %s", error)
        return None


def _describe(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    """FastAPI's description plus what it cannot see: bodies are read by hand, keys are checked by middleware."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema(
        [(model, "validation") for model in _REQUEST_MODELS], ref_template="#/components/schemas/{model}"
    )
    components = description.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for model in _REQUEST_MODELS:
        schemas[model.__name__]["properties"].update(harmless_properties(model.model_fields.keys()))
    if with_keys:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        for path, operations in description["paths"].items():
            if path not in OPEN_PATHS:
                for operation in operations.values():
                    operation["security"] = [{"apiKey": []}]
    return description
