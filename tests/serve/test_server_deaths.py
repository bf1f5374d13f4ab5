"""`antiphon serve` when workers die again and again, when it cannot go on, and when it is told to end meanwhile."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.fork_server import is_fork_server
from tests.serve.server_harness import PATIENCE_S, ServerProcess, event_texts, serve
from tests.waiting import wait_until

LONG = {"prompt": "bada do", "temperature": 0, "max_tokens": 8000, "stream": True}


def workers(server: ServerProcess) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if not is_fork_server(child)]


def zombies(server: ServerProcess) -> list[psutil.Process]:
    """Every child that was killed too: those for chat templates are replaced when somebody looks, once a second."""
    return [worker for worker in workers(server) if worker.status() == psutil.STATUS_ZOMBIE]


def health(server: ServerProcess) -> tuple[int, dict[str, Any]]:
    response = server.http.get("/health")
    return response.status_code, response.json()


def error_of(server: ServerProcess, streams: list[str]) -> None:
    """Read a stream to its end and keep what it says of it."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
        streams.append(list(response.iter_lines())[-4])


def test_a_server_that_cannot_go_on_ends_its_streams_and_itself(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    with serve(model, tmp_path, "--layout", "disaggregated", "--attention", "2") as server:
        streams: list[str] = []
        readers = [threading.Thread(target=error_of, args=(server, streams)) for _ in range(4)]
        for reader in readers:
            reader.start()
        wait_until(lambda: server.metrics()["antiphon:num_requests_running"] == 4, "they run")
        pids = [worker.pid for worker in workers(server)]
        shutil.rmtree(model)
        os.kill(server.worker_pid("experts[0]"), signal.SIGKILL)
        for reader in readers:
            reader.join(PATIENCE_S)
        assert server.process.wait(PATIENCE_S) == 1
        assert len(streams) == 4
        assert all("experts[0] died and cannot start again: " in stream for stream in streams), streams
        last = server.log.splitlines()[-1]
        assert last.startswith("error: experts[0] died and cannot start again: ")
        assert "Traceback" not in server.log
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


@contextmanager
def killed_every(period_s: float, server: ServerProcess) -> Iterator[None]:
    """Kill whatever process the first expert worker has at the time."""
    over = threading.Event()
    others = {server.worker_pid("attention[0]"), server.worker_pid("attention[1]")}

    def kill() -> None:
        while not over.wait(period_s):
            with suppress(psutil.NoSuchProcess):  # it, or the server, may end by itself
                for worker in workers(server):
                    if worker.pid not in others:
                        worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def test_somebody_who_kills_a_worker_for_long_ends_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path, "--layout", "disaggregated", "--attention", "2") as server:
        expected = server.text(max_tokens=200)
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1000}) as response:
            texts = event_texts(response.iter_lines())
            begin = next(texts)
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other, killed_every(0.7, server):
                wait_until(lambda: server.log.count("lost experts[0]") > 8, "nine deaths", 3 * PATIENCE_S)
                answers: list[httpx.Response] = []

                def says_so() -> bool:
                    answers.append(other.get("/health"))
                    return answers[-1].status_code == 503 and "died" in answers[-1].json()["status"]

                wait_until(says_so, "it says so")
                answer = answers[-1]  # the very one: the next may find it back
            assert answer.json()["missing"] == ["experts[0]"]
            assert "experts[0] (" in answer.json()["status"]
            assert len(begin + "".join(texts)) > 1000
        assert server.text(max_tokens=200) == expected
        wait_until(lambda: not zombies(server), "no zombie is left")
        wait_until(lambda: health(server) == (200, {"status": "ok", "missing": []}), "healthy again")
        assert server.end() == 0


@pytest.mark.parametrize(
    ("state", "number"),
    [
        ("loading", signal.SIGINT),
        ("restart in", signal.SIGTERM),
        pytest.param("loading", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("restart in", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_server_whose_worker_is_away(
    state: str, number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    with serve(checkpoint, tmp_path, "--layout", "disaggregated", "--attention", "2") as server:
        pids = [worker.pid for worker in workers(server)]
        with killed_every(0.05, server):
            wait_until(lambda: state in health(server)[1]["status"], "it is away")
            begin_s = time.monotonic()
            assert server.end(number) == 0
        took_s = time.monotonic() - begin_s
        print(f"\n{number.name} with a worker in state {state!r}: {took_s:.2f} s")
        assert took_s < PATIENCE_S
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
