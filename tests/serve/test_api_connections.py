"""Connections that wait, come in crowds or speak no HTTP: deadlines, the cap, and refusals in OpenAI's shape."""

import contextlib
import errno
import json
import resource
import socket
import sys
from typing import Any

import httpx
import pytest

from antiphon.serve.api.guard.connections import Connections
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import Live, fake_engine, is_closed, live, post, read_all, read_answer
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def error_of(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    """The error of a refusal that ends its connection."""
    assert answer[0] == status
    assert answer[1]["content-type"] == "application/json"
    assert answer[1]["connection"] == "close"
    error: dict[str, Any] = json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_half_a_head_is_408_after_the_deadline() -> None:
    with live(fake_engine(), header_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(HALF_A_HEAD)
        assert "headers did not arrive within 1 s" in error_of(read_answer(connection), 408)["message"]
        assert is_closed(connection)
        assert server.metric('connections_ended_total{reason="header timeout"}') == 1


def test_a_head_that_trickles_is_no_excuse() -> None:
    with live(fake_engine(), header_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(HALF_A_HEAD)
        connection.settimeout(0.1)
        for _ in range(200):
            try:
                connection.sendall(b"x: y\r\n")
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            assert answer.startswith(b"HTTP/1.1 408")
            return
        pytest.fail("the server waits for ever")


def test_a_connection_that_asks_nothing_is_closed() -> None:
    with live(fake_engine(), header_timeout_s=0.5) as server, server.connect() as connection:
        assert is_closed(connection)


def test_an_idle_connection_is_kept_for_a_while_and_serves_again() -> None:
    with live(fake_engine(), header_timeout_s=0.5, keep_alive_timeout_s=3) as server, server.connect() as connection:
        for _ in range(3):
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
            connection.settimeout(1.5)
            with pytest.raises(TimeoutError):  # longer than a head may take, shorter than idle connections are kept
                connection.recv(1)
            connection.settimeout(30)
        assert is_closed(connection)


def test_a_body_that_nobody_reads_may_not_trickle_for_ever() -> None:
    with live(fake_engine(), header_timeout_s=0.5, api_keys=("secret",)) as server, server.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert read_answer(connection)[0] == 401
        connection.settimeout(0.1)
        for _ in range(200):
            try:
                connection.sendall(b" ")
                assert connection.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
        pytest.fail("the server reads for ever")


def test_when_all_connections_are_busy_the_next_is_503() -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine, max_connections=2) as server:
        stream = post("/v1/completions", {"prompt": "x", "stream": True})
        with server.connect() as first, server.connect() as second:
            for connection in (first, second):
                connection.sendall(stream)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            with server.connect() as third:
                third.sendall(GET)
                answer = read_answer(third)
                error = error_of(answer, 503)
                assert (error["code"], error["type"]) == ("too_many_connections", "server_error")
                assert "all 2 connections of this server are in use" in error["message"]
                assert answer[1]["retry-after"] == "1"
                assert is_closed(third)
            engine.release()
            received = b""
            while b"[DONE]" not in received:
                received += first.recv(65536)
        assert server.metric('connections_ended_total{reason="refused"}') == 1
        with server.connect() as fourth:
            fourth.sendall(GET)
            assert read_answer(fourth)[0] == 200


def test_idle_connections_make_room_the_longest_waiting_first() -> None:
    with live(fake_engine(), max_connections=2) as server:
        with server.connect() as first, server.connect() as second:
            for connection in (second, first):  # the one that came first was served last
                connection.sendall(GET)
                assert read_answer(connection)[0] == 200
            with server.connect() as third:
                third.sendall(GET)
                assert read_answer(third)[0] == 200
                assert is_closed(second)
                first.sendall(GET)
                assert read_answer(first)[0] == 200
        assert server.metric('connections_ended_total{reason="made room"}') >= 1


@pytest.mark.parametrize(
    ("request_bytes", "status", "message"),
    [
        (b"hello\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/one\r\nhost: x\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400, "header"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "Content-Length"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS", 400, "not a valid HTTP/1.1 request"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000, 431, "too long"),
    ],
)
def test_what_is_not_http_is_refused_in_the_same_shape(request_bytes: bytes, status: int, message: str) -> None:
    with live(fake_engine()) as server, server.connect() as connection:
        connection.sendall(request_bytes)
        assert message in error_of(read_answer(connection), status)["message"]
        assert is_closed(connection)
        assert server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("header", [b"", b"expect: 100-continue\r\n"])
def test_a_body_that_breaks_off_in_nonsense_is_400(header: bytes, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + header + b"transfer-encoding: chunked\r\n\r\n"
    with live(fake_engine()) as server, server.connect() as connection:
        connection.sendall(head + b"5\r\nhello\r\nnonsense\r\n")
        assert "not a valid HTTP/1.1 request" in error_of(read_answer(connection), 400)["message"]
        assert is_closed(connection)
    assert "failed" not in caplog.text


def test_nonsense_behind_a_request_does_not_spoil_its_answer() -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine) as server, server.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}) + b"nonsense\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        engine.release()
        stream, _, refusal = read_all(connection).partition(b"HTTP/1.1 400")
        assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"not a valid HTTP/1.1 request" in refusal


def test_pipelined_requests_are_answered_in_order() -> None:
    with live(fake_engine(), header_timeout_s=0.5) as server, server.connect() as connection:
        connection.sendall(GET + GET.replace(b"health", b"version") + b"GET /v1/models HTT")
        health, version, late = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert b'{"status":"ok",' in health
        assert b"fake-moe" in version
        assert late.startswith(b"408")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "BREW"])
def test_other_methods_are_405(method: str) -> None:
    with live(fake_engine()) as server:
        response = server.http.request(method, "/v1/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert response.headers["content-type"] == "application/json"
        if method != "HEAD":
            assert "method not allowed" in response.json()["error"]["message"]


def test_a_slash_too_many_is_404_and_names_the_path() -> None:
    with live(fake_engine()) as server:
        response = server.http.post("/v1/completions/", json={"prompt": "x"})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message == "POST /v1/completions/: not found; leave the slash at the end out: /v1/completions"
        assert "/openapi.json" in server.http.get("/nothing/").json()["error"]["message"]


def open_half_bodies(server: Live, stack: contextlib.ExitStack, num: int) -> list[socket.socket]:
    """Requests with a body of which one byte comes."""
    opened = [stack.enter_context(server.connect()) for _ in range(num)]
    for connection in opened:
        connection.sendall(post("/tokenize", {"prompt": "x" * 100})[:-100])
    return opened


def test_an_address_may_have_a_few_late_bodies() -> None:
    with live(fake_engine(), max_slow_bodies=2) as server, contextlib.ExitStack() as stack:
        opened = open_half_bodies(server, stack, 5)
        for connection in opened[2:]:
            answer = read_answer(connection)
            assert "2 requests of this address" in error_of(answer, 429)["message"]
            assert answer[1]["retry-after"] == "1"
        for connection in opened[:2]:
            connection.sendall(b" " * 98 + b"}}")
            assert read_answer(connection)[0] == 400, "it was not ended: its body is not JSON"
        assert server.metric('connections_ended_total{reason="slow body"}') == 3


def test_late_bodies_make_room_and_sockets_stay_within_the_cap() -> None:
    with live(fake_engine(), max_connections=8) as server, contextlib.ExitStack() as stack:
        connections = server.server._connections
        open_half_bodies(server, stack, 60)
        wait_until(lambda: connections.num_open >= 8, "the connections are accepted")
        for _ in range(3):
            with httpx.Client(base_url=server.url) as client:
                wait_until(
                    lambda client=client: client.post("/tokenize", json={"prompt": "x"}).status_code == 200,
                    "a client that sends its body is served",
                )
            assert connections.num_open <= connections.limit + connections.max_lingering
    assert connections.num_open == 0


def test_a_process_without_descriptors_serves_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Idle connections make room, although the cap is not reached."""
    with live(fake_engine()) as server, contextlib.ExitStack() as stack:
        listener = server.server._acceptors[0]._listener
        idle = [stack.enter_context(server.connect()) for _ in range(5)]
        wait_until(lambda: server.server._connections.num_open >= 5, "they are accepted")
        num_refused = 0

        class Full:
            """The listening socket of a process that has no descriptor left, three times."""

            fileno = staticmethod(listener.fileno)

            @staticmethod
            def accept() -> tuple[socket.socket, Any]:
                nonlocal num_refused
                num_refused += 1
                if num_refused <= 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return listener.accept()

        server.server._acceptors[0]._listener = Full()  # type: ignore[assignment]
        with server.connect() as connection:
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
        assert num_refused < 20, "it does not spin"
        assert is_closed(idle[0])
        server.server._acceptors[0]._listener = listener
    assert caplog.text.count("cannot accept a connection: Too many open files") == 1


def test_large_bodies_of_all_requests_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.serve.api.guard.input_limits._MIN_BODY_MEMORY_BYTES", 2**20)
    monkeypatch.setattr("antiphon.serve.api.guard.input_limits._NUM_LARGEST_BODIES", 1)
    with live(fake_engine()) as server, server.connect() as connection:
        content = json.dumps({"prompt": "x" * 2**20}).encode()
        connection.sendall(post("/v1/completions", {"prompt": "x" * 2**20})[:-100])
        headers = {"content-type": "application/json"}
        memory = server.server.config.app.state.context.body_memory  # type: ignore[union-attr]
        wait_until(lambda: memory._num_bytes > 0.9 * 2**20, "nearly all of the first body")

        def status() -> int:
            return server.http.post("/v1/completions", content=content, headers=headers).status_code

        wait_until(lambda: status() == 429, "the other body takes all memory")
        assert server.complete(max_tokens=1).status_code == 200
        connection.sendall(b" " * 100)
        assert read_answer(connection)[0] == 400
        wait_until(lambda: status() == 400, "the memory is free again, and the prompt is too long")


LIMITS_PROGRAM = """
import resource
from antiphon.serve.api.guard.connections import Connections, affordable_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(*affordable_connections(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard"), [(300, 700), (300, 1024), (1024, 4096)])
def test_the_limit_on_open_files_is_raised_and_a_reserve_is_kept(soft: int, hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this machine allows fewer than {hard} open files")
    program = LIMITS_PROGRAM.format(soft=soft, hard=hard)
    run = PROGRAMS.run([sys.executable, "-c", program], text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    in_use, lingering, raised = map(int, run.stdout.split())
    assert raised == hard
    if hard == 4096:
        assert (in_use, lingering) == (1000, 256)
    else:
        assert hard - 400 < in_use + lingering <= hard - 256, "what is open, and 256 for everything else"
        assert f"at most {in_use} connections instead of 1000" in run.stderr


class Watched:
    """A connection that counts how often its deadlines are looked at."""

    body_began_s = None

    def __init__(self) -> None:
        self.num_checks = 0

    def check(self, now_s: float) -> None:
        self.num_checks += 1


def test_deadlines_of_many_connections_are_looked_at_a_tenth_at_a_time() -> None:
    connections = Connections(ServerSettings(), ServerMetrics(fake_engine(), None))
    watched = [Watched() for _ in range(2000)]
    connections.connections.update(watched)  # type: ignore[arg-type]
    for number in range(20):
        connections.check(number / 10)
        assert sum(each.num_checks for each in watched) == 200 * (number + 1)
    assert {each.num_checks for each in watched} == {2}
    gone = watched[:500]
    connections.connections.difference_update(gone)  # type: ignore[arg-type]
    for number in range(10):
        connections.check(2 + number / 10)
    assert {each.num_checks for each in gone} == {2}
    assert {each.num_checks for each in watched[500:]} == {3}
