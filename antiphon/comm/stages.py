"""One process's place in a pipeline: who hears of a step with it, who works beside it, whose rows it goes on with.

    stage 0 --link 0--> stage 1 --link 1--> ... --last link--> stage 0

Each stage has some layers, on one rank or on several. Rank t of a stage hands its rows to rank t of the next one. What
comes back to stage 0 are the rows that need logits: embedding, head and sampling are there, because they often share
their weights, and because requests' sampling state is the leader's.

All groups of a process are connected together: one ticket leads to all of them, one `reset` begins an epoch of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.comm.rank_group import SLOT_BYTES, NativeRankGroup, RankGroup
from antiphon.comm.two_level.levels import Levels, MakeEndpoint

_MOST_SLOTS = 128  # for a step's rows; an inbox has room for 256


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Rank `rank` of stage `stage` of worker `worker`, of `num_stages` stages of `num_ranks` ranks each.

    Workers are counted among those whose stages work together (layout hybrid); a worker by itself is number 0.
    Processes are numbered by worker, then by stage, then by rank."""

    worker: int
    stage: int
    rank: int
    num_stages: int
    num_ranks: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def in_worker(self) -> int:
        """This process among those of its worker."""
        return self.stage * self.num_ranks + self.rank

    def number(self, worker: int, stage: int, rank: int) -> int:
        """That process among those of all workers."""
        return (worker * self.num_stages + stage % self.num_stages) * self.num_ranks + rank

    def crew(self) -> list[int]:
        """The processes of this worker."""
        first = self.number(self.worker, 0, 0)
        return list(range(first, first + self.num_stages * self.num_ranks))

    def beside(self, num_workers: int) -> list[int]:
        """The processes of this stage, of all workers."""
        return [
            self.number(worker, self.stage, rank) for worker in range(num_workers) for rank in range(self.num_ranks)
        ]

    def link(self, stage: int) -> list[int]:
        """The two processes, giver and taker, of the link that leads on from `stage`."""
        return [self.number(self.worker, each, self.rank) for each in (stage, stage + 1)]


class Stages:
    """The groups of one process; see the module. Calls wait as those of a `RankGroup` do, and raise as they do."""

    def __init__(
        self, place: StagePlace, crew: RankGroup, beside: RankGroup | Levels, before: RankGroup, after: RankGroup
    ) -> None:
        """`crew`: all processes of the worker. `beside`: those of this stage. `before` and `after`: the links that lead
        here and on; the giver is rank 0 of a link."""
        self.place = place
        self.crew = crew
        self.beside = beside
        self._before = before
        self._after = after

    def give(self, rows_TH: Tensor) -> None:
        """Rows for the next stage. Waits only if it has not taken many before; none: nothing is sent."""
        if rows_TH.shape[0] == 0:
            return  # the other end does not take either
        rows_TH = rows_TH.cpu()
        self._after.all_to_all(rows_TH, [0, rows_TH.shape[0]], [0, 0])

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width]: rows of the stage before, in the order in which it gave them."""
        return self._before.all_to_all(torch.empty(0, width, dtype=dtype), [0, 0], [num_rows, 0])

    @property
    def ticket(self) -> bytes:
        return msgspec.msgpack.encode([group.ticket for group in self._groups()])

    def _groups(self) -> list[RankGroup | Levels]:
        return [self.beside, self.crew, self._before, self._after]

    def reset(self, epoch: int, tickets: Sequence[bytes]) -> None:
        """Begin `epoch` in all groups; `tickets` of all processes of all workers, in order. See `RankGroup.reset`.

        Links begin by number: each first waits for the lower of its two, so that no circle of waits can close."""
        place = self.place
        of_worker = place.num_stages * place.num_ranks
        if len(tickets) % of_worker:
            raise UserError(f"{len(tickets)} tickets for workers of {of_worker} processes: give one for each process")
        known = [msgspec.msgpack.decode(ticket, type=tuple[bytes, bytes, bytes, bytes]) for ticket in tickets]

        def of(processes: Sequence[int], kind: int) -> list[bytes]:
            return [known[process][kind] for process in processes]

        self.beside.reset(epoch, of(place.beside(len(tickets) // of_worker), 0))
        self.crew.reset(epoch, of(place.crew(), 1))
        leads_here = (place.stage - 1) % place.num_stages
        for link in sorted((leads_here, place.stage)):
            giver, taker = place.link(link)
            group = self._after if link == place.stage else self._before
            group.reset(epoch, [*of([giver], 3), *of([taker], 2)])

    def abort(self, epoch: int) -> None:
        """Any thread: see `RankGroup.abort`."""
        for group in self._groups():
            group.abort(epoch)

    def close(self) -> None:
        for group in self._groups():
            group.close()


def open_stages(
    place: StagePlace,
    beside: RankGroup | Levels,
    *,
    endpoint: MakeEndpoint,
    names: Sequence[str],
    step_bytes: int,
    num_micro_batches: int,
    timeout_s: float,
) -> Stages:
    """The groups of this process, not yet connected. `names` of the worker's processes; `endpoint` makes one end of the
    name it is given. `step_bytes`: rows of a whole step, which a link takes while its taker is busy: the first and the
    last stage give each other rows before they take any."""
    own = names[place.in_worker]
    crew = NativeRankGroup(endpoint(f"{own} crew"), place.in_worker, len(names), names=names, timeout_s=timeout_s)
    slot_bytes = max(SLOT_BYTES, -(-step_bytes // (_MOST_SLOTS * 64)) * 64)
    slots = _m2n.RANK_GROUP_SLOTS + num_micro_batches + -(-step_bytes // slot_bytes)

    def link(stage: int, end: int) -> NativeRankGroup:
        first = place.number(place.worker, 0, 0)
        ends = [names[process - first] for process in place.link(stage)]
        return NativeRankGroup(
            endpoint(f"{own} link {stage}"),
            end,
            2,
            names=ends,
            timeout_s=timeout_s,
            num_slots=slots,
            slot_bytes=slot_bytes,
        )

    before = link((place.stage - 1) % place.num_stages, 1)
    return Stages(place, crew, beside, before, link(place.stage, 0))
