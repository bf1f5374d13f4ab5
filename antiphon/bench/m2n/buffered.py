"""What members have in common that send and receive messages, each from a buffer and into one."""

from collections.abc import Sequence

from antiphon.bench.m2n.api import Flow, Seat, Traffic
from antiphon.bench.m2n.pattern import Bytes, check_pattern, pattern

ACK_BYTES = 4


class BufferedMember:
    """The part of a `Member` (see `api`) that handles bytes. `prepare` sets `sent` and `received`, unless they
    are elsewhere: a buffer for each of `outgoing` and of `incoming`."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.incoming: list[Flow] = []
        self.outgoing: list[Flow] = []
        self.sent: Sequence[Bytes] = ()
        self.received: Sequence[Bytes] = ()

    def set_flows(self, traffic: Traffic) -> None:
        self.incoming, self.outgoing = traffic.incoming(self.seat.rank), traffic.outgoing(self.seat.rank)

    def produce(self, step: int) -> None:
        for data, flow in zip(self.payloads(), self.outgoing, strict=True):
            data[:] = pattern(flow.num_bytes, step, flow.source, flow.destination)

    def check(self, step: int) -> None:
        for data, flow in zip(self.received, self.incoming, strict=True):
            check_pattern(data, flow.num_bytes, step, flow.source, flow.destination)

    def payloads(self) -> Sequence[Bytes]:
        return self.sent

    def arrived(self, step: int) -> Sequence[Bytes]:
        return self.received
