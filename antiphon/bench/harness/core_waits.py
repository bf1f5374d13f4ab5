"""How long a step, and the engine beside it, wait for a core of this machine now, while all cores compute.

1. A program for each core computes, as a worker's step does, and notes when its core was taken from it: a stall.
2. The first of them wakes a thread of this process after each `period_s`, as a worker's result wakes the engine. That
   computes for `turn_s`, and wakes the one that called, as the engine wakes who reads its outputs. The time until that
   one runs is a wake.
3. Where the engine works beside the steps (`is_beside`), its turn is part of a wake, and what these threads take from a
   program is a stall. Else neither is: who asks has the engine's turns in the steps' times.

Rejected: the operating system's own counts (`schedstat`). They give sums, and here the slowest hundredth matters; what
a hypervisor takes is not in them at all.
"""

import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE

import psutil

from antiphon.base.errors import UserError
from antiphon.sim.host import CoreWaits

_PATIENCE_S = 30.0
_LEAST_NS = 100_000
_STAMP = struct.Struct("<q")
_COMPUTE = """
import json, os, sys, time
core, seconds, period_ns, least_ns, news = (float(word) for word in sys.argv[1:])
os.sched_setaffinity(0, {int(core)})
stalls, last = [], time.monotonic_ns()
until, due = last + int(seconds * 1e9), last
while last < until:
    now = time.monotonic_ns()
    if now - last > least_ns:
        stalls.append((last, now))
    last = now
    if news >= 0 and now >= due:
        due = now + int(period_ns)
        os.write(int(news), now.to_bytes(8, "little"))
if news >= 0:
    os.close(int(news))
print(json.dumps(stalls))
"""


def measure_core_waits(seconds: float, *, period_s: float, turn_s: float, is_beside: bool = False) -> CoreWaits:
    """Computes on all cores of this process for so long. `UserError` if the programs do not end."""
    cores = sorted(os.sched_getaffinity(0))
    heard, news = os.pipe()
    engine = _WokenThread(heard, turn_s)
    programs: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            wakes = [news] if core == cores[0] else []
            numbers = [core, seconds, period_s * 1e9, _LEAST_NS, *(wakes or [-1])]
            command = [sys.executable, "-S", "-E", "-c", _COMPUTE, *map(str, numbers)]
            programs.append(subprocess.Popen(command, pass_fds=wakes, stdout=PIPE, stdin=DEVNULL))
        os.close(news)
        news = -1
        turns = engine.turns(seconds + _PATIENCE_S)
        stalls = [json.loads(program.communicate(timeout=_PATIENCE_S)[0] or "[]") for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
        if news >= 0:
            os.close(news)
        engine.close()
    left_s = [_without(stall, [] if is_beside else turns) * 1e-9 for each in stalls for stall in each]
    counted_s = tuple(stall_s for stall_s in left_s if stall_s > _LEAST_NS * 1e-9)
    return CoreWaits(
        stalls_per_s=len(counted_s) / (seconds * len(cores)),
        stalls_s=counted_s,
        wakes_s=tuple(max(0.0, (turn.read - turn.sent) * 1e-9 - (0.0 if is_beside else turn_s)) for turn in turns),
    )


def packets_s() -> float:
    """Processor time of all cores, since the machine started, in the system's soft interrupts, which move packets; 0
    where it does not say. A link that is emulated is work of the cores that compute."""
    return float(getattr(psutil.cpu_times(), "softirq", 0.0))


def together(waits: list[CoreWaits]) -> CoreWaits | None:
    """What was measured several times, as long each. None: never."""
    if not waits:
        return None
    return CoreWaits(
        stalls_per_s=sum(each.stalls_per_s for each in waits) / len(waits),
        stalls_s=tuple(stall_s for each in waits for stall_s in each.stalls_s),
        wakes_s=tuple(wake_s for each in waits for wake_s in each.wakes_s),
        network_share=sum(each.network_share for each in waits) / len(waits),
    )


@dataclass(slots=True)
class _EngineTurn:
    """When a program wrote, the thread ran, its turn was over, and the caller ran: nanoseconds, monotonic clock."""

    sent: int
    began: int
    ended: int
    read: int = 0


class _WokenThread:
    """A thread that is woken by what comes from `heard`, works, and wakes the one that reads its `turns`."""

    def __init__(self, heard: int, turn_s: float) -> None:
        self._heard = heard
        self._turn_s = turn_s
        self._turns: deque[_EngineTurn] = deque()
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name="turns", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while stamp := os.read(self._heard, _STAMP.size):
            began, worked_s = time.monotonic_ns(), time.thread_time()
            while time.thread_time() - worked_s < self._turn_s:
                pass
            self._turns.append(_EngineTurn(_STAMP.unpack(stamp)[0], began, time.monotonic_ns()))
            os.eventfd_write(self._news, 1)
        self._has_ended = True
        os.eventfd_write(self._news, 1)

    def turns(self, timeout_s: float) -> list[_EngineTurn]:
        """All of them, when no program writes any more."""
        found: list[_EngineTurn] = []
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        while not self._has_ended or self._turns:
            if not poll.poll(1000 * timeout_s):
                raise UserError(f"programs that measure waits for cores have said nothing for {timeout_s:g} s")
            os.eventfd_read(self._news)
            now = time.monotonic_ns()
            while self._turns:
                turn = self._turns.popleft()
                turn.read = now
                found.append(turn)
        return found

    def close(self) -> None:
        """After the last writer's end is closed."""
        self._thread.join()
        os.close(self._heard)
        os.close(self._news)


def _without(stall: tuple[int, int], turns: list[_EngineTurn]) -> int:
    """The part of a stall in which no turn was taken."""
    first, last = stall
    return last - first - sum(max(0, min(last, turn.ended) - max(first, turn.began)) for turn in turns)
