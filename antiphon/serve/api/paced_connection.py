"""uvicorn's HTTP/1.1 protocol, with the clients' bytes handled in turns (`ReadingLine`) instead of as they come.

What is read of a connection stands in the line, and the connection is not read until its turn. The same for a request
that came before the answer to the one in front of it, for the end of half a body, and for refusals of many at once.

Rejected: reading in smaller pieces only, with which a turn of the event loop still serves every client.
"""

import asyncio
import time
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from antiphon.base.logging import get_logger
from antiphon.serve.api.connections import Connections
from antiphon.serve.api.errors import ApiError
from antiphon.serve.api.lingering import LingeringTransport
from antiphon.serve.api.strict_http import StrictConnection

_log = get_logger("serve.api")

_FIRST_PIECES = 2  # a head and a short body, which many clients send apart


class PacedConnection(H11Protocol, asyncio.BufferedProtocol):
    """See the module's docstring. What happens to a request is the subclass's affair."""

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
        self._all = server_state
        self._piece: bytes | None = None  # received and waiting in the line; empty: the end of the client's direction
        self._refusal: ApiError | None = None  # waits in the line
        self._num_pieces = 0  # since a request began
        self._in_line_s = 0.0
        self._is_completing = False
        self._ended_s: float | None = None  # when the client ended its direction

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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

    def refuse_in_turn(self, error: ApiError) -> None:
        """As `refuse`, but within what a turn of the event loop may take; nothing more is read."""
        self._refusal = error
        self._stand_in_line(None, is_first=False)

    # --- what the subclass does ------------------------------------------------------------------------------------

    def refuse(self, error: ApiError) -> None:
        """Answer `error` in the place of what is in progress, if nothing of it is sent yet, and close."""
        raise NotImplementedError

    def reset(self) -> None:
        """Close at once."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait for a request, unless one is in progress."""
        raise NotImplementedError

    def _end_body(self) -> None:
        """The client has ended its direction, in the middle of a body when that was seen."""
        raise NotImplementedError

    def _postpone(self, waited_s: float) -> None:
        """Move all deadlines of the client: the server let it wait."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return "client {}:{}".format(*self.client) if self.client else "a client"
