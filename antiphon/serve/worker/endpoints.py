"""A process's ends of exchanges and of groups of ranks, which it opens while it is built."""

from antiphon import _m2n
from antiphon.comm.m2n.native import SPIN_S
from antiphon.serve.worker.messages import Configure


def rank_names(configure: Configure) -> list[str]:
    """What the processes of this worker call each other (`WorkerName.among_peers`)."""
    return [f"{configure.role}[{configure.index}][{rank}]" for rank in range(configure.num_ranks)]


class Endpoints:
    """Opens ends; `description` sums them up, because a process may have half a dozen."""

    def __init__(self, configure: Configure) -> None:
        self._configure = configure
        self._opened: list[_m2n.Endpoint] = []

    def open(self, name: str, *, of_ranks: bool = False) -> _m2n.Endpoint:
        """An end of an exchange, or of a group of this worker's ranks."""
        exchange = self._configure.exchange
        assert exchange is not None, "a worker without peers needs no endpoint"
        endpoint = _m2n.Endpoint(
            name,
            exchange.rank_transport if of_ranks else exchange.transport,
            host=exchange.host,
            secret=exchange.secret,
            waiting=exchange.waiting,
            local_processes=exchange.local_processes,
            spin_s=SPIN_S,
        )
        self._opened.append(endpoint)
        return endpoint

    @property
    def description(self) -> str:
        """Transports, and how this process waits, which decides more than anything else; empty without ends."""
        transports = ", ".join(sorted({endpoint.transport for endpoint in self._opened}))
        waits = ", ".join(sorted({endpoint.waiting for endpoint in self._opened}))
        return f"transport {transports}, waits by {waits}" if self._opened else ""
