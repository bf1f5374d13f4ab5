"""The actor that Ray runs for one worker: it starts the worker, passes on what it says, and tells how it ended.

The worker is a process of its own, tethered to the actor (`worker/joined`): when Ray kills the actor, or its node ends,
the worker ends too. Rejected: the worker inside the actor's process, where Ray's threads and signal handlers are, and
where an exit code or a crash of native code would be Ray's to explain. Nothing here imports Ray or PyTorch.
"""

import os
import socket
import subprocess
import sys
from collections import deque

import msgspec

from antiphon.base.system import python_module

COMMAND = python_module("antiphon.serve.worker.joined")
_MAX_LAST_LINES = 5


class WorkerEnd(msgspec.Struct, frozen=True):
    """How a worker ended: its exit code, negative for a signal, and the last lines it wrote to standard error."""

    code: int
    last_lines: list[str]


class WorkerActor:
    """The actor of one worker; it runs on a Ray node."""

    def hello(self) -> tuple[str, int]:
        """(host name, process id), once Ray has started the actor."""
        return socket.gethostname(), os.getpid()

    def run(self, job: bytes) -> bytes:
        """Run the worker to its end. `job` is a `TetheredJob` as JSON; the answer a `WorkerEnd` as JSON."""
        last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            assert worker.stdin is not None, "standard input is a pipe"
            assert worker.stderr is not None, "standard error is a pipe"
            try:
                worker.stdin.write(job + b"\n")
                worker.stdin.flush()  # stays open: its end would be the worker's end
            except BrokenPipeError:
                pass  # it died at once; its last lines say of what
            for line in worker.stderr:
                sys.stderr.write(text := line.decode(errors="replace"))
                sys.stderr.flush()
                last_lines.append(text.rstrip())
            code = worker.wait()
        return msgspec.json.encode(WorkerEnd(code, list(last_lines)))
