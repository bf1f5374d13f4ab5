"""A peer: UCX's tagged messages (through ucxx), acknowledged by four bytes back.

UCX picks the ways between two processes by itself; `UCX_TLS` and its other settings are taken from the environment.
Receives of a round are posted as soon as the acknowledgements of the last one have left, as for gloo. A wait sleeps
until UCX has something to do (its "wakeup"). Looking in a loop with an offer of the core after each look, as for MPI,
takes 1.14 of the time at 8 x 8 of 256 KiB on two cores, 0.86 at 2 x 2.
"""

import select
import time
from collections.abc import Mapping, Sequence

import numpy as np
from ucxx._lib import libucxx as ucx
from ucxx._lib.arr import Array

from antiphon.base.errors import PeerTimeout
from antiphon.bench.m2n.rounds import (
    ACK_BYTES,
    Bytes,
    Flow,
    Member,
    MemberSeat,
    RoundPhase,
    RoundTraffic,
)

_DATA, _ACK = 1, 2


class UcxMember(Member):
    """A sender, a receiver, or both at once. UCX lets go of everything when the process ends; closing in good order
    would wait for peers."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._worker = ucx.UCXWorker(ucx.UCXContext({}, (ucx.Feature.TAG, ucx.Feature.WAKEUP)))
        self._worker.init_blocking_progress_mode()
        self._wakeup = select.poll()
        self._wakeup.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._endpoints: dict[int, ucx.UCXEndpoint] = {}
        self._incoming: list[_Message] = []
        self._outgoing: list[_Message] = []
        self._receives: list[ucx.UCXRequest] = []
        self._sends: list[ucx.UCXRequest] = []
        self._ack_receives: list[ucx.UCXRequest] = []

    def introduction(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def connect(self, introductions: Sequence[bytes]) -> None:
        """Endpoints to all who are sent to or acknowledged; UCX connects with their first messages."""
        rank, traffic = self.seat.rank, self.seat.traffic
        peers = {flow.destination for flow in traffic.outgoing(rank)} | {flow.source for flow in traffic.incoming(rank)}
        for peer in sorted(peers):
            address = ucx.UCXAddress.create_from_buffer(introductions[peer])
            # Without UCX's error handling, which would rule out shared memory: the benchmark itself sees who dies.
            self._endpoints[peer] = ucx.UCXEndpoint.create_from_worker_address(self._worker, address, False)

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self.set_flows(traffic)
        self._incoming = [_Message(flow, self._endpoints[flow.source]) for flow in self.incoming]
        self._outgoing = [_Message(flow, self._endpoints[flow.destination]) for flow in self.outgoing]
        self.received = [message.data for message in self._incoming]
        self.sent = [message.data for message in self._outgoing]
        return self.phases_of_pairs(self._send, self._wait, self._release, self._wait_for_acks)

    def _send(self, step: int) -> None:
        if self._incoming:
            self._post_receives()
        self._ack_receives = [self._worker.tag_recv(message.ack, message.ack_tag) for message in self._outgoing]
        self._sends = [message.endpoint.tag_send(message.array, message.data_tag) for message in self._outgoing]

    def _post_receives(self) -> None:
        self._receives = [self._worker.tag_recv(message.array, message.data_tag) for message in self._incoming]

    def _wait(self, step: int) -> None:
        if not self._outgoing:
            self._post_receives()
        self._finish(self._receives, "messages")

    def _release(self, step: int) -> None:
        acks = [message.endpoint.tag_send(message.ack, message.ack_tag) for message in self._incoming]
        self._finish(acks, "acknowledgements to leave")

    def _wait_for_acks(self, step: int) -> None:
        self._finish(self._ack_receives, "acknowledgements")
        self._finish(self._sends, "sends")

    def _finish(self, requests: list[ucx.UCXRequest], what: str) -> None:
        """Wait until all are complete; what failed is raised."""
        deadline: float | None = None
        for request in requests:
            self._worker.progress()
            while not request.completed:
                now = time.monotonic()
                deadline = deadline or now + self.seat.timeout_s
                if now > deadline:
                    raise PeerTimeout(f"UCX's {what}", ["its peers"], self.seat.timeout_s)
                if self._worker.arm():  # else something came meanwhile
                    self._wakeup.poll((deadline - now) * 1e3)
                self._worker.progress()
            request.check_error()


class _Message:
    """One flow's payload, its acknowledgement, and the tags that tell them from all others at the same worker."""

    def __init__(self, flow: Flow, endpoint: ucx.UCXEndpoint) -> None:
        self.endpoint = endpoint
        self.data: Bytes = np.zeros(flow.num_bytes, np.uint8)
        self.array = Array(self.data)
        self.ack = Array(np.zeros(ACK_BYTES, np.uint8))
        self.data_tag = _tag(_DATA, flow.source)
        self.ack_tag = _tag(_ACK, flow.destination)


def _tag(kind: int, sender: int) -> ucx.UCXXTag:
    return ucx.UCXXTag(kind << 32 | sender)
