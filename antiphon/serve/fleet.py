"""Worker processes: start, talk, notice death. No policy: the engine decides what to do about a death.

When a worker's process dies the kernel closes its socket, and the next `poll` reports it within milliseconds. A
stopped process (SIGSTOP) differs from a busy one by its state in the process table. Rejected: heartbeats between
processes of one machine, which notice later and can be wrong. Nothing here waits for one worker: what it does not read
now is sent later. A worker that reads nothing for `send_timeout_s` hangs, and is killed.

The system may refuse any call, for want of descriptors, memory or processes. That costs the worker concerned at most.
"""

import contextlib
import selectors
import signal
import socket
import time
from dataclasses import dataclass

from antiphon.base.errors import PeerLost
from antiphon.base.logging import get_logger
from antiphon.serve.worker.messages import Configure, FromWorker, ToWorker
from antiphon.serve.worker_handle import RemoteWorkers, WorkerName, WorkerProcess

_log = get_logger("fleet")
_SEND_TIMEOUT_S = 30.0
_LAST_WORD_S = 1.0  # for workers to exit in order; they hold nothing that is not held here
_LONGEST_TICK_S = 1.0  # what passes between two ticks of the clock counts for this long at most


@dataclass(frozen=True)
class Event:
    """Something a worker said, or (`message` None) that it is gone."""

    worker: WorkerProcess
    message: FromWorker | None
    reason: str = ""


class WakeUp:
    """Wakes a thread that sleeps on sockets: a socket pair that its selector watches like any other. `wake` from any
    thread; the rest is for the thread that sleeps."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable when `wake` is called."""
        return self._receiver.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # many wake-ups are pending, or it is closed and no thread sleeps
            self._sender.send(b"x")

    def drain(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(OSError):  # none is left; or the system refuses, and the selector says it again
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class AwakeClock:
    """A clock that runs while this process does: for how long a worker has been silent, stopped or hanging.

    The whole server may be stopped and go on later: ^Z, a benchmark that gives the cores to another engine, a
    machine that is suspended. Its workers must not be found hanging then. So what passes between two ticks counts for
    at most a second. Rejected: the system's clock of process time, which stands still while the process only waits.

    `tick` more often than once a second, in one thread; the rest may be used by any."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.paused = False  # the clock stands still: the workers were stopped on purpose
        self._ticked_s = time.monotonic()

    def tick(self) -> None:
        """Let the time since the last tick count."""
        ticked_s = time.monotonic()
        if not self.paused:
            self.now_s += min(ticked_s - self._ticked_s, _LONGEST_TICK_S)
        self._ticked_s = ticked_s


class Fleet:
    """All workers of a server, and one place to wait for any of them."""

    def __init__(self, remote: RemoteWorkers | None = None) -> None:
        """`remote`: where workers of other machines come from."""
        self.send_timeout_s = _SEND_TIMEOUT_S
        self._remote = remote
        self.clock = AwakeClock()
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._events: list[Event] = []  # left over from a `poll` that the system cut short
        self._unwatched: list[WorkerProcess] = []  # the selector refused them
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ, None)

    def start(self) -> None:
        """Let workers of other machines in. `ResourceError` if the address cannot be had."""
        if self._remote is not None:
            self._remote.start(self.wake)

    def launch(self, name: WorkerName, configure: Configure) -> None:
        """Start (or restart) a worker and send it its configuration; if it comes from outside, ask for one. `OSError`,
        and nothing has started, if the system refuses the process."""
        if self._remote is not None and self._remote.expects(name):
            self._remote.ask(name, configure)
            return
        worker = WorkerProcess(name)
        worker.start()
        self._add(worker, configure)
        _log.info("started %s, process %d", name, worker.pid)

    def _add(self, worker: WorkerProcess, configure: Configure) -> None:
        assert worker.channel is not None, "a started worker has a channel"
        worker.heard_s = self.clock.now_s
        try:
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        except OSError:
            worker.kill("it cannot be watched")
            worker.wait_until_gone(_LAST_WORD_S)
            raise
        self.workers[worker.name] = worker
        self.send(worker, configure)

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        self._wake_up.wake()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for messages or deaths, at most `timeout_s`; send on what workers were too busy to read.

        Events of workers that died come first, their last words before the death."""
        selected = self._selector.select(0.0 if self._events or self._unwatched else timeout_s)
        self.clock.tick()
        for key, ready_for in selected:
            if key.data is None:
                self._wake_up.drain()
                continue
            if ready_for & selectors.EVENT_WRITE:
                self._send_rest(key.data)
            if ready_for & selectors.EVENT_READ:
                self._take_events_of(key.data)
        self._bury_unwatched()
        self._take_in_arrivals()
        for worker in self.workers.values():
            if worker.channel is not None and worker.channel.stalled_s > self.send_timeout_s and not self.clock.paused:
                worker.kill(f"it has read nothing for {self.send_timeout_s:.1f} s")
        events, self._events = self._events, []
        # What others say meanwhile is mostly that they miss the one that died; the death itself says more.
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

    def _take_events_of(self, worker: WorkerProcess) -> None:
        channel = worker.channel
        if channel is None:
            return
        try:
            while (message := channel.poll()) is not None:
                worker.heard_s = self.clock.now_s
                self._events.append(Event(worker, message))
        except PeerLost as error:
            self._events.append(self._bury(worker, error.reason))

    def _bury_unwatched(self) -> None:
        while self._unwatched:
            worker = self._unwatched.pop()
            if worker.channel is not None:
                self._events.append(self._bury(worker, "it could not be watched"))

    def _take_in_arrivals(self) -> None:
        for worker in self._remote.arrivals() if self._remote is not None else []:
            try:
                self._add(worker, worker.configure)
            except OSError as error:
                _log.error(
                    "%s joined and cannot be watched: %s; the next one may", worker.name, error.strerror or error
                )
                assert self._remote is not None, "it came from there"
                self._remote.ask(worker.name, worker.configure)

    def _bury(self, worker: WorkerProcess, reason: str) -> Event:
        assert worker.channel is not None, "only a worker with a channel can be lost"
        with contextlib.suppress(KeyError):  # it is not watched, and lost because of that
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
            self._watch(worker, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return True

    def _watch(self, worker: WorkerProcess, events: int) -> None:
        """Watch for these from now on. A worker that cannot be watched is lost: the next `poll` says so."""
        assert worker.channel is not None, "a closed channel is not watched"
        try:
            self._selector.modify(worker.channel, events, worker)
        except (OSError, KeyError) as error:  # a selector that refuses once has forgotten the channel
            worker.kill(f"it cannot be watched ({error})")
            self._unwatched.append(worker)

    def _send_rest(self, worker: WorkerProcess) -> None:
        """The worker's socket takes more. That it does not, because the worker is gone, is for reading to find out."""
        assert worker.channel is not None, "a closed channel is not watched"
        with contextlib.suppress(PeerLost):
            if worker.channel.flush():
                self._watch(worker, selectors.EVENT_READ)

    def stop(self, timeout_s: float = _LAST_WORD_S) -> None:
        """Stop all workers, all at once; returns when all processes have ended. Those that have not exited after
        `timeout_s` are killed. Safe to call again."""
        deadline = time.monotonic() + timeout_s
        if self._remote is not None:
            self._remote.close()
        for worker in self.workers.values():
            worker.ask_to_exit()
        for worker in self.workers.values():
            worker.wait_until_gone(max(0.0, deadline - time.monotonic()))
        self._selector.close()
        self._wake_up.close()
