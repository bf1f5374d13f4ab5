"""Which ranks belong together where links inside a node are fast and links between nodes are slow.

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
"""

from dataclasses import dataclass
from typing import Self

from antiphon.base.errors import UserError
from antiphon.specs.plan import groups_nest


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

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

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
