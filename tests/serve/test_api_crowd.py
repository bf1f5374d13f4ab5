"""A crowd of connections that ask nothing or ask slowly, and a few clients among them who want to be served."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.serve.api_harness import Live, fake_engine, live, post

NUM_IDLE, NUM_SLOW, NUM_CONNECTIONS = 2000, 300, 1500
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
HALF_A_BODY = post("/v1/completions", {"prompt": "x" * 1000})[:-500]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    needed = 2 * (NUM_IDLE + NUM_SLOW) + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def trickle(connections: list[socket.socket], stop: threading.Event) -> None:
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


def test_a_few_clients_are_served_among_thousands_that_wait(many_files: None) -> None:
    limits = {"max_connections": NUM_CONNECTIONS, "header_timeout_s": 5.0, "body_timeout_s": 10.0}
    with live(fake_engine(), **limits) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(NUM_SLOW)]
        for number, connection in enumerate(slow):
            connection.sendall((HALF_A_HEAD, HALF_A_BODY)[number % 2])
        stop = threading.Event()
        trickling = threading.Thread(target=trickle, args=(slow, stop))
        trickling.start()
        try:
            for _ in range(NUM_IDLE):
                stack.enter_context(server.connect())
            assert_served(server)
            assert server.metric("connections") <= NUM_CONNECTIONS
            assert server.metric('connections_ended_total{reason="made room"}') >= NUM_IDLE - NUM_CONNECTIONS
            deadline_s = time.monotonic() + 120
            while server.metric("connections") > 1:  # the one that asks
                assert time.monotonic() < deadline_s, "connections that ask nothing are kept"
                assert_served(server)
        finally:
            stop.set()
            trickling.join()
        assert server.metric('connections_ended_total{reason="refused"}') == 0
        assert server.server.config.app.state.context.num_active == 0  # type: ignore[union-attr]
