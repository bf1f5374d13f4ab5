"""Collectives of a small group: ours (`comm/rank_group.py`) beside `torch.distributed` on gloo, on this machine.

1. every rank is a process that belongs to a group of ours and to one of gloo's
2. for each collective and size: both results must be those of one process
3. blocks of calls in turns, the order turned around each time, until each contestant has enough with little foreign
   CPU (`harness.quiet`). A call's time is that of the slowest rank; a block's is the median of its calls

Sizes are those of the tensor that all ranks have afterwards (all-reduce, all-gather) or before (the others).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typer import Option

from antiphon import _m2n
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.children import Children, join_gloo, seconds_of_calls
from antiphon.bench.harness.columns import PATIENCE, ContestColumns, UpTo, foreign_words, num_bytes, seconds, times
from antiphon.bench.harness.quiet import Repetitions, take_turns
from antiphon.bench.m2n.cases import TRANSPORTS, WAITING
from antiphon.comm.collectives import all_gather_single, reduce_scatter_single
from antiphon.comm.m2n.native import SPIN_S
from antiphon.comm.rank_group import NativeRankGroup

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_LINE = 64
Call = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One collective of `num_ranks` ranks; `num_bytes` is rounded up to a cache line for each rank."""

    collective: str
    num_ranks: int
    num_bytes: int

    @property
    def num_floats(self) -> int:
        unit = _LINE // 4 * self.num_ranks
        return -(-self.num_bytes // (4 * unit)) * unit


def check_result(name: str, case: CollectiveCase, found: Tensor, expected: Tensor) -> None:
    """`ResourceError` if a contestant's result is not the right one to the last bit."""
    if not torch.equal(found, expected):
        raise ResourceError(f"{name}: {case.collective} of {4 * case.num_floats} bytes gives a wrong result")


def _filled(case: CollectiveCase, rank: int) -> Tensor:
    """What a rank gives: small whole numbers, so that a sum is exact in any order."""
    return (torch.arange(case.num_floats, dtype=torch.float32) + rank) % 17


def expected_result(case: CollectiveCase, rank: int) -> Tensor:
    """What a rank must have afterwards, made from what all give."""
    given = torch.stack([_filled(case, other) for other in range(case.num_ranks)])
    parts = given.view(case.num_ranks, case.num_ranks, -1)  # by who gives, then by part
    if case.collective == "all-reduce":
        return given.sum(0)
    if case.collective == "reduce-scatter":
        return parts.sum(0)[rank]
    if case.collective == "all-gather":
        return parts[:, 0].reshape(-1)
    return parts[:, rank].reshape(-1)


def our_call(group: NativeRankGroup, case: CollectiveCase) -> Call:
    own = _filled(case, group.rank)
    rows = [case.num_floats // case.num_ranks] * case.num_ranks
    if case.collective == "all-gather":
        return partial(group.all_gather, own[: rows[0]].clone(), rows)
    if case.collective == "reduce-scatter":
        return partial(group.reduce_scatter, own, rows)
    if case.collective == "all-to-all":
        return partial(group.all_to_all, own, rows, rows)

    def all_reduce() -> Tensor:
        group.all_reduce(own)
        return own

    return all_reduce


def gloo_call(case: CollectiveCase) -> Call:
    own = _filled(case, dist.get_rank())
    part = torch.empty(case.num_floats // case.num_ranks)
    out = torch.empty_like(own)

    def call() -> Tensor:
        if case.collective == "all-reduce":
            dist.all_reduce(own)
            return own
        if case.collective == "all-gather":
            all_gather_single(out, own[: len(part)])
            return out
        if case.collective == "reduce-scatter":
            reduce_scatter_single(part, own)
            return part
        dist.all_to_all_single(out, own)
        return out

    return call


OURS, GLOO = "antiphon", "gloo"
_BLOCK_S = 0.2
_MOST_CALLS = 2000
_MOST_QUIET_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """How both are measured; `transport` and `waiting` are ours."""

    transport: Annotated[str, Option(metavar="T", help="shm, tcp or libfabric."), TRANSPORTS] = "shm"
    waiting: Annotated[str, Option(metavar="HOW", help="auto, poll, spin or block."), WAITING] = "auto"
    repetitions: Annotated[int, Option(metavar="N", help="Turns of every contestant."), UpTo(1000)] = 5
    timeout: Annotated[float, Option(metavar="S", help="Patience of every wait."), PATIENCE] = 30.0
    quiet_timeout: Annotated[float, Option(metavar="S", help="Wait so long for other programs to rest.")] = 5.0

    def check(self) -> None:
        """`UserError` for what cannot be."""
        if not 0 <= self.quiet_timeout <= _MOST_QUIET_S:
            raise UserError(f"--quiet-timeout is {self.quiet_timeout:g}: use 0 to {_MOST_QUIET_S:g} seconds")


COLUMNS = ContestColumns(
    (
        ("collective", "collective"),
        ("ranks", "ranks"),
        ("bytes", num_bytes("bytes")),
        ("median", seconds("median_s")),
        ("gloo", seconds("gloo_median_s")),
        ("gloo/this", times("speedup_over_gloo")),
        ("foreign", foreign_words),
    ),
    title="slowest rank, medians",
)


def bench_collectives(
    num_ranks: int, collectives: Sequence[str], sizes: Sequence[int], settings: CollectiveSettings, report: Report
) -> list[dict[str, Any]]:
    """One row per collective and size. `ChildFailed` or `PeerLost` names a rank that fails or has a wrong result."""
    rows = []
    cases = [
        CollectiveCase(collective=collective, num_ranks=num_ranks, num_bytes=size)
        for collective in collectives
        for size in sizes
    ]
    with TemporaryDirectory() as folder, Children() as ranks:
        ranks.start_ranks(num_ranks, partial(CollectivesRank, num_ranks, settings, f"{folder}/store"))
        ranks.introduce()
        for number, case in enumerate(cases):
            report(number, len(cases))
            rows.append(_measure(ranks, case, settings))
    return rows


def _measure(ranks: Children, case: CollectiveCase, settings: CollectiveSettings) -> dict[str, Any]:
    ranks.ask("prepare", case)
    contestants = {}
    for name in (OURS, GLOO):
        probed_s = ranks.slowest_median_s("run", name, 5)
        num_calls = max(5, min(_MOST_CALLS, int(_BLOCK_S / probed_s)))
        contestants[name] = partial(ranks.slowest_median_s, "run", name, num_calls)
    blocks = take_turns(contestants, settings.repetitions, quiet_timeout_s=settings.quiet_timeout)
    return _row(case, settings, blocks)


def _row(case: CollectiveCase, settings: CollectiveSettings, blocks: dict[str, Repetitions[float]]) -> dict[str, Any]:
    ours_s, gloo_s = (blocks[name].median(float) for name in (OURS, GLOO))
    return {
        "collective": case.collective,
        "ranks": case.num_ranks,
        "bytes": 4 * case.num_floats,
        "transport": settings.transport,
        "waiting": settings.waiting,
        "median_s": ours_s,
        "gloo_median_s": gloo_s,
        "speedup_over_gloo": gloo_s / ours_s,
        "repetitions": len(blocks[OURS].counted),
        "foreign_cpu_share": max(repetitions.foreign_share for repetitions in blocks.values()),
        "quiet": all(repetitions.is_quiet for repetitions in blocks.values()),
    }


class CollectivesRank:
    """One rank of both groups."""

    def __init__(self, num_ranks: int, settings: CollectiveSettings, store: str, rank: int) -> None:
        self._store = store
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, settings.timeout
        endpoint = _m2n.Endpoint(
            f"rank[{rank}]",
            settings.transport,
            waiting=settings.waiting,
            local_processes=num_ranks,
            spin_s=SPIN_S,
            dead_after_s=10.0,
        )
        self._group = NativeRankGroup(endpoint, rank, num_ranks, timeout_s=settings.timeout)
        self._calls: dict[str, Call] = {}

    def introduction(self) -> bytes:
        return self._group.ticket

    def connect(self, tickets: Sequence[bytes]) -> None:
        self._group.reset(0, tickets)
        join_gloo(self._store, self._rank, self._num_ranks, self._timeout_s)

    def prepare(self, case: CollectiveCase) -> None:
        """Buffers of both, and their results beside one process's."""
        self._calls = {OURS: our_call(self._group, case), GLOO: gloo_call(case)}
        for name, call in self._calls.items():
            check_result(name, case, call(), expected_result(case, self._rank))

    def run(self, name: str, num_calls: int) -> list[float]:
        return seconds_of_calls(self._calls[name], num_calls, self._group.barrier)
