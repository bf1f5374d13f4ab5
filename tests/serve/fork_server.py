"""Forks the workers of in-process engines from one process that has torch loaded: importing it takes a worker longest.

The engine starts a worker with `subprocess.Popen`; `ForkingSubprocess` stands in its place.

1. The fork server is a child of the test process. It imports what a worker imports and waits. It starts no thread
   (NumPy's BLAS has one and takes it down around a fork).
2. A request carries the worker's socket, standard output and error, and the folder. The server forks twice and the one
   in between ends, so that the worker becomes a child of the test process: that is a subreaper for as long.
3. The worker runs `worker.process.main`, as it does after `python -m`. Signals, exit codes and waits are real.
4. A worker gets the test's environment, and runs the `sitecustomize.py` that a test may have put there, as Python does.
   A test that changes more than `PYTHONPATH` and names of its own gets a real start.

Rejected: forking the test process, which has threads.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

WORKER = "antiphon.serve.worker.process"
_PR_SET_CHILD_SUBREAPER = 36
_REPLY_TIMEOUT_S = 60.0  # the server's own imports come before its first reply


class _Forked(subprocess.Popen[bytes]):
    """A child that somebody else has forked; everything after the start is `Popen`'s."""

    def __init__(self, pid: int) -> None:
        self.args = [WORKER]
        self.pid = pid
        self.returncode: Any = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class ForkingSubprocess:
    """What `serve/worker_process` uses of the module `subprocess`."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._executable = sys.executable
        self._environment = dict(os.environ)

    def Popen(self, command: Sequence[str], *, pass_fds: tuple[int, ...], stdin: int) -> subprocess.Popen[bytes]:
        """Forks where it can, starts a program where it must."""
        is_worker = command[:3] == [self._executable, "-m", WORKER]
        if not is_worker or _constant(os.environ) != _constant(self._environment):
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin)
        with self._lock:
            control = self._start()
            _be_subreaper(True)
            try:
                cores = sorted(os.sched_getaffinity(0))
                request = msgspec.msgpack.encode((str(Path.cwd()), cores, dict(os.environ)))
                socket.send_fds(control, [request], [pass_fds[0], 1, 2])
                pid = int(control.recv(64))
            finally:
                _be_subreaper(False)
        return _Forked(pid)

    def _start(self) -> socket.socket:
        if self._server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_REPLY_TIMEOUT_S)
            command = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(
                command, env=self._environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
            theirs.close()
            self._server = process, ours
        return self._server[1]

    def close(self) -> None:
        if self._server is not None:
            process, control = self._server
            control.close()
            process.wait(_REPLY_TIMEOUT_S)
            self._server = None


def _constant(environment: Mapping[str, str]) -> dict[str, str]:
    """What a forked worker could not change any more; the rest it gets with the request."""
    changeable = ("PYTEST_", "PYTHONPATH", "ANTIPHON_TEST_")
    return {name: value for name, value in environment.items() if not name.startswith(changeable)}


def _be_subreaper(yes: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def serve(control: socket.socket) -> int | None:
    """Fork for each request; in a worker, returns its socket."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 2**18, 3)
        if not request:
            return None
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(writing, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(reading)
            os.close(writing)
            return _become_worker(request, descriptors)
        os.waitpid(between, 0)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        control.send(os.read(reading, 64))
        os.close(reading)


def _become_worker(request: bytes, descriptors: list[int]) -> int:
    folder, cores, environment = msgspec.msgpack.decode(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    channel, output, error = descriptors
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.close(output)
    os.close(error)
    customize = Path(environment.get("PYTHONPATH", "").split(os.pathsep)[0], "sitecustomize.py")
    if customize.exists():
        exec(
            compile(customize.read_text(), customize, "exec"), {"__name__": "sitecustomize", "__file__": str(customize)}
        )
    return channel


def main() -> None:
    from antiphon.serve.worker import process

    channel = serve(socket.socket(fileno=int(sys.argv[1])))
    if channel is not None:
        sys.argv = [WORKER, "--fd", str(channel)]
        process.main()


if __name__ == "__main__":
    main()
