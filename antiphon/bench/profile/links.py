"""The link between two machines, measured with the engine's own transport: Util by message size, latency, and both
directions at once (MegaScale-Infer, eq. 6).

    antiphon profile --listen 10.0.0.1:7700 --folder DIR      # on the machine that gets the figures
    antiphon profile --join 10.0.0.1:7700                     # on the other one

1. Both have an inbox and an outbox. The listening side sends a message of one size and waits for a short answer, then
   both send one of that size at the same time; the other side follows what the messages say.
2. A way of x bytes is a round trip without half of the shortest one. The large ones give the rate, the others the
   size that costs as much as a message itself: Util(x) = x / (x + half), as the cost model has it.
3. Every second size is left out of the fit and says, from 16 KiB on, how far the model is off.
4. With `--cluster FILE` all other nodes of that cluster join the same address. They are measured one after the other,
   so that no link carries two measurements, and the cluster gets the slowest link.

Rejected: every pair of nodes. That takes N (N - 1) / 2 turns, and the model has one rate and one latency a cluster.
Rejected: fitting latency and half together. A short message tells them apart only on a clock finer than a network's.
"""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import quantiles

import numpy as np

from antiphon import _m2n
from antiphon.base.errors import PeerLost, UserError
from antiphon.base.progress import Report
from antiphon.base.units import split_address
from antiphon.comm.m2n.rendezvous import Rendezvous
from antiphon.cost.network import Link
from antiphon.specs.cluster import ClusterSpec

SIZES = tuple(1 << power for power in range(10, 24))  # 1 KiB to 8 MiB
_SHORTEST = 64
_WARM, _LEAST_ROUNDS, _MOST_ROUNDS, _SIZE_S = 2, 4, 40, 0.4
_LARGE = 16  # messages of a sixteenth of the largest one, or more, give the rate; the others what a message costs
_JUDGED_BYTES = 16 << 10  # a few rows; a shaped link lets less pass at once
_GROWS = 0.05  # of the time of the largest message, at least, comes from its bytes
_ONE_WAY, _BOTH_WAYS, _END = 1, 2, 3
_RENDEZVOUS_S, _TIMEOUT_S = 120.0, 30.0


@dataclass(frozen=True, kw_only=True)
class WireTimes:
    """Lower quartiles of one message size, seconds: one way, and while as much comes back. `predicted_s`: one way by
    the fitted link, `is_fitted`: the size was one of those it was fitted to."""

    size_bytes: int
    one_way_s: float
    both_ways_s: float
    predicted_s: float = 0.0
    is_fitted: bool = True


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What a link between two machines does. `both_ways`: how much longer large messages take while as much comes
    back; `error`: the largest difference to the sizes that were not fitted, as a fraction."""

    latency_s: float
    bytes_per_s: float
    half_bytes: float
    both_ways: float
    error: float
    wires: tuple[WireTimes, ...]

    def link(self) -> Link:
        """As the cost model has it."""
        return Link(
            level="scale_out", bytes_per_s=self.bytes_per_s, latency_s=self.latency_s, half_bytes=self.half_bytes
        )


class _LinkEnd:
    """One side: an endpoint, an inbox for the other one, and the way to it."""

    def __init__(
        self, meeting: Rendezvous, host: str, secret: bytes, number: int, *, listens: bool, timeout_s: float
    ) -> None:
        """`number`: of the machine that joins."""
        own, other = f"listening[{number}]", f"joining[{number}]"
        own, other = (own, other) if listens else (other, own)
        self.endpoint = _m2n.Endpoint(own, "tcp", host=host, secret=secret)
        self.inbox = self.endpoint.inbox(1, 2, max(SIZES), [other])
        meeting.publish(own, self.endpoint.ticket(self.inbox))
        ticket = meeting.collect([other], timeout_s)[other]
        self.outbox = self.endpoint.connect(ticket, 0, _TIMEOUT_S)
        self.inbox.wait_connected(1, _TIMEOUT_S)
        self._meeting = meeting  # kept until both sides have what they need
        self._payload = np.zeros(max(SIZES), np.uint8).data

    def send(self, step: int, num_bytes: int, order: int = 0, answer_bytes: int = 0) -> None:
        self.outbox.send(
            step, self._payload[:num_bytes], user=(order, answer_bytes, *[0] * 6), participants=1, timeout_s=_TIMEOUT_S
        )

    def receive(self, step: int) -> tuple[int, int]:
        """What the other side ordered with this message. `PeerTimeout` or `PeerLost` names it."""
        self.inbox.wait(step, 1, _TIMEOUT_S)
        (message,) = self.inbox.messages(step)
        order, size = message.user[:2]
        self.inbox.release(step)
        return int(order), int(size)


def measure_links(
    address: str,
    secret: bytes,
    report: Report,
    *,
    num_joining: int = 1,
    sizes: Sequence[int] = SIZES,
) -> list[MeasuredLink]:
    """The listening side, at `address`: the link to each machine that joins. Waits 120 s for each. `PeerTimeout` if one
    does not come."""
    host, _ = split_address(address)
    meeting = Rendezvous(address, serve=True, timeout_s=_RENDEZVOUS_S)
    links = []
    for number in range(num_joining):
        end = _LinkEnd(meeting, host, secret, number, listens=True, timeout_s=_RENDEZVOUS_S)
        links.append(_measured(end, report, sizes))
    return links


def slowest(links: Sequence[MeasuredLink]) -> MeasuredLink:
    """The one over which a large message takes longest."""
    return max(links, key=lambda link: float(link.link().send_s(max(SIZES))))


def _measured(end: _LinkEnd, report: Report, sizes: Sequence[int]) -> MeasuredLink:
    try:
        step = 1
        shortest_s, step = _quartile_s(end, step, _SHORTEST, _ONE_WAY)
        wires = []
        for number, size in enumerate(sizes):
            report(number, len(sizes))
            there_and_ack_s, step = _quartile_s(end, step, size, _ONE_WAY)
            both_s, step = _quartile_s(end, step, size, _BOTH_WAYS)
            one_way_s = max(1e-9, there_and_ack_s - shortest_s / 2)
            wires.append(WireTimes(size_bytes=size, one_way_s=one_way_s, both_ways_s=both_s))
        end.send(step, _SHORTEST, _END)
        end.receive(step)  # it has heard it
        return fitted_link(shortest_s / 2, wires)
    finally:
        end.endpoint.close()


def _quartile_s(end: _LinkEnd, step: int, size: int, order: int) -> tuple[float, int]:
    """Lower quartile, which other programs disturb less than the median, of rounds with a message of `size`: answered
    shortly, or with as much at the same time. And the next step."""
    took_s: list[float] = []
    deadline = time.perf_counter() + _SIZE_S
    for count in range(_WARM + _MOST_ROUNDS):
        if count >= _WARM + _LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        if order == _BOTH_WAYS:  # an announcement first, so that both begin together
            end.send(step, _SHORTEST, order, size)
            end.receive(step)
            step += 1
        begin_s = time.perf_counter()
        end.send(step, size, order, size)
        end.receive(step)
        if count >= _WARM:
            took_s.append(time.perf_counter() - begin_s)
        step += 1
    return quantiles(took_s, n=4)[0], step


def follow_link(address: str, host: str, secret: bytes) -> None:
    """The joining side, reachable at `host`: does what the messages say until the last one."""
    meeting = Rendezvous(address, timeout_s=_RENDEZVOUS_S)
    number = meeting.number("joining")
    turn_s = 3 * len(SIZES) * _SIZE_S  # of each that came before
    end = _LinkEnd(meeting, host, secret, number, listens=False, timeout_s=_RENDEZVOUS_S + number * turn_s)
    try:
        step = 1
        while True:
            order, size = end.receive(step)
            if order == _END:
                end.send(step, _SHORTEST)
                with suppress(PeerLost):  # the other side has what it wanted
                    end.outbox.wait_credits(end.outbox.slots, _TIMEOUT_S)
                return
            if order == _BOTH_WAYS:
                end.send(step, _SHORTEST)
                step += 1
                end.send(step, size)
                end.receive(step)
            else:
                end.send(step, _SHORTEST)
            step += 1
    finally:
        end.endpoint.close()


def own_host_towards(address: str) -> str:
    """The address of this machine on the way there; nothing is sent."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])


def fitted_link(latency_s: float, wires: Sequence[WireTimes]) -> MeasuredLink:
    """The link through every second size, judged by the others. `UserError` for times that do not grow with size."""
    fitted = wires[::2] if len(wires) > 3 else wires
    sizes = np.array([wire.size_bytes for wire in fitted], dtype=float)
    times = np.array([wire.one_way_s for wire in fitted])
    large = sizes >= sizes[-1] / _LARGE
    slope = np.polyfit(sizes[large], times[large], 1)[0]
    if slope * sizes[-1] < _GROWS * times[-1]:
        raise UserError("larger messages took no longer than short ones: measure again while the machines are idle")
    rate, fixed_s = float(1 / slope), max(0.0, float(np.median(times[~large] - slope * sizes[~large])))
    latency_s = min(latency_s, fixed_s)
    link = MeasuredLink(
        latency_s=latency_s,
        bytes_per_s=rate,
        half_bytes=(fixed_s - latency_s) * rate,
        both_ways=max(1.0, wires[-1].both_ways_s / wires[-1].one_way_s),
        error=0.0,
        wires=(),
    )
    judged = tuple(
        replace(
            wire,
            predicted_s=float(link.link().send_s(wire.size_bytes)),
            is_fitted=wire in fitted,
        )
        for wire in wires
    )
    others = [each for each in judged if not each.is_fitted and each.size_bytes >= _JUDGED_BYTES] or list(judged)
    error = max(abs(each.predicted_s / each.one_way_s - 1) for each in others)
    return replace(link, error=error, wires=judged)


def with_link(cluster: ClusterSpec, link: MeasuredLink) -> ClusterSpec:
    """The nodes of `cluster`, or two like its only one, with this link between them; what is inside a node stays as it
    is. Where both directions at once are slower, the rate is what each then has."""
    if len(cluster.groups) != 1:
        raise UserError(
            f"cluster {cluster.name} has {len(cluster.groups)} kinds of nodes: a measured link joins equals"
        )
    (group,) = cluster.groups
    rate = link.bytes_per_s / link.both_ways
    said = (
        f"antiphon profile --join: {link.bytes_per_s:.3g} bytes/s one way, {link.both_ways:.2f} times as long both ways"
    )
    device = replace(
        group.device,
        scale_out_bytes_per_s=rate / group.devices_per_node,
        sources=group.device.sources | {"scale_out_bytes_per_s": said},
    )
    return replace(
        cluster,
        name="these-machines",
        groups=(replace(group, device=device, num_nodes=max(2, group.num_nodes), node_scale_out_bytes_per_s=rate),),
        scale_out_latency_s=link.latency_s,
        efficiency=replace(cluster.efficiency, scale_out=1.0, scale_out_half_bytes=link.half_bytes),
        source=f"{cluster.source}; {said}",
    )
