"""Timings that other processes did not spoil: when a machine is quiet, and how long contestants take turns.

Method
1. `/proc/stat` gives the CPU time of all processes, psutil that of our own process tree (this process, its
   children, and what they have reaped); the difference over the CPU time there was is the *foreign share*.
   Time stolen by the hypervisor is foreign too.
2. Before a repetition, wait until the share falls below the limit, for a minute at most (`take_turns`: 5 s); after
   it, note the share seen while it ran.
3. Repeat in rounds, every contestant once a round and in alternating order, until each has enough quiet repetitions
   (three; `take_turns`: as many as asked for) or the rounds run out (ten; `take_turns`: twice as many as asked for).
   The quiet ones count; where they are too few, as many of the least disturbed as would be enough do, and the report
   says so through their share.
4. What a run is predicted from is measured right before and right after it, for machines drift from minute to minute;
   the mean of both predictions counts (`MeasuredAround`).

Rejected: the load average (a minute late, and it counts ourselves), and best-of-N alone (a two-thread product
slows down fifty-fold when a third process is busy, so N disturbed repetitions say nothing).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from antiphon.base.logging import get_logger

FOREIGN_SHARE_LIMIT = 0.08  # of the CPU time there is; a machine with less is quiet
NUM_QUIET_REPETITIONS = 3
_SHORT_PATIENCE_S = 5.0
_log = get_logger("bench")

Value = TypeVar("Value")


def machine_busy_s(proc_stat: str) -> float:
    """CPU seconds all processes have used since boot, stolen time included, from the text of `/proc/stat`."""
    fields = proc_stat.split("\n", 1)[0].split()
    if fields[0] != "cpu" or len(fields) < 9:
        raise ValueError(f"the first line of /proc/stat should list CPU times, it reads {' '.join(fields)!r}")
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(value) for value in fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_busy_s(root_pids: Iterable[int]) -> float:
    """CPU seconds of these processes and their descendants, those already reaped included."""
    seen: set[int] = set()
    total_s = 0.0
    for root_pid in root_pids:
        try:
            root = psutil.Process(root_pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in tree:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


@dataclass
class CpuWatch:
    """Measures the foreign share between its creation and a call of `foreign_share`.

    Our own processes are this one and `extra_root_pids` (a server that another program started for us), with
    all descendants.
    """

    extra_root_pids: Sequence[int] = ()
    _start_busy_s: float = field(init=False)
    _start_own_s: float = field(init=False)
    _start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_busy_s, self._start_own_s, self._start_s = self._now()

    def foreign_share(self) -> float:
        """CPU time of others since creation, as a fraction (0 to 1) of what all CPUs could give."""
        busy_s, own_s, now_s = self._now()
        foreign_s = (busy_s - self._start_busy_s) - (own_s - self._start_own_s)
        available_s = (now_s - self._start_s) * (os.cpu_count() or 1)  # of the machine, as `/proc/stat`
        return min(1.0, max(0.0, foreign_s / available_s)) if available_s > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        own_s = own_busy_s((os.getpid(), *self.extra_root_pids))
        return machine_busy_s(Path("/proc/stat").read_text(encoding="ascii")), own_s, time.monotonic()


def foreign_share_during(duration_s: float, extra_root_pids: Sequence[int] = ()) -> float:
    """Sleep for `duration_s` and return the foreign share meanwhile."""
    watch = CpuWatch(extra_root_pids)
    time.sleep(duration_s)
    return watch.foreign_share()


def wait_for_quiet(*, timeout_s: float, extra_root_pids: Sequence[int] = ()) -> bool:
    """Block until half a second saw little foreign CPU; False if `timeout_s` passed first. A wait is logged."""
    deadline_s = time.monotonic() + timeout_s
    is_told = False
    while (share := foreign_share_during(0.5, extra_root_pids)) >= FOREIGN_SHARE_LIMIT:
        if time.monotonic() >= deadline_s:
            return False
        if not is_told:
            limit = f"{FOREIGN_SHARE_LIMIT:.0%}"
            _log.info(
                "other programs use %.0f%% of the CPUs: waiting up to %.0f s for %s", 100 * share, timeout_s, limit
            )
            is_told = True
    return True


@dataclass(frozen=True)
class Repetition(Generic[Value]):
    """One repetition's result and the foreign share while it ran."""

    value: Value
    foreign_share: float


@dataclass(frozen=True)
class Repetitions(Generic[Value]):
    """All repetitions of one contestant; `counted` are those a report may use."""

    all: tuple[Repetition[Value], ...]
    num_required: int = NUM_QUIET_REPETITIONS

    @property
    def num_quiet(self) -> int:
        return sum(repetition.foreign_share < FOREIGN_SHARE_LIMIT for repetition in self.all)

    @property
    def is_quiet(self) -> bool:
        """Whether enough repetitions were quiet. If not, say so beside the number."""
        return self.num_quiet >= self.num_required

    @property
    def counted(self) -> tuple[Repetition[Value], ...]:
        """The quiet repetitions, or the least disturbed `num_required` when there were too few."""
        by_share = sorted(self.all, key=lambda repetition: repetition.foreign_share)
        return tuple(by_share[: max(self.num_required, self.num_quiet)])

    @property
    def foreign_share(self) -> float:
        """The largest foreign share among the counted repetitions."""
        return max(repetition.foreign_share for repetition in self.counted)

    def best(self, score: Callable[[Value], float]) -> Value:
        """The counted value with the highest score."""
        return max((repetition.value for repetition in self.counted), key=score)

    def median(self, score: Callable[[Value], float]) -> float:
        """The median score of the counted values."""
        return statistics.median(score(repetition.value) for repetition in self.counted)


def rounds_of(contestants: Sequence[Value], num_rounds: int) -> Iterator[Sequence[Value]]:
    """All contestants in each round, in reversed order every second time, so that none profits from a machine that
    drifts."""
    for number in range(num_rounds):
        yield contestants if number % 2 == 0 else contestants[::-1]


def repeat_until_quiet(
    contestants: Mapping[str, Callable[[], Value]],
    *,
    num_required: int = NUM_QUIET_REPETITIONS,
    max_rounds: int = 10,
    quiet_timeout_s: float = 60.0,
    extra_root_pids: Sequence[int] = (),
) -> dict[str, Repetitions[Value]]:
    """Run the contestants interleaved until each has `num_required` quiet repetitions, at most `max_rounds` rounds.

    A contestant that has enough still runs while another has not: numbers are only compared within the same
    rounds. After a wait in vain for a quiet machine the next ones are short.
    """
    patience_s = quiet_timeout_s
    records: dict[str, list[Repetition[Value]]] = {name: [] for name in contestants}
    for names in rounds_of(list(contestants), max_rounds):
        for name in names:
            is_quiet = wait_for_quiet(timeout_s=patience_s, extra_root_pids=extra_root_pids)
            patience_s = quiet_timeout_s if is_quiet else min(quiet_timeout_s, _SHORT_PATIENCE_S)
            watch = CpuWatch(extra_root_pids)
            value = contestants[name]()
            records[name].append(Repetition(value, watch.foreign_share()))
        found = {name: Repetitions(tuple(record), num_required) for name, record in records.items()}
        if all(repetitions.is_quiet for repetitions in found.values()):
            break
    return found


def take_turns(
    contestants: Mapping[str, Callable[[], Value]], num_repetitions: int, *, quiet_timeout_s: float = 5.0
) -> dict[str, Repetitions[Value]]:
    """All turns, by contestant: until each has `num_repetitions` that other programs did not disturb, at most twice as
    often. `quiet_timeout_s` bounds each wait for other programs to rest."""
    return repeat_until_quiet(
        contestants, num_required=num_repetitions, max_rounds=2 * num_repetitions, quiet_timeout_s=quiet_timeout_s
    )


# --- predictions from what was measured around a run


class MeasuredAround(Generic[Value]):
    """What `measure` says right before and right after each run. What it says after one run stands before the next."""

    def __init__(self, measure: Callable[[], Value]) -> None:
        self._measure = measure
        self._last: Value | None = None

    def before(self) -> Value:
        """Measured now, if there was no run yet."""
        if self._last is None:
            self._last = self._measure()
        return self._last

    def after(self) -> tuple[Value, ...]:
        """What was measured before and after the run that just ended. The same object both times is one."""
        before, self._last = self.before(), self._measure()
        return (before,) if before is self._last else (before, self._last)
