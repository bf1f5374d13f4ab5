"""Random bytes as HTTP: whatever comes, the server answers with something below 500 or closes, and keeps nothing.

Requests that are right are bent: bytes changed, doubled, left out; heads that grow; chunked bodies with wrong sizes;
several at once, in pieces, with an end too early. The seeds are fixed.
"""

import random
import re
import socket
from collections.abc import Iterator

import pytest

from tests.serve.api_harness import Live, fake_engine, live, post
from tests.waiting import wait_until

NUM_CONNECTIONS = 60
COMPLETION = post("/v1/completions", {"prompt": "x", "max_tokens": 2})
STREAM = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2})
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    b'8\r\n{"prompt\r\n6;a=b\r\n":"x"}\r\n0\r\ntrailer: x\r\n\r\n'
)
LINES = (
    b"content-length: 5",
    b"content-length: 99999999999999999999",
    b"content-length: 1, 1",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"expect: 100-continue",
    b"connection: close",
    b"connection: upgrade\r\nupgrade: websocket",
    b"upgrade: h2c",
    b"host: y",
    b"x: " + b"y" * 70_000,
    b" folded",
    b"content-type: \xff\x00",
    b"authorization: \xe4",
    b"content-encoding: gzip",
)
BYTES = (
    b"\r\n",
    b"\n",
    b"\x00",
    b"\xff",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"HTTP/1.1",
    b"%00",
    b"//",
    b"?",
    b"#",
    b"ffffffff\r\n",
)


def bent(request: bytes, draw: random.Random) -> bytes:
    """One request with up to three faults."""
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(request) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            request = request[:place] + draw.choice(BYTES) + request[place:]
        elif kind == 1:
            request = request[:place] + request[place + draw.randrange(1, 20) :]
        elif kind == 2:
            request = request[:place] + bytes([draw.randrange(256)]) + request[place + 1 :]
        elif kind == 3:
            head, line_end, rest = request.partition(b"\r\n")
            request = head + line_end + draw.choice(LINES) + b"\r\n" + rest
        else:
            request = request[:place] + request[max(0, place - 30) :]
    return request


def talk(connection: socket.socket, draw: random.Random) -> bytes:
    """Send some requests in pieces; what came back until the server fell silent or closed."""
    sent = b"".join(bent(draw.choice((COMPLETION, STREAM, GET, CHUNKED)), draw) for _ in range(draw.randrange(1, 4)))
    received = b""
    connection.settimeout(0.2)
    try:
        while sent:
            size = draw.choice((1, 7, 100, 100_000)) if len(sent) < 1000 else 100_000
            connection.sendall(sent[:size])
            sent = sent[size:]
        ending = draw.randrange(4)
        if ending == 0:
            return received
        if ending == 1:
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            received += part
    except (TimeoutError, ConnectionError):
        pass
    return received


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_engine(), header_timeout_s=2.0, body_timeout_s=2.0, keep_alive_timeout_s=2.0) as running:
        yield running


@pytest.mark.parametrize("seed", [0, 242, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_no_bytes_bring_the_server_down(server: Live, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    statuses = set()
    for _ in range(NUM_CONNECTIONS):
        with server.connect() as connection:
            received = talk(connection, draw)
        for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received):
            statuses.add(int(status))
    assert statuses, "not one answer came"
    assert max(statuses) < 500
    assert server.complete(max_tokens=1).status_code == 200
    context = server.server.config.app.state.context  # type: ignore[union-attr]
    wait_until(lambda: server.metric("connections") == 1 and not context.num_active, "only the one that asks this")
    loud = [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert not loud, loud[0].getMessage()
