"""What a connection takes as HTTP (`StrictConnection`), and how it closes so that its answer is read
(`LingeringTransport`).

h11's parser, without the leniencies through which two servers read one stream of bytes as different requests. A proxy
in front and this server must agree where a request ends. h11 lets Transfer-Encoding win over Content-Length, ends lines
at a bare line feed, joins continued lines and reads what stands beside the bytes of a chunk. All of that is an error
here; so are a Host that names no host and a version other than HTTP/1. A target with a scheme and a host, as clients
send it to proxies, becomes a path and a Host. Chunks have a reader of their own: h11 makes an event of each, which
takes ten microseconds for a byte. Rejected: a parser of our own, which would have to be right about everything else as
well; httptools, which is faster and forgives more.

A socket that is closed while bytes wait in it, or arrive later, makes the operating system reset the connection, and
the client may lose an answer that it has not read: 413 for a large body above all. So the server ends only its own
direction, and reads and drops what comes until the client closes, sends nothing for a while, or sends too much.
Rejected: reading the rest before the answer, for which a client that waits for the answer would wait in vain; leaving
the connection to its next request, which clients that asked for `Connection: close` do not send.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

from antiphon.base.errors import shortened

_MAX_HEAD_BYTES = 16 * 1024
_MAX_HEADERS = 256
_MAX_CHUNK_LINE_BYTES = 256
_MAX_REASON_CHARACTERS = 200
_MAX_CHUNK_OVERHEAD_BYTES = 64 * 1024
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")  # others count in 32 or 64 bits
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
_CONTINUED_LINE = re.compile(rb"\n[ \t]")

# How h11 shows what it was sent, in the words of Python.
_PYTHON_BYTES = re.compile(r"""\b(?:bytearray\()?b(?P<value>(['"]).*\2)\)?""", re.DOTALL)

_Event = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]
_SILENCE_S = 2.0
_LONGEST_S = 20.0
MAX_DROPPED_BYTES = 128 * 2**20


class StrictConnection(h11.Connection):
    """The server's side of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self.request_method = b""

    def next_event(self) -> _Event:
        """h11's next event; `h11.RemoteProtocolError` with the reason."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = self.trailing_data[0]
        if before.count(b"\n", 0, before.find(b"\n\r\n")) > _MAX_HEADERS:
            raise h11.RemoteProtocolError(f"more than {_MAX_HEADERS} headers", error_status_hint=431)
        event: _Event = super().next_event()
        if isinstance(event, h11.Request):
            return self._checked(event, head=before[: len(before) - len(self.trailing_data[0])])
        return event

    def _checked(self, request: h11.Request, head: bytes) -> h11.Request:
        self.request_method = request.method
        if head.count(b"\n") != head.count(b"\r\n"):
            raise h11.RemoteProtocolError("a line ends without a carriage return: end lines with CR LF")
        if _CONTINUED_LINE.search(head):
            raise h11.RemoteProtocolError("a header goes on in the next line: write it in one")
        if not request.http_version.startswith(b"1."):
            version = request.http_version.decode("ascii")
            raise h11.RemoteProtocolError(f"HTTP/{version} is not spoken here: use HTTP/1.1")
        headers = dict(request.headers)
        if b"transfer-encoding" in headers:
            if b"content-length" in headers:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding contradict each other: send one")
            if request.http_version == b"1.0":
                raise h11.RemoteProtocolError("Transfer-Encoding does not exist in HTTP/1.0")
            self._reader = _ChunkReader()
        request = _with_path(request)
        host = dict(request.headers).get(b"host", b"")
        if not _HOST.fullmatch(host):
            raise h11.RemoteProtocolError(f"Host is {_shown(host)}: it must be a name or an address, and a port")
        return request


class _ChunkReader:
    """A body in chunks, in the place of h11's reader: what a piece of the stream holds of it becomes one event."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._num_left = 0  # bytes of the chunk that has begun
        self._is_in_chunk = self._is_last = False
        self._num_body_bytes = self._num_overhead_bytes = 0

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        self._received += buffer.maybe_extract_at_most(len(buffer)) or b""
        parts: list[bytearray] = []
        position = self._read(parts)
        del self._received[:position]
        num_bytes = sum(map(len, parts))
        self._num_body_bytes += num_bytes
        self._num_overhead_bytes += position - num_bytes
        if self._num_overhead_bytes > self._num_body_bytes + _MAX_CHUNK_OVERHEAD_BYTES:
            raise h11.LocalProtocolError("the chunks of the body hold too little: send larger ones")
        if parts:
            return h11.Data(data=b"".join(parts))
        if self._is_last:
            buffer += self._received  # the next request
            return h11.EndOfMessage()
        return None

    def _read(self, parts: list[bytearray]) -> int:
        """Add the bytes of chunks to `parts`; how much of `_received` is done with."""
        received, position = self._received, 0
        while not self._is_last:
            if self._num_left:
                part = received[position : position + self._num_left]
                if not part:
                    break
                parts.append(part)
                position += len(part)
                self._num_left -= len(part)
                continue
            if self._is_in_chunk:
                if len(received) < position + 2:
                    break
                _expect_line_end(received[position : position + 2])
                self._is_in_chunk = False
                position += 2
            end = received.find(b"\r\n", position, position + _MAX_CHUNK_LINE_BYTES)
            if end < 0:
                if len(received) - position >= _MAX_CHUNK_LINE_BYTES:
                    raise h11.LocalProtocolError("the line before a chunk is too long: send its size only")
                break
            line = _CHUNK_LINE.fullmatch(received, position, end)
            if line is None:
                raise h11.LocalProtocolError(f"not the size of a chunk: {_shown(received[position:end])}")
            size = int(line.group(1), 16)
            if size:
                self._num_left, self._is_in_chunk, position = size, True, end + 2
                continue
            after = received[end + 2 : end + 4]
            if b"\r\n".startswith(after) and len(after) < 2:
                break
            _expect_line_end(after, "trailers behind a body are not read: send headers")
            self._is_last, position = True, end + 4
        return position


def _shown(sent: bytes | bytearray) -> str:
    return repr(shortened(sent.decode("latin-1")))


def reason_of(error: h11.ProtocolError) -> str:
    """What is wrong with a request, in words for the client."""
    reason = _PYTHON_BYTES.sub(lambda found: found["value"], " ".join(str(error).split()))
    return shortened(reason, _MAX_REASON_CHARACTERS)


def _expect_line_end(found: bytearray, problem: str = "a chunk is longer than its size") -> None:
    if found != b"\r\n":
        raise h11.LocalProtocolError(problem)


def _with_path(request: h11.Request) -> h11.Request:
    """``GET http://name/path`` as ``GET /path`` for the host ``name``, which counts more than the header Host."""
    absolute = _ABSOLUTE_TARGET.fullmatch(request.target)
    if absolute is None:
        return request
    host, path = absolute.groups()
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", host), *others],
        http_version=request.http_version,
    )


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
