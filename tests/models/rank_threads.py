"""Ranks of a tensor-parallel group as threads of one process: collectives that add what all of them bring, in order."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.rank_group import RankGroup

_T = TypeVar("_T")
_PATIENCE_S = 60.0


class ThreadRanks(RankGroup):
    """One rank's view. All ranks of a group share the list `brought` and the barrier."""

    num_blocks = 1  # in which rows are summed

    def __init__(self, rank: int, brought: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(brought)
        self._brought = brought
        self._barrier = barrier

    def row_blocks(self, num_rows: int) -> list[tuple[int, int]]:
        return split_evenly(num_rows, self.num_blocks)

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._parts(tensor)).sum(0))

    def all_gather(self, tensor: Tensor, rows_by_rank: Sequence[int]) -> Tensor:
        parts = self._parts(tensor)
        assert [len(part) for part in parts] == list(rows_by_rank)
        return torch.cat(parts)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        self._brought[self.rank] = tensor
        self._barrier.wait(_PATIENCE_S)
        parts = [part.clone() for part in self._brought if part is not None]
        self._barrier.wait(_PATIENCE_S)
        return parts


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], _T]) -> list[_T]:
    """`work` of every rank, side by side; the results in their order."""
    brought: list[Tensor | None] = [None] * num_ranks
    barrier = threading.Barrier(num_ranks)

    def of(rank: int) -> _T:
        try:
            return work(ThreadRanks(rank, brought, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(of, range(num_ranks)))
