"""Puts the server together (one engine, one tokenizer, routes, key check, OpenAPI description), runs it on a
socket, and ends it without cutting clients off.

On SIGTERM, SIGINT or a closed terminal (a second one cuts off what runs, a third one ends without an answer):

1. new requests are refused with 503 and `/health` says 503, so that load balancers look elsewhere;
2. the engine drains: running answers go on, up to `drain_timeout_s`, then the engine aborts what is left;
3. the socket closes and `run_server` returns, so that the caller can stop the engine.

When the engine gives up the same happens by itself: a process without an engine must end, so that its supervisor
starts another.

Rejected: uvicorn's own order, which closes the socket first (a health check then sees a refused connection, as after a
crash) and waits without an end for idle connections.
"""

import asyncio
import errno
import gc
import inspect
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from antiphon import __version__
from antiphon.base.errors import UserError
from antiphon.base.logging import adopt_logger, get_logger
from antiphon.base.system import resident_bytes
from antiphon.base.units import check_host, split_address
from antiphon.serve.api import anthropic_routes, completions, openai_responses_routes, operator_routes, tokens
from antiphon.serve.api.anthropic_requests import CountTokensRequest, MessagesRequest
from antiphon.serve.api.chat_messages import RequestModel
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import install_error_handlers
from antiphon.serve.api.guard.connection import ApiConnection
from antiphon.serve.api.guard.connections import Acceptor, Connections
from antiphon.serve.api.guard.harmless import harmless_properties
from antiphon.serve.api.guard.middlewares import OPEN_PATHS, AccessMiddleware, entry_middleware
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
from antiphon.serve.joining import is_wildcard
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TextTokenizer

_log = get_logger("serve.api")

_LAST_BYTES_TIMEOUT_S = 5.0
_CUT_S = 1.0  # for requests that are cut off to say so
_BACKLOG = 2048
_TICKS_PER_SECOND = 10  # uvicorn's
_MOST_GROWTH_BYTES = 128 * 1024 * 1024
_NEVER = 2**31 - 1
# A page of the internet asks whether it may use a server of this network. Older releases do not refuse it.
_HAS_FROM_OUTSIDE = "allow_private_network" in inspect.signature(CORSMiddleware).parameters
_FROM_OUTSIDE: dict[str, Any] = {"allow_private_network": True} if _HAS_FROM_OUTSIDE else {}
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
        operator_routes.workers_router,
        operator_routes.router,
    ):
        app.include_router(routes)
    app.add_middleware(AccessMiddleware, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
            **_FROM_OUTSIDE,
        )
    app.add_middleware(entry_middleware, root_path=settings.root_path)  # the outermost: the last that is added
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


# --- on a socket -----------------------------------------------------------------------------------------------------


class DrainingServer(uvicorn.Server):
    """uvicorn, ended in the order the module's docstring gives."""

    def __init__(self, config: uvicorn.Config, context: ApiContext) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.server_state = self._connections = Connections(context.settings, context.metrics)
        self._acceptors: list[Acceptor] = []
        self._context = context
        self.on_ready: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: list[asyncio.Task[None]] = []
        self._is_cutting = False
        self._collector = QuietCollector()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_note_exception)
        self._context.texts.start()
        self._collector.begin()
        await super().startup(sockets=[])
        for listener in sockets or []:
            self._open(listener, self._loop)
        self._context.engine.call_when_given_up(self._stop_without_engine)
        self.on_ready()
        self.ready.set()

    def _open(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        acceptor = Acceptor(
            listener, self._connections, lambda: ApiConnection(self.config, self._connections, {}, loop), loop
        )
        acceptor.open()
        self._connections.on_room = acceptor.resume
        self._acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)
        self._context.texts.close()
        self._collector.end()

    async def on_tick(self, counter: int) -> bool:
        try:
            self._connections.check(time.monotonic())
            if counter % _TICKS_PER_SECOND == 0:
                self._look_around()
        except (OSError, MemoryError):  # raised here it would end the server
            _log.exception("the system refused the server something: the next look is in a moment")
        return await super().on_tick(counter)

    def _look_around(self) -> None:
        """Once a second."""
        if self._connections.have_left():
            self._context.trimmer.note_large_input()
        self._collector.collect_if_due(is_idle=not self._context.num_active)
        self._context.dashboard.sample()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.request_stop()

    def request_stop(self) -> None:
        """Begin to drain; the second call cuts off what runs, the third ends at once. From any thread and from signal
        handlers."""
        if self._loop is None or self._is_cutting:
            self.should_exit, self.force_exit = True, self._context.draining
            self._context.draining = True
            return
        self._is_cutting, self._context.draining = self._context.draining, True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _stop_without_engine(self) -> None:
        """Called on the engine's thread, with all requests ended. A drain that is under way ends by itself."""
        if not self._context.draining:
            _log.error("the engine has given up: the server ends")
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self.request_stop()

    def _start_draining(self) -> None:
        limits = (0.0, _CUT_S) if self._is_cutting else (self._context.settings.drain_timeout_s, _LAST_BYTES_TIMEOUT_S)
        self._draining.append(asyncio.ensure_future(self._drain(*limits)))

    async def _drain(self, timeout_s: float, last_bytes_s: float) -> None:
        _log.info("shutting down: %d requests may run for %.0f s more", self._context.num_active, timeout_s)
        try:
            await self._context.engine.drain(timeout_s)
            if not await self._context.wait_idle(last_bytes_s):
                _log.warning("%d requests did not end and are cut off", self._context.num_active)
        finally:
            self.should_exit, self.force_exit = True, self._is_cutting


class QuietCollector:
    """Chooses when Python's garbage collector walks through all objects: when the server is idle, or when memory has
    grown. With 2,500 answers under way that takes a tenth of a second, in which every thread waits.

    Reference counts free what requests leave behind, and collections of young objects, which take a millisecond, find
    most of the cycles. Rejected: the collector's own choice, a full collection each time the objects have become a
    quarter more, which is when a crowd of requests arrives; none at all, with which cycles would take memory for
    good."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._collected_bytes = 0  # resident after the last full collection

    def begin(self) -> None:
        """What is there stays: a model's libraries alone take tenths of a second to walk through."""
        self._collect()
        gc.freeze()
        young, middle, _ = self._thresholds
        if self._collected_bytes:  # else growth cannot be seen, and the collector goes on choosing
            gc.set_threshold(young, middle, _NEVER)

    def end(self) -> None:
        """Leave the choice to the collector again."""
        gc.set_threshold(*self._thresholds)

    def collect_if_due(self, *, is_idle: bool) -> None:
        """Called once a second. The middle generation's collections are counted since the last full one."""
        if (is_idle and gc.get_count()[2]) or resident_bytes() > self._collected_bytes + _MOST_GROWTH_BYTES:
            self._collect()

    def _collect(self) -> None:
        gc.collect()
        self._collected_bytes = resident_bytes()


def _note_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's own, but for clients that are gone while something is done to their sockets."""
    if isinstance(context.get("exception"), OSError) and "handle" in context:
        _log.debug("a connection was lost: %r", context["exception"])
    else:
        loop.default_exception_handler(context)


def make_server(app: FastAPI, settings: ServerSettings) -> DrainingServer:
    """A server for `app` that is not running yet: `run(sockets=[listener])` blocks, `request_stop()` ends it."""
    for library in ("uvicorn.error", "asyncio"):  # what they warn about is counted, answered, or advice for others
        adopt_logger(library, logging.ERROR)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=ApiConnection,
        ws="none",
        loop="asyncio",  # what the tests run on; another one may be installed by chance
        timeout_keep_alive=math.ceil(settings.keep_alive_timeout_s),
        timeout_graceful_shutdown=int(_LAST_BYTES_TIMEOUT_S),
    )
    return DrainingServer(config, app.state.context)


def run_server(
    app: FastAPI,
    settings: ServerSettings,
    on_listening: Callable[[str], None] | None = None,
    address: socket.socket | None = None,
) -> None:
    """Serve `app` until a signal ends it (from the main thread only are signals seen). `on_listening` is called once
    with the server's URL when it accepts connections. `UserError` when the address cannot be used.

    `address`: a socket from `reserve`, for callers that want to know early; it is closed at the end in any case.
    """
    with closing(address or reserve(settings.host, settings.port)) as listener:
        listen(listener, settings.host)
        url = url_of(listener)
        server = make_server(app, settings)

        def report() -> None:
            _log.info("listening on %s", url)
            if on_listening is not None:
                on_listening(url)

        server.on_ready = report
        server.run(sockets=[listener])


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to `host:port` that refuses connections until `listen`; `UserError` if the port is in use.

    For the time between the start and the loaded model: a wrong port is found at once, and no request hangs."""
    check_host("--host", host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        plain = host.strip("[]")
        fix = f"write {plain}, without brackets" if plain != host else "use 127.0.0.1, or 0.0.0.0 for all"
        raise UserError(f"--host {host} is not an address of this machine ({error.strerror}): {fix}") from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise UserError(_bind_problem(error, host, port)) from error
    return reserved


def check_apart(option: str, other: str, settings: ServerSettings) -> None:
    """`UserError` if the `HOST:PORT` of another listener, which begins first, is where the server is to listen."""
    host, port = split_address(other)
    is_same_host = is_wildcard(settings.host) or _addresses_of(host) & _addresses_of(settings.host)
    if port == settings.port != 0 and is_same_host:
        raise UserError(f"{option} {other} and --port {port} are one address: choose another port for one of them")


def _addresses_of(host: str) -> set[object]:
    """None if it cannot be found, which the listener there says."""
    try:
        return {found[4][0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def listen(reserved: socket.socket, host: str) -> None:
    """Let connections in. `UserError` if another process began to listen on this port meanwhile."""
    try:
        reserved.listen(_BACKLOG)
    except OSError as error:
        raise UserError(_bind_problem(error, host, reserved.getsockname()[1])) from error


def _bind_problem(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port (0 takes any free one)"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user: choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine: use 127.0.0.1, or 0.0.0.0 for all of its addresses"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def url_of(listener: socket.socket) -> str:
    """``http://127.0.0.1:8000`` for a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
