"""One rank's groups on both levels of a `TwoLevel` topology, and what it sends on each.

The groups are connected together: one ticket leads to all of them, one `reset` begins an epoch of all. Where attention
groups and expert groups have the same ranks they are one group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.comm.ledger import Ledger
from antiphon.comm.m2n.rank_group import SLOT_BYTES, NativeRankGroup
from antiphon.comm.rank_group import Alone, RankGroup
from antiphon.comm.two_level.topology import TwoLevel

MakeEndpoint = Callable[[str], _m2n.Endpoint]


@dataclass(kw_only=True)
class Levels:
    """`attention`, `experts`: this rank's groups inside its node; `across`: the same place of all nodes.

    `ledger`: payload bytes by "level.purpose", `inside.` or `across.`; routing is what goes along with rows. `epoch`:
    the last one that has begun."""

    topology: TwoLevel
    rank: int
    attention: RankGroup
    experts: RankGroup
    across: RankGroup
    ledger: Ledger = field(default_factory=Ledger)
    epoch: int = -1

    @property
    def node(self) -> int:
        return self.topology.node_of(self.rank)

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self.groups())

    @property
    def ticket(self) -> bytes:
        """How the other ranks reach this one, in all its groups."""
        return msgspec.msgpack.encode([group.ticket for group in (self.attention, self.experts, self.across)])

    def groups(self) -> list[RankGroup]:
        """Each once."""
        shared = self.attention is self.experts
        return [self.attention, self.across] if shared else [self.attention, self.experts, self.across]

    def takes(self, device: torch.device) -> bool:
        """Whether the collectives inside a node take tensors there."""
        return self.attention.takes(device) and self.experts.takes(device)

    def reset(self, epoch: int, tickets: Sequence[bytes]) -> None:
        """Begin `epoch` in all groups; `tickets` of all ranks of the topology, in order. See `RankGroup.reset`."""
        topology, rank = self.topology, self.rank
        if len(tickets) != topology.size:
            raise UserError(f"{len(tickets)} tickets for a topology of {topology.size} ranks: give one for each")
        known = [msgspec.msgpack.decode(ticket, type=tuple[bytes, bytes, bytes]) for ticket in tickets]
        members = (topology.attention_group(rank), topology.expert_group(rank), topology.across(rank))
        done: list[RankGroup] = []
        for kind, group in enumerate((self.attention, self.experts, self.across)):
            if group not in done:
                group.reset(epoch, [known[member][kind] for member in members[kind]])
                done.append(group)
        self.epoch = epoch

    def sum_over_all(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over all ranks of the topology, the same bits on each: see `all_reduce`."""
        whole_node = self.attention if self.topology.attention_tp >= self.topology.expert_tp else self.experts
        whole_node.all_reduce(tensor)
        self.across.all_reduce(tensor)

    def abort(self, epoch: int) -> None:
        """Any thread: see `RankGroup.abort`."""
        for group in self.groups():
            group.abort(epoch)

    def close(self) -> None:
        for group in self.groups():
            group.close()


def open_levels(
    topology: TwoLevel,
    rank: int,
    *,
    inside: MakeEndpoint,
    across: MakeEndpoint,
    message_bytes: int,
    names: Sequence[str] | None = None,
    num_micro_batches: int = 1,
    timeout_s: float = 30.0,
    inner_group: Callable[..., NativeRankGroup] = NativeRankGroup,
) -> Levels:
    """The groups of `rank`, not yet connected. `inside` and `across` make endpoints, of the transport for each level,
    with the name they are given: a rank's of `names` and what the group is for. `message_bytes`: the largest message
    between nodes, see `exchange.message_bytes`. `inner_group` makes those inside a node; messages between nodes are in
    host memory."""

    def group(
        ranks: range,
        make: MakeEndpoint,
        kind: str,
        slots: int,
        slot_bytes: int,
        made: Callable[..., NativeRankGroup] = inner_group,
    ) -> RankGroup:
        if len(ranks) == 1:
            return Alone()
        ends = [f"{f'rank {other}' if names is None else names[other]} {kind}" for other in ranks]
        endpoint = make(ends[ranks.index(rank)])
        return made(
            endpoint,
            ranks.index(rank),
            len(ranks),
            names=ends,
            timeout_s=timeout_s,
            num_slots=slots,
            slot_bytes=slot_bytes,
        )

    fewest = _m2n.RANK_GROUP_SLOTS
    attention = group(topology.attention_group(rank), inside, "attention", fewest, SLOT_BYTES)
    experts = attention
    if topology.attention_tp != topology.expert_tp:
        experts = group(topology.expert_group(rank), inside, "experts", fewest, SLOT_BYTES)
    # Dispatches of all micro-batches may be on their way, and one combine with the credits of the one before.
    slots = max(fewest, num_micro_batches + 2)
    nodes = group(topology.across(rank), across, "nodes", slots, -(-max(message_bytes, 64) // 64) * 64, NativeRankGroup)
    return Levels(topology=topology, rank=rank, attention=attention, experts=experts, across=nodes)
