"""Stages of a pipeline: who belongs together, rows from stage to stage, losses and what comes after them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from antiphon.base.errors import PeerLost
from antiphon.comm.m2n.api import StepAborted
from antiphon.comm.rank_group import NativeRankGroup, RankGroup
from antiphon.comm.stages import StagePlace, Stages, open_stages
from tests.comm.m2n.backends import PATIENCE_S, by_name

WIDTH = 8
(SHM,) = by_name("shm")
Result = TypeVar("Result")


class Pipelines:
    """All processes of `num_workers` pipelines, each a thread. The ranks of a stage, of all workers, are one group."""

    def __init__(self, num_workers: int, num_stages: int, num_ranks: int, step_bytes: int = 4096) -> None:
        self.places = [
            StagePlace(worker=worker, stage=stage, rank=rank, num_stages=num_stages, num_ranks=num_ranks)
            for worker in range(num_workers)
            for stage in range(num_stages)
            for rank in range(num_ranks)
        ]
        self._beside = num_workers * num_ranks
        self._step_bytes = step_bytes
        self.stages = [self._open(place) for place in self.places]
        self._pool = ThreadPoolExecutor(len(self.stages))

    def _open(self, place: StagePlace) -> Stages:
        names = [f"worker[{place.worker}][{each}]" for each in range(place.num_stages * place.num_ranks)]
        beside: Any = RankGroup()
        if self._beside > 1:
            number = place.worker * place.num_ranks + place.rank
            beside = NativeRankGroup(
                SHM.endpoint(f"{names[place.in_worker]} stage"), number, self._beside, timeout_s=PATIENCE_S
            )
        return open_stages(
            place,
            beside,
            endpoint=SHM.endpoint,
            names=names,
            step_bytes=self._step_bytes,
            num_micro_batches=2,
            timeout_s=PATIENCE_S,
        )

    def reset(self, epoch: int) -> None:
        """As the engine does: workers that share nothing get the tickets of their own processes."""
        tickets = [stages.ticket for stages in self.stages]
        self.each(lambda stages: stages.reset(epoch, tickets))

    def replace(self, number: int) -> None:
        self.stages[number].close()
        self.stages[number] = self._open(self.places[number])

    def each(self, call: Callable[[Stages], Result]) -> list[Result]:
        return [future.result() for future in [self._pool.submit(call, each) for each in self.stages]]

    def outcomes(self, call: Callable[[Stages], Any]) -> list[BaseException | None]:
        return [future.exception() for future in [self._pool.submit(call, each) for each in self.stages]]

    def close(self) -> None:
        for stages in self.stages:
            stages.abort(1 << 14)
        self._pool.shutdown()
        for stages in self.stages:
            stages.close()


@contextmanager
def pipelines(num_workers: int, num_stages: int, num_ranks: int, **options: Any) -> Iterator[Pipelines]:
    made = Pipelines(num_workers, num_stages, num_ranks, **options)
    try:
        made.reset(0)
        yield made
    finally:
        made.close()


def pass_on(stages: Stages, rows: int = 3) -> torch.Tensor | None:
    """Each stage adds 1 and its group's sum; the first one has begun with its worker's and rank's number."""
    place = stages.place
    x_TH = torch.full((rows, WIDTH), float(10 * place.worker + place.rank))
    if not place.is_first:
        x_TH = stages.take(rows, WIDTH, torch.float32)
    x_TH = x_TH + 1.0
    stages.give(x_TH)
    return stages.take(rows, WIDTH, torch.float32) if place.is_first else None


@pytest.mark.parametrize(("num_workers", "num_stages", "num_ranks"), [(1, 2, 1), (1, 3, 2), (2, 3, 2), (3, 2, 1)])
def test_rows_go_round_and_each_rank_has_its_own(num_workers: int, num_stages: int, num_ranks: int) -> None:
    with pipelines(num_workers, num_stages, num_ranks) as made:
        for epoch in (1, 2):
            for place, came in zip(made.places, made.each(pass_on), strict=True):
                if place.is_first:
                    assert came is not None
                    assert came.tolist() == [[10.0 * place.worker + place.rank + num_stages] * WIDTH] * 3
                else:
                    assert came is None
            heard = made.each(lambda stages: stages.crew.broadcast_bytes(b"go" if stages.crew.rank == 0 else None))
            assert set(heard) == {b"go"}
            made.each(lambda stages: stages.beside.barrier() if num_workers * num_ranks > 1 else None)  # type: ignore[union-attr]
            made.reset(epoch)


def test_no_rows_are_no_message() -> None:
    with pipelines(1, 2, 1) as made:
        made.each(lambda stages: stages.give(torch.empty(0, WIDTH)))
        assert made.each(pass_on)[0] is not None


def test_a_step_of_rows_fits_a_link_both_ways() -> None:
    """The first and the last stage both give all they have before they take."""
    rows = 4096
    with pipelines(1, 2, 1, step_bytes=rows * WIDTH * 4) as made:

        def exchange(stages: Stages) -> float:
            for _ in range(2):
                stages.give(torch.full((rows // 2, WIDTH), float(stages.place.stage)))
            return sum(float(stages.take(rows // 2, WIDTH, torch.float32).sum()) for _ in range(2))

        assert made.each(exchange) == [rows * WIDTH, 0.0]


def test_a_lost_stage_is_named_and_a_new_one_takes_its_place() -> None:
    with pipelines(1, 3, 1) as made:
        made.stages[1].close()
        ends = made.outcomes(lambda stages: pass_on(stages) if stages.place.stage != 1 else None)
        assert isinstance(ends[2], PeerLost)
        assert "worker[0][1]" in str(ends[2])
        made.stages[0].abort(1)
        made.stages[2].abort(1)
        made.replace(1)
        made.reset(1)
        assert made.each(pass_on)[0] is not None


def test_an_abort_ends_a_wait_and_the_same_epoch_may_be_asked_for_twice() -> None:
    with pipelines(1, 2, 1) as made:
        pool = ThreadPoolExecutor(1)
        waiting = pool.submit(made.stages[1].take, 1, WIDTH, torch.float32)
        made.stages[1].abort(1)
        assert isinstance(waiting.exception(PATIENCE_S), StepAborted)
        pool.shutdown()
        made.stages[0].abort(1)
        made.reset(1)
        tickets = [stages.ticket for stages in made.stages]
        made.stages[0].reset(1, tickets)  # another group of that process could not begin
        assert made.each(pass_on)[0] is not None
