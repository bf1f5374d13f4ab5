"""The M2N benchmark: contestants in turns, checked before and after, timed by one clock.

For each number of senders and receivers
1. start the processes of every contestant; between their turns they are blocked in a read
2. for each size: check a few rounds byte by byte; find how many rounds take `BLOCK_S`
3. repeat: one block of rounds of each contestant, the order turned around every time, until each has enough blocks
   with little foreign CPU (see `harness.quiet`)
4. check again; a contestant that delivers anything wrong ends the benchmark

A block begins with rounds that do not count: the processes do not wake up at the same moment.

Median and 99th percentile are of operations, one of each timed process and round, taken per block; the figure is the
median over blocks, so that one disturbed block moves neither. The slowest operation of each round has figures of its
own. Throughput is the bytes of all rounds over the time they took together. That is not the sum of the slowest
operations: where processes outnumber cores, a sender whose credits are all back may wait for its core while its
neighbours copy the next round. A ratio is this contestant's figure over the baseline's, so below 1 is faster;
`speedup_over_gloo_*` is the inverse, for people.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from antiphon.base.progress import progress
from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.base.units import format_bytes
from antiphon.bench.harness.children import Children, programs
from antiphon.bench.harness.columns import ContestColumns, Row, foreign_words, seconds, times
from antiphon.bench.harness.quiet import Repetitions, take_turns
from antiphon.bench.m2n.cases import M2nContestant, by_processes, check_memory, largest, under_mpiexec
from antiphon.bench.m2n.rounds import MemberSeat, RoundTraffic, member_of

BLOCK_S, MAX_BLOCK_S = 0.3, 3.0
MIN_ROUNDS, WANTED_ROUNDS, MAX_ROUNDS = 5, 50, 10_000
_NUM_CHECKED = 3
_NUM_PROBED = 8
_NUM_RECORDED = 20
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# --- the processes of one contestant


@dataclass(frozen=True, kw_only=True)
class Track:
    """What one process recorded: int64 [rounds, phases + 1] ns, the start of a round and the end of each phase."""

    seat: MemberSeat
    phases: tuple[str, ...]
    marks: NDArray[np.int64]


Recording = tuple[str, list[Track]]
"""Contestant and case; a few rounds as each of its processes saw them."""


def operations_s(tracks: Sequence[Track]) -> NDArray[np.float64]:
    """[rounds, timed processes]: how long each operation took."""
    operations = [track.marks[:, -1] - track.marks[:, 0] for track in tracks if track.seat.timed]
    seconds: NDArray[np.float64] = np.stack(operations, axis=1) * 1e-9
    return seconds


def elapsed_s(tracks: Sequence[Track]) -> float:
    """From the first start of a timed operation to the last end of one."""
    timed = [track.marks for track in tracks if track.seat.timed]
    return float(max(marks[-1, -1] for marks in timed) - min(marks[0, 0] for marks in timed)) * 1e-9


@dataclass(frozen=True, kw_only=True)
class RoundBlock:
    """One block of rounds: median, 99th percentile and shortest of all operations, the same of each round's slowest
    one, and the time from the first start to the last end."""

    median_s: float
    p99_s: float
    best_s: float
    slowest_median_s: float
    slowest_p99_s: float
    elapsed_s: float
    num_rounds: int

    @classmethod
    def of(cls, operations_s: NDArray[np.float64], elapsed_s: float) -> "RoundBlock":
        """`operations_s`: [rounds, timed processes]."""
        slowest_s = operations_s.max(axis=1)
        return cls(
            median_s=float(np.median(operations_s)),
            p99_s=float(np.percentile(operations_s, 99)),
            best_s=float(operations_s.min()),
            slowest_median_s=float(np.median(slowest_s)),
            slowest_p99_s=float(np.percentile(slowest_s, 99)),
            elapsed_s=elapsed_s,
            num_rounds=len(operations_s),
        )


class ProcessGroup:
    """All processes of one contestant, for use in a `with`."""

    def __init__(self, contestant: M2nContestant, traffic: RoundTraffic, timeout_s: float) -> None:
        self.contestant = contestant
        self._seats = contestant.seats(traffic, timeout_s)
        self._children = Children(contestant.name)
        self._next_step = 1

    def __enter__(self) -> Self:
        """Start the processes and connect them; blocks until all are ready."""
        kind, options = self.contestant.kind, dict(self.contestant.options)
        starter = under_mpiexec(_ONE_THREAD) if kind == "mpi" else programs(_ONE_THREAD)
        try:
            made = [partial(member_of, kind, options, seat) for seat in self._seats]
            self._children.start([str(seat) for seat in self._seats], made, starter)
            self._children.introduce()
        except BaseException:
            self._children.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return self._children.pids

    def prepare(self, traffic: RoundTraffic) -> None:
        """Make ready for rounds of `traffic`, none of whose messages is larger than the group was made for."""
        self._children.ask("prepare", traffic)

    def check(self, num_rounds: int) -> None:
        """This many rounds with every byte compared. `ChildFailed` names the process and the byte."""
        for _ in range(num_rounds):
            self._children.ask("check", self._take_steps(1))

    def run(self, num_rounds: int, num_warm: int) -> list[Track]:
        """This many timed rounds, after `num_warm` others, as every process saw them."""
        first_step = self._take_steps(num_warm + num_rounds)
        answers = self._children.ask("run", first_step, num_warm, num_rounds)
        return [
            Track(
                seat=seat,
                phases=tuple(phases),
                marks=np.frombuffer(marks, np.int64).reshape(num_rounds, len(phases) + 1),
            )
            for seat, (phases, marks) in zip(self._seats, answers, strict=True)
        ]

    def _take_steps(self, number: int) -> int:
        first = self._next_step
        self._next_step += number
        return first


# --- turns


def bench_m2n(
    contestants: Sequence[M2nContestant],
    cases: Sequence[RoundTraffic],
    *,
    num_rounds: int = 0,
    num_repetitions: int = 5,
    quiet_timeout_s: float = 5.0,
    timeout_s: float = 30.0,
    record: bool = False,
) -> tuple[list[dict[str, Any]], list[Recording]]:
    """Rows of every case, and with `record` a few rounds of each. `num_rounds`: of a block; 0: as many as take
    `BLOCK_S`. `timeout_s` bounds each wait of a contestant's process. `ChildFailed`, `PeerLost` or `PeerTimeout` names
    the contestant and its process."""
    check_memory(cases, len(contestants))
    rows: list[dict[str, Any]] = []
    recordings: list[Recording] = []
    for group_cases in by_processes(cases):
        with ExitStack() as stack:
            groups = _start(stack, contestants, largest(group_cases), timeout_s)
            for traffic in group_cases:
                blocks = _measure(groups, traffic, num_rounds, num_repetitions, quiet_timeout_s)
                rows += make_rows(traffic, contestants, blocks)
                if record:
                    recordings += [_record(group, traffic) for group in groups]
    return rows, recordings


def _start(
    stack: ExitStack, contestants: Sequence[M2nContestant], traffic: RoundTraffic, timeout_s: float
) -> list[ProcessGroup]:
    """All processes, which end with `stack`. One contestant after the other: starting takes all cores."""
    groups = []
    shape = f"{traffic.num_senders} x {traffic.num_receivers}"
    with progress(f"starting {len(contestants)} contestants, {shape}") as report:
        for number, contestant in enumerate(contestants):
            report(number, len(contestants))
            groups.append(stack.enter_context(ProcessGroup(contestant, traffic, timeout_s)))
    return groups


def _measure(
    groups: Sequence[ProcessGroup],
    traffic: RoundTraffic,
    num_rounds: int,
    num_repetitions: int,
    quiet_timeout_s: float,
) -> dict[str, Repetitions[RoundBlock]]:
    """Blocks of every contestant, by its name."""
    with progress(str(traffic)) as report:
        done, turns = count(1), {}

        def advance() -> None:
            report(next(done), len(groups) * (2 * num_repetitions + 1))

        for group in groups:
            group.prepare(traffic)
            group.check(_NUM_CHECKED)
            turns[group.contestant.name] = partial(_block, group, num_rounds or _rounds_a_block(group), advance)
            advance()
        blocks = take_turns(turns, num_repetitions, quiet_timeout_s=quiet_timeout_s)
        for group in groups:
            group.check(1)
    return blocks


def _rounds_a_block(group: ProcessGroup) -> int:
    """As many rounds as make a block last `BLOCK_S`, or longer if there would be fewer than `WANTED_ROUNDS`."""
    round_s = elapsed_s(group.run(_NUM_PROBED, num_warm=2)) / _NUM_PROBED
    wanted = max(BLOCK_S / round_s, min(WANTED_ROUNDS, MAX_BLOCK_S / round_s))
    return int(min(max(wanted, MIN_ROUNDS), MAX_ROUNDS))


def _block(group: ProcessGroup, num_rounds: int, advance: Callable[[], None]) -> RoundBlock:
    tracks = group.run(num_rounds, num_warm=min(max(num_rounds // 20, 2), 50))
    advance()
    return RoundBlock.of(operations_s(tracks), elapsed_s(tracks))


def _record(group: ProcessGroup, traffic: RoundTraffic) -> Recording:
    return f"{group.contestant.name}, {traffic}", group.run(_NUM_RECORDED, num_warm=3)


# --- the report


def make_rows(
    traffic: RoundTraffic, contestants: Sequence[M2nContestant], results: Mapping[str, Repetitions[RoundBlock]]
) -> list[dict[str, Any]]:
    """One row per contestant; a ratio is None where its baseline did not take part."""
    gloo, memcpy = results.get("gloo"), results.get("memcpy")
    return [_row(traffic, contestant, results[contestant.name], gloo, memcpy) for contestant in contestants]


def _row(
    traffic: RoundTraffic,
    contestant: M2nContestant,
    blocks: Repetitions[RoundBlock],
    gloo: Repetitions[RoundBlock] | None,
    memcpy: Repetitions[RoundBlock] | None,
) -> dict[str, Any]:
    median_s, p99_s = _median_s(blocks), _p99_s(blocks)
    return {
        "transport": contestant.transport,
        "in_place": contestant.in_place,
        "touched": traffic.touched,
        "direction": "both ways" if traffic.both_ways else "one way",
        "senders": traffic.num_senders,
        "receivers": traffic.num_receivers,
        "message_bytes": traffic.message_bytes,
        "receiver_bytes": list(traffic.receiver_bytes),
        "median_s": median_s,
        "p99_s": p99_s,
        "best_median_s": min(repetition.value.median_s for repetition in blocks.counted),
        "best_s": min(repetition.value.best_s for repetition in blocks.counted),
        "slowest_median_s": blocks.median(lambda block: block.slowest_median_s),
        "slowest_p99_s": blocks.median(lambda block: block.slowest_p99_s),
        "throughput_bytes_per_s": traffic.round_bytes * blocks.median(lambda block: block.num_rounds / block.elapsed_s),
        "iterations": sum(repetition.value.num_rounds for repetition in blocks.counted),
        "repetitions": len(blocks.counted),
        "ratio_to_gloo_median": median_s / _median_s(gloo) if gloo else None,
        "ratio_to_gloo_p99": p99_s / _p99_s(gloo) if gloo else None,
        "speedup_over_gloo_median": _median_s(gloo) / median_s if gloo else None,
        "speedup_over_gloo_p99": _p99_s(gloo) / p99_s if gloo else None,
        "ratio_to_memcpy_median": median_s / _median_s(memcpy) if memcpy else None,
        "foreign_cpu_share": blocks.foreign_share,
        "quiet": blocks.is_quiet,
        "waiting": contestant.options.get("waiting"),
    }


def _median_s(blocks: Repetitions[RoundBlock]) -> float:
    return blocks.median(lambda block: block.median_s)


def _p99_s(blocks: Repetitions[RoundBlock]) -> float:
    return blocks.median(lambda block: block.p99_s)


def _message(row: Row) -> str:
    text = format_bytes(row["message_bytes"])
    if len(set(row["receiver_bytes"])) > 1:
        text = f"{format_bytes(min(row['receiver_bytes']))} to {format_bytes(max(row['receiver_bytes']))}"
    return text + (" <->" if row["direction"] == "both ways" else "") + (" touched" if row["touched"] else "")


COLUMNS = ContestColumns(
    (
        ("transport", lambda row: row["transport"] + (" in place" if row["in_place"] else "")),
        ("M x N", lambda row: f"{row['senders']} x {row['receivers']}"),
        ("message", _message),
        ("median", seconds("median_s")),
        ("p99", seconds("p99_s")),
        ("slowest", seconds("slowest_median_s")),
        ("GB/s", lambda row: row["throughput_bytes_per_s"] / 1e9),
        ("gloo/this", times("speedup_over_gloo_median")),
        ("p99 gloo/this", times("speedup_over_gloo_p99")),
        ("this/memcpy", times("ratio_to_memcpy_median")),
        ("foreign", foreign_words),
    )
)


# --- a few rounds as a trace that Perfetto and chrome://tracing open
#
# One process of the trace per contestant and case, one track per process of the contestant. Every contestant's first
# round begins at zero, so that they lie beneath each other. Not shared with the timeline of serving, whose spans carry
# layers and micro-batches; the two have only Chrome's event format in common.


def write_trace(path: Path, recordings: Iterable[Recording]) -> None:
    """Chrome's JSON with complete events in µs; every span carries its round."""
    events: list[dict[str, Any]] = []
    for process, (name, tracks) in enumerate(recordings, start=1):
        events.append(process_named(name, process))
        origin_ns = min(int(track.marks[0, 0]) for track in tracks)
        for thread, track in enumerate(tracks, start=1):
            events.append(thread_named(str(track.seat), process, thread))
            events.extend({"pid": process, "tid": thread} | event for event in _spans(track, origin_ns))
    write_events(path, events)


def _spans(track: Track, origin_ns: int) -> Iterable[dict[str, Any]]:
    for number, marks in enumerate(track.marks.tolist()):
        for phase, start_ns, end_ns in zip(track.phases, marks, marks[1:], strict=False):
            yield {
                "ph": "X",
                "name": phase,
                "ts": (start_ns - origin_ns) / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "args": {"round": number},
            }
