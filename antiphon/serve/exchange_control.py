"""Epochs of one group's exchange: who is called out of a step and who is told how to reach whom.

Rejected: a rendezvous. The engine hears of every process that comes up, and is the one that decides when to begin anew.
"""

from collections.abc import Collection

from antiphon.serve.fleet import Fleet
from antiphon.serve.members import Members
from antiphon.serve.worker.messages import Abort, Ready, Reset
from antiphon.serve.worker_process import WorkerName


class ExchangeControl:
    """Numbers the epochs of a group's exchange, and hands expert workers' tickets to attention workers, and those of a
    worker's ranks to each other."""

    def __init__(self, fleet: Fleet, members: Members) -> None:
        self._fleet = fleet
        self._members = members
        self._ready: dict[WorkerName, Ready] = {}
        self._epoch = 0

    def learn(self, name: WorkerName, ready: Ready) -> None:
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
