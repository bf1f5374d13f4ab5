"""A server in a process of its own, clients that send it the largest and strangest bodies, and one that only wants two
tokens and says how long each of its requests took.

Time in which a thread of the server or of this process was ready to run and had no core is left out: other programs
take that time, not an attack. A server that computes for one client while another waits has a core: that time counts.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.serve.fork_server import PROGRAMS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
PAUSE_S = 0.005  # between requests of the other client, whose waits are looked at from 1 s on; the core is the server's

PROGRAM = """
import sys
from antiphon.serve.api.server import create_app
from antiphon.serve.api.server import run_server
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import fake_engine, small_grammars, small_tokenizer

settings = ServerSettings(port=0, max_body_bytes=8 * 2**20)
tokenizer = small_tokenizer()
if len(sys.argv) > 2:
    tokenizer.template_sources = open(sys.argv[2]).read()
app = create_app(fake_engine(max_model_len=int(sys.argv[1])), tokenizer, settings, small_grammars())
run_server(app, settings, on_listening=lambda url: print(url, flush=True))
"""


@dataclass
class Target:
    """The server under attack."""

    address: tuple[str, int]
    process: psutil.Process

    @property
    def rss_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def without_core_s(self) -> dict[int, float]:
        """How long each thread of the server and of this process has waited for a core, so far."""
        waited_s = {}
        for pid in (self.process.pid, os.getpid()):
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # the thread has ended
                    waited_s[int(thread.parent.name)] = int(thread.read_text().split()[1]) / 1e9
        return waited_s

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer. A refusal may come, and the connection close, before the whole body is sent."""
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)
        try:
            try:
                connection.request("POST", path, body, {"content-type": "application/json"})
            except (BrokenPipeError, ConnectionResetError):
                return 413, {}
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except ConnectionResetError:
            return 413, {}
        finally:
            connection.close()


@contextmanager
def target(max_model_len: int, template: Path | None = None) -> Iterator[Target]:
    """A server over a fake engine, which takes bodies of 8 MiB whatever its context."""
    command = [sys.executable, "-c", PROGRAM, str(max_model_len), *([str(template)] if template else [])]
    with PROGRAMS.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
            running = Target((host, int(port)), psutil.Process(process.pid))
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
            running.post("/v1/chat/completions", body)  # its processes have started
            yield running
        finally:
            process.kill()


@dataclass
class Outcome:
    """What the attackers were told, and what another client's requests took meanwhile."""

    answers: list[tuple[int, dict[str, Any]]]
    waits_s: list[float]

    @property
    def statuses(self) -> set[int]:
        return {status for status, _ in self.answers}

    @property
    def longest_s(self) -> float:
        return max(self.waits_s)

    @property
    def p99_s(self) -> float:
        return sorted(self.waits_s)[int(0.99 * (len(self.waits_s) - 1))]

    def __str__(self) -> str:
        return (
            f"answers {sorted(self.statuses)}, another client's {len(self.waits_s)} requests took"
            f" {1e3 * self.p99_s:.0f} ms at p99, {1e3 * self.longest_s:.0f} ms at most"
        )


def attack(server: Target, path: str, body: bytes, num_clients: int = 1, least_s: float = 0.1) -> Outcome:
    """Send `body` from `num_clients` clients at once while another one asks for two tokens again and again."""
    answers: list[tuple[int, dict[str, Any]]] = []
    clients = [
        threading.Thread(target=lambda: answers.append(server.post(path, body)), daemon=True)
        for _ in range(num_clients)
    ]
    waits_s: list[float] = []
    innocent = http.client.HTTPConnection(*server.address, timeout=TIMEOUT_S)
    wish = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    begin = time.monotonic()
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients) or time.monotonic() < begin + least_s:
        before, started = server.without_core_s(), time.perf_counter()
        innocent.request("POST", "/v1/completions", wish, {"content-type": "application/json"})
        response = innocent.getresponse()
        response.read()
        took_s, after = time.perf_counter() - started, server.without_core_s()
        waits_s.append(took_s - sum(waited_s - before.get(thread, 0.0) for thread, waited_s in after.items()))
        assert response.status == 200
        time.sleep(PAUSE_S)
    innocent.close()
    return Outcome(answers, waits_s)
