"""The engine's hand on the exchange: it numbers the epochs and hands expert workers' tickets to attention workers."""

from antiphon.serve.fleet import Fleet, WorkerName
from antiphon.serve.worker.messages import Abort, Reset


class ExchangeControl:
    """One per group of workers that exchange rows."""

    def __init__(self, fleet: Fleet, experts: list[WorkerName]) -> None:
        self._fleet = fleet
        self._experts = experts
        self._tickets: dict[WorkerName, bytes] = {}
        self._epoch = 0

    def learn(self, worker: WorkerName, ticket: bytes) -> None:
        """A worker is ready and can be reached so; a restarted one has a new ticket."""
        self._tickets[worker] = ticket

    def abort_step(self) -> int:
        """Begin a new epoch and call all workers out of the running step. Returns the epoch to `reset` to."""
        self._epoch += 1
        for worker in self._fleet.workers.values():
            if worker.ready:
                self._fleet.send(worker, Abort(self._epoch))
        return self._epoch

    def reset(self, epoch: int) -> Reset:
        """The order to begin `epoch`. All expert workers must be ready."""
        return Reset(epoch, [self._tickets[name] for name in self._experts])
