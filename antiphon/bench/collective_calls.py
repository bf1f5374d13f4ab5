"""The collectives that are timed: what each rank gives, the call of either contestant, the result it must have."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.base.errors import ResourceError
from antiphon.comm.collectives import reduce_scatter_single
from antiphon.comm.m2n.rank_group import NativeRankGroup
from antiphon.comm.point_to_point import all_gather_single

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
