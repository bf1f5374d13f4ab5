"""Which ranks belong together where links inside a node are fast and links between nodes are slow, and one rank's
groups on both levels.

A node is the larger of an attention group and an expert group; the other divides it. Rank = node * ranks per node +
place. Messages between nodes go from a place to the same place, so every rank talks to one rank of each other node.

| case | `attention_tp` | a node is | rows of a node |
|---|---|---|---|
| d_DP = d_EP | = `expert_tp` | both groups | the same on all its ranks |
| d_DP > d_EP | smaller | one expert group, some attention groups | a set for each attention group |
| d_DP < d_EP | larger | one attention group, some expert groups | the same on all its ranks |

In the third case a rank sends only what is for the expert group at its own place: the redundant copies are dropped.
Plain tensor parallelism is one node; plain expert parallelism is `expert_tp` 1 (MixServe, section III-B and III-C).
A machine may hold several nodes in this sense.

The groups of a rank are connected together: one ticket leads to all of them, one `reset` begins an epoch of all. Where
attention groups and expert groups have the same ranks they are one group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec
import torch
from torch import Tensor

from antiphon import _m2n
from antiphon.base.errors import UserError
from antiphon.comm.ledger import Ledger
from antiphon.comm.rank_group import SLOT_BYTES, NativeRankGroup, RankGroup
from antiphon.specs.plan import groups_nest

MakeEndpoint = Callable[[str], _m2n.Endpoint]


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """The ranks of one pipeline stage. `attention_tp`, `expert_tp`: ranks that share one set of rows, one expert."""

    num_nodes: int = 1
    attention_tp: int = 1
    expert_tp: int = 1

    def __post_init__(self) -> None:
        for name in ("num_nodes", "attention_tp", "expert_tp"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use at least 1")
        _check_groups(self.size, self.attention_tp, self.expert_tp)

    @classmethod
    def of_ranks(cls, num_ranks: int, attention_tp: int, expert_tp: int) -> Self:
        """This many ranks in such groups. `UserError` if one group size does not divide the other and the ranks."""
        _check_groups(num_ranks, attention_tp, expert_tp)
        num_nodes = num_ranks // max(attention_tp, expert_tp)
        return cls(num_nodes=num_nodes, attention_tp=attention_tp, expert_tp=expert_tp)

    @property
    def ranks_per_node(self) -> int:
        return max(self.attention_tp, self.expert_tp)

    @property
    def size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def attention_dp(self) -> int:
        """Sets of rows: d_DP."""
        return self.size // self.attention_tp

    @property
    def expert_ep(self) -> int:
        """Parts that the experts are dealt into: d_EP."""
        return self.size // self.expert_tp

    @property
    def num_shards(self) -> int:
        """Pieces that a row is cut into, along the hidden size, to travel between nodes."""
        return min(self.attention_tp, self.expert_tp)

    @property
    def sets_per_expert_group(self) -> int:
        """Attention groups whose rows one expert group receives from each node."""
        return max(1, self.expert_tp // self.attention_tp)

    @property
    def parts_per_node(self) -> int:
        """Expert groups of a node."""
        return self.ranks_per_node // self.expert_tp

    def place_of(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def shard_of(self, rank: int) -> int:
        """Which piece of a row this rank sends and is sent."""
        return rank % self.num_shards

    def part_of(self, rank: int) -> int:
        """Which part of the experts this rank's expert group holds, of `expert_ep`."""
        return rank // self.expert_tp

    def part_at(self, node: int, rank: int) -> int:
        """The part of the experts in `node` that `rank` sends rows for."""
        return node * self.parts_per_node + self.place_of(rank) // self.expert_tp

    def attention_group(self, rank: int) -> range:
        first = rank // self.attention_tp * self.attention_tp
        return range(first, first + self.attention_tp)

    def expert_group(self, rank: int) -> range:
        first = rank // self.expert_tp * self.expert_tp
        return range(first, first + self.expert_tp)

    def across(self, rank: int) -> range:
        """The ranks at the same place of all nodes, in order of nodes."""
        return range(self.place_of(rank), self.size, self.ranks_per_node)


def _check_groups(num_ranks: int, attention_tp: int, expert_tp: int) -> None:
    if not groups_nest(num_ranks, attention_tp, expert_tp):
        raise UserError(
            f"attention_tp {attention_tp} and expert_tp {expert_tp} on {num_ranks} ranks: one must divide the other, "
            f"and the larger the number of ranks"
        )


@dataclass(kw_only=True)
class Levels:
    """`attention`, `experts`: this rank's groups inside its node; `across`: the same place of all nodes.

    `ledger`: payload bytes by "level.purpose", `inside.` or `across.`; routing is what goes along with rows. `epoch`:
    the last one that has begun. `on_reset` is called before one begins, by what resets these groups: the
    exchange over them learns that what went before is void."""

    topology: TwoLevel
    rank: int
    attention: RankGroup
    experts: RankGroup
    across: RankGroup
    ledger: Ledger = field(default_factory=Ledger)
    epoch: int = -1
    on_reset: Callable[[], None] = field(default=lambda: None)

    @property
    def node(self) -> int:
        return self.rank // self.topology.ranks_per_node

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
        self.on_reset()
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
            return RankGroup()
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
