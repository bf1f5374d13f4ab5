"""One TCP connection: uvicorn's HTTP/1.1 protocol with turns, deadlines, and refusals in OpenAI's shape.

*Turns.* What is read of a connection stands in a line (`ReadingLine`), and the connection is not read until its turn.
So a turn of the event loop never serves every client at once. The same holds for a request that came before the answer
to the one in front of it, for the end of half a body, and for refusals of many at once.

*Deadlines.* uvicorn waits without end for the rest of a request's head, for the rest of an unread body, and for a
client that takes no bytes. Here each of these waits has a deadline (`ServerSettings`), looked at once a second.
Requests are read with the strict parser, and a connection closes only when the client had time to read its answer
(`LingeringTransport`).

A client may end its own direction behind its request and still get the answer. Whether it is gone altogether shows when
something is written. So such a client is sent an interim answer (100) or a comment in its stream once a second.

Rejected: a timer for each wait, armed and cancelled for every request, for limits that need no precision; taking the
end of the client's direction for the end of the connection, as most servers do; reading in smaller pieces only, with
which a turn of the event loop still serves every client.
"""

import array
import asyncio
import contextlib
import fcntl
import http
import math
import socket
import struct
import sys
import termios
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from antiphon.base.logging import get_logger
from antiphon.serve.api.errors import ApiError
from antiphon.serve.api.guard.connections import Connections
from antiphon.serve.api.guard.http_rules import MAX_DROPPED_BYTES, LingeringTransport, StrictConnection, reason_of

_log = get_logger("serve.api")

_FIRST_PIECES = 2  # a head and a short body, which many clients send apart
_UNSENT_IN_KERNEL_BYTES = 64 * 1024
_LEAST_TAKEN_BYTES = 16 * 1024
_INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"
_EVENT_COMMENT = b":\n\n"


class ApiConnection(H11Protocol, asyncio.BufferedProtocol):
    """One connection. It *waits* while no request is in progress: when new, between two requests, in the middle of a
    head."""

    transport: LingeringTransport
    conn: StrictConnection

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(server_state, Connections)
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection()
        self.body_began_s: float | None = None
        self._all = server_state
        self._piece: bytes | None = None  # received and waiting in the line; empty: the end of the client's direction
        self._refusal: ApiError | None = None  # waits in the line
        self._num_pieces = 0  # since a request began
        self._in_line_s = 0.0
        self._is_completing = False
        self._ended_s: float | None = None  # when the client ended its direction
        self._settings = self._all.settings
        self._head_deadline_s: float | None = None
        self._num_dropped_bytes = 0
        self._watched_s = 0.0
        self._watched_bytes: int | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way in either direction, as far as this machine knows."""
        if self.transport.get_write_buffer_size() or self in self._all.line:
            return False
        unread = array.array("i", [0])  # a request may be there that was not looked at yet
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
        return not unread[0]

    @property
    def address(self) -> str:
        """The client's, without its port."""
        return self.client[0] if self.client else ""

    @property
    def _name(self) -> str:
        return "client {}:{}".format(*self.client) if self.client else "a client"

    @property
    def _path(self) -> str:
        """The path of the request that is in progress, as the application knows it; errors have its API's shape."""
        path: str = self.scope["path"] if self._is_answering else ""
        return path.removeprefix(self._settings.root_path)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _sends_more(self) -> bool:
        """The client is in the middle of a request's body, or has sent another request."""
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0] or self._piece)

    # --- what asyncio and uvicorn call -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, lambda: self._sends_more, self._begin_lingering))
        # What a client does not read waits here, where it is counted, and not in megabytes of the kernel's buffers.
        self._set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_IN_KERNEL_BYTES)
        if self._all.make_room():
            self._all.waiting[self] = None
            self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s
            return
        self._all.note_refusal()
        message = f"all {self._all.limit} connections of this server are in use: try again later"
        self.refuse(ApiError(503, message, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.line.discard(self)
        super().connection_lost(exc)
        self._all.forget(self)
        self._all.note_closed()

    def data_received(self, data: bytes) -> None:
        if not self._is_answering:
            if self._head_deadline_s is None:
                self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s
            if self.conn.their_state is h11.SEND_BODY and not self._may_drop(len(data)):
                return
        super().data_received(data)
        if self._is_answering:
            self._head_deadline_s = None
            self._all.waiting.pop(self, None)
        self._note_body()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: the client may have ended its direction only."""
        self._ended_s = time.monotonic()
        if not self._is_answering or self.transport.is_lingering:
            return False
        if self.cycle.more_body:
            self._stand_in_line(b"", is_first=False)
        return True

    def _end_body(self) -> None:
        """The client has ended its direction, in the middle of a body when that was seen."""
        if self._is_answering and self.cycle.more_body:
            self.refuse(ApiError(400, "the connection ended before the whole body had arrived"))
            self.transport.finish()
        elif not self._is_answering:
            self.transport.close()

    def _settle(self) -> None:
        """Wait for a request, unless one is in progress."""
        self._note_body()
        if self.transport.is_closing():
            return
        if self._is_answering:
            self._head_deadline_s = None
            self._all.waiting.pop(self, None)
            return
        if self._ended_s is not None:
            self.transport.close()
            return
        self._all.waiting[self] = None
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            # An unread body, or half a head: the timeout for idle connections is not for those.
            self._head_deadline_s = time.monotonic() + self._settings.header_timeout_s

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watched_bytes = None

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this while it handles the parser's error, which knows more than `msg`.
        error = sys.exc_info()[1]
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self.refuse(ApiError(431, "the request line and headers are too long: send shorter ones"))
        else:
            reason = reason_of(error) if isinstance(error, h11.ProtocolError) else msg
            self.refuse(ApiError(400, f"this is not a valid HTTP/1.1 request: {reason}"))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked: that is what a server does that speaks nothing else."""

    # --- the line --------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._all.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.transport.is_lingering:
            self.transport.drop(nbytes)
            return
        received = bytes(self._all.receive_buffer[:nbytes])
        if self in self._all.line:  # it was on its way here when reading stopped
            self._piece = (self._piece or b"") + received
            return
        begins = not self._is_answering and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        self._num_pieces = 1 if begins else self._num_pieces + 1
        self._stand_in_line(received, is_first=self._num_pieces <= _FIRST_PIECES)

    def _stand_in_line(self, piece: bytes | None, *, is_first: bool) -> None:
        """Have `take_piece` called, at once if nothing waits; until then nothing more is read."""
        self._piece = piece
        self._in_line_s = time.monotonic()
        if self._all.line.is_free:
            self._all.line.take(self)
            return
        self._unset_keepalive_if_required()
        if self._ended_s is None:
            self.transport.hold()
        self._all.line.add(self, is_first=is_first)

    def take_piece(self) -> bool:
        """Handle what waits in the line; whether a request has started. Raises nothing."""
        piece, self._piece = self._piece, None
        refusal, self._refusal = self._refusal, None
        if self.transport.is_closing():
            return False
        if refusal is not None and self._is_answering:
            self.refuse(refusal)
            return False
        self._postpone(time.monotonic() - self._in_line_s)
        before = self.cycle
        try:
            if piece is None:
                self.handle_events()
                self._settle()
            elif piece:
                self.data_received(piece)
            else:
                self._end_body()
        except Exception:
            _log.exception("%s sent something that this server cannot handle: closing", self._name)
            self.reset()
        if self._ended_s is None:
            self.transport.release()
        return self.cycle is not before

    def _postpone(self, waited_s: float) -> None:
        """Move all deadlines of the client: the server let it wait."""
        if self._head_deadline_s is not None:
            self._head_deadline_s += waited_s
        if self.body_began_s is not None:
            self.body_began_s += waited_s

    def handle_events(self) -> None:
        if not self._is_completing:
            super().handle_events()

    def on_response_complete(self) -> None:
        self._is_completing = True
        try:
            super().on_response_complete()  # would begin the next request when the client has sent it already
        finally:
            self._is_completing = False
        if self in self._all.line:
            self._unset_keepalive_if_required()
        elif self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._num_pieces = _FIRST_PIECES
            self._stand_in_line(None, is_first=False)
        self._num_dropped_bytes = 0
        if self not in self._all.line:
            self._settle()
        else:
            self._all.waiting[self] = None

    # --- deadlines and refusals ------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """End the connection if it is past a deadline."""
        self.transport.end_if_late(now_s)
        if self._head_deadline_s is not None and now_s > self._head_deadline_s and self not in self._all.line:
            self._head_deadline_s = None
            self._end_waiting()
        self._probe(now_s)
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
            self.reset()

    def _probe(self, now_s: float) -> None:
        """Write to a client that ended its direction: if it is gone, the connection is lost with one of the next."""
        if self._ended_s is None or now_s - self._ended_s < 1.0 or self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self.transport.write(_INTERIM_ANSWER)
        elif self._is_answering and self.transport.at_event_end:
            comment = self.conn.send(h11.Data(data=_EVENT_COMMENT))
            self.transport.write(comment or b"")

    def reset(self) -> None:
        """Close at once, and have the operating system drop what it holds for this client as well."""
        self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _set_option(self, level: int, option: int, value: int | bytes) -> None:
        with contextlib.suppress(OSError):  # the client is gone already: asyncio hears of it in a moment
            self.transport.get_extra_info("socket").setsockopt(level, option, value)

    def _note_body(self) -> None:
        """Remember since when the application waits for a body."""
        if not self._is_answering or not self.cycle.more_body:
            self.body_began_s = None
        elif self.body_began_s is None:
            self.body_began_s = time.monotonic()

    def _may_drop(self, num_bytes: int) -> bool:
        """Whether this much more of a body that has its answer may come; else the connection ends."""
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes <= MAX_DROPPED_BYTES:
            return True
        self.reset()
        return False

    def _end_waiting(self) -> None:
        """The head, or the unread rest of a body, did not arrive in time."""
        self._all.count_end("header timeout")
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            timeout_s = math.ceil(self._settings.header_timeout_s)
            self.refuse(ApiError(408, f"the request's headers did not arrive within {timeout_s} s"))
        else:
            self.transport.close()

    def refuse(self, error: ApiError) -> None:
        """Answer `error` in the place of what is in progress, if nothing of it is sent yet, and close."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.reset()
            return
        self.transport.write(self._rendered(error))
        self.transport.linger()

    def refuse_in_turn(self, error: ApiError) -> None:
        """As `refuse`, but within what a turn of the event loop may take; nothing more is read."""
        self._refusal = error
        self._stand_in_line(None, is_first=False)

    def _begin_lingering(self) -> None:
        self._all.line.discard(self)
        self._unset_keepalive_if_required()
        self._head_deadline_s = self.body_began_s = None
        self._all.linger(self)

    def _rendered(self, error: ApiError) -> bytes:
        response = error.response(self._path)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        phrase = http.HTTPStatus(error.status).phrase
        body = b"" if self.conn.request_method == b"HEAD" else bytes(response.body)
        parts = (
            self.conn.send(h11.Response(status_code=error.status, headers=headers, reason=phrase)),
            self.conn.send(h11.Data(data=body)),
            self.conn.send(h11.EndOfMessage()),
        )
        return b"".join(part for part in parts if part is not None)
