"""Keys, the queue's limit, and the end of the server: each with a server of its own."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from antiphon.base.system import python_module
from tests.serve.server_harness import PATIENCE_S, ServerProcess, event_texts, serve
from tests.waiting import wait_until

LONG = {"prompt": "bada do", "temperature": 0, "max_tokens": 8000, "stream": True}


@pytest.fixture(scope="module")
def strict_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Colocated, one request at a time, one may wait, keys are asked for."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "keys").write_text("# ours\nsecret-1\nsecret-2\n")
    limits = ("--max-running", "1", "--max-waiting", "1", "--max-prompt-tokens", "100", "--served-model-name", "moe")
    with serve(checkpoint, folder, *limits, "--api-key-file", str(folder / "keys"), key="secret-2") as server:
        yield server


def test_without_a_key_it_is_401(strict_server: ServerProcess) -> None:
    assert strict_server.complete().status_code == 200
    for headers in ({}, {"authorization": "Bearer secret"}):
        response = httpx.post(f"{strict_server.url}/v1/completions", json={"prompt": "x"}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{strict_server.url}/metrics").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert "Authorization: Bearer KEY" in strict_server.log


def test_the_served_name_is_the_one_given(strict_server: ServerProcess) -> None:
    assert strict_server.openai.models.list().data[0].id == "moe"
    assert strict_server.complete(model="tiny").status_code == 404


def test_the_operators_prompt_limit_is_400(strict_server: ServerProcess) -> None:
    response = strict_server.complete(prompt=[5] * 101)
    assert response.status_code == 400
    assert "101 tokens, the limit is 100" in response.json()["error"]["message"]


def test_a_full_queue_is_429(strict_server: ServerProcess) -> None:
    def metric(name: str) -> float:
        return strict_server.metrics()[f"antiphon:{name}"]

    with strict_server.http.stream("POST", "/v1/completions", json=LONG) as running:
        texts = event_texts(running.iter_lines())
        next(texts)
        with strict_server.http.stream("POST", "/v1/completions", json=LONG):
            wait_until(lambda: metric("num_requests_waiting") == 1, "one waits")
            refused = strict_server.complete()
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "1 requests are waiting, the limit is 1" in refused.json()["error"]["message"]
            with pytest.raises(openai.RateLimitError):
                strict_server.openai.completions.create(model="moe", prompt="x")
    wait_until(lambda: metric("num_requests_running") + metric("num_requests_waiting") == 0, "idle again")
    assert strict_server.complete().status_code == 200


def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_0(checkpoint: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    # Time enough for the answer on a machine that stands still: the default of 30 s is not what is tested.
    options = ("--layout", "disaggregated", "--timeline", str(timeline), "--drain-timeout", "600")
    with (
        serve(checkpoint, tmp_path, *options) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other,
    ):
        body = {**LONG, "max_tokens": 1000}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            texts = event_texts(response.iter_lines())
            next(texts)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: other.get("/health").status_code == 503, "it is draining")
            refused = other.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert len(list(texts)) > 100, "the running answer goes on to its end"
        assert server.process.wait(PATIENCE_S) == 0
        assert timeline.exists()
        assert "exposed communication" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_is_a_signal_to_the_server(checkpoint: Path, tmp_path: Path, number: int) -> None:
    """As a service manager or a closed terminal sends it: workers get it too and leave the decision to the server."""
    with serve(checkpoint, tmp_path, "--layout", "disaggregated", "--drain-timeout", "600") as server:
        body = {**LONG, "max_tokens": 1000}
        ended: list[str] = []

        def read() -> None:
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                ended.extend(event_texts(response.iter_lines()))

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: server.metrics()["antiphon:num_requests_running"] == 1, "it runs")
        os.killpg(server.process.pid, number)
        reader.join(10 * PATIENCE_S)
        assert server.process.wait(PATIENCE_S) == 0
        assert len(ended) > 100
        assert "lost" not in server.log


@pytest.mark.parametrize(
    ("layout", "who"),
    [
        ("--layout disaggregated --micro-batches 2", r"attention\[0\] cannot join the others: experts\[0\]"),
        ("--tp 2", r"replica\[0\](\[1\])? cannot join the others: replica\[0\]\[[01]\]"),
    ],
)
def test_a_start_that_the_system_refuses_ends_with_the_reason(checkpoint: Path, layout: str, who: str) -> None:
    """Workers load, but the shared memory between them may not be made: asking again changes nothing."""
    command = ["bash", "-c", 'ulimit -f 8; exec "$@"', "limited"]
    command += python_module("antiphon.cli.main", "serve", str(checkpoint), *layout.split(), "--port", "0")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert re.match(rf"error: {who} refused: .*ulimit -f", ended.stderr.splitlines()[-1])
