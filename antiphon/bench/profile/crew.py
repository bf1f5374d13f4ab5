"""The profiler's processes as the profiler sees them: start, order, answer, end. All are gone when `close` returns."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from typing import IO, Self, TypeVar

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout, ResourceError, UserError
from antiphon.bench.profile.orders import Busy, Done, Failed, FromRig, Settle, Stop, Time, Times, ToRig, Work
from antiphon.serve.worker.channel import Channel

ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 5.0
Answer = TypeVar("Answer", bound=msgspec.Struct)


class RigHandle:
    """One process."""

    def __init__(self, name: str, log: IO[bytes]) -> None:
        ours, theirs = socket.socketpair()
        self.name = name
        self._log = log
        self._channel = Channel(ours, name, FromRig)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "antiphon.bench.profile.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        finally:
            theirs.close()

    def begin(self, order: ToRig) -> None:
        """Send an order whose answer will be taken later by `answer`."""
        try:
            self._channel.send(order)
        except PeerLost:
            raise self._death() from None

    def answer(self, kind: type[Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer to the last order; blocks. `ResourceError` if the process failed, in its own words."""
        try:
            message = self._channel.receive(timeout_s)
        except PeerLost:
            raise self._death() from None
        if isinstance(message, Failed):
            raise UserError(f"the profiler's process {self.name} failed: {message.reason}")
        assert isinstance(message, kind), f"{self.name} answered {message} where {kind.__name__} belongs"
        return message

    def ask(self, order: ToRig, kind: type[Answer]) -> Answer:
        self.begin(order)
        return self.answer(kind)

    def settle(self, num_threads: int, cores: list[int]) -> None:
        self.ask(Settle(num_threads=num_threads, cores=cores), Done)

    def time(self, work: Work, seconds: float, min_repetitions: int) -> Times:
        return self.ask(Time(work=work, seconds=seconds, min_repetitions=min_repetitions), Times)

    def keep_busy(self, work: Work) -> None:
        """Until the next order."""
        self.ask(Busy(work), Done)

    def close(self) -> None:
        with contextlib.suppress(PeerLost, PeerTimeout):
            self._channel.send(Stop(), timeout_s=0.5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _death(self) -> ResourceError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").split("\n") if line.strip()]
        words = f"; its last words: {lines[-1]}" if lines and code >= 0 else ""
        return ResourceError(f"the profiler's process {self.name} was {how}{words}: is there enough memory?")


class Crew:
    """Some processes, for use in a `with`."""

    def __init__(self) -> None:
        self._handles: list[RigHandle] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.close()
        self._log.close()

    def start(self, name: str) -> RigHandle:
        handle = RigHandle(name, self._log)
        self._handles.append(handle)
        return handle
