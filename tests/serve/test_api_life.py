"""Clients that hang up, limits, keys, and the end of the server."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from antiphon.base.errors import UserError
from antiphon.cli.top import read_api_keys
from antiphon.serve.api import server as server_module
from antiphon.serve.api.server import QuietCollector
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import Live, bind, fake_engine, live
from tests.serve.fork_server import PROGRAMS
from tests.serve.server_harness import PATIENCE_S
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[Live]:
    """A server whose answers stop after three tokens until they are released."""
    engine = fake_engine()
    engine.hold_after_tokens = 3
    with live(engine) as running:
        yield running


def wait_ended(server: Live, num_requests: int) -> None:
    assert len(server.engine.submissions) == num_requests
    for submission in server.engine.submissions:
        assert submission.ended.wait(PATIENCE_S), "the engine still computes for a client that is gone"
        assert submission.aborted


@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_in_the_middle_of_a_stream_frees_the_engine(server: Live, n: int) -> None:
    body = {"prompt": "x", "stream": True, "n": n, "max_tokens": 50}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: {")
    wait_ended(server, n)


@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_while_waiting_for_a_whole_answer_frees_the_engine(server: Live, n: int) -> None:
    body = b'{"prompt": "x", "max_tokens": 50, "n": %d}' % n
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 80)) as connection:
        connection.sendall(head % len(body) + body)
        assert server.engine.first_output.wait(10)
    wait_ended(server, n)


def test_the_official_clients_close_frees_the_engine(server: Live) -> None:
    stream = server.openai.completions.create(model="fake-moe", prompt="x", stream=True, max_tokens=50)
    next(iter(stream))
    stream.close()
    wait_ended(server, 1)


def test_what_clients_gave_up_is_counted(server: Live) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        next(response.iter_lines())
    wait_ended(server, 1)
    counted = 'antiphon:requests_finished_total{reason="abort"} 1.0'
    # the engine is told a moment before the server counts
    wait_until(lambda: counted in server.http.get("/metrics").text, "the request is counted as aborted")


def test_requests_that_end_by_themselves_are_not_aborted(server: Live) -> None:
    server.engine.release()
    assert server.complete(n=2).status_code == 200
    assert [submission.aborted for submission in server.engine.submissions] == [False, False]


def test_too_many_streams_are_429_and_a_place_is_free_again_after_one_ended() -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 1
    with live(engine, max_streams=1) as server:
        body = {"prompt": "x", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = server.complete()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            with pytest.raises(openai.RateLimitError):
                server.openai.completions.create(model="fake-moe", prompt="x")
            engine.release()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        wait_until(lambda: server.complete().status_code == 200, "the place is free again")


def test_many_answers_leave_room_in_line_for_a_single_one() -> None:
    with live(fake_engine()) as server:  # whose line is 64 long
        context = server.server.config.app.state.context  # type: ignore[union-attr]
        server.engine.hold_after_tokens = 0
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "n": 16, "stream": True}):
            wait_until(lambda: context.num_in_line == 16, "sixteen wait")
            refused = server.complete(n=10, prompt=["a"] * 4 + ["b"])
            assert refused.status_code == 429
            assert "the limit for requests with several is 56: this one has 50" in refused.json()["error"]["message"]
            server.engine.release()
            assert server.complete(n=2, max_tokens=2).status_code == 200
        wait_until(lambda: context.num_in_line == 0, "all have begun or were given up")


def test_the_operators_prompt_limit() -> None:
    with live(fake_engine(), max_prompt_tokens=3) as server:
        assert server.complete(prompt=[5, 6, 7]).status_code == 200
        refused = server.complete(prompt=[5, 6, 7, 8])
        assert "4 tokens, the limit is 3" in refused.json()["error"]["message"]


def test_keys() -> None:
    with live(fake_engine(), api_keys=("secret-1", "secret-2")) as server:
        assert server.complete().status_code == 200
        for header in ({"authorization": "Bearer secret-2"}, {"authorization": "bearer  secret-1"}):
            assert httpx.get(f"{server.url}/v1/models", headers=header, verify=False).status_code == 200
        for header in ({}, {"authorization": "Bearer secret"}, {"authorization": "Basic secret-1"}):
            for path in ("/v1/models", "/tokenize", "/nothing"):
                refused = httpx.get(server.url + path, headers=header, verify=False)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version", "/metrics", "/openapi.json"):
            assert httpx.get(server.url + path, verify=False).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nabc\n\n  def  \n")
    assert read_api_keys(path) == ("abc", "def")
    path.write_text("# nothing\n")
    with pytest.raises(UserError, match="holds no key"):
        read_api_keys(path)
    path.write_text("good\nbad key\n")
    with pytest.raises(UserError, match=r"key 2 .* space"):
        read_api_keys(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_api_keys(tmp_path / "missing")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"max_body_bytes": 0}, "at least 1"),
        ({"drain_timeout_s": -1}, "must be 0 to 1000000"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerSettings(**settings)


def test_a_port_in_use_and_a_foreign_address_are_one_line() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match="is in use: choose another with --port"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="not an address of this machine"):
        bind("192.0.2.1", 0)
    with pytest.raises(UserError, match="not an address of this machine"):
        bind("no such host", 0)


def test_draining_refuses_new_requests_finishes_running_ones_and_ends(server: Live) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 8}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.server.request_stop()
        assert server.engine.drained.wait(10)
        with httpx.Client(base_url=server.url) as other:
            refused = other.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert other.get("/health").status_code == 503
        server.engine.release()
        events = [line for line in lines if line]
        assert '"finish_reason":"length"' in events[-2]
        assert events[-1] == "data: [DONE]"
    assert not server.engine.submissions[0].aborted


def listens(server: Live) -> bool:
    try:
        httpx.get(f"{server.url}/health")
    except httpx.TransportError:
        return False
    return True


def test_a_server_whose_engine_gives_up_ends_too() -> None:
    with live(fake_engine()) as server:
        assert server.complete().status_code == 200
        server.engine.on_giving_up()
        wait_until(lambda: not listens(server), "it listens no more")
        server.engine.on_giving_up()


def test_full_collections_of_garbage_wait_until_the_server_is_idle_or_memory_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            full.append(phase)

    collector = QuietCollector()
    collector.begin()
    gc.callbacks.append(note)
    try:
        crowd = [{"answer": [number]} for number in range(300_000)]
        assert not full, "a crowd of objects alone starts no full collection"
        collector.collect_if_due(is_idle=False)
        assert not full
        monkeypatch.setattr(server_module, "resident_bytes", lambda: 2**40)
        collector.collect_if_due(is_idle=False)
        assert full == ["start", "stop"], "cycles may take so much memory and no more"
        collector.collect_if_due(is_idle=True)
        assert full == ["start", "stop"], "nothing has happened since"
        crowd.extend({"answer": [number]} for number in range(100_000))
        collector.collect_if_due(is_idle=True)
        assert full == ["start", "stop"] * 2
    finally:
        gc.callbacks.remove(note)
        collector.end()


def test_what_does_not_finish_in_time_is_cut_off_by_the_engine() -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 3
    with live(engine, drain_timeout_s=0.05) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.request_stop()
            events = [line for line in lines if line]
        assert '"code":"shutting_down"' in events[-2]
        assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("is_engine_stuck", [False, True])
def test_a_second_signal_cuts_off_what_runs_with_an_answer(
    is_engine_stuck: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine()
    engine.hold_after_tokens = 3

    async def never_ends(timeout_s: float) -> None:
        await asyncio.sleep(PATIENCE_S)

    if is_engine_stuck:
        monkeypatch.setattr(engine, "drain", never_ends)
        monkeypatch.setattr(server_module, "_CUT_S", 0.05)
    with live(engine) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.complete)
        assert engine.first_output.wait(10)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.request_stop()
            server.server.request_stop()
            if is_engine_stuck:
                server.server.request_stop()
            else:
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert asked.result(10).json()["error"]["code"] == "shutting_down"
            assert asked.result().status_code == 503
        wait_until(lambda: not listens(server), "it listens no more")
    assert is_engine_stuck or not caplog.records or "Traceback" not in caplog.text


SERVER_PROGRAM = """
import sys
from antiphon.serve.api.server import create_app
from antiphon.serve.api.server import run_server
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import fake_engine, small_grammars, small_tokenizer

settings = ServerSettings(port=0)
app = create_app(fake_engine(), small_tokenizer(), settings, small_grammars())
run_server(app, settings, on_listening=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_run_server_and_the_caller_goes_on(sig: signal.Signals) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with PROGRAMS.Popen(
        [sys.executable, "-c", SERVER_PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "missing": []}
        process.send_signal(sig)
        assert process.stdout.read().strip() == "ended"
        assert process.wait(20) == 0
