"""The profiler's processes as the profiler sees them: start, order, answer, end. All are gone when `close` returns."""

import contextlib
import subprocess
import tempfile
from typing import IO, Self, TypeVar

import msgspec

from antiphon.base.errors import PeerLost, PeerTimeout, ResourceError, UserError
from antiphon.bench.obeying import Done, Failed, Stop, describe_exit, last_words, start_obeying
from antiphon.bench.profile.orders import Busy, FromRig, Settle, Time, Times, ToRig, Work

ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 5.0
Answer = TypeVar("Answer", bound=msgspec.Struct)


class RigHandle:
    """One process."""

    def __init__(self, name: str, log: IO[bytes]) -> None:
        self.name = name
        self._log = log
        self._channel, self._process = start_obeying("antiphon.bench.profile.process", name, FromRig, log)

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
        how = describe_exit(self._process) + last_words(self._process, self._log)
        return ResourceError(f"the profiler's process {self.name} was {how}: is there enough memory?")


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
