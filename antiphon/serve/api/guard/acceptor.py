"""Takes connections from the listening socket, no more than the server has room and descriptors for.

asyncio accepts as many connections as wait in one go, two thousand here, before any of them can be looked at, and each
takes a descriptor: a crowd that connects and waits would leave none for workers, logs and processes. Here a few are
accepted at a time, and none at all while there is no room. The rest waits in the operating system's queue. When a
descriptor is missing all the same, the connection that has waited longest makes room. While connections wait for the
event loop to look at their bytes, one at a time is accepted: a crowd of new ones gets in no one's way.

Rejected: asyncio's own server with a small `backlog`, which is the length of the operating system's queue as well.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable

from antiphon.base.logging import get_logger
from antiphon.serve.api.guard.connections import Connections

_log = get_logger("serve.api")

_BATCH = 16
_RETRY_S = 0.25
_SECONDS_BETWEEN_WARNINGS = 60.0
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts on one listening socket, from `open` to `close`. Used from the event loop's thread only."""

    def __init__(
        self,
        listener: socket.socket,
        room: Connections,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listener = listener
        self._room = room
        self._new_protocol = new_protocol
        self._loop = loop
        self._greetings: set[asyncio.Task[None]] = set()
        self._is_open = self._is_reading = False
        self._warned_s = -_SECONDS_BETWEEN_WARNINGS

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._is_open = True
        self.resume()

    def close(self) -> None:
        """Accept no more; the socket stays the caller's."""
        self._pause()
        self._is_open = False

    def resume(self) -> None:
        """Go on accepting: there is room again, or time has passed."""
        if self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._listener, self._accept_some)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener)

    def _accept_some(self) -> None:
        for _ in range(1 if self._room.line else _BATCH):
            if not self._room.has_room():
                self._wait_for_room()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    self._warn(error)
                    self._wait_for_room()
                    return
                continue  # this client is gone already
            connection.setblocking(False)
            self._room.note_accepted()
            greeting = self._loop.create_task(self._greet(connection))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    def _wait_for_room(self) -> None:
        self._pause()
        self._loop.call_later(_RETRY_S, self.resume)
        self._room.free_a_socket()

    def _warn(self, error: OSError) -> None:
        if time.monotonic() - self._warned_s >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_s = time.monotonic()
            _log.warning("cannot accept a connection: %s; idle ones are closed (ulimit -n)", error.strerror)

    async def _greet(self, connection: socket.socket) -> None:
        """Give the connection its protocol, which says so when it is lost."""
        protocol = None
        try:
            protocol = self._new_protocol()
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except (OSError, ValueError) as error:  # gone, or no descriptor for the event loop's set
            _log.debug("a connection was lost while it was accepted: %s", error)
            connection.close()
            self._room.note_closed()
