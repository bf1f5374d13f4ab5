"""A process that obeys orders over a channel, from both ends: the M2N benchmark and the profiler have such processes.

One order, one answer; what goes wrong is an answer too. Between orders the process is blocked in a read.
"""

import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.system import python_module
from antiphon.serve.worker.channel import Channel

FOREVER_S = 365.0 * 86400


class Stop(msgspec.Struct, tag=True, frozen=True):
    """An order: end. Not answered."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """An answer that says nothing more."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Handle(Protocol):
    """What is needed of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def start_obeying(
    module: str, name: str, answers: Any, log: IO[bytes], environment: Mapping[str, str] | None = None
) -> tuple[Channel, "subprocess.Popen[bytes]"]:
    """`python -m MODULE FD` and the channel to it; `answers` is the type of what comes back."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, name, answers)
    try:
        command = python_module(module, str(theirs.fileno()))
        return channel, start_logged(command, log, environment, [theirs.fileno()])
    finally:
        theirs.close()


def start_logged(
    command: Sequence[str],
    log: IO[bytes],
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """A command whose words go to `log`; `environment` is added to ours."""
    return subprocess.Popen(
        command,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # Ctrl-C is ours to handle
    )


def describe_exit(handle: Handle) -> str:
    """How the process ended, in words; one that only closed its channel is ended first."""
    if handle.poll() is None:
        handle.kill()
    code = handle.wait()
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def last_words(handle: Handle, log: IO[bytes]) -> str:
    """The last line of `log`, unless the ended process was killed: then it could say nothing."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").split("\n") if line.strip()]
    return f"; its last words: {lines[-1]}" if lines and (handle.poll() or 0) >= 0 else ""


def obey_orders(channel: Channel, receive: Callable[[], Any], obey: Callable[[Any], Any]) -> int:
    """The process's own part, until `Stop`: `receive` has the next order, `obey` its answer, or None if that was sent
    already. Returns the exit code."""
    try:
        while not isinstance(order := receive(), Stop):
            if (answer := _answer(order, obey)) is not None:
                channel.send(answer)
    except PeerLost:
        return 1
    return 0


def _answer(order: Any, obey: Callable[[Any], Any]) -> Any:
    """What went wrong is answered too; the traceback goes to the log."""
    try:
        return obey(order)
    except Exception as error:
        traceback.print_exc()
        for_people = isinstance(error, (UserError, PeerLost, PeerTimeout))
        return Failed(str(error) if for_people else f"{type(error).__name__}: {error}")
