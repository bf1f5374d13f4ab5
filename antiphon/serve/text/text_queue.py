"""A process that works on texts, the line of jobs before it, and the thread that hands them over one by one.

A job has a time from when it starts, and memory. A process that takes more is killed and replaced; its request is told
which limit it hit, and the next ones go on. The line is bounded, and nobody waits in it for ever. Rejected: a task of
the event loop instead of the thread: the kernel ends a process with the thread that started it, and loops end earlier.
"""

import concurrent.futures
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.base.programs import python_module
from antiphon.base.units import format_bytes
from antiphon.serve import signals
from antiphon.serve.engine_api import QueueFull, ShuttingDown
from antiphon.serve.text.text_messages import Answer, Configure, Job, Ready
from antiphon.serve.worker.channel import Channel

_log = get_logger("serve.text")
_TOKENIZER_TIMEOUT_S = 10.0
_TOKENIZER_TIMEOUT_S_PER_TOKEN = 20e-6  # ten times what it takes an idle core
_MEMORY_BYTES = 512 * 1024 * 1024
_MEMORY_BYTES_PER_TOKEN = 2048  # the tokenizer takes some 400 while it works; more than what fits is tried
_START_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 10.0
_LOOK_S = 1.0  # between two looks, while nobody asks, whether the process is still there


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """What one job may take. `memory_bytes` is what its process may grow by; `max_waiting` jobs may wait for each of
    the processes, and none longer than `max_wait_s`."""

    template_timeout_s: float = 2.0
    tokenizer_timeout_s: float = _TOKENIZER_TIMEOUT_S
    memory_bytes: int = _MEMORY_BYTES
    max_waiting: int = 64
    max_wait_s: float = 30.0

    @classmethod
    def for_context(cls, num_tokens: int) -> "TextLimits":
        """Time and memory enough for a text that fits `num_tokens`."""
        return cls(
            tokenizer_timeout_s=_TOKENIZER_TIMEOUT_S + _TOKENIZER_TIMEOUT_S_PER_TOKEN * num_tokens,
            memory_bytes=_MEMORY_BYTES + _MEMORY_BYTES_PER_TOKEN * num_tokens,
        )


@dataclass(frozen=True)
class _Asked:
    """A job in line. `what` names it in errors: ``the model's chat template``."""

    job: Job
    what: str
    timeout_s: float
    answer: "concurrent.futures.Future[Answer]" = field(default_factory=concurrent.futures.Future)
    asked_s: float = field(default_factory=time.monotonic)


class TextQueue:
    """One process, its line of jobs, and the thread that hands them over one by one."""

    def __init__(self, name: str, configure: Configure, limits: TextLimits) -> None:
        self._name = name
        self._configure = configure
        self._limits = limits
        self._line: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._closing = False

    def start(self) -> None:
        """Begin to start the process; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Kill the process; who still waits is told. Waits for the end, seconds at most."""
        self._closing = True
        self._line.put(None)
        if (process := self._process) is not None:
            process.kill()
        self._thread.join(_EXIT_TIMEOUT_S)

    @property
    def pid(self) -> int | None:
        """The process that takes the next job; None while there is none."""
        return None if self._process is None else self._process.pid

    def submit(self, job: Job, what: str, timeout_s: float) -> "concurrent.futures.Future[Answer]":
        """Put a job in line; `QueueFull` when the line is at its limit, `ShuttingDown` after `close`."""
        if self._closing:
            raise _shutting_down()
        num_waiting = self._line.qsize()
        if num_waiting >= self._limits.max_waiting:
            raise QueueFull(
                f"{num_waiting} requests wait for {what}, the limit is {self._limits.max_waiting}: try again later", 1.0
            )
        asked = _Asked(job, what, timeout_s)
        self._line.put(asked)
        return asked.answer

    def _work(self) -> None:
        """The thread. It starts the process itself: the kernel ends a process with the thread that started it."""
        self._replace()
        while True:
            try:
                asked = self._line.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._channel is not None:
                    self._replace()
                continue
            if asked is None:
                break
            self._settle(asked)
            del asked  # it may be large, and the next one may be long in coming
            self._replace()
        self._kill()

    def _settle(self, asked: _Asked) -> None:
        if asked.answer.set_running_or_notify_cancel():
            try:
                asked.answer.set_result(self._answer(asked))
            except Exception as error:
                asked.answer.set_exception(error)

    def _answer(self, asked: _Asked) -> Answer:
        if self._closing:
            raise _shutting_down()
        waited_s = time.monotonic() - asked.asked_s
        if waited_s > self._limits.max_wait_s:
            raise QueueFull(
                f"the request waited {waited_s:.1f} s for {asked.what}, the limit is {self._limits.max_wait_s:g} s:"
                " try again later",
                1.0,
            )
        channel = self._begin()
        try:
            channel.send(asked.job, asked.timeout_s)
            answer: Answer = channel.receive(asked.timeout_s)
        except PeerTimeout:
            self._kill()
            _log.warning("%s took longer than %g s: killed", asked.what, asked.timeout_s)
            raise UserError(
                f"{asked.what} took longer than {asked.timeout_s:.3g} s, the limit: send fewer or shorter texts"
            ) from None
        except PeerLost as error:
            how = self._kill()
            if self._closing:
                raise _shutting_down() from None
            _log.warning("%s: its process %s (%s)", asked.what, how, error.reason)
            raise UserError(
                f"{asked.what} cannot do this: its process {how}, most likely at the limit of"
                f" {format_bytes(self._limits.memory_bytes)} of memory; send fewer or shorter texts"
            ) from None
        return answer

    def _begin(self) -> Channel:
        """The channel to a process that is ready, started if there is none. Seconds for a large vocabulary."""
        if self._channel is not None:
            if self._process is not None and self._process.poll() is None:
                return self._channel
            _log.warning(
                "the process for %s %s between two jobs: another one takes its place", self._name, self._kill()
            )
        ours, theirs = socket.socketpair()
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
        with theirs, signals.blocked():
            command = python_module("antiphon.serve.text.text_process", "--fd", str(theirs.fileno()))
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
            )
        channel = Channel(ours, self._name, Ready)
        try:
            channel.send(self._configure, _START_TIMEOUT_S)
            channel.receive(_START_TIMEOUT_S)
        except (PeerLost, PeerTimeout):
            channel.close()
            self._kill()
            raise
        channel.speak(self._name, Answer)
        self._channel = channel
        return channel

    def _replace(self) -> None:
        """A process where there is none yet or no more, before anybody asks for it. If it does not start, the next
        job tries again and tells its client."""
        is_gone = self._process is None or self._process.poll() is not None
        if (self._channel is None or is_gone) and not self._closing:
            try:
                self._begin()
            except (PeerLost, PeerTimeout, OSError) as error:
                if not self._closing:
                    _log.error("the process for %s does not start: %s", self._name, error)

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
            process.kill()
            code = process.wait(_EXIT_TIMEOUT_S)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down and takes no new requests")
