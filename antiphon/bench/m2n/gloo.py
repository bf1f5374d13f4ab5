"""The baseline: `torch.distributed` on gloo, `isend` and `irecv`, an acknowledgement being a message of four bytes.

A receiver posts the receives of a round as soon as its acknowledgements of the last one have left, a sender those of
the acknowledgements before it sends: most data then finds its receive posted, and gloo need not announce it first.
Rejected: posting them even before those acknowledgements, which gains gloo 2 to 18% at the median (1 x 1 to 8 x 8,
256 KiB) and would leave receives behind that nothing answers when the size changes.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from antiphon.bench.m2n.rounds import (
    ACK_BYTES,
    RELEASE,
    WAIT,
    Bytes,
    Member,
    MemberSeat,
    RoundPhase,
    RoundTraffic,
)

_DATA, _ACK = 0, 1


class GlooProcessGroup(Member):
    """A member's way into a process group over loopback, and out of it."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._store: Store | None = None

    def introduction(self) -> bytes:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as ours; the host's name may lead anywhere
        if self.seat.rank > 0:
            return b""
        self._store, port = self._make_store(0)
        return str(port).encode()

    def connect(self, introductions: Sequence[bytes]) -> None:
        store = self._store or self._make_store(int(introductions[0]))[0]
        timeout = timedelta(seconds=self.seat.timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=self.seat.rank, world_size=self.seat.num_seats, timeout=timeout
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _make_store(self, port: int) -> tuple[Store, int]:
        """(where ranks find each other, its port). Rank 0 keeps it, at a free port."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            self.seat.num_seats,
            self.seat.rank == 0,
            timeout=timedelta(seconds=self.seat.timeout_s),
            wait_for_workers=False,
        )
        return store, int(store.port)


def as_bytes(buffers: Sequence[Tensor]) -> list[Bytes]:
    """The same memory."""
    return [buffer.numpy() for buffer in buffers]


class GlooMember(GlooProcessGroup):
    """A sender, a receiver, or both at once."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._received: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._acks: list[Tensor] = []
        self._ack = torch.zeros(ACK_BYTES, dtype=torch.uint8)
        self._sends: list[dist.Work | None] = []
        self._receives: list[dist.Work | None] = []
        self._ack_receives: list[dist.Work | None] = []

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self.set_flows(traffic)
        self._received = [torch.zeros(flow.num_bytes, dtype=torch.uint8) for flow in self.incoming]
        self._sent = [torch.zeros(flow.num_bytes, dtype=torch.uint8) for flow in self.outgoing]
        self.received, self.sent = as_bytes(self._received), as_bytes(self._sent)
        self._acks = [torch.zeros(ACK_BYTES, dtype=torch.uint8) for _ in self.outgoing]
        return self.phases_of_pairs(self._send, self._wait, self._release, self._wait_for_acks)

    def _send(self, step: int) -> None:
        if self.incoming:
            self._post_receives()
        self._ack_receives = [
            dist.irecv(ack, src=flow.destination, tag=_ACK) for ack, flow in zip(self._acks, self.outgoing, strict=True)
        ]
        self._sends = [
            dist.isend(data, dst=flow.destination, tag=_DATA)
            for data, flow in zip(self._sent, self.outgoing, strict=True)
        ]

    def _post_receives(self) -> None:
        self._receives = [
            dist.irecv(data, src=flow.source, tag=_DATA)
            for data, flow in zip(self._received, self.incoming, strict=True)
        ]

    def _wait(self, step: int) -> None:
        if not self.outgoing:
            self._post_receives()
        _wait_all(self._receives)

    def _release(self, step: int) -> None:
        _wait_all([dist.isend(self._ack, dst=flow.source, tag=_ACK) for flow in self.incoming])

    def _wait_for_acks(self, step: int) -> None:
        _wait_all(self._ack_receives)
        _wait_all(self._sends)


def _wait_all(works: Sequence[dist.Work | None]) -> None:
    """A `Work` is None only for ranks outside the group, which there are none of."""
    for work in works:
        assert work is not None
        work.wait()


# --- as a collective
#
# One `all_to_all_single` moves all data of a round, another the acknowledgements: what training frameworks do between
# experts. Every rank takes part in both, also those with nothing to send.


_Buffers = tuple[Tensor, Tensor, list[int], list[int]]
"""What `all_to_all_single` takes: received and sent bytes, and how many of each by rank."""


def _buffers(sent: list[int], received: list[int]) -> _Buffers:
    return torch.zeros(sum(received), dtype=torch.uint8), torch.zeros(sum(sent), dtype=torch.uint8), received, sent


class GlooAllToAllMember(GlooProcessGroup):
    """Any process of the contestant: all do the same."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        super().__init__(seat, options)
        self._data, self._acks = _buffers([], []), _buffers([], [])

    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        self.set_flows(traffic)
        sent, received = [0] * self.seat.num_seats, [0] * self.seat.num_seats
        for flow in self.outgoing:
            sent[flow.destination] = flow.num_bytes
        for flow in self.incoming:
            received[flow.source] = flow.num_bytes
        self._data = _buffers(sent, received)
        from_ranks, to_ranks = torch.split(self._data[0], received), torch.split(self._data[1], sent)
        self.sent = as_bytes([to_ranks[flow.destination] for flow in self.outgoing])
        self.received = as_bytes([from_ranks[flow.source] for flow in self.incoming])
        # Acknowledgements go the other way.
        self._acks = _buffers([ACK_BYTES * (n > 0) for n in received], [ACK_BYTES * (n > 0) for n in sent])
        return [(WAIT, self._exchange_data), (RELEASE, self._exchange_acks)]

    def _exchange_data(self, step: int) -> None:
        dist.all_to_all_single(*self._data)

    def _exchange_acks(self, step: int) -> None:
        dist.all_to_all_single(*self._acks)
