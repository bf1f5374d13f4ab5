"""Clients that do not read: what the server keeps for them is limited in bytes and in time, and the engine is free."""

import json
import time
from collections.abc import Iterator

import pytest

from tests.serve.api_harness import Live, fake_engine, live, post, read_all
from tests.waiting import wait_until

MANY_TOKENS = 20_000
LONG_STREAM = {"prompt": "x", "stream": True, "n": 4, "logprobs": 20, "max_tokens": MANY_TOKENS}
LONG_ANSWER = {"prompt": "x", "max_tokens": MANY_TOKENS, "logprobs": 20}


@pytest.fixture
def server() -> Iterator[Live]:
    """A server that is quick to give up, with an engine that has much to say."""
    with live(fake_engine(max_model_len=MANY_TOKENS + 100), send_timeout_s=1.5, max_unread_bytes=200_000) as running:
        yield running


def wait_ended(server: Live, num_requests: int) -> None:
    wait_until(lambda: len(server.engine.submissions) == num_requests, "all requests")
    for submission in server.engine.submissions:
        assert submission.ended.wait(60), "the engine still computes for a client that does not read"
        assert submission.aborted


def wait_reset(server: Live) -> None:
    """Wait for the end of the one connection that takes nothing."""
    wait_until(
        lambda: server.metric('connections_ended_total{reason="send timeout"}') == 1,
        "the connection ends",
    )


def num_active(server: Live) -> int:
    active: int = server.server.config.app.state.context.num_active  # type: ignore[union-attr]
    return active


def wait_idle(server: Live) -> None:
    wait_until(lambda: num_active(server) == 0, "the engine is done with it")


@pytest.mark.parametrize("n", [1, 4])
def test_a_stream_that_nobody_reads_is_cancelled_at_the_limit(server: Live, n: int) -> None:
    with server.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_STREAM | {"n": n}))
        wait_ended(server, n)
        assert server.metric("slow_readers_total") == 1
        wait_idle(server)  # what was left went with the connection
        wait_reset(server)
    assert server.complete(max_tokens=1).status_code == 200


def test_a_client_that_reads_late_gets_what_there_is_and_an_error(server: Live) -> None:
    with server.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_STREAM))
        wait_ended(server, 4)
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
        wait_ended(server, 4)
        wait_idle(server)


def test_a_whole_answer_that_nobody_reads_is_dropped_after_the_timeout(server: Live) -> None:
    with server.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post("/v1/completions", LONG_ANSWER))
        wait_reset(server)
        with pytest.raises(ConnectionError):
            read_all(connection)


def test_a_whole_answer_may_be_read_slowly(server: Live) -> None:
    with server.connect(receive_buffer_bytes=65536) as connection:
        connection.sendall(post("/v1/completions", LONG_ANSWER))
        received = connection.recv(4096)
        started_s = time.monotonic()
        while time.monotonic() < started_s + 6:  # four times the timeout, never without progress
            received += connection.recv(65536)
            time.sleep(0.1)
        length = int(received.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        head_bytes = received.index(b"\r\n\r\n") + 4
        assert len(received) < length, "read too fast to show anything"
        while len(received) < head_bytes + length:
            received += connection.recv(65536)
    assert len(json.loads(received[head_bytes:])["choices"][0]["logprobs"]["tokens"]) == MANY_TOKENS


def test_a_client_that_does_not_read_may_not_pipeline(server: Live) -> None:
    with server.connect(receive_buffer_bytes=4096) as connection:
        connection.settimeout(0.2)
        try:
            while True:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        except TimeoutError:  # its requests wait in the operating system: the server reads no more of them
            pass
        wait_reset(server)
