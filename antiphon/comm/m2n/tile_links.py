"""Tiles between ranks over the M2N library: each rank writes into the others' slots and counts what arrives.

Every message has a step number of its own, made of its flight, its rank and its number, so the library hands out each
one when it is there, in whichever order they come.

Two ranks that send to each other, and receive later, must not wait for each other's slots:

1. What finds no slot is kept, and goes out in the next wait. Slots are many, and their memory is used once written.
2. What comes for another flight than the one that is waited for is copied, so that its slot is free.
3. A flight ends when its own tiles are out too: what its rank does next may wait for ranks that need them.

Tiles may go `first`: their packets carry a mark of high priority. A host's queue (SO_PRIORITY) and a network that obeys
IP_TOS put them ahead of other traffic, such as sums of gradients, for which no computation waits. Lina (section 4)
orders the two by when it launches them, and cannot once both are under way.

Tickets travel over the ranks' own process group, which is there already and names who is missing. Rejected: the ranks'
`TCPStore`. It would need names that no earlier start of these ranks has used.

How a rank waits for tiles depends on how many others want the same cores: ranks of one kernel, whatever their nodes are
called. Rejected: `LOCAL_WORLD_SIZE`. It is 1 in each of four containers, or nodes of a box, on one machine. Four ranks
then look for tiles without end, on cores that the others need to make them.
"""

import math
import secrets
import socket
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.base.logging import get_logger
from antiphon.comm.collectives import gather_bytes
from antiphon.comm.m2n.native import view_of
from antiphon.comm.mesh import Group

_log = get_logger("train")
MOST_SLOTS = 128
PAIR_BYTES = 64 << 20  # of slots for one pair and direction
FIRST_PRIORITY, FIRST_TYPE_OF_SERVICE = 6, 0x10  # SO_PRIORITY "interactive"; IP_TOS "low delay"
LOOK_S = 0.001  # between looks while something waits for a slot
KERNEL = Path("/proc/sys/kernel/random/boot_id")  # one for all nodes and containers of a machine
_RANK_BITS, _NUMBER_BITS = 12, 20


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [first, last) of those that go to, or come from, the rank at place `rank`; the `number`th of them."""

    rank: int
    number: int
    first: int
    last: int


class TileLinks:
    """One rank's links, which carry tiles between the ranks of `group`. They belong to the thread that uses them. All
    ranks begin their flights in one order."""

    def __init__(self, group: Group, endpoint: _m2n.Endpoint, inbox: _m2n.Inbox, tile_rows: int, timeout_s: float):
        self.group = group
        self.tile_rows = tile_rows
        self._endpoint = endpoint
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._outboxes: dict[int, _m2n.Outbox] = {}
        self._flight = 0
        self._unsent: dict[int, deque[tuple[int, Tensor]]] = defaultdict(deque)  # by rank
        self._early: dict[int, deque[tuple[int, int, Tensor]]] = defaultdict(deque)  # by flight
        self._held: set[int] = set()  # steps whose bytes were handed out

    @staticmethod
    def connect(
        group: Group,
        tile_rows: int,
        row_bytes: int,
        timeout_s: float,
        *,
        first: bool = False,
        local_processes: int = 0,
    ) -> "TileLinks":
        """Links between all ranks of `group`, which call it together, for rows of at most `row_bytes`.
        `local_processes`: ranks of the run on this machine; 0: unknown."""
        slot_bytes = tile_rows * row_bytes
        host = socket.gethostname()
        hosts = gather_bytes(group, "tickets", host.encode())
        secret = gather_bytes(group, "tickets", secrets.token_bytes(32))[0]
        transport = "shm" if len(set(hosts)) == 1 else "tcp"
        endpoint = _m2n.Endpoint(
            _name(group, group.index),
            transport,
            host="127.0.0.1" if transport == "shm" else socket.gethostbyname(host),
            secret=secret,
            dead_after_s=max(1.0, min(timeout_s, 30.0)),  # a network may pause, a dead process closes its connection
            local_processes=local_processes,
            options=_marked() if first else None,
        )
        slots = max(4, min(MOST_SLOTS, PAIR_BYTES // slot_bytes))
        inbox = endpoint.inbox(group.size, slots, slot_bytes, [_name(group, rank) for rank in range(group.size)])
        links = TileLinks(group, endpoint, inbox, tile_rows, timeout_s)
        for rank, ticket in enumerate(gather_bytes(group, "tickets", endpoint.ticket(inbox))):
            if rank != group.index:
                links._outboxes[rank] = endpoint.connect(ticket, group.index, timeout_s)
        inbox.wait_connected(list(links._outboxes), timeout_s)
        slot_sizes = f"{slots} slots of {slot_bytes} bytes for each rank"
        _log.debug("tiles over %s, %s, waiting: %s", transport, slot_sizes, endpoint.waiting)
        return links

    def begin(self) -> int:
        """The number of the next flight."""
        self._flight += 1
        return self._flight

    def post(self, flight: int, tile: Tile, encoded: Tensor) -> None:
        """Send a tile's bytes; returns before they are there. `encoded` may change on return."""
        step = _step(flight, self.group.index, tile.number)
        if self._unsent[tile.rank] or not self._outboxes[tile.rank].credits:
            self._unsent[tile.rank].append((step, encoded.clone()))
            self._send_rest()
        else:
            self._write(tile.rank, step, encoded)

    def next(self, flight: int, name: str, missing: Sequence[int]) -> tuple[int, int, Tensor]:
        """The next tile that came for a flight: its rank, its number and its bytes, valid until `release`. Waits;
        `PeerLost` and `PeerTimeout` name the collective, `name`, and the ranks, of which those at places `missing` have
        not sent all."""
        if self._early[flight]:
            return self._early[flight].popleft()
        deadline = time.monotonic() + self._timeout_s
        while True:
            patience_s = LOOK_S if self._send_rest() else math.inf
            if (found := self._look(flight, name, missing, patience_s, deadline)) is not None:
                return found

    def release(self, flight: int, rank: int, number: int) -> None:
        """Its bytes may be overwritten."""
        step = _step(flight, rank, number)
        if step in self._held:
            self._held.remove(step)
            self._inbox.release(step)

    def finish(self, flight: int, name: str) -> None:
        """All tiles of `flight` have come. Waits until those that it sends are on their way; errors as of `next`."""
        self._early.pop(flight, None)
        deadline = time.monotonic() + self._timeout_s
        while waiting := self._send_rest():
            self._look(0, name, waiting, LOOK_S, deadline)

    def _look(
        self, flight: int, name: str, missing: Sequence[int], patience_s: float, deadline: float
    ) -> tuple[int, int, Tensor] | None:
        """Take what comes next, if it comes in time; it is handed out if it is for `flight`."""
        try:
            step = self._inbox.wait_complete(min(patience_s, max(0.0, deadline - time.monotonic())))
        except PeerLost as error:
            raise PeerLost(error.peer, f"{name}: {error.reason}") from error
        if step is None:
            if time.monotonic() >= deadline:
                peers = [_name(self.group, rank) for rank in missing]
                raise PeerTimeout(f"{_name(self.group, self.group.index)}, {name}", peers, self._timeout_s)
            return None
        (message,) = self._inbox.messages(step)
        payload = message.payload
        encoded = view_of(payload.ctypes.data, payload.shape, torch.uint8)
        arrived, rank, number = _parts(step)
        if arrived == flight:
            self._held.add(step)
            return rank, number, encoded
        self._early[arrived].append((rank, number, encoded.clone()))
        self._inbox.release(step)
        return None

    def close(self) -> None:
        """Say goodbye to all ranks."""
        self._endpoint.close()

    def _send_rest(self) -> list[int]:
        """Send what finds a slot now; the ranks for which something is left."""
        for rank, waiting in self._unsent.items():
            while waiting and self._outboxes[rank].credits:
                self._write(rank, *waiting.popleft())
        return [rank for rank, waiting in self._unsent.items() if waiting]

    def _write(self, rank: int, step: int, encoded: Tensor) -> None:
        given = encoded.view(torch.uint8).flatten()
        slot = torch.from_numpy(self._outboxes[rank].slot(self._timeout_s))
        slot[: given.shape[0]] = given
        self._outboxes[rank].commit(step, given.shape[0], participants=1)


def ranks_on_this_machine(group: Group) -> int:
    """How many ranks of `group`, all of which call it, run under this rank's kernel and so share its cores."""
    own = KERNEL.read_bytes().strip() if KERNEL.exists() else socket.gethostname().encode()
    return gather_bytes(group, "tickets", own).count(own)


def _step(flight: int, rank: int, number: int) -> int:
    if number >> _NUMBER_BITS:
        raise UserError(f"an exchange has more than {1 << _NUMBER_BITS} tiles for a rank: raise overlap.tile_rows")
    return (flight << _RANK_BITS | rank) << _NUMBER_BITS | number


def _parts(step: int) -> tuple[int, int, int]:
    """Flight, rank and number."""
    rest = step >> _NUMBER_BITS
    return rest >> _RANK_BITS, rest & (1 << _RANK_BITS) - 1, step & (1 << _NUMBER_BITS) - 1


def _marked() -> _m2n.TransportOptions:
    options = _m2n.TransportOptions()
    options.data_priority, options.data_type_of_service = FIRST_PRIORITY, FIRST_TYPE_OF_SERVICE
    return options


def _name(group: Group, place: int) -> str:
    return f"rank {group.ranks[place]}"
