"""Closing a connection so that the client can read the answer, although it has not sent everything yet.

A socket that is closed while bytes wait in it, or arrive later, makes the operating system reset the connection, and
the client may lose an answer that it has not read: 413 for a large body above all. So the server ends only its own
direction, and reads and drops what comes until the client closes, sends nothing for a while, or sends too much.

Rejected: reading the rest before the answer, for which a client that waits for the answer would wait in vain; leaving
the connection to its next request, which clients that asked for `Connection: close` do not send.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

_SILENCE_S = 2.0
_LONGEST_S = 20.0
MAX_DROPPED_BYTES = 128 * 2**20


class LingeringTransport(asyncio.Transport):
    """The transport of one connection, with a `close` that lingers where `must_linger` says so.

    `on_linger` is called once when it begins to linger; `is_closing` is true from then on. `at_event_end`: what was
    written last is a whole server-sent event, with its chunk's end if it has one."""

    def __init__(
        self, inner: asyncio.Transport, must_linger: Callable[[], bool], on_linger: Callable[[], None]
    ) -> None:
        super().__init__()
        self._inner = inner
        self._must_linger = must_linger
        self._on_linger = on_linger
        self._num_dropped_bytes = 0
        self._began_s = 0.0
        self._deadline_s = 0.0
        self._is_paused = self._is_held = False
        self.is_lingering = False
        self.at_event_end = False

    def close(self) -> None:
        if self.is_closing():
            return
        if self._must_linger():
            self.linger()
        else:
            self._inner.close()

    def linger(self) -> None:
        """End our direction behind what is written; what still comes must be given to `drop`."""
        self.is_lingering = True
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + _SILENCE_S
        self._on_linger()
        try:
            self._inner.write_eof()
        except OSError:  # the client is gone already
            self._inner.abort()
        self._is_paused = self._is_held = False
        self._inner.resume_reading()

    def finish(self) -> None:
        """Close behind what is written: the client sends nothing more."""
        self._inner.close()

    def drop(self, num_bytes: int) -> None:
        """The client has sent this much that is not wanted any more."""
        self._num_dropped_bytes += num_bytes
        self._deadline_s = min(time.monotonic() + _SILENCE_S, self._began_s + _LONGEST_S)
        if self._num_dropped_bytes > MAX_DROPPED_BYTES:
            self.abort()

    def end_if_late(self, now_s: float) -> None:
        """Close for good once the client had its time to read."""
        if self.is_lingering and now_s > self._deadline_s and not self.get_write_buffer_size():
            self._inner.close()

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        written = bytes(data[-4:])
        self.at_event_end = written.endswith((b"\n\n", b"\n\n\r\n"))
        self._inner.write(data)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def hold(self) -> None:
        """Read nothing until `release`, whatever `resume_reading` says meanwhile."""
        self._is_held = True
        self._inner.pause_reading()

    def release(self) -> None:
        """Read again, unless reading is paused."""
        self._is_held = False
        if not self._is_paused:
            self._inner.resume_reading()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_held:
            self._inner.resume_reading()
