"""The M2N benchmark: contestants in turns, checked before and after, timed by one clock.

For each number of senders and receivers
1. start the processes of every contestant; between their turns they are blocked in a read
2. for each size: check a few rounds byte by byte; find how many rounds take `BLOCK_S`
3. repeat: one block of rounds of each contestant, the order turned around every time, until each has enough blocks
   with little foreign CPU (see `bench.quiet`)
4. check again; a contestant that delivers anything wrong ends the benchmark

A block begins with rounds that do not count: the processes do not wake up at the same moment.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from antiphon.base.progress import progress
from antiphon.bench.m2n.api import Traffic
from antiphon.bench.m2n.cases import by_processes, check_memory, largest
from antiphon.bench.m2n.contestants import Contestant
from antiphon.bench.m2n.group import ProcessGroup, Recording, elapsed_s, operations_s
from antiphon.bench.m2n.table import Block, make_rows
from antiphon.bench.quiet import Repetitions, repeat_until_quiet

BLOCK_S, MAX_BLOCK_S = 0.3, 3.0
MIN_ROUNDS, WANTED_ROUNDS, MAX_ROUNDS = 5, 50, 10_000
_NUM_CHECKED = 3
_NUM_PROBED = 8
_NUM_RECORDED = 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`num_rounds` of a block, 0: as many as take `BLOCK_S`. `timeout_s` bounds each wait of a contestant's process."""

    num_rounds: int = 0
    num_repetitions: int = 5
    quiet_timeout_s: float = 5.0
    timeout_s: float = 30.0
    record: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run found."""

    rows: list[dict[str, Any]]
    recordings: list[Recording]


def bench_m2n(contestants: Sequence[Contestant], cases: Sequence[Traffic], settings: Settings) -> Outcome:
    """Measure every case. Raises `MemberFailed`, `PeerLost` or `PeerTimeout` naming the contestant and its process."""
    check_memory(cases, len(contestants))
    rows: list[dict[str, Any]] = []
    recordings: list[Recording] = []
    for group_cases in by_processes(cases):
        with ExitStack() as stack:
            groups = _start(stack, contestants, largest(group_cases), settings)
            for traffic in group_cases:
                rows += make_rows(traffic, contestants, _measure(groups, traffic, settings))
                if settings.record:
                    recordings += [_record(group, traffic) for group in groups]
    return Outcome(rows=rows, recordings=recordings)


def _start(
    stack: ExitStack, contestants: Sequence[Contestant], traffic: Traffic, settings: Settings
) -> list[ProcessGroup]:
    """Everybody's processes, which end with `stack`. One contestant after the other: starting takes all cores."""
    groups = []
    shape = f"{traffic.num_senders} x {traffic.num_receivers}"
    with progress(f"starting {len(contestants)} contestants, {shape}") as report:
        for number, contestant in enumerate(contestants):
            report(number, len(contestants))
            groups.append(stack.enter_context(ProcessGroup(contestant, traffic, settings.timeout_s)))
    return groups


def _measure(groups: Sequence[ProcessGroup], traffic: Traffic, settings: Settings) -> dict[str, Repetitions[Block]]:
    """Blocks of every contestant, by its name."""
    with progress(str(traffic)) as report:
        max_rounds = 2 * settings.num_repetitions  # disturbed turns are repeated
        done, turns = count(1), {}

        def advance() -> None:
            report(next(done), len(groups) * (max_rounds + 1))

        for group in groups:
            group.prepare(traffic)
            group.check(_NUM_CHECKED)
            num_rounds = settings.num_rounds or _rounds_a_block(group)
            turns[group.contestant.name] = partial(_block, group, num_rounds, advance)
            advance()
        blocks = repeat_until_quiet(
            turns,
            num_required=settings.num_repetitions,
            max_rounds=max_rounds,
            quiet_timeout_s=settings.quiet_timeout_s,
        )
        for group in groups:
            group.check(1)
    return blocks


def _rounds_a_block(group: ProcessGroup) -> int:
    """As many rounds as make a block last `BLOCK_S`, or longer if there would be fewer than `WANTED_ROUNDS`."""
    round_s = elapsed_s(group.run(_NUM_PROBED, num_warm=2)) / _NUM_PROBED
    wanted = max(BLOCK_S / round_s, min(WANTED_ROUNDS, MAX_BLOCK_S / round_s))
    return int(min(max(wanted, MIN_ROUNDS), MAX_ROUNDS))


def _block(group: ProcessGroup, num_rounds: int, advance: Callable[[], None]) -> Block:
    tracks = group.run(num_rounds, num_warm=min(max(num_rounds // 20, 2), 50))
    advance()
    return Block.of(operations_s(tracks), elapsed_s(tracks))


def _record(group: ProcessGroup, traffic: Traffic) -> Recording:
    return Recording(contestant=group.contestant, traffic=traffic, tracks=group.run(_NUM_RECORDED, num_warm=3))
