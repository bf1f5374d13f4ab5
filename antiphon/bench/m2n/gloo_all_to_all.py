"""The baseline as a collective: one `all_to_all_single` moves all data of a round, another the acknowledgements.

This is what training frameworks do between experts. Every rank takes part in both, also those with nothing to send.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.bench.m2n.api import RELEASE, WAIT, Phase, Seat, Traffic
from antiphon.bench.m2n.buffered import ACK_BYTES
from antiphon.bench.m2n.gloo import GlooProcessGroup, as_bytes


class GlooAllToAllMember(GlooProcessGroup):
    """Any process of the contestant: all do the same."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._data = _Exchange([], [])
        self._acks = _Exchange([], [])

    def prepare(self, traffic: Traffic) -> Sequence[Phase]:
        self.set_flows(traffic)
        sent, received = [0] * self.seat.num_seats, [0] * self.seat.num_seats
        for flow in self.outgoing:
            sent[flow.destination] = flow.num_bytes
        for flow in self.incoming:
            received[flow.source] = flow.num_bytes
        self._data = _Exchange(sent, received)
        self.sent = as_bytes([self._data.sent_to(flow.destination) for flow in self.outgoing])
        self.received = as_bytes([self._data.received_from(flow.source) for flow in self.incoming])
        # Acknowledgements go the other way.
        self._acks = _Exchange([ACK_BYTES * (n > 0) for n in received], [ACK_BYTES * (n > 0) for n in sent])
        return [Phase(WAIT, self._exchange_data), Phase(RELEASE, self._exchange_acks)]

    def _exchange_data(self, step: int) -> None:
        self._data.run()

    def _exchange_acks(self, step: int) -> None:
        self._acks.run()


class _Exchange:
    """Buffers of one collective; counts are bytes by rank."""

    def __init__(self, sent: list[int], received: list[int]) -> None:
        self._num_sent, self._num_received = sent, received
        self._sent = torch.zeros(sum(sent), dtype=torch.uint8)
        self._received = torch.zeros(sum(received), dtype=torch.uint8)

    def sent_to(self, rank: int) -> Tensor:
        return self._sent[sum(self._num_sent[:rank]) :][: self._num_sent[rank]]

    def received_from(self, rank: int) -> Tensor:
        return self._received[sum(self._num_received[:rank]) :][: self._num_received[rank]]

    def run(self) -> None:
        dist.all_to_all_single(self._received, self._sent, self._num_received, self._num_sent)


def make_member(seat: Seat, options: Mapping[str, str]) -> GlooAllToAllMember:
    return GlooAllToAllMember(seat)
