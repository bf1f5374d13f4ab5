"""A member in its process: what the benchmark calls there (`harness.children`), and the rounds that it times."""

import gc
import importlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from antiphon.bench.m2n.rounds import READ, WAIT, Member, MemberSeat, RoundPhase, RoundTraffic

# Loaded only where needed: a process of ours need not carry torch, and a baseline not our library.
MEMBERS = {
    "antiphon": "ours.AntiphonMember",
    "gloo": "gloo.GlooMember",
    "gloo-all-to-all": "gloo.GlooAllToAllMember",
    "memcpy": "memcpy.MemcpyMember",
    "mpi": "mpi.MpiMember",
    "ucx": "ucx.UcxMember",
}


class MemberProcess:
    """One process of a contestant; `kind` names its implementation, which has `options` of its own."""

    def __init__(self, kind: str, options: Mapping[str, str], seat: MemberSeat) -> None:
        module, name = MEMBERS[kind].split(".")
        self._member: Member = getattr(importlib.import_module(f"{__package__}.{module}"), name)(seat, options)
        self._phases: Sequence[RoundPhase] = ()
        self._touched = False
        self.connect = self._member.connect
        self.close = self._member.close

    def introduction(self) -> bytes:
        """What the others need to reach this process."""
        return self._member.open()

    def prepare(self, traffic: RoundTraffic) -> None:
        """Make buffers for rounds of `traffic`."""
        self._touched = traffic.touched
        self._phases = self._member.prepare(traffic)
        if self._touched:
            self._phases = with_reading(self._member, self._phases)

    def check(self, step: int) -> None:
        """One round whose every byte is compared."""
        checked_round(self._member, self._phases, step)

    def run(self, first_step: int, num_warm: int, num_rounds: int) -> tuple[list[str], bytes]:
        """`num_warm` rounds that do not count, then `num_rounds` that do: the phases' names, and int64 [rounds,
        phases + 1] nanoseconds of the monotonic clock: the start, then the end of each phase."""
        before = partial(write_anew, self._member) if self._touched else None
        marks = timed_rounds(self._phases, first_step, num_warm + num_rounds, before)
        del marks[: num_warm * (len(self._phases) + 1)]
        return [phase.name for phase in self._phases], marks.tobytes()


def checked_round(member: Member, phases: Sequence[RoundPhase], step: int) -> None:
    """One round with its patterns; `WrongData` if they did not arrive."""
    member.produce(step)
    for phase in phases:
        phase.run(step)
        if phase.name == WAIT:
            member.check(step)


def write_anew(member: Member, step: int) -> None:
    """Every byte of what the member sends."""
    for payload in member.payloads():
        payload.fill(step % 256)


def with_reading(member: Member, phases: Sequence[RoundPhase]) -> list[RoundPhase]:
    """The phases of a touched round: what arrived is read, every byte, before anything else."""

    def read(step: int) -> None:
        for payload in member.arrived(step):
            payload.max()

    read_phase = RoundPhase(READ, read)
    return [each for phase in phases for each in ((phase, read_phase) if phase.name == WAIT else (phase,))]


def timed_rounds(
    phases: Sequence[RoundPhase], first_step: int, num_rounds: int, before: Callable[[int], None] | None = None
) -> "array[int]":
    """Nanoseconds: per round its start and the end of each phase; `before` runs ahead of a round's start. No garbage
    collection meanwhile."""
    calls = [phase.run for phase in phases]
    clock = time.monotonic_ns
    marks: list[int] = []  # appending to an array parses its argument, which costs more
    mark = marks.append
    gc.collect()
    gc.disable()
    try:
        for step in range(first_step, first_step + num_rounds):
            if before is not None:
                before(step)
            mark(clock())
            for call in calls:
                call(step)
                mark(clock())
    finally:
        gc.enable()
    return array("q", marks)
