"""Full-duplex links with data and acknowledgements: what ACKs that queue behind data cost (MegaScale-Infer section 5).

1. A message is cut into packets. A packet occupies its sender's outgoing wire, then, `latency_s` later, its receiver's
   incoming wire. Messages of one sender take turns packet by packet.
2. The receiver acknowledges every `packets_per_ack` packets and the last one. ACKs travel the other way on the same
   wires as the data that the receiver itself sends.
3. Packets wait first come, first served. A sender has at most `window_packets` packets of a message unacknowledged:
   late ACKs stall it. A message is complete for its sender when the last ACK is there: then the buffer is free again.
`ack_first` gives ACKs a queue of their own ahead of data; a packet on the wire is never interrupted.

Rejected: a formula. The loss comes from the interplay of window, queues and both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.sim.disciplines import Priority
from antiphon.sim.events import EventGraph, Run

DATA, ACK = "data", "ack"


@dataclass(frozen=True, kw_only=True)
class Message:
    """`size_bytes` from `source` to `target`, handed over at `post_s`."""

    source: str
    target: str
    size_bytes: int
    post_s: float = 0.0

    def __post_init__(self) -> None:
        if self.size_bytes < 1 or self.source == self.target:
            raise UserError(
                f"message of {self.size_bytes} bytes from {self.source} to {self.target}: "
                "give at least one byte and two different endpoints"
            )


@dataclass(frozen=True, kw_only=True)
class Wire:
    """All endpoints' links. 4,096 bytes is the largest packet of InfiniBand and RoCE; 64 an ACK with its headers."""

    bytes_per_s: float
    latency_s: float
    packet_bytes: int = 4096
    ack_bytes: int = 64
    packets_per_ack: int = 1
    window_packets: int = 32
    ack_first: bool = False

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "packet_bytes", "packets_per_ack", "window_packets"):
            if not getattr(self, name) > 0:
                raise UserError(f"wire: {name} is {getattr(self, name)}: give more than 0")
        if self.ack_bytes < 0:
            raise UserError(f"wire: ack_bytes is {self.ack_bytes}: give 0 or more")
        if self.packets_per_ack > self.window_packets:
            raise UserError(
                f"wire: one ACK for {self.packets_per_ack} packets, but the window is {self.window_packets}: "
                "no ACK would ever come, give a larger window"
            )


@dataclass(frozen=True)
class Traffic:
    """Per message: when its last byte has arrived, and when its sender knows. Bytes each outgoing wire carried."""

    delivered_s: list[float]
    acknowledged_s: list[float]
    data_bytes: dict[str, int]
    ack_bytes: dict[str, int]
    run: Run


def simulate_traffic(messages: Sequence[Message], wire: Wire) -> Traffic:
    """Send all messages; packets of messages posted together take turns."""
    builder = _Builder(messages, wire)
    longest = max((len(sizes) for sizes in builder.packet_sizes), default=0)
    for number in range(longest):
        for index, sizes in enumerate(builder.packet_sizes):
            if number < len(sizes):
                builder.add_packet(index, number)
    run = builder.graph.run()
    return Traffic(
        delivered_s=[run.ends_s[packets[-1]] for packets in builder.received],
        acknowledged_s=[run.ends_s[acks[-1][1]] for acks in builder.acks],
        data_bytes=builder.carried[DATA],
        ack_bytes=builder.carried[ACK],
        run=run,
    )


class _Builder:
    def __init__(self, messages: Sequence[Message], wire: Wire) -> None:
        self._messages = messages
        self._wire = wire
        self.graph = EventGraph()
        endpoints = dict.fromkeys(name for message in messages for name in (message.source, message.target))
        for endpoint in endpoints:
            for way in ("out", "in"):
                self.graph.resource(f"{endpoint} {way}", Priority())
        self._posted = [self.graph.add("posted", 0.0, latency_s=message.post_s) for message in messages]
        self.packet_sizes = [_packets(message.size_bytes, wire.packet_bytes) for message in messages]
        self.received: list[list[int]] = [[] for _ in messages]  # arrival of each packet
        self.acks: list[list[tuple[int, int]]] = [[] for _ in messages]  # (packets acknowledged so far, arrival)
        self.carried = {kind: dict.fromkeys(endpoints, 0) for kind in (DATA, ACK)}

    def add_packet(self, index: int, number: int) -> None:
        """Packet `number` of a message, and the ACK it causes."""
        message, sizes, wire = self._messages[index], self.packet_sizes[index], self._wire
        after = [self._posted[index]]
        if (needed := number - wire.window_packets + 1) > 0:
            after.append(next(arrival for covered, arrival in self.acks[index] if covered >= needed))
        label = f"{message.source} to {message.target} {number + 1}"
        arrived = self._travel(DATA, message.source, message.target, sizes[number], after, label)
        self.received[index].append(arrived)
        if (number + 1) % wire.packets_per_ack == 0 or number + 1 == len(sizes):
            acknowledged = self._travel(
                ACK, message.target, message.source, wire.ack_bytes, [arrived], f"ack of {label}"
            )
            self.acks[index].append((number + 1, acknowledged))

    def _travel(self, kind: str, source: str, target: str, size_bytes: int, after: Sequence[int], label: str) -> int:
        """Over the outgoing and the incoming wire; returns its arrival."""
        wire = self._wire
        duration_s = size_bytes / wire.bytes_per_s
        priority = 1 if wire.ack_first and kind == DATA else 0
        out = self.graph.add(label, duration_s, f"{source} out", after=after, kind=kind, priority=priority)
        arrived = self.graph.add(
            label,
            duration_s,
            f"{target} in",
            after=[out],
            latency_s=wire.latency_s,
            kind=kind,
            priority=priority,
        )
        self.carried[kind][source] += size_bytes
        return arrived


def _packets(size_bytes: int, packet_bytes: int) -> list[int]:
    full, rest = divmod(size_bytes, packet_bytes)
    return [packet_bytes] * full + ([rest] if rest else [])
