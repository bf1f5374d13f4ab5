"""One worker's process as the engine holds it: start, signal, kill, and how it ended.

A worker inherits one end of a socket pair. When its process dies the kernel closes that end.
"""

import contextlib
import signal
import socket
import subprocess
from dataclasses import dataclass, replace

import psutil

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.base.system import python_module
from antiphon.serve import signals
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import FromWorker, Pool, Role, Shutdown

_log = get_logger("fleet")
_HUNG_UP_S = 0.2  # for a worker that closed its socket to end by itself
_EXIT_TIMEOUT_S = 10.0  # for the kernel to take apart a process that was killed


@dataclass(frozen=True)
class WorkerName:
    """`attention[0]`, `experts[2]`, `replica[1]`; `replica[1][2]` is rank 2 of the last one. A worker is a group of
    ranks, each a process; rank 0 leads it and has the worker's name. Indices begin anew in every instance of the model;
    `1/experts[2]` is one of the second. Where prefill and decode are apart, `prefill/replica[0]` is in the pool for
    prompts."""

    role: Role
    index: int
    rank: int = 0
    instance: int = 0
    pool: Pool = ""

    def __str__(self) -> str:
        where = (f"{self.pool}/" if self.pool else "") + (f"{self.instance}/" if self.instance else "")
        return f"{where}{self.role}[{self.index}]" + (f"[{self.rank}]" if self.rank else "")

    @property
    def leader(self) -> "WorkerName":
        return replace(self, rank=0)

    @property
    def among_peers(self) -> tuple[str, str]:
        """What the other workers of its instance call it, and what the other ranks of its worker do."""
        worker = f"{self.role}[{self.index}]"
        return worker, f"{worker}[{self.rank}]"

    def ranks(self, num_ranks: int) -> "tuple[WorkerName, ...]":
        """All ranks of the worker, the leader first."""
        return tuple(replace(self, rank=rank) for rank in range(num_ranks))


class WorkerProcess:
    """One incarnation of a worker: a process and the channel to it."""

    is_remote = False

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.ready = False
        self.explanation = ""  # why it ended: the reason of `kill`, or what the worker said itself
        self.fell_blameless = False  # killed because another rank of its worker was, from outside
        self.heard_s = 0.0  # when it was started or last said something, by the fleet's clock
        self.channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launch the process; it waits for `Configure`. `OSError` if the system refuses another process."""
        ours, theirs = socket.socketpair()
        command = python_module("antiphon.serve.worker.process", "--fd", str(theirs.fileno()))
        try:
            with theirs, signals.blocked():
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            self.channel = Channel(ours, str(self.name), FromWorker)
        except BaseException:
            ours.close()
            self.kill("its channel cannot be opened")
            self.wait_until_gone(_HUNG_UP_S)
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """The process was stopped (SIGSTOP, SIGTSTP) and does nothing until it is continued. False where the
        process table cannot be read: no descriptor is free, or there is no such table."""
        with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError):
            return self.channel is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def was_killed_from_outside(self) -> bool:
        """The process has ended by SIGKILL, and not for a reason of ours."""
        if self.fell_blameless:
            return True
        return self._process is not None and self._process.poll() == -signal.SIGKILL and not self.explanation

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        assert self._process is not None, "start() comes first"
        self._process.send_signal(number)

    def kill(self, reason: str = "") -> None:
        """SIGKILL: for a worker that hangs. Its death is then noticed as any other, and explained by `reason`."""
        if self._process is not None and self._process.poll() is None:
            self.explanation = self.explanation or reason
            try:
                self._process.kill()
            except OSError as error:  # a system that forbids it; the worker ends when it notices its closed channel
                _log.error("%s, process %d, cannot be killed: %s", self.name, self.pid, error.strerror or error)
                if self.channel is not None:
                    self.channel.hang_up()

    def end_after_hanging_up(self, reason: str) -> None:
        """The channel is closed: the process is about to end. Kill it, because of `reason`, if it goes on."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_HUNG_UP_S)
        self.kill(reason)

    def ask_to_exit(self) -> None:
        """Send `Shutdown`. A worker that does not take it at once is killed, as is one that loads or was stopped: it
        would not obey."""
        if self.channel is None:
            return
        with contextlib.suppress(PeerLost):
            self.channel.enqueue(Shutdown())
            if self.ready and not self.channel.has_unsent and not self.is_stopped:
                return
        self.kill()

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                self.describe_exit()
        self.close()

    def describe_exit(self) -> str:
        """How the process ended, in words. It must have been killed, or be about to exit."""
        assert self._process is not None, "start() comes first"
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, for example in a driver: nothing can end it
            _log.error("%s, process %d, was killed and does not end", self.name, self.pid)
            return "does not end, although killed"
        return f"killed by {signals.name_of(-code)}" if code < 0 else f"exited with {code}"

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
