"""Worker processes: start, talk, notice death. No policy: what to do about a death is the engine's business.

A worker is reached over a socket pair whose other end it inherits; when the process dies, by whatever hand, the
kernel closes that end and the next `poll` reports it within milliseconds. Rejected: heartbeats between processes of
one machine, which notice later and can be wrong.

Nothing here waits for one worker: what it does not read now is sent later, by `poll`, while the others are served. A
worker that reads nothing for `send_timeout_s` hangs, and is killed.
"""

import contextlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.serve.joining import JoinedPeer
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, FromWorker, Shutdown, ToWorker

_log = get_logger("fleet")
_SEND_TIMEOUT_S = 30.0
_LAST_WORD_S = 1.0  # for a worker to take its order to exit
_EXIT_TIMEOUT_S = 10.0  # for the kernel to take apart a process that was killed


@dataclass(frozen=True)
class WorkerName:
    """`attention[0]`, `experts[2]`, `replica[1]`."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}[{self.index}]"


class WorkerProcess:
    """One incarnation of a worker: a process and the channel to it."""

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.ready = False
        self.killed_for = ""  # why `kill` was called, once it was
        self._heard_s = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None

    def start(self) -> None:
        """Launch the process; it waits for `Configure`."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "antiphon.serve.worker.process", "--fd", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        self.channel = Channel(ours, str(self.name), FromWorker)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """Time since the start or the last message."""
        return time.monotonic() - self._heard_s

    def note_message(self) -> None:
        self._heard_s = time.monotonic()

    def kill(self, reason: str = "") -> None:
        """SIGKILL: for a worker that hangs. Its death is then noticed as any other, and explained by `reason`."""
        if self._process is not None and self._process.poll() is None:
            self.killed_for = self.killed_for or reason
            self._process.kill()

    def ask_to_exit(self) -> None:
        """Send `Shutdown`; a worker that takes no message is killed."""
        if self.channel is not None:
            try:
                self.channel.send(Shutdown(), timeout_s=_LAST_WORD_S)
            except (PeerLost, TimeoutError):
                self.kill()

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self.describe_exit()
        self.close()

    def describe_exit(self) -> str:
        """How the process ended, in words. It must have been killed, or be about to exit."""
        assert self._process is not None, "start() comes first"
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, for example in a driver: nobody can end it
            _log.error("%s, process %d, was killed and does not end", self.name, self.pid)
            return "does not end, although killed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class JoinedWorker(WorkerProcess):
    """A worker of another machine: only its channel can be reached, and its end is the end of the channel."""

    def __init__(self, name: WorkerName, peer: JoinedPeer) -> None:
        super().__init__(name)
        self.channel = peer.channel
        self._peer = peer

    @property
    def pid(self) -> int:
        return self._peer.pid

    def kill(self, reason: str = "") -> None:
        """Hang up: the worker ends when it notices, and this end hears of it as of any other death."""
        if self.channel is not None:
            self.killed_for = self.killed_for or reason
            self.channel.hang_up()

    def wait_until_gone(self, timeout_s: float) -> None:
        self.close()

    def describe_exit(self) -> str:
        return f"{self._peer.name} at {self._peer.host} left"


@dataclass(frozen=True)
class Arrival:
    """A worker that joined, the place it takes, and its configuration."""

    name: WorkerName
    peer: JoinedPeer
    configure: Configure


class Outside(Protocol):
    """Where workers of other machines come from (`serve/door`)."""

    def expects(self, name: WorkerName) -> bool: ...

    def ask(self, name: WorkerName, configure: Configure) -> None: ...

    def arrivals(self) -> list[Arrival]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Event:
    """Something a worker said, or (`message` None) that it is gone."""

    worker: WorkerProcess
    message: FromWorker | None
    reason: str = ""


class Fleet:
    """All workers of a server, and one place to wait for any of them."""

    def __init__(self, send_timeout_s: float = _SEND_TIMEOUT_S, outside: Outside | None = None) -> None:
        self.send_timeout_s = send_timeout_s
        self._outside = outside
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)

    def launch(self, name: WorkerName, configure: Configure) -> None:
        """Start (or restart) a worker and send it its configuration; if it comes from outside, ask for one."""
        if self._outside is not None and self._outside.expects(name):
            self._outside.ask(name, configure)
            return
        worker = WorkerProcess(name)
        worker.start()
        self._add(worker, configure)
        _log.info("started %s, process %d", name, worker.pid)

    def _add(self, worker: WorkerProcess, configure: Configure) -> None:
        assert worker.channel is not None, "a started worker has a channel"
        self.workers[worker.name] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self.send(worker, configure)

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        with contextlib.suppress(OSError):  # many wake-ups are pending, or the fleet has stopped and nobody polls
            self._wake_sender.send(b"x")

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for messages or deaths, at most `timeout_s`; send on what workers were too busy to read.

        Who died comes first, last words before the death."""
        events: list[Event] = []
        for key, ready_for in self._selector.select(timeout_s):
            if key.data is None:
                self._drain_wake_ups()
                continue
            if ready_for & selectors.EVENT_WRITE:
                self._send_rest(key.data)
            if ready_for & selectors.EVENT_READ:
                events.extend(self._events_of(key.data))
        for arrival in self._outside.arrivals() if self._outside is not None else []:
            _log.info("%s is %s at %s", arrival.name, arrival.peer.name, arrival.peer.host)
            arrival.peer.channel.speak(str(arrival.name), FromWorker)
            self._add(JoinedWorker(arrival.name, arrival.peer), arrival.configure)
        for worker in self.workers.values():
            if worker.channel is not None and worker.channel.stalled_s > self.send_timeout_s:
                worker.kill(f"it has read nothing for {self.send_timeout_s:.1f} s")
        # What others say meanwhile is mostly that they miss who died; the death itself tells more.
        dead = {event.worker.name for event in events if event.message is None}
        return sorted(events, key=lambda event: event.worker.name not in dead) if dead else events

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
                worker.note_message()
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
        reason = f"{worker.describe_exit()} ({worker.killed_for or reason})"
        _log.warning("lost %s: %s", worker.name, reason)
        return Event(worker, None, reason)

    def send(self, worker: WorkerProcess, message: ToWorker) -> bool:
        """Send without waiting; False if the worker turns out to be gone (its death is then reported by `poll`)."""
        if worker.channel is None:
            return False
        try:
            worker.channel.enqueue(message)
        except PeerLost as error:
            worker.kill(error.reason)
            return False
        if worker.channel.has_unsent:
            self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)
        return True

    def _send_rest(self, worker: WorkerProcess) -> None:
        """The worker's socket takes more. That it does not, because the worker is gone, is for reading to find out."""
        assert worker.channel is not None, "a closed channel is not watched"
        with contextlib.suppress(PeerLost):
            if worker.channel.flush():
                self._selector.modify(worker.channel, selectors.EVENT_READ, worker)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all workers, all at once; returns when all processes have ended. Safe to call again."""
        deadline = time.monotonic() + timeout_s
        if self._outside is not None:
            self._outside.close()
        for worker in self.workers.values():
            worker.ask_to_exit()
        for worker in self.workers.values():
            worker.wait_until_gone(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
