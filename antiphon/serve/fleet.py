"""Worker processes: start, talk, notice death. No policy: what to do about a death is the engine's business.

A worker is reached over a socket pair whose other end it inherits; when the process dies, by whatever hand, the
kernel closes that end and the next `poll` reports it within milliseconds. Rejected: heartbeats between processes of
one machine, which notice later and can be wrong.
"""

import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, FromWorker, Shutdown, ToWorker

_log = get_logger("fleet")


@dataclass(frozen=True)
class WorkerName:
    """`attention[0]`, `experts[2]`, `replica[1]`."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}[{self.index}]"


class WorkerProcess:
    """One incarnation of a worker: a process and the channel to it."""

    def __init__(self, name: WorkerName, inherited: Iterable[int]) -> None:
        self.name = name
        self.ready = False
        self._inherited = tuple(inherited)
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None

    def start(self) -> None:
        """Launch the process; it waits for `Configure`."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "antiphon.serve.worker.process", "--fd", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(), *self._inherited), stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.channel = Channel(ours, str(self.name), FromWorker)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: for a worker that hangs. Its death is then noticed as any other."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def ask_to_exit(self) -> None:
        """Send `Shutdown`; a worker that takes no message is killed."""
        if self.channel is not None:
            try:
                self.channel.send(Shutdown(), timeout_s=1.0)
            except (PeerLost, TimeoutError):
                self.kill()

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.close()

    def describe_exit(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None, "start() comes first"
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


@dataclass(frozen=True)
class Event:
    """Something a worker said, or (`message` None) that it is gone."""

    worker: WorkerProcess
    message: FromWorker | None
    reason: str = ""


class Fleet:
    """All workers of a server, and one place to wait for any of them."""

    def __init__(self) -> None:
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)

    def launch(self, name: WorkerName, configure: Configure, inherited: Iterable[int]) -> WorkerProcess:
        """Start (or restart) a worker and send it its configuration."""
        worker = WorkerProcess(name, inherited)
        worker.start()
        assert worker.channel is not None, "a started worker has a channel"
        self.workers[name] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self.send(worker, configure)
        _log.info("started %s, process %d", name, worker.pid)
        return worker

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        with contextlib.suppress(OSError):  # many wake-ups are pending, or the fleet has stopped and nobody polls
            self._wake_sender.send(b"x")

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for messages or deaths, at most `timeout_s`."""
        events: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._drain_wake_ups()
            else:
                events.extend(self._events_of(key.data))
        return events

    def _drain_wake_ups(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _events_of(self, worker: WorkerProcess) -> list[Event]:
        events: list[Event] = []
        channel = worker.channel
        if channel is None:
            return events
        try:
            while (message := channel.poll()) is not None:
                events.append(Event(worker, message))
        except PeerLost as error:
            events.append(self._bury(worker, error.reason))
        return events

    def _bury(self, worker: WorkerProcess, reason: str) -> Event:
        assert worker.channel is not None, "only a worker with a channel can be lost"
        self._selector.unregister(worker.channel)
        worker.close()
        worker.ready = False
        worker.kill()  # a worker that spoke nonsense, or closed its socket, may still run
        reason = f"{worker.describe_exit()} ({reason})"
        _log.warning("lost %s: %s", worker.name, reason)
        return Event(worker, None, reason)

    def send(self, worker: WorkerProcess, message: ToWorker) -> bool:
        """Send; False if the worker turns out to be gone (its death is then reported by `poll`)."""
        if worker.channel is None:
            return False
        try:
            worker.channel.send(message)
        except (PeerLost, TimeoutError):
            worker.kill()
            return False
        return True

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all workers, all at once; returns when all processes have ended. Safe to call again."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers.values():
            worker.ask_to_exit()
        for worker in self.workers.values():
            worker.wait_until_gone(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
