"""Connections that wait, come in crowds, are not read or break off: deadlines, caps, and refusals in OpenAI's shape."""

import contextlib
import errno
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from antiphon.serve.api.guard.connections import Connections
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import Live, fake_engine, is_closed, live, post, read_all, read_answer, refusal
from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def impatient() -> Iterator[Live]:
    with live(fake_engine(), header_timeout_s=0.5, keep_alive_timeout_s=3) as running:
        yield running


def ended(server: Live, reason: str) -> float:
    """Connections that the server ended for this reason."""
    return server.metric(f'connections_ended_total{{reason="{reason}"}}')


def trickle(connection: socket.socket, piece: bytes) -> bytes:
    """Send `piece` again and again; what the server says to it, nothing where it closes."""
    connection.settimeout(0.1)
    for _ in range(200):
        try:
            connection.sendall(piece)
            return connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    pytest.fail("the server reads without an end")


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_half_a_head_is_408_after_the_deadline(impatient: Live) -> None:
    before = ended(impatient, "header timeout")
    with impatient.connect() as connection:
        connection.sendall(HALF_A_HEAD)
        assert "headers did not arrive within 1 s" in refusal(connection, 408)["message"]
        assert is_closed(connection)
    assert ended(impatient, "header timeout") == before + 1


def test_a_head_that_trickles_is_no_excuse(impatient: Live) -> None:
    with impatient.connect() as connection:
        connection.sendall(HALF_A_HEAD)
        assert trickle(connection, b"x: y\r\n").startswith(b"HTTP/1.1 408")


def test_a_connection_that_asks_nothing_is_closed(impatient: Live) -> None:
    with impatient.connect() as connection:
        assert is_closed(connection)


def test_an_idle_connection_is_kept_for_a_while_and_serves_again(impatient: Live) -> None:
    with impatient.connect() as connection:
        for _ in range(2):
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):  # longer than a head may take, shorter than idle connections are kept
                connection.recv(1)
            connection.settimeout(30)
        assert is_closed(connection)


def test_pipelined_requests_are_answered_in_order(impatient: Live) -> None:
    with impatient.connect() as connection:
        connection.sendall(GET + GET.replace(b"health", b"version") + b"GET /v1/models HTT")
        health, version, late = read_all(connection).split(b"HTTP/1.1 ")[1:]
        assert b'{"status":"ok",' in health
        assert b"fake-moe" in version
        assert late.startswith(b"408")


def test_a_body_that_is_not_read_may_not_trickle_without_an_end() -> None:
    with live(fake_engine(), header_timeout_s=0.5, api_keys=("secret",)) as server, server.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert read_answer(connection)[0] == 401
        assert trickle(connection, b" ") == b""


# --- caps -------------------------------------------------------------------------------------------------------------


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
                answer = third.recv(65536, socket.MSG_PEEK)
                error = refusal(third, 503)
                assert (error["code"], error["type"]) == ("too_many_connections", "server_error")
                assert "all 2 connections of this server are in use" in error["message"]
                assert b"retry-after: 1\r\n" in answer
                assert is_closed(third)
            engine.release()
            received = b""
            while b"[DONE]" not in received:
                received += first.recv(65536)
        assert ended(server, "refused") == 1
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
        assert ended(server, "made room") >= 1


def test_nonsense_behind_a_request_does_not_spoil_its_answer() -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine) as server, server.connect() as connection:
        connection.sendall(post("/v1/completions", {"prompt": "x", "stream": True}) + b"nonsense\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        engine.release()
        stream, _, refused = read_all(connection).partition(b"HTTP/1.1 400")
        assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"not a valid HTTP/1.1 request" in refused


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
            status, headers, content = read_answer(connection)
            assert (status, headers["retry-after"]) == (429, "1")
            assert b"2 requests of this address" in content
        for connection in opened[:2]:
            connection.sendall(b" " * 98 + b"}}")
            assert read_answer(connection)[0] == 400, "it was not ended: its body is not JSON"
        assert ended(server, "slow body") == 3


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
    monkeypatch.setattr("antiphon.serve.api.input_limits._MIN_BODY_MEMORY_BYTES", 2**20)
    monkeypatch.setattr("antiphon.serve.api.input_limits._NUM_LARGEST_BODIES", 1)
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
        assert "raise that (ulimit -n), or lower --max-connections" in run.stderr


# --- a crowd ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_files(needed: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def trickle_all(connections: list[socket.socket], stop: threading.Event) -> None:
    """A byte of a header or of a body now and then."""
    while not stop.wait(0.5):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"x")


def assert_served(server: Live) -> None:
    for _ in range(5):
        assert server.complete(max_tokens=2).status_code == 200
        events = server.complete(max_tokens=2, stream=True).text
        assert events.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("num_idle", "num_slow", "most"), [(400, 60, 300), pytest.param(2000, 300, 1500, marks=pytest.mark.slow)]
)
def test_a_few_clients_are_served_among_many_that_wait(num_idle: int, num_slow: int, most: int) -> None:
    half_a_body = post("/v1/completions", {"prompt": "x" * 1000})[:-500]
    limits = {"max_connections": most, "header_timeout_s": 5.0, "body_timeout_s": 10.0}
    both_ends = 2 * (num_idle + num_slow)
    with open_files(both_ends + 500), live(fake_engine(), **limits) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(num_slow)]
        for number, connection in enumerate(slow):
            connection.sendall((HALF_A_HEAD, half_a_body)[number % 2])
        stop = threading.Event()
        trickling = threading.Thread(target=trickle_all, args=(slow, stop))
        trickling.start()
        try:
            for _ in range(num_idle):
                stack.enter_context(server.connect())
            assert_served(server)
            assert server.metric("connections") <= most
            assert ended(server, "made room") >= num_idle - most
            deadline_s = time.monotonic() + 120
            while server.metric("connections") > 1:  # the one that asks
                assert time.monotonic() < deadline_s, "connections that ask nothing are kept"
                assert_served(server)
                time.sleep(0.1)
        finally:
            stop.set()
            trickling.join()
        assert ended(server, "refused") == 0
        assert server.server.config.app.state.context.num_active == 0  # type: ignore[union-attr]


# --- clients that do not read -----------------------------------------------------------------------------------------

MANY_TOKENS = 8_000  # more than the operating system keeps for a connection
LONG_STREAM = {"prompt": "x", "stream": True, "n": 4, "logprobs": 20, "max_tokens": MANY_TOKENS}
LONG_ANSWER = {"prompt": "x", "max_tokens": MANY_TOKENS, "logprobs": 20}


@pytest.fixture
def talkative() -> Iterator[Live]:
    """A server that is quick to give up, with an engine that has much to say."""
    with live(fake_engine(max_model_len=MANY_TOKENS + 100), send_timeout_s=1.0, max_unread_bytes=200_000) as running:
        yield running


def wait_given_up(server: Live, num_requests: int) -> None:
    wait_until(lambda: len(server.engine.submissions) == num_requests, "all requests")
    for submission in server.engine.submissions:
        assert submission.ended.wait(60), "the engine still computes for a client that does not read"
        assert submission.aborted


def wait_idle(server: Live) -> None:
    context = server.server.config.app.state.context  # type: ignore[union-attr]
    wait_until(lambda: context.num_active == 0, "the engine is done with it")


def wait_reset(server: Live) -> None:
    """Wait for the end of the one connection that takes nothing."""
    wait_until(lambda: ended(server, "send timeout") == 1, "the connection ends")


@pytest.mark.parametrize("n", [1, 4])
def test_a_stream_that_is_not_read_is_cancelled_at_the_limit(talkative: Live, n: int) -> None:
    with talkative.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_STREAM | {"n": n}))
        wait_given_up(talkative, n)
        assert talkative.metric("slow_readers_total") == 1
        wait_idle(talkative)  # what was left went with the connection
        wait_reset(talkative)
    assert talkative.complete(max_tokens=1).status_code == 200


def test_a_client_that_reads_late_gets_what_there_is_and_an_error(talkative: Live) -> None:
    with talkative.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_STREAM))
        wait_given_up(talkative, 4)
        received = b""
        while b"\r\n0\r\n\r\n" not in received[-100:]:
            part = connection.recv(65536)
            assert part, received[-300:]
            received += part
    events = [line for line in received.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("slow_reader", "invalid_request_error")
    assert "the limit is 200000" in error["message"]


def test_hanging_up_while_the_stream_is_held_up_frees_the_engine_at_once() -> None:
    engine = fake_engine(max_model_len=MANY_TOKENS + 100)
    engine.hold_after_tokens = 1500
    with live(engine, send_timeout_s=600, max_unread_bytes=10**9) as server:
        with server.connect(receive_buffer_bytes=4096) as connection:
            connection.sendall(post("/v1/completions", LONG_STREAM))
            wait_until(
                lambda: any(other.flow.write_paused for other in server.server.server_state.connections),
                "a full connection",
            )
        wait_given_up(server, 4)
        wait_idle(server)


def test_a_whole_answer_that_is_not_read_is_dropped_after_the_timeout(talkative: Live) -> None:
    with talkative.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_ANSWER))
        wait_reset(talkative)
        with pytest.raises(ConnectionError):
            read_all(connection)


def test_a_whole_answer_may_be_read_slowly(talkative: Live) -> None:
    with talkative.connect(receive_buffer_bytes=65536) as connection:
        connection.sendall(post("/v1/completions", LONG_ANSWER))
        received = connection.recv(4096)
        started_s = time.monotonic()
        while time.monotonic() < started_s + 4:  # four times the timeout, never without progress
            received += connection.recv(20_000)
            time.sleep(0.1)
        length = int(received.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        head_bytes = received.index(b"\r\n\r\n") + 4
        assert len(received) < length, "read too fast to show anything"
        while len(received) < head_bytes + length:
            received += connection.recv(65536)
    assert len(json.loads(received[head_bytes:])["choices"][0]["logprobs"]["tokens"]) == MANY_TOKENS


def test_a_client_that_does_not_read_may_not_pipeline(talkative: Live) -> None:
    with talkative.connect(receive_buffer_bytes=4096) as connection:
        connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):  # requests wait in the operating system: the server reads no more
            while True:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        wait_reset(talkative)


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
