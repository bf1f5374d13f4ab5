"""Ours: every pair through the M2N library, as a program that uses it alone would.

Sender: one `send` (in place: `slot` and `commit`, the calls that the engine's dispatch is made of) to each receiver,
then wait until every credit is back. Receiver: wait until the messages of all senders are visible, release them; the
credits are the acknowledgements. One slot per pair: a round never needs a second one, and
the memory touched is then as large as that of the plain copy it is compared with.

In place: the producer writes its payload into the slot, so that sending copies nothing. Untouched rounds send the slot
again as it is.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from antiphon import _m2n
from antiphon.bench.m2n.rounds import (
    Bytes,
    Member,
    MemberSeat,
    RoundPhase,
    RoundTraffic,
    WrongData,
    check_pattern,
    phases_of_pairs,
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

    def open(self) -> bytes:
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

    def prepare(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self.set_flows(traffic)
        lengths = [0 if self._in_place else flow.num_bytes for flow in self.outgoing]
        self._pieces = np.split(np.zeros(sum(lengths), np.uint8), np.cumsum(lengths)[:-1]) if lengths else []
        self._arrived = []
        return phases_of_pairs(
            (self._commit_call() if self._in_place else self._send_call()) if self.outgoing else None,
            self._receive_calls() if self.incoming else None,
            self._wait_for_credits_call(),
        )

    def check(self, step: int) -> None:
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
        assert self._inbox is not None, "only a receiver waits"
        wait, num_sources, timeout_s = self._inbox.wait, len(self.incoming), self.seat.timeout_s
        return lambda step: wait(step, num_sources, timeout_s), self._inbox.release

    def _wait_for_credits_call(self) -> Callable[[int], None]:
        wait_all, outboxes, timeout_s = _m2n.wait_all_credits, self._outboxes, self.seat.timeout_s
        return lambda _: wait_all(outboxes, timeout_s)
