"""The server's TCP connections: uvicorn's HTTP/1.1 protocol with deadlines, a cap, and refusals in OpenAI's shape.

uvicorn waits without end for the rest of a request's head, for the rest of a body that nobody reads, and for a client
that takes no bytes. Here each of these waits has a deadline (`ServerSettings`), looked at once a second for all
connections. At the cap the connection that has waited longest for a request makes room for the new one; when every
connection has a request in progress, the new one is told 503 and closed.

Rejected: a timer for each wait, armed and cancelled for every request, for limits that need no precision; uvicorn's
`limit_concurrency`, which lets idle connections keep busy clients out and answers in plain text.
"""

import asyncio
import contextlib
import math
import resource
import socket
import struct
import sys
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from antiphon.base.logging import get_logger
from antiphon.serve.api.errors import ApiError
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.settings import ServerSettings

_log = get_logger("serve.api")

_SPARE_FILES = 256  # for the workers' sockets, the log, libraries
_LINGER_S = 2.0
_UNSENT_IN_KERNEL_BYTES = 64 * 1024
_MAX_LINGERING = 256
_LEAST_TAKEN_BYTES = 16 * 1024
_MAX_REASON_CHARACTERS = 200


class Connections(ServerState):
    """All connections of one server. Used from the event loop's thread only."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        super().__init__()
        self.settings = settings
        self.limit = _affordable(settings.max_connections)
        self.waiting: dict[ApiConnection, None] = {}  # for a request, longest first
        self.refused: set[ApiConnection] = set()
        self._has_refused = False
        self._ended = metrics.connections_ended
        metrics.connections.set_function(lambda: len(self.connections))

    def check(self, now_s: float) -> None:
        """End the connections that are past a deadline. `now_s` is on the monotonic clock."""
        for connection in [*self.connections, *self.refused]:
            assert isinstance(connection, ApiConnection)
            connection.check(now_s)

    def make_room(self) -> bool:
        """Whether the newest connection may stay; at the cap another one that waits for a request is closed for it."""
        if len(self.connections) <= self.limit:
            return True
        oldest = next((connection for connection in self.waiting if connection.is_flushed), None)
        if oldest is None:
            return False
        self.count_end("made room")
        self.forget(oldest)
        oldest.transport.close()
        return True

    def forget(self, connection: "ApiConnection") -> None:
        """This connection counts no more."""
        self.connections.discard(connection)
        self.waiting.pop(connection, None)
        self.refused.discard(connection)

    def note_refusal(self) -> None:
        """A connection was turned away; said once, counted always."""
        if not self._has_refused:
            self._has_refused = True
            _log.warning("all %d connections are in use, more are refused: see --max-connections", self.limit)
        self.count_end("refused")

    def count_end(self, reason: str) -> None:
        self._ended.labels(reason).inc()


class ApiConnection(H11Protocol):
    """One connection. It *waits* while no request is in progress: when new, between two requests, in the middle of a
    head."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(server_state, Connections)
        super().__init__(config, server_state, app_state, _loop)
        self._all = server_state
        self._settings = server_state.settings
        self._head_deadline_s: float | None = None
        self._is_refused = False
        self._watched_s = 0.0
        self._watched_bytes: int | None = None

    @property
    def is_flushed(self) -> bool:
        """All bytes of earlier answers are with the operating system."""
        return self.transport.get_write_buffer_size() == 0

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- what asyncio and uvicorn call -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What a client does not read waits here, where it is counted, and not in megabytes of the kernel's buffers.
        self._set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_IN_KERNEL_BYTES)
        if self._all.make_room():
            self._all.waiting[self] = None
            self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s
            return
        self._all.note_refusal()
        message = f"all {self._all.limit} connections of this server are in use: try again later"
        self._refuse(ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # the rest of a request that has its answer
        if self._head_deadline_s is None and not self._is_answering:
            self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s
        super().data_received(data)
        if self._is_answering:
            self._head_deadline_s = None
            self._all.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request when the client has sent it already
        if self.transport.is_closing() or self._is_answering:
            return
        self._all.waiting[self] = None
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            # A body that nobody reads, or half a head: the timeout for idle connections is not for those.
            self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watched_bytes = None

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this while it handles the parser's error, which knows more than `msg`.
        error = sys.exc_info()[1]
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(ApiError(431, "the request line and headers are too long: send shorter ones"))
        else:
            reason = " ".join(str(error or msg).split())[:_MAX_REASON_CHARACTERS]
            self._refuse(ApiError(400, f"this is not a valid HTTP/1.1 request: {reason}"))

    # --- deadlines and refusals ------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """End the connection if it is past a deadline."""
        if self._head_deadline_s is not None and now_s > self._head_deadline_s:
            self._head_deadline_s = None
            self._end_waiting()
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or not (self.flow.write_paused or self.transport.is_closing()):
            self._watched_bytes = None  # writing goes on: what is unsent now need not be what was unsent before
        elif self._watched_bytes is None or unsent_bytes <= self._watched_bytes - _LEAST_TAKEN_BYTES:
            self._watched_s, self._watched_bytes = now_s, unsent_bytes
        elif now_s - self._watched_s > self._settings.send_timeout_s:
            _log.warning(
                "%s took less than %d bytes in %.0f s (--send-timeout): closing, %d bytes unsent",
                self._name, _LEAST_TAKEN_BYTES, self._settings.send_timeout_s, unsent_bytes,
            )  # fmt: skip
            self._all.count_end("send timeout")
            self._reset()

    def _reset(self) -> None:
        """Close at once, and have the operating system drop what it holds for this client as well."""
        self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _set_option(self, level: int, option: int, value: int | bytes) -> None:
        with contextlib.suppress(OSError):  # the client is gone already: asyncio hears of it in a moment
            self.transport.get_extra_info("socket").setsockopt(level, option, value)

    def _end_waiting(self) -> None:
        """The head, or the unread rest of a body, did not arrive in time; or a refused client had time to read why."""
        if self._is_refused:
            self.transport.close()
            return
        self._all.count_end("header timeout")
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            timeout_s = math.ceil(self._settings.header_timeout_s)
            self._refuse(ApiError(408, f"the request's headers did not arrive within {timeout_s} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer `error` and close; what still comes is read and dropped for a moment, because closing at once would
        reset the connection and the client might lose the answer."""
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self._all.forget(self)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or len(self._all.refused) >= _MAX_LINGERING:
            self._reset()
            return
        self._is_refused = True
        self._all.refused.add(self)
        self._head_deadline_s = time.monotonic() + _LINGER_S
        self.transport.write(self._rendered(error))
        self.transport.write_eof()

    def _rendered(self, error: ApiError) -> bytes:
        response = error.response()
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        parts = (
            self.conn.send(h11.Response(status_code=error.status, headers=headers)),
            self.conn.send(h11.Data(data=bytes(response.body))),
            self.conn.send(h11.EndOfMessage()),
        )
        return b"".join(part for part in parts if part is not None)

    @property
    def _name(self) -> str:
        return "client {}:{}".format(*self.client) if self.client else "a client"


def _affordable(asked: int) -> int:
    """How many connections the limit on open files allows, at most `asked`; raises the soft limit if it may."""
    needed = asked + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return asked
    affordable = max(1, soft - _SPARE_FILES)
    _log.warning(
        "at most %d connections instead of %d: this process may open %d files (ulimit -n)", affordable, asked, soft
    )
    return affordable
