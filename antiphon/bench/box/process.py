"""A process in a node, as its owner sees it.

It is the keeper's child, not ours: its exit code comes through a pipe of its own. So a waiting thread polls a
descriptor, and no thread has to sort messages for others.
"""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO, BinaryIO

from antiphon.base.errors import UserError

from .keeper import Keeper

Stream = int | IO[bytes] | IO[str] | None
"""None: this process's own. Or subprocess.PIPE, subprocess.DEVNULL, a descriptor, an open file."""


class NodeProcess:
    """A process in a node. `pid` is its number outside; inside it has another one. The streams are there if piped."""

    def __init__(self, keeper: Keeper, node: int, args: Sequence[str], pid: int, status: int) -> None:
        self.node = node
        self.args = tuple(args)
        self.pid = pid
        self.stdin: BinaryIO | None = None
        self.stdout: BinaryIO | None = None
        self.stderr: BinaryIO | None = None
        self.returncode: int | None = None
        self._keeper = keeper
        self._status = status
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"NodeProcess(node={self.node}, pid={self.pid}, {' '.join(self.args)!r})"

    def __del__(self) -> None:
        close_all([self._status])

    def fileno(self) -> int:
        """Becomes readable when the process ends and stays so, for select and poll."""
        return self._status

    def poll(self) -> int | None:
        """Exit code if it has ended, negative for a signal; None while it runs."""
        return self._collect(0.0)

    def wait(self, timeout_s: float) -> int:
        """Wait for its end. Returns the exit code, negative for a signal; TimeoutError names node and command."""
        code = self._collect(timeout_s)
        if code is None:
            raise TimeoutError(f"node {self.node}: {' '.join(self.args)!r} did not end within {timeout_s:.1f} s")
        return code

    def send_signal(self, number: int) -> None:
        """To the process and the children of its process group. Nothing if it has ended; does not collect its end."""
        if not self._ended(0.0):
            self._keeper.ask("signal", pid=self.pid, signal_number=int(number))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _collect(self, timeout_s: float) -> int | None:
        if self._ended(timeout_s):
            with self._lock:
                if self.returncode is None:
                    # Nothing written: the keeper died, and took everything with it.
                    self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)
        return self.returncode

    def _ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))


def wait_all(processes: Sequence[NodeProcess], timeout_s: float) -> list[int]:
    """Exit codes of all, in order; TimeoutError names the first that is late."""
    deadline = time.monotonic() + timeout_s
    return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]


def open_stream(stream: Stream, number: int, *, output: bool, stack: ExitStack) -> tuple[int, int]:
    """(descriptor for the command, our end of a pipe or -1). The former is closed by `stack` if it is new."""
    if stream is None:
        return number, -1
    if stream == subprocess.PIPE:
        read, write = os.pipe()
        theirs, ours = (write, read) if output else (read, write)
        stack.callback(os.close, theirs)
        return theirs, ours
    if stream == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        return null, -1
    descriptor = stream if isinstance(stream, int) else stream.fileno()
    if descriptor < 0:
        raise UserError(f"{stream} is no stream; give PIPE, DEVNULL, a descriptor or an open file")
    return descriptor, -1


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
