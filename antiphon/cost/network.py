"""Messages on a network of two levels, bytes and time: collectives in a group, and M2N between two groups of workers.

`size_bytes` is defined once, for all: the bytes of the whole tensor that one rank holds before the collective
(all-reduce, reduce-scatter, all-to-all) or after it (all-gather). A group of `degree` ranks has `ranks_per_domain` of
them in one scale-up domain.

1. Inside a domain every rank sends to every other at once (MixServe, Table I: one round), the bytes of a ring.
2. Across domains the ranks of equal place form rings, of `size / ranks_per_domain`: reduce-scatter inside, then across;
   all-gather across, then inside; all-reduce both. Dependent rounds pay the link's latency each.
3. All-to-all sends each pair its block directly, all at once; the two levels are different wires, the longer counts.
4. Where `ranks_per_domain` does not divide `degree`, or the library knows no levels (`flat_rings`), one ring runs over
   all, each round as slow as its slowest link.
5. In a mesh a message has one wire, its pair's: of W wires a device uses as many as it has peers in the group, so that
   4 ranks of a domain of 8 reach 3/7 of the rate that all 8 reach.
6. A message of x bytes reaches the fraction x / (x + half) of the bandwidth: each message costs `half` bytes more.

Rejected: the proportionalities of MixServe's eq. 1-3 as costs. They leave out latency and divide by the degree twice in
eq. 2; `reproduce.mix` keeps them, named as what they are.

M2N: attention workers send rows to expert workers, and results come back.

1. A row goes to each expert worker that holds at least one of its top-k experts, once (`cost.exchange`).
2. Every device of a worker of `tp` devices sends (or receives) its share of a row; between workers of unequal tp the
   row is cut into max(tp_a, tp_e) pieces, so that the wider side sends one piece per device.
3. One way takes as long as the slower side: the busiest sender's messages one after another on its link, or the
   busiest receiver's on its own (MegaScale-Infer eq. 6 in bytes; Util is of one message, not of the sum).
4. No worker is sent an empty message: there are at most as many as rows.

Rejected: eq. 6 to the letter. It counts elements, and applies Util to all of a device's bytes as if they were one
message.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from antiphon.cost.roofline import Number, Parts, longest, select
from antiphon.specs.cluster import ClusterSpec, NodeGroup

Level = Literal["scale_up", "scale_out"]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One device's way to others, one direction: what large messages reach, latency, Util's half point. `num_wires`: of
    a mesh, those that `bytes_per_s` is spread over, one to each other device; 0: any message may use all of it."""

    level: Level
    bytes_per_s: Number
    latency_s: Number
    half_bytes: Number
    num_wires: int = 0

    def wire_s(self, message_bytes: Number, num_messages: Number = 1) -> Number:
        """Time the wires are busy with messages of that size, latency left out. No bytes, no time."""
        turns = np.maximum(num_messages, self.num_wires)
        busy: Number = np.where(
            np.asarray(message_bytes) > 0, turns * (message_bytes + self.half_bytes) / self.bytes_per_s, 0.0
        )
        return busy

    def send_s(self, message_bytes: Number, num_messages: Number = 1, num_rounds: Number = 1) -> Number:
        """`num_rounds` dependent rounds of `num_messages` messages each, every round with its latency."""
        sent = np.asarray(message_bytes * num_messages) > 0
        time: Number = np.where(sent, num_rounds * (self.latency_s + self.wire_s(message_bytes, num_messages)), 0.0)
        return time

    def stream_s(self, size_bytes: Number, num_peers: Number) -> Number:
        """Time of `size_bytes`, spread evenly over `num_peers` peers and not cut into messages."""
        slower = np.maximum(self.num_wires / np.maximum(num_peers, 1), 1.0)
        time: Number = np.where(
            np.asarray(size_bytes) > 0, self.latency_s + slower * size_bytes / self.bytes_per_s, 0.0
        )
        return time

    def util(self, message_bytes: Number) -> Number:
        """Fraction of `bytes_per_s` that a message of that size reaches: x / (x + half)."""
        return message_bytes / (message_bytes + self.half_bytes)

    def parts(self, seconds: Number) -> Parts:
        """Seconds on this link, booked under its level."""
        return Parts(scale_up_s=seconds) if self.level == "scale_up" else Parts(scale_out_s=seconds)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network as the devices of one group of nodes see it. `domain`: devices that the scale-up link joins (by
    candidate, where they differ).

    `collective_s`: fixed time of one collective beyond latency; `exchange_s`: of an all-to-all, and of one way of rows
    to their experts; `round_s`: of each round of a fused exchange; `overlap`: fraction of hideable communication that
    really is hidden; `flat_rings`: see above.
    """

    scale_up: Link
    scale_out: Link
    domain: Number
    collective_s: Number = 0.0
    exchange_s: Number = 0.0
    round_s: Number = 0.0
    overlap: float = 1.0
    flat_rings: bool = False

    def link(self, span_devices: int) -> Link:
        """The link that joins `span_devices` neighbouring devices: scale-up if they fit in one domain (of one size)."""
        return self.scale_up if span_devices <= float(self.domain) else self.scale_out

    def ranks_per_domain(self, degree: Number, stride: Number = 1) -> Number:
        """How many of `degree` ranks that stand `stride` devices apart share a domain; at least 1."""
        together: Number = np.clip(self.domain // np.asarray(stride), 1, degree)
        return together

    def all_reduce(self, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None) -> Parts:
        """Sum of a tensor over `degree` ranks, known to all. None: all ranks in as few domains as they fit in."""
        return self.collective("all_reduce", size_bytes, degree, ranks_per_domain)

    def reduce_scatter(self, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None) -> Parts:
        """Sum of a tensor over `degree` ranks, each keeping its 1 / degree."""
        return self.collective("reduce_scatter", size_bytes, degree, ranks_per_domain)

    def all_gather(self, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None) -> Parts:
        """Each rank's 1 / degree of `size_bytes`, known to all."""
        return self.collective("all_gather", size_bytes, degree, ranks_per_domain)

    def all_to_all(self, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None) -> Parts:
        """Each rank sends 1 / degree of `size_bytes` to every rank, itself included (which costs nothing)."""
        return self.collective("all_to_all", size_bytes, degree, ranks_per_domain)

    def collective(
        self, name: CollectiveName, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None
    ) -> Parts:
        """Time of one collective. A group of one, or nothing to send, costs nothing."""
        together = self.ranks_per_domain(degree) if ranks_per_domain is None else ranks_per_domain
        together = np.minimum(together, degree)
        if name == "all_to_all":
            sent = self._all_to_all(size_bytes, degree, together)
        else:
            num_passes = 2 if name == "all_reduce" else 1
            even = np.asarray(degree) % np.asarray(together) == 0
            if self.flat_rings:
                even = np.asarray(degree) <= together
            even_parts = num_passes * self._two_level_pass(size_bytes, degree, together) if even.any() else Parts()
            odd_parts = Parts() if even.all() else num_passes * self._flat_ring_pass(size_bytes, degree)
            sent = even_parts if even.all() else select(even, even_parts, odd_parts)
        happens = (np.asarray(degree) > 1) & (np.asarray(size_bytes) > 0)
        fixed_s = self.exchange_s if name == "all_to_all" else self.collective_s
        return select(happens, sent + Parts(fixed_s=fixed_s), Parts())

    def point_to_point(self, size_bytes: Number, across: bool) -> Parts:
        """One message to one other device, as between pipeline stages."""
        link = self.scale_out if across else self.scale_up
        return link.parts(link.send_s(size_bytes))

    def _two_level_pass(self, size_bytes: Number, degree: Number, together: Number) -> Parts:
        """Reduce-scatter or all-gather, which mirror each other: inside a domain and across equal domains."""
        num_domains = degree / together
        shard = size_bytes / together
        inside = self.scale_up.send_s(shard, together - 1)
        across = self.scale_out.send_s(shard / num_domains, 1, num_domains - 1)
        return Parts(scale_up_s=inside, scale_out_s=np.where(np.asarray(num_domains) > 1, across, 0.0))

    def _flat_ring_pass(self, size_bytes: Number, degree: Number) -> Parts:
        chunk, rounds = size_bytes / degree, degree - 1
        inner = replace(self.scale_up, num_wires=0)  # rings in different orders share a mesh's wires
        up = inner.parts(inner.send_s(chunk, 1, rounds))
        out = self.scale_out.parts(self.scale_out.send_s(chunk, 1, rounds))
        return select(np.asarray(up.total_s) > np.asarray(out.total_s), up, out)

    def _all_to_all(self, size_bytes: Number, degree: Number, together: Number) -> Parts:
        """Rank by rank the longer of its two wires; the slowest rank is of the fullest or of the emptiest domain."""
        block = size_bytes / degree
        fewest = degree - together * (np.ceil(degree / np.asarray(together)) - 1)
        up = self.scale_up.parts(self.scale_up.send_s(block, together - 1))
        out = self.scale_out.parts(self.scale_out.send_s(block, degree - fewest))
        return select(np.asarray(up.total_s) >= np.asarray(out.total_s), up, out)


def network(cluster: ClusterSpec, group: NodeGroup) -> Network:
    """The network seen by `group`'s devices, with the cluster's latencies, oversubscription and efficiency.

    A domain of one device has no scale-up link: neighbours reach each other through the NICs. A CPU's cores copy what
    they send, at the scale-up rate, and do nothing else meanwhile: only the rest of a message's time can be hidden."""
    efficiency = cluster.efficiency
    overlap = efficiency.overlap
    if group.device.kind == "cpu":
        overlap *= max(0.0, 1 - group.scale_out_bytes_per_s / group.scale_up_bytes_per_s)
    return Network(
        scale_up=Link(
            level="scale_up",
            bytes_per_s=group.scale_up_bytes_per_s * efficiency.scale_up,
            latency_s=cluster.scale_up_latency_s,
            half_bytes=efficiency.scale_up_half_bytes,
            num_wires=group.device.scale_up_domain - 1 if group.device.scale_up_mesh else 0,
        ),
        scale_out=Link(
            level="scale_out",
            bytes_per_s=group.scale_out_bytes_per_s * efficiency.scale_out / cluster.oversubscription,
            latency_s=cluster.scale_out_latency_s,
            half_bytes=efficiency.scale_out_half_bytes,
        ),
        domain=group.scale_up_domain,
        collective_s=efficiency.collective_s,
        exchange_s=efficiency.exchange_s,
        round_s=efficiency.round_s,
        overlap=overlap,
        flat_rings=efficiency.flat_rings,
    )


def collective_bytes(
    name: CollectiveName, size_bytes: Number, degree: Number, ranks_per_domain: Number | None = None
) -> tuple[Number, Number]:
    """Bytes one rank sends to ranks of its domain, and to others; of unequal ranks, the most each. None: the whole
    group lies in one domain."""
    together = np.asarray(degree if ranks_per_domain is None else np.minimum(ranks_per_domain, degree))
    if name == "all_to_all":
        fewest = degree - together * (np.ceil(degree / together) - 1)
        return size_bytes * (together - 1) / degree, size_bytes * (degree - fewest) / degree
    num_passes = 2 if name == "all_reduce" else 1
    num_domains = degree / together
    flat = size_bytes * (degree - 1) / degree
    even = degree % together == 0
    return (
        num_passes * np.where(even, size_bytes * (together - 1) / together, flat),
        num_passes * np.where(even, size_bytes / together * (num_domains - 1) / num_domains, flat),
    )


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the exchange: workers, devices per worker, and one device's link to the other side."""

    num_workers: Number
    tp: Number
    link: Link


def message_bytes(rows_per_pair: Number, row_bytes: Number, sending_tp: Number, receiving_tp: Number) -> Number:
    """Bytes of one message between two devices: rows from one worker to another, cut into max(tp) pieces."""
    result: Number = rows_per_pair * row_bytes / np.maximum(sending_tp, receiving_tp)
    return result


def m2n(
    sending: Side,
    receiving: Side,
    *,
    rows_sent: Number,
    rows_received: Number,
    row_bytes: Number,
    fixed_s: Number = 0.0,
) -> Parts:
    """One way of one micro-batch: dispatch (attention sends) or, with the sides exchanged, combine.

    `rows_sent`: rows the busiest sending worker sends to all receivers together; `rows_received`: what the busiest
    receiving worker gets from all senders. `row_bytes`: hidden size * bytes per element of a whole row."""
    pieces = np.maximum(sending.tp, receiving.tp)
    send_s = _side_s(sending, receiving.num_workers, rows_sent, row_bytes, pieces)
    receive_s = _side_s(receiving, sending.num_workers, rows_received, row_bytes, pieces)
    slower = longest(sending.link.parts(send_s), receiving.link.parts(receive_s))
    return slower + Parts(fixed_s=fixed_s)


def _side_s(side: Side, num_peers: Number, rows: Number, row_bytes: Number, pieces: Number) -> Number:
    """One device's messages with the workers of the other side: ceil(pieces / tp) for each that has a row."""
    num_messages = np.minimum(num_peers, rows) * np.ceil(pieces / np.asarray(side.tp))
    return side.link.send_s(rows * row_bytes / side.tp / np.maximum(num_messages, 1e-12), num_messages)
