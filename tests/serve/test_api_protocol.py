"""What clients and browsers may send: what is no HTTP, requests that two servers would read differently, pages of other
sites, bodies that are sent whole before the answer is read, and directions that end before the answer."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import h11
import httpx
import pytest

from antiphon.serve.api.guard.http_rules import StrictConnection
from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import (
    Live,
    fake_engine,
    is_closed,
    live,
    post,
    read_all,
    read_answer,
    refusal,
    small_tokenizer,
)
from tests.waiting import wait_until

BODY = b'{"prompt":"x","max_tokens":1}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"
JSON = {"content-type": "application/json"}


def completion(headers: bytes, body: bytes = BODY, version: bytes = b"1.1", host: bytes = b"host: x\r\n") -> bytes:
    head = b"POST /v1/completions HTTP/" + version + b"\r\n" + host + b"content-type: application/json\r\n"
    return head + headers + b"\r\n" + body


NO_HTTP = "not a valid HTTP/1.1 request"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
# Name: bytes, status, words of the message.
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "two framings": (completion(LENGTH + CHUNKED), 400, "contradict"),
    "two framings, the other order": (completion(CHUNKED + LENGTH, IN_CHUNKS), 400, "contradict"),
    "chunks in 1.0": (completion(CHUNKED, IN_CHUNKS, version=b"1.0"), 400, "does not exist in HTTP/1.0"),
    "two lengths": (completion(LENGTH + b"content-length: 3\r\n"), 400, "conflicting Content-Length"),
    "a signed length": (completion(b"content-length: +29\r\n"), 400, "bad Content-Length"),
    "another coding": (completion(b"transfer-encoding: gzip, chunked\r\n", IN_CHUNKS), 400, "Transfer-Encoding"),
    "chunked twice": (completion(CHUNKED + CHUNKED, IN_CHUNKS), 400, "Transfer-Encoding"),
    "a blank before the colon": (completion(b"transfer-encoding : chunked\r\n", IN_CHUNKS), 400, "illegal header line"),
    "a continued header": (completion(LENGTH + b"x: a\r\n b\r\n"), 400, "in the next line"),
    "a bare line feed": (completion(LENGTH + b"x: a\ny: b\r\n"), 400, "without a carriage return"),
    "a bare carriage return": (completion(LENGTH + b"x: a\ry: b\r\n"), 400, "illegal header line"),
    "only line feeds": (completion(LENGTH).replace(b"\r\n", b"\n"), 400, "without a carriage return"),
    "two hosts": (completion(LENGTH, host=b"host: x\r\nhost: y\r\n"), 400, "multiple Host"),
    "a user in the host": (completion(LENGTH, host=b"host: a@x\r\n"), 400, "must be a name or an address"),
    "a list of hosts": (completion(LENGTH, host=b"host: x, y\r\n"), 400, "must be a name or an address"),
    "a size that others count as 0": (completion(CHUNKED, b"1" + b"0" * 16 + b"\r\n"), 400, "not the size of a chunk"),
    "a size with a prefix": (completion(CHUNKED, b"0x1d\r\n" + IN_CHUNKS[4:]), 400, "not the size of a chunk"),
    "a chunk longer than its size": (completion(CHUNKED, b"1c" + IN_CHUNKS[2:]), 400, "longer than its size"),
    "a line feed in an extension": (completion(CHUNKED, b"1d;a\nb" + IN_CHUNKS[2:]), 400, "not the size of a chunk"),
    "a bare line feed behind the chunks": (completion(CHUNKED, IN_CHUNKS[:-2] + b"\n"), 400, "trailers"),
    "a trailer": (completion(CHUNKED, IN_CHUNKS[:-2] + b"content-length: 3\r\n\r\n"), 400, "trailers"),
    "a megabyte of extension": (completion(CHUNKED, b"1d;" + b"x" * 2**20), 400, "too long"),
    "chunks of a byte": (completion(CHUNKED, b"1\r\n \r\n" * 50_000), 400, "hold too little"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP/2.0 is not spoken"),
    "words": (b"hello\r\n\r\n", 400, NO_HTTP),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
    "no version": (b"GET /health HTTP/one\r\nhost: x\r\n\r\n", 400, NO_HTTP),
    "no colon": (GET[:-2] + b"bad header\r\n\r\n", 400, "header"),
    "a negative length": (GET[:-2] + b"content-length: -1\r\n\r\n", 400, "Content-Length"),
    "a path beyond ASCII": (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, NO_HTTP),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS", 400, NO_HTTP),
    "a coding in a GET": (GET[:-2] + b"transfer-encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
    "a header of 100 KB": (GET[:-2] + b"x: " + b"y" * 100_000, 431, "too long"),
    "nonsense in a body": (TOKENIZE + CHUNKED + b"\r\n5\r\nhello\r\nnonsense\r\n", 400, NO_HTTP),
    "nonsense in a body that was asked for": (
        TOKENIZE + b"expect: 100-continue\r\n" + CHUNKED + b"\r\n5\r\nhello\r\nnonsense\r\n", 400, NO_HTTP
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_http_is_refused_and_closes(server: Live, name: str, caplog: pytest.LogCaptureFixture) -> None:
    request, status, message = REFUSED[name]
    with server.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(request + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    with server.connect() as connection:
        connection.sendall(request)
        said = refusal(connection, status)["message"]
        assert message in said
        assert not re.search(r"""bytearray|\sb['"].""", said), "words of Python"
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert server.engine.submissions == []
    assert server.complete(max_tokens=1).status_code == 200
    assert "failed" not in caplog.text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_are_read_however_they_are_cut(size: int) -> None:
    wire = (
        b"5;a=b\r\n" + BODY[:5] + b"\r\n0018\r\n" + BODY[5:] + b"\r\n0\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    connection = StrictConnection()
    connection.receive_data(completion(CHUNKED, b""))
    assert isinstance(connection.next_event(), h11.Request)
    body, ended = b"", False
    for begin in range(0, len(wire), size):
        connection.receive_data(wire[begin : begin + size])
        while isinstance(event := connection.next_event(), h11.Event):
            ended = ended or isinstance(event, h11.EndOfMessage)
            body += event.data if isinstance(event, h11.Data) else b""
    assert (body, ended) == (BODY, True)
    assert connection.trailing_data[0].startswith(b"GET /")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET http://x/health HTTP/1.1\r\nhost: other\r\n\r\n", 200),
        (b"GET http://other/health HTTP/1.1\r\nhost: x\r\n\r\n", 403),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"TRACE /health HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /hea%00lth HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: \xff\xe4\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"HEAD /health HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    ],
)
def test_strange_requests_have_plain_answers(server: Live, request_bytes: bytes, status: int) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes)
        assert connection.recv(12) == b"HTTP/1.1 %d" % status


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "BREW"])
def test_other_methods_are_405(server: Live, method: str) -> None:
    response = server.http.request(method, "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.headers["content-type"] == "application/json"
    if method != "HEAD":
        assert "method not allowed, allowed are POST; this server" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/dashboard", "/nothing"])
def test_head_is_get_without_the_body(server: Live, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        head = read_all(connection)
    answer = server.http.get(path)
    assert head.startswith(b"HTTP/1.1 %d " % answer.status_code)
    assert f"content-type: {answer.headers['content-type']}".encode() in head
    assert head.index(b"\r\n\r\n") == len(head) - 4
    assert answer.content


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/messages/batches"])
def test_what_this_server_does_not_do_is_404_and_says_what_it_does(server: Live, path: str) -> None:
    response = server.http.post(path, json={"model": "fake-moe", "input": "x"})
    assert response.status_code == 404
    message = f"POST {path}: not found; this server answers chats and continues texts, by the paths that"
    assert response.json()["error"]["message"].startswith(message)


def test_a_slash_too_many_is_404_and_names_the_path(server: Live) -> None:
    response = server.http.post("/v1/completions/", json={"prompt": "x"})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == "POST /v1/completions/: not found; leave the slash at the end out: /v1/completions"
    assert "/openapi.json" in server.http.get("/nothing/").json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "right"),
    [("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages"), ("/models", "/v1/models")],
)
def test_a_base_url_with_the_wrong_end_is_404_and_names_the_path(server: Live, path: str, right: str) -> None:
    response = server.http.post(path, json={})
    assert response.status_code == 404
    assert f"POST {path}: not found; it is {right}: a base URL ends in /v1" in response.json()["error"]["message"]


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_an_upgrade_is_not_taken_and_nothing_is_advised(
    server: Live, upgrade: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with server.connect() as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: " + upgrade + b"\r\n\r\n"
        )
        assert read_answer(connection)[0] == 200
        connection.sendall(b"nonsense\r\n\r\n")
        assert read_answer(connection)[0] == 400
    assert capfd.readouterr().err == ""


# --- answers that come before the request is sent ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Live]:
    with live(fake_engine(), api_keys=("secret",), max_body_bytes=10_000) as running:
        yield running


EARLY = {
    "too large": (413, {"authorization": "Bearer secret", **JSON}),
    "no key": (401, JSON),
    "not JSON": (415, {"authorization": "Bearer secret", "content-type": "text/plain"}),
    "compressed": (415, {"authorization": "Bearer secret", "content-encoding": "gzip", **JSON}),
    "another host": (403, {"authorization": "Bearer secret", "host": "evil.example", **JSON}),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", EARLY)
def test_a_client_that_sends_everything_first_reads_the_refusal(locked_server: Live, name: str, chunked: bool) -> None:
    """`urllib` asks the server to close, and would lose the answer to a reset."""
    status, headers = EARLY[name]
    content = iter([b" " * 2**20] * 8) if chunked else b" " * 2**23
    request = urllib.request.Request(f"{locked_server.url}/v1/completions", content, headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=30)
    assert refusal.value.code == status
    assert "message" in json.loads(refusal.value.read())["error"]


def test_the_same_for_clients_that_keep_connections(locked_server: Live) -> None:
    host, port = httpx.URL(locked_server.url).host, httpx.URL(locked_server.url).port
    connection = http.client.HTTPConnection(host, port, timeout=30)
    for _ in range(3):
        connection.request("POST", "/v1/completions", b" " * 2**22, JSON | {"authorization": "Bearer wrong"})
        response = connection.getresponse()
        assert (response.status, b"API key" in response.read()) == (401, True)
    connection.close()
    with httpx.Client(base_url=locked_server.url, timeout=30) as client:
        for content in (b" " * 2**22, iter([b" " * 2**16] * 64)):
            answer = client.post("/v1/completions", content=content, headers=EARLY["too large"][1])
            assert answer.status_code == 413


def test_what_is_dropped_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.serve.api.guard.http_rules.MAX_DROPPED_BYTES", 2**20)
    monkeypatch.setattr("antiphon.serve.api.guard.connection.MAX_DROPPED_BYTES", 2**20)
    for header in (b"connection: close\r\n", b""):
        with live(fake_engine(), api_keys=("secret",)) as server, server.connect() as connection:
            connection.sendall(completion(header + b"content-length: 1000000000\r\n", b""))
            with pytest.raises(ConnectionError):
                connection.sendall(b" " * 2**29)


# --- a direction that ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_end_its_direction_and_still_gets_the_answer(stream: bool) -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine) as server, server.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: bool(engine.submissions), "the request runs")
        sign, received = (b":\n\n" if stream else b"100 Continue"), b""
        while received.count(sign) < 2:  # it is asked whether it is there
            received += connection.recv(65536)
        engine.release()
        assert read_all(connection).endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b"}"))
        assert not engine.submissions[0].aborted


def test_pipelined_requests_and_then_the_end(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "x", "max_tokens": 1}) * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_noticed_without_a_token(stream: bool) -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine) as server:
        with server.connect() as connection:
            connection.sendall(post("/v1/completions", {"prompt": "x", "stream": stream}))
            wait_until(lambda: bool(engine.submissions), "the request runs")
        wait_until(lambda: engine.submissions[0].aborted, "the request ends")


def test_half_a_body_and_the_end_is_400(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(completion(LENGTH, BODY[:-5]))
        connection.shutdown(socket.SHUT_WR)
        assert "before the whole body" in refusal(connection, 400)["message"]


# --- browsers ---------------------------------------------------------------------------------------------------------

OWN = {"host": "localhost:8000", **JSON}
FROM_PAGES: list[tuple[str, dict[str, str], int]] = [
    ("a program", OWN, 200),
    ("another name", OWN | {"host": "evil.example"}, 403),
    ("another name with a port", OWN | {"host": "evil.example:8000"}, 403),
    ("a name that ends like ours", OWN | {"host": "localhost.evil.example"}, 403),
    ("a name in capitals", OWN | {"host": "LOCALHOST."}, 200),
    ("an address", OWN | {"host": "127.0.0.1:9000"}, 200),
    ("an address of version 6", OWN | {"host": "[::1]:9000"}, 200),
    ("our own page", OWN | {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, 200),
    ("a page of another port", OWN | {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
    ("a page of another site", OWN | {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ("a page without an origin", OWN | {"origin": "null"}, 403),
    ("a browser that hides the origin", OWN | {"sec-fetch-site": "cross-site"}, 403),
    ("a form", OWN | {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("a form with a file", OWN | {"content-type": "multipart/form-data; boundary=x"}, 415),
    ("plain text", OWN | {"content-type": "text/plain"}, 415),
    ("JSON in another name", OWN | {"content-type": "text/plain; application/json"}, 415),
    ("no type", {"host": "localhost"}, 415),
]


@pytest.fixture(scope="module")
def own_server() -> Iterator[Live]:
    with live(fake_engine(), allowed_hosts=()) as running:
        yield running


@pytest.mark.parametrize(("name", "headers", "status"), FROM_PAGES, ids=[name for name, _, _ in FROM_PAGES])
@pytest.mark.parametrize("path", ["/v1/completions", "/placement"])
def test_pages_of_other_sites_change_nothing(
    own_server: Live, path: str, name: str, headers: dict[str, str], status: int
) -> None:
    own_server.engine.reset()
    answer = own_server.http.send(httpx.Request("POST", f"{own_server.url}{path}", content=BODY, headers=headers))
    expected = status if path == "/v1/completions" or status != 200 else 400  # it is no placement
    assert answer.status_code == expected, answer.text
    assert bool(own_server.engine.submissions) == (answer.status_code == 200)


def test_another_name_reads_nothing() -> None:
    with live(fake_engine(), allowed_hosts=("llm.example",)) as server:
        for path in ("/dashboard", "/metrics", "/v1/models", "/health", "/nothing"):
            refused = server.http.get(path, headers={"host": "evil.example"})
            assert refused.status_code == 403
            assert "--allowed-hosts evil.example" in refused.json()["error"]["message"]
            assert server.http.get(path, headers={"host": "llm.example:80"}).status_code != 403


@pytest.mark.parametrize(
    ("host", "allowed", "name", "status"),
    [
        ("0.0.0.0", (), "anything.example", 200),
        ("0.0.0.0", ("llm.example",), "anything.example", 403),
        ("0.0.0.0", ("LLM.example:80",), "llm.example", 200),
        ("127.0.0.1", ("*",), "anything.example", 200),
        ("::1", (), "[::1]:8000", 200),
        ("::1", (), "anything.example", 403),
        ("localhost", (), "127.0.0.1", 200),
    ],
)
def test_which_names_are_a_servers_own(host: str, allowed: tuple[str, ...], name: str, status: int) -> None:
    app = create_app(fake_engine(), small_tokenizer(), ServerSettings(host=host, allowed_hosts=allowed))
    transport = httpx.ASGITransport(app)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/version", headers={"host": name})).status_code

    assert asyncio.run(ask()) == status


def test_a_form_type_is_told_what_curl_needs(server: Live) -> None:
    answer = server.http.post("/v1/completions", content=BODY, headers=FROM_PAGES[12][1] | {"host": "x"})
    assert "curl -H 'Content-Type: application/json'" in answer.json()["error"]["message"]


def test_every_503_says_when_to_try_again(server: Live) -> None:
    context = server.server.config.app.state.context  # type: ignore[union-attr]
    context.draining = True
    try:
        for answer in (server.complete(), server.chat(), server.http.get("/health")):
            assert (answer.status_code, answer.headers.get("retry-after", "").isdecimal()) == (503, True)
    finally:
        context.draining = False
