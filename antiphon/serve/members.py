"""The workers of one group, the processes they consist of, which of those are up, and the epochs of their exchange.

`ExchangeControl` says who is called out of a step and who is told how to reach whom. Rejected: a rendezvous. The engine
hears of every process that comes up, and is the one that decides when to begin anew.
"""

from collections.abc import Collection, Mapping, Sequence

from antiphon.serve.fleet import Fleet
from antiphon.serve.worker.messages import Abort, Reset, WorkerReady
from antiphon.serve.worker_process import WorkerName, WorkerProcess


class Members:
    """`ranks_of`: the processes of every worker, its leader first, by the leader's name. `share_experts`: attention
    workers hold experts for each other (layout hybrid), so that none can step without the others."""

    def __init__(
        self,
        attention: Sequence[WorkerName],
        experts: Sequence[WorkerName],
        ranks_of: Mapping[WorkerName, tuple[WorkerName, ...]],
        fleet: Fleet,
        *,
        share_experts: bool = False,
    ) -> None:
        self.attention = attention
        self.experts = experts
        self.ranks_of = ranks_of
        self.processes = tuple(name for ranks in ranks_of.values() for name in ranks)
        self.share_experts = share_experts
        self._fleet = fleet

    def peers_of(self, name: WorkerName) -> Sequence[WorkerName]:
        """The processes that reach each other as ranks: those of one worker, or of all that share experts."""
        return self.processes if self.share_experts else self.ranks_of[name.leader]

    def ranks(self, leaders: Collection[WorkerName]) -> list[WorkerName]:
        """The processes of these workers."""
        return [name for leader in leaders for name in self.ranks_of[leader]]

    def is_ready(self, name: WorkerName) -> bool:
        """This process has loaded its part and can be spoken to."""
        worker = self._fleet.workers.get(name)
        return worker is not None and worker.ready

    def is_loaded(self, leader: WorkerName) -> bool:
        """All ranks of a worker are up."""
        return all(map(self.is_ready, self.ranks_of[leader]))

    def loaded(self, absent: Collection[int]) -> list[WorkerProcess]:
        """The processes of workers of which all ranks are up, without the expert workers `absent`."""
        left_out = {name for name in self.experts if name.index in absent}
        leaders = [leader for leader in self.ranks_of if leader not in left_out and self.is_loaded(leader)]
        return [self._fleet.workers[name] for name in self.ranks(leaders)]

    def loaded_attention(self) -> list[WorkerName]:
        """Attention workers of which all ranks are up."""
        return [name for name in self.attention if self.is_loaded(name)]

    @property
    def expert_holders(self) -> Sequence[WorkerName]:
        """The processes that hold experts for others: those of expert workers, or of all that share experts."""
        return self.processes if self.share_experts else self.ranks(self.experts)

    def missing_experts(self) -> frozenset[int]:
        """Expert workers of which not all ranks are up."""
        return frozenset(name.index for name in self.experts if not self.is_loaded(name))

    def others_missing(self) -> bool:
        """Where attention workers share experts: one of them is not up."""
        return self.share_experts and len(self.loaded_attention()) < len(self.attention)


class ExchangeControl:
    """Numbers the epochs of a group's exchange, and hands expert workers' tickets to attention workers, and those of a
    worker's ranks to each other."""

    def __init__(self, fleet: Fleet, members: Members) -> None:
        self._fleet = fleet
        self._members = members
        self._ready: dict[WorkerName, WorkerReady] = {}
        self._epoch = 0

    def learn(self, name: WorkerName, ready: WorkerReady) -> None:
        """A process is ready and can be reached so; a restarted one has new tickets."""
        self._ready[name] = ready

    def abort_step(self) -> int:
        """Begin a new epoch and call all workers out of the running step. Returns the epoch to `reset` to."""
        self._epoch += 1
        for name in filter(self._members.is_ready, self._members.processes):
            self._fleet.send(self._fleet.workers[name], Abort(self._epoch))
        return self._epoch

    def reset(self, epoch: int, name: WorkerName, absent: Collection[int]) -> Reset:
        """The order to begin `epoch`, for this process. All ranks of its own must be ready. `absent`: expert workers
        that get no rows in it, also if they are back by now."""
        return Reset(
            epoch,
            tickets=[b"" if expert.index in absent else self._ready[expert].ticket for expert in self._members.experts],
            rank_tickets=[self._ready[rank].rank_ticket for rank in self._members.peers_of(name)],
        )
