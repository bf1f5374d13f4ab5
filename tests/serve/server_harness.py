"""`antiphon serve` as users run it: a process of its own, over a tiny random checkpoint with a tokenizer.

Weights are computed with in float32, so that greedy text does not depend on how a batch was cut or repeated.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.serve.fork_server import PROGRAMS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
PATIENCE_S = 60.0


def write_checkpoint(folder: Path) -> Path:
    """The yardstick's tiny preset: 8 experts, 512 tokens, a chat template; greedy text never ends by itself."""
    spec = importlib.util.spec_from_file_location("make_model_script", ROOT / "benchmarks" / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    script.make_model(script.PRESETS["tiny"], folder)
    return folder


@dataclass
class ServerProcess:
    """A running `antiphon serve`."""

    process: subprocess.Popen[bytes]
    facts: dict[str, Any]
    log_path: Path
    http: httpx.Client
    openai: openai.OpenAI

    @property
    def url(self) -> str:
        return str(self.facts["url"])

    @property
    def model(self) -> str:
        return str(self.facts["model"])

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "bada", "temperature": 0, "max_tokens": 8, **body})

    def text(self, **body: Any) -> str:
        response = self.complete(**body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def worker_pid(self, name: str) -> int:
        """The process id a worker had at the start."""
        return next(int(worker["pid"]) for worker in self.facts["workers"] if worker["name"] == name)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serve(model: Path, folder: Path, *options: str, key: str = "none") -> Iterator[ServerProcess]:
    """Start `antiphon serve MODEL --port 0 OPTIONS`, wait until it listens, kill it at the end if it still runs."""
    ready, log_path = folder / "ready.json", folder / "server.log"
    command = [sys.executable, "-m", "antiphon.cli.main", "serve", str(model), "--port", "0", "--json", str(ready)]
    with (
        log_path.open("wb") as log,
        PROGRAMS.Popen(
            [*command, "--dtype", "float32", "--kv-bytes", "16MiB", *options],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None, "the server is ready", START_TIMEOUT_S)
            assert ready.exists(), log_path.read_text(errors="replace")
            facts = json.loads(ready.read_text())
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=facts["url"], headers=headers, timeout=PATIENCE_S) as http:
                client = openai.OpenAI(base_url=f"{facts['url']}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)
                yield ServerProcess(process, facts, log_path, http, client)
                client.close()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def event_texts(lines: Iterator[str]) -> Iterator[str]:
    """The texts of a completion's server-sent events; stops at [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield from (choice["text"] for choice in event["choices"])
