"""A member's process: obeys the benchmark, and is blocked in a read in between.

    python -m antiphon.bench.m2n.process FD            # the benchmark's end of the channel is a socket it inherits
    python -m antiphon.bench.m2n.process --mpi PATH    # a rank of mpiexec, which calls the benchmark

An idle contestant must not disturb the one that is being timed: it neither spins nor is it stopped by a signal, which
would look like death to those of its own that watch each other.
"""

import gc
import importlib
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from antiphon.bench.m2n.api import READ, WAIT, Member, Phase
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
from antiphon.bench.obeying import FOREVER_S, Done, obey_orders
from antiphon.bench.peers.engine_child import end_with_parent
from antiphon.serve.worker.channel import Channel

# Loaded only where needed: a process of ours need not carry torch, and a baseline not our library.
MODULES = {
    "antiphon": "antiphon.bench.m2n.antiphon_pairs",
    "gloo": "antiphon.bench.m2n.gloo",
    "gloo-all-to-all": "antiphon.bench.m2n.gloo_all_to_all",
    "memcpy": "antiphon.bench.m2n.memcpy",
    "mpi": "antiphon.bench.m2n.mpi",
    "ucx": "antiphon.bench.m2n.ucx",
}


class MemberProcess:
    """Carries out orders, one at a time."""

    def __init__(self) -> None:
        self._member: Member | None = None
        self._phases: Sequence[Phase] = ()
        self._touched = False

    def obey(self, order: ToMember) -> FromMember:
        """Carry out one order; what goes wrong is raised."""
        if isinstance(order, Open):
            self._member = importlib.import_module(MODULES[order.kind]).make_member(order.seat, order.options)
            return Opened(self._opened().open())
        if isinstance(order, Connect):
            self._opened().connect(order.introductions)
        elif isinstance(order, Prepare):
            member, self._touched = self._opened(), order.traffic.touched
            self._phases = member.prepare(order.traffic)
            if self._touched:
                self._phases = with_reading(member, self._phases)
        elif isinstance(order, Check):
            checked_round(self._opened(), self._phases, order.step)
        elif isinstance(order, Run):
            before = partial(write_anew, self._opened()) if self._touched else None
            marks = timed_rounds(self._phases, order.first_step, order.num_warm + order.num_rounds, before)
            del marks[: order.num_warm * (len(self._phases) + 1)]
            return Ran(phases=[phase.name for phase in self._phases], marks=marks.tobytes())
        return Done()

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None

    def _opened(self) -> Member:
        assert self._member is not None, "Open comes first"
        return self._member


def checked_round(member: Member, phases: Sequence[Phase], step: int) -> None:
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


def with_reading(member: Member, phases: Sequence[Phase]) -> list[Phase]:
    """The phases of a touched round: what arrived is read, every byte, before anything else."""

    def read(step: int) -> None:
        for payload in member.arrived(step):
            payload.max()

    read_phase = Phase(READ, read)
    return [each for phase in phases for each in ((phase, read_phase) if phase.name == WAIT else (phase,))]


def timed_rounds(
    phases: Sequence[Phase], first_step: int, num_rounds: int, before: Callable[[int], None] | None = None
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


def main() -> int:
    end_with_parent()
    if sys.argv[1] == "--mpi":
        stream: socket.socket = importlib.import_module(MODULES["mpi"]).join_benchmark(sys.argv[2])
    else:
        stream = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(stream, "the benchmark", ToMember)
    process = MemberProcess()
    try:
        return obey_orders(channel, partial(channel.receive, FOREVER_S), process.obey)
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
