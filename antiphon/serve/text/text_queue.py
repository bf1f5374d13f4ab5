"""A process that works on texts, the line of jobs before it, and the thread that hands them over one by one.

A request is one job or several, which are its time slices: after each one the next client has its turn (`FairLine`).
A client's small requests go before its large ones, but only so far: a request is due at the time it came plus a time
that grows with its size. So one address behind which many people sit is served by size, and each request gets its turn.

A request has a time, which the process's own processor time counts, and memory. A process that takes more is killed and
replaced; its request fails with the limit that it hit, and the next ones go on. The line is bounded, for each client
and in all, and no request waits in it without an end. Rejected: a task of the event loop instead of the thread: the
kernel ends a process with the thread that started it, and loops end earlier.
"""

import concurrent.futures
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from antiphon.base.errors import PeerLost, PeerTimeout, UserError, with_fix
from antiphon.base.fair_line import FairLine
from antiphon.base.logging import Occasional, get_logger
from antiphon.base.system import ending_signals_blocked, python_module, signal_name
from antiphon.base.units import format_bytes
from antiphon.serve.engine_api import SHUTTING_DOWN, NoRoom, QueueFull, ShuttingDown
from antiphon.serve.text.text_process import Answer, Job, TextConfigure, TextRefused, TextResult
from antiphon.serve.worker.channel import Channel

_log = get_logger("serve.text")
_TOKENIZER_TIMEOUT_S = 10.0
_TOKENIZER_TIMEOUT_S_PER_TOKEN = 20e-6  # ten times what it takes an idle core
_MEMORY_BYTES = 512 * 1024 * 1024
_MEMORY_BYTES_PER_TOKEN = 2048  # the tokenizer takes some 400 while it works; more than what fits is tried
_START_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 10.0
_NOT_BY_ITS_JOB = (f"was ended by {signal_name(signal.SIGKILL)}", "exited with 0")  # killed, or cut off
_SAY_S = 5.0  # between two lines on a process that does not start
_LOOK_S = 1.0  # between two looks, while no request comes, whether the process is still there
_WALL_FACTOR = 5  # a job may take this many times its processor time, because others use the cores, too
_BYTES_PER_S_OF_PATIENCE = 16 * 1024
_MAX_PATIENCE_S = 10.0
_MIN_WAITING_BYTES = 4096
_FULL_CLIENTS = 4  # the limit of all clients together is that of this many
WORK_PROGRAM, READ_PROGRAM = "antiphon.serve.text.text_process", "antiphon.serve.text.tokenizer_reading"


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """What one request may take: seconds of its process's processor, and `memory_bytes` by which the process may grow.
    Texts of one client that wait may have `max_waiting_bytes` together, each at least `_MIN_WAITING_BYTES`, which is
    about what it takes beside its text; none waits longer than `max_wait_s`."""

    template_timeout_s: float = 2.0
    tokenizer_timeout_s: float = _TOKENIZER_TIMEOUT_S
    memory_bytes: int = _MEMORY_BYTES
    max_waiting_bytes: int = 64 * 1024 * 1024
    max_wait_s: float = 30.0

    @classmethod
    def for_context(cls, num_tokens: int) -> "TextLimits":
        """Time and memory enough for a text that fits `num_tokens`."""
        return cls(
            tokenizer_timeout_s=_TOKENIZER_TIMEOUT_S + _TOKENIZER_TIMEOUT_S_PER_TOKEN * num_tokens,
            memory_bytes=_MEMORY_BYTES + _MEMORY_BYTES_PER_TOKEN * num_tokens,
        )


@dataclass
class TextRequest:
    """Jobs for one client, of `num_bytes` together. `what` names them in errors, ``the model's chat template``, and
    `advice` is what helps. `answer` becomes the answers in their order; the first `TextRefused` is the last."""

    jobs: Sequence[Job]
    what: str
    timeout_s: float
    client: str = ""
    num_bytes: int = 0
    advice: str = "send fewer or shorter texts"
    answer: "concurrent.futures.Future[list[Answer]]" = field(default_factory=concurrent.futures.Future)
    came_s: float = field(default_factory=time.monotonic)
    used_s: float = 0.0
    was_tried_again: bool = False
    answers: list[Answer] = field(default_factory=list)

    @property
    def due_s(self) -> float:
        """When it comes before all later requests of its client."""
        return self.came_s + min(_MAX_PATIENCE_S, self.num_bytes / _BYTES_PER_S_OF_PATIENCE)

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.jobs) or isinstance(self.answers[-1], TextRefused)


class WaitingBytes:
    """The bytes of the requests that wait, counted for each client. For any thread."""

    def __init__(self, max_bytes: int) -> None:
        """The limit of one client; all together may have some times as much."""
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, client: str, num_bytes: int, what: str) -> None:
        """One more request of `client` waits for `what`; `QueueFull` when it does not fit. One alone always does."""
        counted = max(num_bytes, _MIN_WAITING_BYTES)
        with self._lock:
            own = ("of this client", self._bytes[client], 1)
            total = ("of all clients", self._bytes.total(), _FULL_CLIENTS)
            for whose, waiting_bytes, times in (own, total):
                if waiting_bytes and waiting_bytes + counted > times * self._max_bytes:
                    size, limit_size = format_bytes(waiting_bytes), format_bytes(times * self._max_bytes)
                    raise QueueFull(
                        f"requests {whose} of {size} wait for {what}, the limit is {limit_size}: try again later", 1.0
                    )
            self._bytes[client] += counted

    def remove(self, client: str, num_bytes: int) -> None:
        """The counterpart of `add`. What is zero is forgotten: clients are many."""
        with self._lock:
            self._bytes[client] -= max(num_bytes, _MIN_WAITING_BYTES)
            if self._bytes[client] <= 0:
                del self._bytes[client]


class TextQueue:
    """One process, its line of requests, and the thread that hands their jobs over one by one."""

    def __init__(self, name: str, configure: TextConfigure, limits: TextLimits, program: str = WORK_PROGRAM) -> None:
        self._name = name
        self._configure = configure
        self._limits = limits
        self._program = program
        self._line: FairLine[TextRequest] = FairLine()
        self._changed = threading.Condition()  # guards the line and `_closing`
        self._closing = False
        self._waiting = WaitingBytes(limits.max_waiting_bytes)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._saying = Occasional(_SAY_S)

    def start(self) -> None:
        """Begin to start the process; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Kill the process and fail the requests that still wait. Waits for the end, seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if (process := self._process) is not None:
            process.kill()
        self._thread.join(_EXIT_TIMEOUT_S)

    def submit(self, asked: TextRequest) -> "concurrent.futures.Future[list[Answer]]":
        """Put a request in line; `QueueFull` when the line is at its limit, `ShuttingDown` after `close`."""
        if self._closing:
            raise ShuttingDown(SHUTTING_DOWN)
        self._waiting.add(asked.client, asked.num_bytes, asked.what)
        self._put(asked)
        return asked.answer

    def _put(self, asked: TextRequest) -> None:
        with self._changed:
            self._line.put(asked.client, asked, asked.due_s)
            self._changed.notify()

    def _take(self) -> TextRequest | None:
        """The next request, after `close` what is left; None when none came in a while, or none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closing, _LOOK_S)
            return self._line.take() if self._line else None

    def _work(self) -> None:
        """The thread. It starts the process itself: the kernel ends a process with the thread that started it."""
        self._replace()
        while True:
            asked = self._take()
            if asked is not None:
                self._go_on(asked)
            elif self._closing:
                break
            if asked is not None or self._channel is not None:
                self._replace()
            del asked  # it may be large, and the next one may be long in coming
        self._kill()

    def _go_on(self, asked: TextRequest) -> None:
        """The request's next job; then it is done, or another client has its turn."""
        outcome: Exception | None = None
        if not asked.answer.cancelled():
            try:
                asked.answers.append(self._answer(asked))
                if not asked.is_done:
                    self._put(asked)
                    return
            except Exception as error:
                outcome = error
        self._waiting.remove(asked.client, asked.num_bytes)
        if asked.answer.set_running_or_notify_cancel():
            if outcome is None:
                asked.answer.set_result(asked.answers)
            else:
                asked.answer.set_exception(outcome)

    def _answer(self, asked: TextRequest) -> Answer:
        if self._closing:
            raise ShuttingDown(SHUTTING_DOWN)
        waited_s = time.monotonic() - asked.came_s
        if waited_s > self._limits.max_wait_s and not asked.answers:
            raise QueueFull(
                f"the request waited {waited_s:.1f} s for {asked.what}, the limit is {self._limits.max_wait_s:g} s:"
                " try again later",
                1.0,
            )
        try:
            channel = self._begin()
        except (PeerLost, PeerTimeout, OSError, MemoryError) as error:
            if self._closing:
                raise ShuttingDown(SHUTTING_DOWN) from None
            self._say_not_started(error)
            raise NoRoom(f"the process for {asked.what} does not start now: {_words(error)}") from error
        try:
            return self._ask(channel, asked)
        except PeerTimeout:
            self._kill()
            _log.warning("%s took longer than %.3g s: killed", asked.what, asked.timeout_s)
            raise UserError(
                f"{asked.what} took longer than {asked.timeout_s:.3g} s, the limit: {asked.advice}"
            ) from None
        except PeerLost as error:
            how = self._kill()
            if self._closing:
                raise ShuttingDown(SHUTTING_DOWN) from None
            if how in _NOT_BY_ITS_JOB:
                if asked.was_tried_again:
                    _log.warning("%s: its process %s, twice (%s)", asked.what, how, error.reason)
                    raise NoRoom(f"the process for {asked.what} {how}, twice: try again later") from error
                asked.was_tried_again = True
                _log.warning("the process for %s %s: its job is tried once more", self._name, how)
                return self._answer(asked)
            _log.warning("%s: its process %s (%s)", asked.what, how, error.reason)
            raise UserError(
                f"{asked.what} cannot do this: its process {how}, most likely at the limit of"
                f" {format_bytes(self._limits.memory_bytes)} of memory: {asked.advice}"
            ) from None

    def _ask(self, channel: Channel, asked: TextRequest) -> Answer:
        """`PeerTimeout` once the process has computed too long for this request, or has had no core for much longer."""
        limit_s = asked.timeout_s - asked.used_s
        started_s, before_s = time.monotonic(), self._processor_s()
        channel.send(asked.jobs[len(asked.answers)], _WALL_FACTOR * asked.timeout_s)
        left_s = limit_s
        while True:
            try:
                answer: Answer = channel.receive(max(0.05, left_s))
            except PeerTimeout:
                left_s = limit_s - (self._processor_s() - before_s)
                if left_s <= 0 or time.monotonic() - started_s > _WALL_FACTOR * limit_s:
                    raise
            else:
                asked.used_s += self._processor_s() - before_s
                return answer

    def _processor_s(self) -> float:
        """What the process has computed so far; the wall's time where the system does not say."""
        assert self._process is not None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except (psutil.Error, OSError):
            return time.monotonic()
        return float(times.user + times.system)

    def _begin(self) -> Channel:
        """The channel to a process that is ready, started if there is none. Seconds for a large vocabulary."""
        if self._channel is not None:
            if self._process is not None and self._process.poll() is None:
                return self._channel
            _log.warning(
                "the process for %s %s between two jobs: another one takes its place", self._name, self._kill()
            )
        ours, theirs = socket.socketpair()
        channel = Channel(ours, self._name, TextResult)
        try:
            with theirs, ending_signals_blocked():
                command = python_module(self._program, "--fd", str(theirs.fileno()))
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            if self._closing:  # `close` may have looked for a process just before there was one
                raise InterruptedError("the queue closes")
            channel.send(self._configure, _START_TIMEOUT_S)
            channel.receive(_START_TIMEOUT_S)
        except BaseException:
            channel.close()
            self._kill()
            raise
        channel.speak(self._name, Answer)
        self._channel = channel
        return channel

    def _replace(self) -> None:
        """A process where there is none yet or no more, before the first job. If it does not start, the next
        job tries again and tells its client."""
        is_gone = self._process is None or self._process.poll() is not None
        if (self._channel is None or is_gone) and not self._closing:
            try:
                self._begin()
            except (PeerLost, PeerTimeout, OSError, MemoryError) as error:
                if not self._closing:
                    self._say_not_started(error)

    def _say_not_started(self, error: Exception) -> None:
        if self._saying.count() is not None:
            _log.error("the process for %s does not start: %s", self._name, with_fix(_words(error)))

    def _kill(self) -> str:
        """End the process; how it ended, in words."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.hang_up()
            channel.close()
        if process is None:
            return "was gone"
        try:
            code = process.wait(0.1)  # it may be ending by itself, and then how is worth knowing
        except subprocess.TimeoutExpired:
            try:
                process.kill()
                code = process.wait(_EXIT_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired):  # stuck in the kernel: another takes its place
                return "does not end, although killed"
        return f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
