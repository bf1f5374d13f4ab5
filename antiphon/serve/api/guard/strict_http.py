"""h11's parser, without the leniencies through which two servers read one stream of bytes as different requests.

A proxy in front and this server must agree where a request ends. h11 lets Transfer-Encoding win over Content-Length,
ends lines at a bare line feed, joins continued lines and reads what stands beside the bytes of a chunk. All of that is
an error here; so are a Host that names no host and a version other than HTTP/1. A target with a scheme and a host, as
clients send it to proxies, becomes a path and a Host.

Chunks have a reader of their own: h11 makes an event of each, which takes ten microseconds for a byte.

Rejected: a parser of our own, which would have to be right about everything else as well; httptools, which is faster
and forgives more.
"""

import re

import h11
from h11._receivebuffer import ReceiveBuffer

_MAX_HEAD_BYTES = 16 * 1024
_MAX_HEADERS = 256
_MAX_CHUNK_LINE_BYTES = 256
_MAX_CHUNK_OVERHEAD_BYTES = 64 * 1024
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")  # others count in 32 or 64 bits
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
_CONTINUED_LINE = re.compile(rb"\n[ \t]")
_MAX_SHOWN_BYTES = 100

_Event = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


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
            raise h11.RemoteProtocolError(
                f"Host is {host[:_MAX_SHOWN_BYTES]!r}: it must be a name or an address, and a port"
            )
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
                raise h11.LocalProtocolError(f"not the size of a chunk: {bytes(received[position:end])!r}")
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
