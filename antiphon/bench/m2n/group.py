"""The processes of one contestant, as the benchmark sees them: start, order, collect, notice death, end.

Every process holds one end of a socket pair. Answers are collected in the order in which they come, so that the process
that fails is named and not the one that waits for it. Everybody is gone when `close` returns; if the benchmark itself
is killed, the kernel ends them.
"""

import contextlib
import select
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.bench.m2n.api import Seat, Traffic
from antiphon.bench.m2n.contestants import Contestant
from antiphon.bench.m2n.launch import LaunchedProcess, end_all, start_each, start_ranks
from antiphon.bench.m2n.messages import (
    Check,
    Connect,
    FromMember,
    Open,
    Opened,
    Prepare,
    Ran,
    Run,
    ToMember,
)
from antiphon.bench.obeying import Done, Failed, Stop, describe_exit, last_words

START_TIMEOUT_S = 300.0  # dozens of processes on few cores import torch
RUN_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
_NOTICE_S = 0.2  # a death may be seen by a fellow before it is by us
Answer = TypeVar("Answer", Opened, Done, Ran)


class MemberFailed(UserError):
    """A process of a contestant could not do its part; the message names both and the reason."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Track:
    """What one process recorded: int64 [rounds, phases + 1] ns, the start of a round and the end of each phase."""

    seat: Seat
    phases: tuple[str, ...]
    marks: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A few rounds of one contestant, as each of its processes saw them."""

    contestant: Contestant
    traffic: Traffic
    tracks: list[Track]


def operations_s(tracks: Sequence[Track]) -> NDArray[np.float64]:
    """[rounds, timed processes]: how long each operation took."""
    operations = [track.marks[:, -1] - track.marks[:, 0] for track in tracks if track.seat.timed]
    seconds: NDArray[np.float64] = np.stack(operations, axis=1) * 1e-9
    return seconds


def elapsed_s(tracks: Sequence[Track]) -> float:
    """From the first start of a timed operation to the last end of one."""
    timed = [track.marks for track in tracks if track.seat.timed]
    return float(max(marks[-1, -1] for marks in timed) - min(marks[0, 0] for marks in timed)) * 1e-9


class ProcessGroup:
    """All processes of one contestant, for use in a `with`. After a failure it is good for nothing but its end."""

    def __init__(self, contestant: Contestant, traffic: Traffic, timeout_s: float) -> None:
        self.contestant = contestant
        self._seats = contestant.seats(traffic, timeout_s)
        self._processes: list[LaunchedProcess] = []
        self._log: IO[bytes] | None = None
        self._next_step = 1
        self._broken = False

    def __enter__(self) -> Self:
        """Start the processes and connect them; blocks until all are ready."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.handle.pid for process in self._processes]

    def prepare(self, traffic: Traffic) -> None:
        """Make ready for rounds of `traffic`, none of whose messages is larger than the group was made for."""
        self._ask([Prepare(traffic)] * len(self._seats), Done, RUN_TIMEOUT_S)

    def check(self, num_rounds: int) -> None:
        """This many rounds with every byte compared. `MemberFailed` names the process and the byte."""
        for _ in range(num_rounds):
            self._ask([Check(self._take_steps(1))] * len(self._seats), Done, RUN_TIMEOUT_S)

    def run(self, num_rounds: int, num_warm: int) -> list[Track]:
        """This many timed rounds, after `num_warm` others, as every process saw them."""
        order = Run(first_step=self._take_steps(num_warm + num_rounds), num_warm=num_warm, num_rounds=num_rounds)
        return [
            Track(
                seat=seat,
                phases=tuple(answer.phases),
                marks=np.frombuffer(answer.marks, np.int64).reshape(num_rounds, len(answer.phases) + 1),
            )
            for seat, answer in zip(self._seats, self._ask([order] * len(self._seats), Ran, RUN_TIMEOUT_S), strict=True)
        ]

    def close(self) -> None:
        """Ask all to end, kill who does not; a second call does nothing."""
        for process in self._processes:
            with contextlib.suppress(PeerLost, PeerTimeout):
                process.channel.send(Stop(), timeout_s=0.1)
        end_all(self._processes, 0.0 if self._broken else STOP_TIMEOUT_S)
        self._processes = []
        if self._log is not None:
            self._log.close()
            self._log = None

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        kind, options = self.contestant.kind, dict(self.contestant.options)
        if kind == "mpi":
            self._processes = start_ranks(self._seats, self._log, START_TIMEOUT_S)
        else:
            self._processes = start_each(self._seats, self._log)
        orders = [Open(kind=kind, options=options, seat=seat) for seat in self._seats]
        opened = self._ask(orders, Opened, START_TIMEOUT_S)
        connect = Connect([answer.introduction for answer in opened])
        self._ask([connect] * len(self._seats), Done, START_TIMEOUT_S)

    def _take_steps(self, number: int) -> int:
        first = self._next_step
        self._next_step += number
        return first

    def _ask(self, orders: Sequence[ToMember], kind: type[Answer], timeout_s: float) -> list[Answer]:
        """Send `orders[rank]` to everybody, return everybody's answer by rank."""
        try:
            for process, order in zip(self._processes, orders, strict=True):
                process.channel.send(order)
            return self._collect(kind, timeout_s)
        except PeerLost:
            self._broken = True
            raise self._first_death() from None
        except BaseException:
            self._broken = True
            raise

    def _collect(self, kind: type[Answer], timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_s
        while waiting := {p.channel: p for p in self._processes if p.seat.rank not in answers}:
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                names = [f"{self.contestant.name} {process.seat}" for process in waiting.values()]
                raise PeerTimeout(f"{kind.__name__} of the benchmark's processes", names, timeout_s)
            for channel in ready:
                if (answer := channel.poll()) is not None:
                    answers[waiting[channel].seat.rank] = self._accept(waiting[channel], answer, kind)
        return [answers[seat.rank] for seat in self._seats]

    def _accept(self, process: LaunchedProcess, answer: FromMember, kind: type[Answer]) -> Answer:
        if isinstance(answer, kind):
            return answer
        assert isinstance(answer, Failed), f"{process.seat} answered {answer} where {kind.__name__} belongs"
        time.sleep(_NOTICE_S)
        if any(other.handle.poll() is not None for other in self._processes):
            raise self._first_death()
        raise MemberFailed(f"{self.contestant.name} {process.seat}: {answer.reason}")

    def _first_death(self) -> PeerLost:
        """The error for a process that is gone; if it ended by itself, with the last line of the common log."""
        time.sleep(_NOTICE_S)
        dead = next((process for process in self._processes if process.handle.poll() is not None), self._processes[0])
        reason = describe_exit(dead.handle)
        if self._log is not None:
            reason += last_words(dead.handle, self._log)
        return PeerLost(f"{self.contestant.name} {dead.name}", reason)
