"""What needs nothing but this package: our library, and the plain copy that bounds every contestant.

Ours: every pair through the M2N library, as a program that uses it alone would. Sender: one `send` (in place: `slot`
and `commit`, the calls that the engine's dispatch is made of) to each receiver, then wait until every credit is back.
Receiver: wait until the messages of all senders are visible, release them; the credits are the acknowledgements. One
slot per pair: a round never needs a second one, and the memory touched is then as large as that of the plain copy. In
place: the producer writes its payload into the slot, so that sending copies nothing. Untouched rounds send the slot
again as it is.

The bound: as many processes as cores copy the bytes of a round into shared memory, with nothing but a barrier. Each
message has its own place in a copier's private memory and its own in the shared one, as for all contestants, so that
caches see as many bytes. Messages go to copiers whole where they divide evenly, else each is cut into one piece per
copier. The barrier is one counter on which a copier spins: there is a core for each. The shared memory is an anonymous
file of the first copier's that the others open through /proc: nothing is left behind when one dies.
"""

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from antiphon import _m2n, _native
from antiphon.base.errors import PeerTimeout
from antiphon.bench.m2n.rounds import (
    RELEASE,
    SEND,
    WAIT,
    Bytes,
    Flow,
    Member,
    MemberSeat,
    RoundPhase,
    RoundTraffic,
    WrongData,
    check_pattern,
    pattern,
)

NUM_SLOTS = 1
# Processes of the idle contestants share the cores; a late heartbeat must not look like a death.
_HEARTBEAT_S = 1.0
_DEAD_AFTER_S = 10.0


class AntiphonMember(Member):
    """A sender, a receiver, or both at once."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._transport = options["transport"]
        self._waiting = options["waiting"]
        self._in_place = options["in_place"] == "yes"
        self._endpoint: _m2n.Endpoint | None = None
        self._inbox: _m2n.Inbox | None = None
        self._outboxes: list[_m2n.Outbox] = []
        self._pieces: list[Bytes] = []  # of one payload, one for each receiver
        self._arrived: list[Bytes] = []

    def introduction(self) -> bytes:
        seat = self.seat
        self._endpoint = _m2n.Endpoint(
            str(seat),
            self._transport,
            waiting=self._waiting,
            local_processes=seat.num_seats,
            heartbeat_s=_HEARTBEAT_S,
            dead_after_s=_DEAD_AFTER_S,
        )
        incoming = seat.traffic.incoming(seat.rank)
        if not incoming:
            return b""
        self._inbox = self._endpoint.inbox(len(incoming), NUM_SLOTS, max(flow.num_bytes for flow in incoming))
        return self._endpoint.ticket(self._inbox)

    def connect(self, introductions: Sequence[bytes]) -> None:
        assert self._endpoint is not None, "open() comes first"
        seat = self.seat
        source = seat.traffic.index(seat.rank)
        self._outboxes = [
            self._endpoint.connect(introductions[flow.destination], source, seat.timeout_s)
            for flow in seat.traffic.outgoing(seat.rank)
        ]
        if self._inbox is not None:
            self._inbox.wait_connected(self._inbox.sources, seat.timeout_s)

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self.set_flows(traffic)
        lengths = [0 if self._in_place else flow.num_bytes for flow in self.outgoing]
        self._pieces = np.split(np.zeros(sum(lengths), np.uint8), np.cumsum(lengths)[:-1]) if lengths else []
        self._arrived = []
        send = self._commit_call() if self._in_place else self._send_call()
        return self.phases_of_pairs(send, *self._receive_calls(), self._wait_for_credits_call())

    def compare(self, step: int) -> None:
        assert self._inbox is not None, "only a receiver waits"
        messages = {message.source: message for message in self._inbox.messages(step)}
        for source, flow in enumerate(self.incoming):
            if source not in messages:
                raise WrongData(f"step {step}: no message from rank {flow.source}, though the wait was for all")
            message = messages[source]
            if message.step != step:
                raise WrongData(f"step {step}: the message from rank {flow.source} says step {message.step}")
            check_pattern(message.payload, flow.num_bytes, step, flow.source, flow.destination)

    def payloads(self) -> Sequence[Bytes]:
        if not self._in_place:
            return self._pieces
        pairs = zip(self._outboxes, self.outgoing, strict=True)
        return [outbox.slot(self.seat.timeout_s)[: flow.num_bytes] for outbox, flow in pairs]

    def arrived(self, step: int) -> Sequence[Bytes]:
        if not self._arrived and self._inbox is not None:  # each source has one slot, so the next round's lie there too
            self._arrived = [message.payload for message in self._inbox.messages(step)]
        return self._arrived

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    # What runs between readings of the clock holds what it calls, as the inner loop of a program would.

    def _send_call(self) -> Callable[[int], None]:
        sends = [(box.send, piece.data) for box, piece in zip(self._outboxes, self._pieces, strict=True)]
        timeout_s = self.seat.timeout_s

        def run(step: int) -> None:
            for send, piece in sends:
                send(step, piece, timeout_s=timeout_s)

        return run

    def _commit_call(self) -> Callable[[int], None]:
        pairs = zip(self._outboxes, self.outgoing, strict=True)
        calls = [(outbox.slot, outbox.commit, flow.num_bytes) for outbox, flow in pairs]
        timeout_s = self.seat.timeout_s

        def run(step: int) -> None:
            for slot, commit, num_bytes in calls:
                slot(timeout_s)
                commit(step, num_bytes)

        return run

    def _receive_calls(self) -> tuple[Callable[[int], None], Callable[[int], None]]:
        if self._inbox is None:  # nothing is received
            return _nothing, _nothing
        wait, num_sources, timeout_s = self._inbox.wait, len(self.incoming), self.seat.timeout_s
        return lambda step: wait(step, num_sources, timeout_s), self._inbox.release

    def _wait_for_credits_call(self) -> Callable[[int], None]:
        wait_all, outboxes, timeout_s = _m2n.wait_all_credits, self._outboxes, self.seat.timeout_s
        return lambda _: wait_all(outboxes, timeout_s)


def _nothing(step: int) -> None:
    """What a sender does to receive."""


# --- the bound


_COUNTER_BYTES = 4096  # the counter has a page of its own
_ALIGNMENT = 64
_SPIN_S = 1.0


class MemcpyMember(Member):
    """One copier."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._descriptor = -1
        self._shared: Bytes = np.empty(0, np.uint8)
        self._counter_address = 0
        self._rounds_done = 0
        self._flows: list[Flow] = []
        self._deals_whole = False
        self._arrived: list[Bytes] = []
        self._sources: list[Bytes] = []
        self._copies: list[tuple[Bytes, Bytes]] = []

    def introduction(self) -> bytes:
        if self.seat.rank > 0:
            return b""
        self._descriptor = os.memfd_create("antiphon-bench")
        os.ftruncate(self._descriptor, _COUNTER_BYTES + sum(_room(flow) for flow in self.seat.traffic.flows()))
        return f"/proc/{os.getpid()}/fd/{self._descriptor}".encode()

    def connect(self, introductions: Sequence[bytes]) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(introductions[0], os.O_RDWR)
        size = os.fstat(self._descriptor).st_size
        self._shared = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
        self._counter_address = self._shared.ctypes.data

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self._flows = traffic.flows()
        self._deals_whole = traffic.is_balanced and len(self._flows) % self.seat.num_seats == 0
        self._arrived, offset = [], _COUNTER_BYTES
        for flow in self._flows:
            self._arrived.append(self._shared[offset : offset + flow.num_bytes])
            offset += _room(flow)
        mine = [self._piece(number) for number in range(len(self._flows))]
        self._sources = [np.zeros(piece.stop - piece.start, np.uint8) for piece in mine]
        pieces = zip(self._arrived, self._sources, mine, strict=True)
        self._copies = [(arrived[piece], source) for arrived, source, piece in pieces if source.size]
        # What arrived is read by all before it is written again.
        released: list[RoundPhase] = [(RELEASE, self._wait_for_all)] if traffic.touched else []
        return [(SEND, self._copy), (WAIT, self._wait_for_all), *released]

    def produce(self, step: int) -> None:
        for number, (flow, source) in enumerate(zip(self._flows, self._sources, strict=True)):
            whole = pattern(flow.num_bytes, step, flow.source, flow.destination)
            source[:] = whole[self._piece(number)]

    def compare(self, step: int) -> None:
        for flow, arrived in zip(self._flows, self._arrived, strict=True):
            check_pattern(arrived, flow.num_bytes, step, flow.source, flow.destination)

    def payloads(self) -> Sequence[Bytes]:
        return [source for _, source in self._copies]

    def arrived(self, step: int) -> Sequence[Bytes]:
        """A share of all, part of it copied by others."""
        rank, num_seats, number = self.seat.rank, self.seat.num_seats, len(self._arrived)
        return self._arrived[number * rank // num_seats : number * (rank + 1) // num_seats]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _piece(self, number: int) -> slice:
        """The part of message `number` that this copier copies; empty if another copies the message."""
        rank, num_seats, num_bytes = self.seat.rank, self.seat.num_seats, self._flows[number].num_bytes
        if self._deals_whole:
            return slice(0, num_bytes if number % num_seats == rank else 0)
        return slice(num_bytes * rank // num_seats, num_bytes * (rank + 1) // num_seats)

    def _copy(self, step: int) -> None:
        for target, source in self._copies:
            np.copyto(target, source)

    def _wait_for_all(self, step: int) -> None:
        """The counter only grows, modulo 2^32: the round is over once all have added one."""
        self._rounds_done += 1
        target = self._rounds_done * self.seat.num_seats % 2**32
        seen = (_native.fetch_add_wake_u32(self._counter_address, 1) + 1) % 2**32
        if seen == target or _reached(seen, target):
            return
        deadline = time.monotonic() + self.seat.timeout_s
        while not _reached(seen, target):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerTimeout("barrier", ["another copier"], self.seat.timeout_s)
            _native.wait_u32(self._counter_address, seen, int(left_s * 1e9), int(_SPIN_S * 1e9))
            seen = _native.load_u32(self._counter_address)


def _reached(seen: int, target: int) -> bool:
    return (seen - target) % 2**32 < 2**31


def _room(flow: Flow) -> int:
    return -(-flow.num_bytes // _ALIGNMENT) * _ALIGNMENT
