"""Worker processes: start, talk, notice death. No policy: what to do about a death is the engine's business.

A worker inherits one end of a socket pair. When its process dies the kernel closes that end, and the next `poll`
reports it within milliseconds. A stopped process (SIGSTOP) is told from a busy one by its state in the process table.
Rejected: heartbeats between processes of one machine, which notice later and can be wrong. Nothing here waits for one
worker: what it does not read now is sent later. One that reads nothing for `send_timeout_s` hangs, and is killed.
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

import psutil

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.serve import signals
from antiphon.serve.awake_clock import AwakeClock
from antiphon.serve.wake_up import WakeUp
from antiphon.serve.worker.channel import Channel
from antiphon.serve.worker.messages import Configure, FromWorker, Shutdown, ToWorker

_log = get_logger("fleet")
_SEND_TIMEOUT_S = 30.0
_LAST_WORD_S = 1.0  # for workers to exit in order; they hold nothing that is not held here
_HUNG_UP_S = 0.2  # for a worker that closed its socket to end by itself
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

    is_remote = False

    def __init__(self, name: WorkerName) -> None:
        self.name = name
        self.ready = False
        self.explanation = ""  # of its end: why `kill` was called, or what the worker said itself
        self.heard_s = 0.0  # when it was started or last said something, by the fleet's clock
        self.channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launch the process; it waits for `Configure`. `OSError` if the system has no room for another process."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "antiphon.serve.worker.process", "--fd", str(theirs.fileno())]
        try:
            with signals.blocked():
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours, str(self.name), FromWorker)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Somebody stopped the process (SIGSTOP, SIGTSTP); it does nothing until it is told to go on."""
        with contextlib.suppress(psutil.Error):
            return self.channel is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def was_killed_from_outside(self) -> bool:
        """The process has ended by SIGKILL, and not for a reason of ours."""
        return self._process is not None and self._process.poll() == -signal.SIGKILL and not self.explanation

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        assert self._process is not None, "start() comes first"
        self._process.send_signal(number)

    def kill(self, reason: str = "") -> None:
        """SIGKILL: for a worker that hangs. Its death is then noticed as any other, and explained by `reason`."""
        if self._process is not None and self._process.poll() is None:
            self.explanation = self.explanation or reason
            self._process.kill()

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


@dataclass(frozen=True)
class Arrival:
    """A worker that joined for a place in the fleet, and its configuration."""

    worker: WorkerProcess
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
        self.clock = AwakeClock()
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ, None)

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
        worker.heard_s = self.clock.now_s
        self.workers[worker.name] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self.send(worker, configure)

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        self._wake_up.wake()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for messages or deaths, at most `timeout_s`; send on what workers were too busy to read.

        Who died comes first, last words before the death."""
        events: list[Event] = []
        selected = self._selector.select(timeout_s)
        self.clock.tick()
        for key, ready_for in selected:
            if key.data is None:
                self._wake_up.drain()
                continue
            if ready_for & selectors.EVENT_WRITE:
                self._send_rest(key.data)
            if ready_for & selectors.EVENT_READ:
                events.extend(self._events_of(key.data))
        for arrival in self._outside.arrivals() if self._outside is not None else []:
            self._add(arrival.worker, arrival.configure)
        for worker in self.workers.values():
            if worker.channel is not None and worker.channel.stalled_s > self.send_timeout_s and not self.clock.paused:
                worker.kill(f"it has read nothing for {self.send_timeout_s:.1f} s")
        # What others say meanwhile is mostly that they miss who died; the death itself tells more.
        dead = {event.worker.name for event in events if event.message is None}
        return sorted(events, key=lambda event: event.worker.name not in dead) if dead else events

    def pause(self) -> None:
        """Stop the workers' processes, so that they leave the cores to others, and the clock with them. Any thread.
        Workers of other machines go on."""
        self.clock.paused = True
        for worker in list(self.workers.values()):
            worker.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`; without one nothing happens."""
        for worker in list(self.workers.values()):
            worker.send_signal(signal.SIGCONT)
        self.clock.paused = False

    def _events_of(self, worker: WorkerProcess) -> list[Event]:
        events: list[Event] = []
        channel = worker.channel
        if channel is None:
            return events
        try:
            while (message := channel.poll()) is not None:
                worker.heard_s = self.clock.now_s
                events.append(Event(worker, message))
        except PeerLost as error:
            events.append(self._bury(worker, error.reason))
        return events

    def _bury(self, worker: WorkerProcess, reason: str) -> Event:
        assert worker.channel is not None, "only a worker with a channel can be lost"
        self._selector.unregister(worker.channel)
        worker.close()
        worker.ready = False
        worker.end_after_hanging_up(reason)
        reason = f"{worker.describe_exit()} ({worker.explanation or reason})"
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

    def stop(self, timeout_s: float = _LAST_WORD_S) -> None:
        """Stop all workers, all at once; returns when all processes have ended. Those that have not exited after
        `timeout_s` are killed. Safe to call again."""
        deadline = time.monotonic() + timeout_s
        if self._outside is not None:
            self._outside.close()
        for worker in self.workers.values():
            worker.ask_to_exit()
        for worker in self.workers.values():
            worker.wait_until_gone(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        self._wake_up.close()
