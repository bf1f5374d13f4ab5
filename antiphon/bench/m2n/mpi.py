"""A peer: MPI's persistent sends and receives between the ranks of one `mpiexec`, acknowledged by four bytes back.

Receives of a round are started as soon as the acknowledgements of the last one have left, as for gloo. Implementations
of MPI look for messages in a loop and block nowhere. Where ranks outnumber cores each look is followed by an offer of
the core: without it a rank keeps it for a whole slice of the scheduler's (8 x 8 of 256 KiB on two cores: 76 ms, with it
6 ms).
"""

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from antiphon.base.allowance import allowance
from antiphon.base.errors import PeerTimeout, UserError
from antiphon.bench.m2n.rounds import ACK_BYTES, Member, MemberSeat, RoundPhase, RoundTraffic

_DATA, _ACK = 1, 2
_LOOKS_BETWEEN_CLOCKS = 256


class MpiMember(Member):
    """A sender, a receiver, or both at once."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._offers_core = seat.num_seats > allowance().num_cores
        self._receives: list[MPI.Prequest] = []
        self._sends: list[MPI.Prequest] = []
        self._acks: list[MPI.Prequest] = []
        self._ack_receives: list[MPI.Prequest] = []

    def introduction(self) -> bytes:
        size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
        if (size, rank) != (self.seat.num_seats, self.seat.rank):
            raise UserError(f"rank {rank} of {size} has the seat of rank {self.seat.rank} of {self.seat.num_seats}")
        return b""  # `mpiexec` has connected all ranks, and mpi4py ends MPI with the process

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        for request in (*self._receives, *self._sends, *self._acks, *self._ack_receives):
            request.Free()
        world = MPI.COMM_WORLD
        self.set_flows(traffic)
        self.received = [np.zeros(flow.num_bytes, np.uint8) for flow in self.incoming]
        self.sent = [np.zeros(flow.num_bytes, np.uint8) for flow in self.outgoing]
        self._receives = [
            world.Recv_init(data, flow.source, _DATA) for data, flow in zip(self.received, self.incoming, strict=True)
        ]
        self._sends = [
            world.Send_init(data, flow.destination, _DATA) for data, flow in zip(self.sent, self.outgoing, strict=True)
        ]
        self._acks = [world.Send_init(np.zeros(ACK_BYTES, np.uint8), flow.source, _ACK) for flow in self.incoming]
        self._ack_receives = [
            world.Recv_init(np.zeros(ACK_BYTES, np.uint8), flow.destination, _ACK) for flow in self.outgoing
        ]
        return self.phases_of_pairs(self._send, self._wait, self._release, self._wait_for_acks)

    def _send(self, step: int) -> None:
        if self.incoming:
            MPI.Prequest.Startall(self._receives)
        MPI.Prequest.Startall(self._ack_receives)
        MPI.Prequest.Startall(self._sends)

    def _wait(self, step: int) -> None:
        if not self.outgoing:
            MPI.Prequest.Startall(self._receives)
        self._finish(self._receives, "messages")

    def _release(self, step: int) -> None:
        MPI.Prequest.Startall(self._acks)
        self._finish(self._acks, "acknowledgements to leave")

    def _wait_for_acks(self, step: int) -> None:
        self._finish(self._ack_receives, "acknowledgements")
        self._finish(self._sends, "sends")

    def _finish(self, requests: list[MPI.Prequest], what: str) -> None:
        deadline: float | None = None
        looks = 0
        while not MPI.Request.Testall(requests):
            if self._offers_core:
                os.sched_yield()
            looks += 1
            if looks % _LOOKS_BETWEEN_CLOCKS:
                continue
            now = time.monotonic()
            deadline = deadline or now + self.seat.timeout_s
            if now > deadline:
                raise PeerTimeout(f"MPI's {what}", ["its peers"], self.seat.timeout_s)
