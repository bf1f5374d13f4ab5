"""Places in the fleet that workers of other machines fill, and those who came before they were needed.

A worker that joins takes the first free place of its role; one too many waits as a spare and takes the place of the
next that is lost. The engine's thread asks for `arrivals`; workers arrive on the listener's threads.
"""

import threading
from collections.abc import Callable, Set

import msgspec

from antiphon.base.logging import get_logger
from antiphon.serve.fleet import Arrival, WorkerName
from antiphon.serve.joining import JoinedPeer, JoinListener
from antiphon.serve.worker.messages import Configure

_log = get_logger("join")


class Door:
    """`start` opens it; `ask` names a place to fill; `on_arrival` is called when `arrivals` may have something."""

    def __init__(self, address: str, secret: bytes, places: Set[WorkerName]) -> None:
        self._places = places
        self._listener = JoinListener(address, secret, self._welcome)
        self._lock = threading.Lock()
        self._asked: dict[WorkerName, Configure] = {}
        self._peers: list[JoinedPeer] = []
        self._on_arrival: Callable[[], None] = lambda: None

    def start(self, on_arrival: Callable[[], None]) -> None:
        """Listen. `ResourceError` if the address cannot be had."""
        self._on_arrival = on_arrival
        address = self._listener.start()
        _log.info("workers can join at %s", address)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for peer in self._peers:
                peer.channel.close()
            self._peers.clear()

    def expects(self, name: WorkerName) -> bool:
        """Whether this place is filled from outside."""
        return name in self._places

    def ask(self, name: WorkerName, configure: Configure) -> None:
        """The place is free: whoever comes next takes it, or a spare at once."""
        with self._lock:
            self._asked[name] = configure
            spare = any(peer.role == name.role for peer in self._peers)
        if spare:
            self._on_arrival()
        else:
            _log.info("%s: waiting for a worker to join", name)

    def _welcome(self, peer: JoinedPeer) -> None:
        with self._lock:
            self._peers.append(peer)
        self._on_arrival()

    def arrivals(self) -> list[Arrival]:
        """Those who can take a place now."""
        with self._lock:
            found = []
            for name in sorted(self._asked, key=lambda name: (name.role, name.index)):
                peer = next((peer for peer in self._peers if peer.role == name.role), None)
                if peer is not None:
                    self._peers.remove(peer)
                    found.append(Arrival(name, peer, _at(self._asked.pop(name), peer)))
            return found


def _at(configure: Configure, peer: JoinedPeer) -> Configure:
    """The configuration for a worker on that machine: where others reach it; how it waits is its own choice there."""
    exchange = configure.exchange
    assert exchange is not None, "only workers of an exchange join"
    exchange = msgspec.structs.replace(exchange, host=peer.host, waiting="auto", local_processes=0, secret=b"")
    return msgspec.structs.replace(configure, exchange=exchange)
