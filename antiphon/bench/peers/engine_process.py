"""Runs an engine in its own process group: it shares no threads with the benchmark and can be stopped as a whole.

The child is `engine_child.py`; its standard error goes to a file whose tail explains failures. Every wait has
a timeout. A paused engine is stopped with SIGSTOP: it keeps its memory and caches nothing on the CPUs, which
an idle engine's spinning threads would.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from antiphon.bench.peers.api import PeerError, PeerUnavailableError, RawRun, RunResult, Workload, run_result

CHILD_SCRIPT = Path(__file__).with_name("engine_child.py")
START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0
LOG_TAIL_LINES = 8


class EngineProcess:
    """A peer (see `api.Peer`) whose engine file runs under `interpreter`.

    `options` reach the engine's `load`; `environment` is added to ours; `advice` says how to get an interpreter that
    is missing.
    """

    def __init__(
        self,
        name: str,
        engine_file: Path,
        options: Mapping[str, Any],
        *,
        interpreter: str,
        environment: Mapping[str, str],
        advice: str = "install it",
    ) -> None:
        self._name = name
        self._advice = advice
        # "-P" keeps our folder off the child's import path.
        self._command = [interpreter, "-P", str(CHILD_SCRIPT), str(engine_file), json.dumps(dict(options))]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Mapping[str, str]:
        """Start the process and wait until the model is loaded and warm. `PeerUnavailableError` if there is no
        interpreter that could be started.

        Call it from a thread that outlives the engine: Linux ends the child with the thread that started it.
        """
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            reason = f"{self._command[0]} cannot be started ({error.strerror})"
            raise PeerUnavailableError(f"{self._name}: {reason}; {self._advice}") from None
        threading.Thread(target=self._read_replies, args=(self._process.stdout,), daemon=True).start()
        details: Mapping[str, str] = self._wait_for("ready", START_TIMEOUT_S)
        return details

    def run(self, workload: Workload) -> RunResult:
        process = self._running()
        assert process.stdin is not None
        request = {"prompts": workload.prompts, "output_tokens": workload.output_tokens}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it is gone") from None
        raw = RawRun(**self._wait_for("run", RUN_TIMEOUT_S))
        return run_result(workload, raw, tree_peak_rss_bytes(process.pid))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(timeout=30)
            for stream in (self._process.stdin, self._process.stdout, self._log):
                if stream is not None:
                    stream.close()
            self._process = None

    def _read_replies(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._replies.put(line)
        except ValueError:
            pass  # closed by `close` while reading
        self._replies.put("")

    def _wait_for(self, key: str, timeout_s: float) -> Any:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise self._failure(f"it ended unexpectedly, with {self._status()}")
        try:
            message = json.loads(line)
        except ValueError:
            raise self._failure(f"it answered {line[:80]!r}, which is no JSON") from None
        if key not in message:
            raise self._failure(str(message.get("error", message)))
        return message[key]

    def _status(self) -> str:
        """How it ended; it has closed its standard output, so it should have."""
        try:
            return f"status {self._running().wait(timeout=30)}"
        except subprocess.TimeoutExpired:
            return "its output closed while it still runs"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise PeerError(f"{self._name}: not started; call start() first")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._running().pid, number)
        except ProcessLookupError:
            if number != signal.SIGKILL:
                raise self._failure("it is gone") from None

    def _failure(self, reason: str) -> PeerError:
        """The reason, with the last lines the engine wrote."""
        tail = ""
        if self._log is not None:
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-LOG_TAIL_LINES:])
        return PeerError(f"{self._name}: {reason}" + (f"; its last lines:\n{tail}" if tail else ""))


def tree_peak_rss_bytes(root_pid: int) -> int:
    """The sum of the peak resident sizes of a process and its descendants: an upper bound of their common peak."""
    root = psutil.Process(root_pid)
    return sum(_peak_rss_bytes(process.pid) for process in (root, *root.children(recursive=True)))


def _peak_rss_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
