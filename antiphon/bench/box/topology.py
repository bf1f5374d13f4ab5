"""What a box consists of, as data, the `ip`, `bridge` and `tc` lines that make it, and who runs what in it. Pure.

    node i:  eth0 ──── veth ──── port i   :switch        10.77.0.(i+1), one /24, one bridge, no way out

Every node's link is shaped in both directions where its packets queue: on the node's `eth0` (up) and on the switch's
port to it (down). Each of the two is an HTB tree:

    1:1   the link      rate = ceil = the link's rate
    1:10  control       IP_TOS 0x10; prio 0; guaranteed 95%; may borrow the rest
    1:20  bulk          everything else; prio 1; guaranteed 5%; may borrow the rest

HTB serves classes within their guarantee before classes that borrow, and the lower `prio` first within each, so control
goes ahead of bulk up to 95% of the link, and a misused mark cannot starve bulk for good. Without priority only 1:20 is
there, with the whole rate: one FIFO.

The mark is IP_TOS. Setting it makes Linux set SO_PRIORITY 6 too; SO_PRIORITY alone never leaves the sending host, so no
switch, this one included, can obey it.

Packets. Segmentation offload is off (`gso_max_segs 1`) and the MTU is 4,096, as in InfiniBand and RoCE. With offload, a
packet is up to 64 KiB and passes an idle link in no time, as a whole: more than many a message of an exchange. Frames
of 1,500 bytes are as true as these, but at 400 Mbit/s they cost more than one core against 0.2, and then that work, not
the bucket, is the wire.

Bucket. `BURST_S` of the rate, at least one frame. What the bucket holds passes an idle link for free, so smaller is
truer; but the timer that refills it comes late by tens of microseconds, and what a full bucket could not take is lost.
Measured figures for all of this are in docs/box.md.

Queue. `QUEUE_S` of the rate per class and direction, so that what credits allow to be in flight is not dropped: fabrics
that carry such traffic are lossless, and one retransmission timeout (200 ms) would be all a benchmark shows.

Rejected: policing (drops instead of queueing), TBF alone (no classes), a queue of packets (a credit would count like a
frame of data).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError

SUBNET = "10.77.0"
MAX_NODES = 250
SWITCH_PORT = "port{}"
NODE_DEVICE = "eth0"

MTU_BYTES = 4096
FRAME_BYTES = MTU_BYTES + 14
BURST_S = 0.0001
QUEUE_S = 0.05
MIN_QUEUE_BYTES = 1 << 20
CONTROL_TOS = 0x10
CONTROL_SHARE = 0.95
MIN_MBIT, MAX_MBIT = 0.1, 40_000.0

CONTROL_CLASS, BULK_CLASS, NEAR_CLASS = 10, 20, 30


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """One node's link: `mbit` (10^6 bits/s) in each direction; `delay_us` and `loss` on what the node sends.

    `delay_us` is the one-way delay added to every packet of this node, so a round trip between two nodes takes both
    nodes' delays. `loss` is the probability that a packet of this node is dropped.
    """

    mbit: float
    priority: bool = True
    delay_us: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not MIN_MBIT <= self.mbit <= MAX_MBIT:
            raise UserError(f"a link of {self.mbit} Mbit/s; between {MIN_MBIT} and {MAX_MBIT:.0f} can be shaped")
        if not 0 <= self.delay_us <= 60e6:
            raise UserError(f"a delay of {self.delay_us} us; give one between 0 and 60,000,000")
        if not 0 <= self.loss < 1:
            raise UserError(f"a loss of {self.loss}; give a probability from 0 up to but not 1")

    @property
    def needs_netem(self) -> bool:
        return self.delay_us > 0 or self.loss > 0

    @property
    def rate_bits_per_s(self) -> float:
        return self.mbit * 1e6

    @property
    def burst_bytes(self) -> int:
        return max(FRAME_BYTES, round(self.rate_bits_per_s / 8 * BURST_S))

    @property
    def queue_bytes(self) -> int:
        return max(MIN_QUEUE_BYTES, round(self.rate_bits_per_s / 8 * QUEUE_S))


def check_num_nodes(num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise UserError(f"{num_nodes} nodes; give 1 to {MAX_NODES}")


def address(node: int) -> str:
    return f"{SUBNET}.{node + 1}"


def hostname(node: int) -> str:
    return f"node{node}"


def hosts_file(num_nodes: int) -> str:
    """`/etc/hosts` of every node: there is no name server in a box."""
    return "127.0.0.1 localhost\n" + "".join(f"{address(node)} {hostname(node)}\n" for node in range(num_nodes))


def _link_address(node: int) -> str:
    return f"02:bb:00:00:00:{node + 1:02x}"


def switch_links(init_pids: Sequence[int]) -> list[str]:
    """Lines for `ip` in the switch: the bridge, and a pair of devices per node whose other end appears in the node.

    `init_pids[i]`: a process in node i's network namespace.
    """
    lines = [
        "link set lo up",
        "link add name br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        "link set br0 up",
    ]
    for node, pid in enumerate(init_pids):
        port = SWITCH_PORT.format(node)
        peer = f"peer name {NODE_DEVICE} mtu {MTU_BYTES} address {_link_address(node)} netns {pid}"
        lines += [
            f"link add name {port} mtu {MTU_BYTES} type veth {peer}",
            f"link set dev {port} gso_max_segs 1 up",
            *join_switch(node),
        ]
    return lines


def join_switch(node: int) -> list[str]:
    """Lines for `ip` in the switch: plug a node's port into the bridge, which must not learn (see `forwarding`)."""
    port = SWITCH_PORT.format(node)
    return [f"link set dev {port} master br0", f"link set dev {port} type bridge_slave flood off learning off"]


def leave_switch(node: int) -> list[str]:
    """Line for `ip` in the switch: pull the plug. The port's end stays up, so the node sees no change of its link.

    Not port state 0: the bridge turns such a port on again at the next event of its device.
    """
    return [f"link set dev {SWITCH_PORT.format(node)} nomaster"]


def forwarding(node: int) -> list[str]:
    """Line for `bridge`: who is behind a port. A bridge that learns would flood what is sent to a silent node."""
    return [f"fdb replace {_link_address(node)} dev {SWITCH_PORT.format(node)} master static"]


def node_links(node: int, num_nodes: int) -> list[str]:
    """Lines for `ip` in a node. Neighbours are fixed: a lost node is silence, not an ARP error after three seconds."""
    neighbours = [
        f"neigh replace {address(other)} lladdr {_link_address(other)} dev {NODE_DEVICE} nud permanent"
        for other in range(num_nodes)
        if other != node
    ]
    return [
        "link set lo up",
        f"link set dev {NODE_DEVICE} gso_max_segs 1 up",
        f"addr add {address(node)}/24 dev {NODE_DEVICE}",
        *neighbours,
    ]


def shaping(
    device: str, shape: LinkShape, *, sends: bool, near: Sequence[int] = (), near_shape: LinkShape | None = None
) -> list[str]:
    """Lines for `tc` that shape `device` the first time. `sends`: the node's own end, where delay and loss apply.
    `near`: nodes that are reached over a link of their own, of `near_shape`, beside the one to all others."""
    lines = [f"qdisc add dev {device} root handle 1: htb default {BULK_CLASS}"]
    lines += [f"class add {line}" for line in _classes(device, shape)]
    lines += [f"qdisc add {line}" for line in _queues(device, shape, sends=sends)]
    if shape.priority:
        # 0xfc: all but the two bits of ECN.
        match = f"match ip dsfield {CONTROL_TOS:#x} 0xfc"
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 2 u32 {match} flowid 1:{CONTROL_CLASS}")
    if near and near_shape is not None:
        rate, burst = round(near_shape.rate_bits_per_s), near_shape.burst_bytes
        bucket = f"ceil {rate}bit burst {burst} cburst {burst} quantum {2 * FRAME_BYTES}"
        lines += [
            f"class add dev {device} parent 1: classid 1:{NEAR_CLASS} htb rate {rate}bit {bucket}",
            f"qdisc add dev {device} parent 1:{NEAR_CLASS} handle {NEAR_CLASS}: bfifo limit {near_shape.queue_bytes}",
        ]
        end = "dst" if sends else "src"
        lines += [
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip {end} {address(other)}/32 "
            f"flowid 1:{NEAR_CLASS}"
            for other in near
        ]
    return lines


def reshaping(device: str, shape: LinkShape, *, sends: bool) -> list[str]:
    """Lines for `tc` that change rate, delay and loss of a shaped device; what waits in a queue may be dropped."""
    lines = [f"class change {line}" for line in _classes(device, shape)]
    return lines + [f"qdisc replace {line}" for line in _queues(device, shape, sends=sends)]


def _classes(device: str, shape: LinkShape) -> Iterator[str]:
    link = round(shape.rate_bits_per_s)
    control = round(shape.rate_bits_per_s * CONTROL_SHARE)
    bucket = f"ceil {link}bit burst {shape.burst_bytes} cburst {shape.burst_bytes} quantum {2 * FRAME_BYTES}"
    yield f"dev {device} parent 1: classid 1:1 htb rate {link}bit {bucket}"
    if shape.priority:
        yield f"dev {device} parent 1:1 classid 1:{CONTROL_CLASS} htb rate {control}bit {bucket} prio 0"
    bulk = link - control if shape.priority else link
    yield f"dev {device} parent 1:1 classid 1:{BULK_CLASS} htb rate {bulk}bit {bucket} prio 1"


def _queues(device: str, shape: LinkShape, *, sends: bool) -> Iterator[str]:
    for leaf in (CONTROL_CLASS, BULK_CLASS) if shape.priority else (BULK_CLASS,):
        queue = _netem(shape) if sends and shape.needs_netem else f"bfifo limit {shape.queue_bytes}"
        yield f"dev {device} parent 1:{leaf} handle {leaf}: {queue}"


def _netem(shape: LinkShape) -> str:
    """A queue that also delays and drops. It counts packets; the limit is for the same bytes in packets of 512."""
    delayed_bytes = shape.rate_bits_per_s / 8 * shape.delay_us * 1e-6
    limit = round((shape.queue_bytes + delayed_bytes) / 512)
    loss = f" loss {shape.loss * 100:.6g}%" if shape.loss else ""
    return f"netem limit {limit} delay {shape.delay_us:.0f}us{loss}"


# --- who runs what: the command, environment and numbers of every rank
#
# Ranks count through node 0, then node 1, ... The names are those of `torchrun` beside our own, so that
# `torch.distributed.init_process_group()` needs nothing else.


MASTER_PORT = 29500  # every box is a network of its own, so no other run can hold it
PLACEHOLDER = re.compile(r"\{(node|rank|local_rank|num_nodes|world_size|addresses|address(\d*))\}")


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One process: where, which, what."""

    rank: int
    node: int
    local_rank: int
    args: list[str]
    env: dict[str, str]


def plan_ranks(
    *,
    num_nodes: int,
    num_local_ranks: int,
    command: Sequence[str],
    node_commands: Mapping[int, Sequence[str]] | None = None,
) -> list[RankPlan]:
    """Every rank in order. `command` is for nodes that have none of their own in `node_commands`."""
    check_num_nodes(num_nodes)
    own = node_commands or {}
    if num_local_ranks < 1:
        raise UserError(f"{num_local_ranks} processes per node; give at least 1")
    without = [node for node in range(num_nodes) if node not in own]
    if without and not command:
        raise UserError(f"no command for node {without[0]}; give it one of its own, or one for all nodes")
    return [
        _plan(node, local_rank, num_nodes, num_local_ranks, own.get(node, command))
        for node in range(num_nodes)
        for local_rank in range(num_local_ranks)
    ]


def _plan(node: int, local_rank: int, num_nodes: int, num_local_ranks: int, command: Sequence[str]) -> RankPlan:
    rank, world_size = node * num_local_ranks + local_rank, num_nodes * num_local_ranks
    addresses = ",".join(address(other) for other in range(num_nodes))
    numbers = {
        "node": str(node),
        "rank": str(rank),
        "local_rank": str(local_rank),
        "num_nodes": str(num_nodes),
        "world_size": str(world_size),
        "address": address(node),
        "addresses": addresses,
    }
    env = {f"BOX_{name.upper()}": value for name, value in numbers.items()}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    env |= {"LOCAL_WORLD_SIZE": str(num_local_ranks), "GROUP_RANK": str(node)}
    env |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(MASTER_PORT)}
    args = [fill(argument, numbers, num_nodes) for argument in command]
    return RankPlan(rank=rank, node=node, local_rank=local_rank, args=args, env=env)


def fill(argument: str, numbers: dict[str, str], num_nodes: int) -> str:
    """Replace the placeholders; every other brace stays, because arguments may be JSON."""

    def value(match: re.Match[str]) -> str:
        if not match[2]:
            return numbers[match[1]]
        if int(match[2]) >= num_nodes:
            raise UserError(f"{match[0]} in {argument!r}; this box has nodes 0 to {num_nodes - 1}")
        return address(int(match[2]))

    return PLACEHOLDER.sub(value, argument)
