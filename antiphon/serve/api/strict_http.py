"""h11's parser, without the leniencies through which two servers read one stream of bytes as different requests.

A proxy in front and this server must agree where a request ends. h11 lets Transfer-Encoding win over Content-Length,
ends lines at a bare line feed, joins continued lines and ignores what chunks carry beside their bytes. All of that is
an error here; so are a Host that names no host and a version other than HTTP/1. A target with a scheme and a host, as
clients send it to proxies, becomes a path and a Host.

Rejected: a parser of our own, which would have to be right about everything else as well; httptools, which is faster
and forgives more.
"""

import re

import h11

_MAX_HEAD_BYTES = 16 * 1024
_MAX_CHUNK_OVERHEAD_BYTES = 128 * 1024
_MAX_CHUNK_DIGITS = 8  # others count in 32 or 64 bits
_CHUNK_SIZE = re.compile(rb"(?:\r\n)?0*([0-9A-Fa-f]+)")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
_CONTINUED_LINE = re.compile(rb"\n[ \t]")

_Event = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


class StrictConnection(h11.Connection):
    """The server's side of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_HEAD_BYTES)
        self.request_method = b""
        self._unread: bytes | None = None  # of what was received; a copy, so it is kept for the next event
        self._is_chunked = False
        self._num_body_bytes = 0
        self._num_wire_bytes = 0

    def receive_data(self, data: bytes) -> None:
        """More of what the client sends."""
        super().receive_data(data)
        self._unread = None

    def next_event(self) -> _Event:
        """h11's next event; `h11.RemoteProtocolError` with the reason."""
        has_lines = self.their_state is h11.IDLE or (self._is_chunked and self.their_state is h11.SEND_BODY)
        if not has_lines:
            self._unread = None
            return super().next_event()
        before = self.trailing_data[0] if self._unread is None else self._unread
        event: _Event = super().next_event()
        self._unread = self.trailing_data[0]
        consumed = before[: len(before) - len(self._unread)]
        if isinstance(event, h11.Request):
            return self._checked_request(event, consumed)
        self._check_chunks(event, consumed)
        return event

    def _checked_request(self, request: h11.Request, head: bytes) -> h11.Request:
        self.request_method = request.method
        _check_lines(head)
        headers = dict(request.headers)
        self._is_chunked = b"transfer-encoding" in headers
        self._num_body_bytes = self._num_wire_bytes = 0
        if not request.http_version.startswith(b"1."):
            version = request.http_version.decode("ascii")
            raise h11.RemoteProtocolError(f"HTTP/{version} is not spoken here: use HTTP/1.1")
        if self._is_chunked and b"content-length" in headers:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding contradict each other: send one")
        if self._is_chunked and request.http_version == b"1.0":
            raise h11.RemoteProtocolError("Transfer-Encoding does not exist in HTTP/1.0")
        request = _with_path(request)
        host = dict(request.headers).get(b"host", b"")
        if not _HOST.fullmatch(host):
            raise h11.RemoteProtocolError(f"Host is {host[:100]!r}: it must be a name or an address, and a port")
        return request

    def _check_chunks(self, event: _Event, consumed: bytes) -> None:
        if isinstance(event, h11.Data):
            self._num_body_bytes += len(event.data)
        elif isinstance(event, h11.EndOfMessage):
            _check_lines(consumed)
            if event.headers:
                raise h11.RemoteProtocolError("trailers behind a body are not read: send them as headers")
        if event is h11.NEED_DATA or (isinstance(event, h11.Data) and event.chunk_start):
            size = _CHUNK_SIZE.match(consumed)
            if size is not None and len(size.group(1)) > _MAX_CHUNK_DIGITS:
                raise h11.RemoteProtocolError(f"a chunk of {size.group(1).decode('ascii')} bytes (hexadecimal)")
        self._num_wire_bytes += len(consumed)
        if self._num_wire_bytes > 2 * self._num_body_bytes + _MAX_CHUNK_OVERHEAD_BYTES:
            raise h11.RemoteProtocolError("the chunks of the body hold too little: send larger ones, no extensions")


def _check_lines(lines: bytes) -> None:
    if lines.count(b"\n") != lines.count(b"\r\n"):
        raise h11.RemoteProtocolError("a line ends without a carriage return: end lines with CR LF")
    if _CONTINUED_LINE.search(lines):
        raise h11.RemoteProtocolError("a header goes on in the next line: write it in one")


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
