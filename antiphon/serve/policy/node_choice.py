"""Which node of a cluster each worker goes to: attention and experts on different nodes where both sides fit.

A worker's ranks share memory, so they are on one node; all ranks need the same. Replicas have no other side: they
spread evenly over all nodes. At first the nodes are split in two, for attention and for experts, so that both sides fit
and the fuller of the two is as empty as can be; within a side workers spread evenly. Where no split fits, they mix.
Without a number of threads the largest is taken that keeps the sides apart, or else the largest that fits. A worker
that is lost goes to a node of its own side if it fits on one, else to any. Rejected: a cluster scheduler's own
spreading, which knows no roles and so puts attention and experts together when there are more workers than nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from antiphon.base.errors import UserError

Side = str  # "attention" or "experts"; "replica", which counts as attention
SIDES: tuple[Side, Side] = ("attention", "experts")
Placed = tuple[Side, str]  # a worker that has a node: its side and the node


@dataclass(frozen=True, kw_only=True)
class WorkerNeeds:
    """What one rank takes of its node, and how many ranks a worker of each side has."""

    num_cpus: int
    num_gpus: int = 0
    attention_ranks: int = 1
    expert_ranks: int = 1

    def ranks(self, side: Side) -> int:
        return self.expert_ranks if side == "experts" else self.attention_ranks

    def __post_init__(self) -> None:
        if self.num_cpus < 1 or self.num_gpus < 0:
            raise UserError(f"a worker needs {self.num_cpus} CPUs and {self.num_gpus} GPUs: at least 1 and 0")


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A live node and what it has in all."""

    node: str
    num_cpus: float
    num_gpus: float = 0.0

    def num_workers(self, needs: WorkerNeeds, side: Side, num_ranks_there: int = 0) -> int:
        """How many workers of this side fit on the node beside that number of ranks."""
        ranks = int(self.num_cpus // needs.num_cpus)
        if needs.num_gpus:
            ranks = min(ranks, int(self.num_gpus // needs.num_gpus))
        return (ranks - num_ranks_there) // needs.ranks(side)


def choose_nodes(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Nodes for the attention workers, then for the expert workers; None if they do not fit."""
    return _apart(nodes, num_attention, num_experts, needs) or _mixed(nodes, num_attention, num_experts, needs)


def most_cpus(nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds) -> int:
    """The largest number of CPUs each rank can have, in place of that of `needs`, with the sides apart, or else at all;
    0 if not even one."""
    for fit in (_apart, _mixed):
        for num_cpus in range(int(max((each.num_cpus for each in nodes), default=0.0)), 0, -1):
            if fit(nodes, num_attention, num_experts, replace(needs, num_cpus=num_cpus)) is not None:
                return num_cpus
    return 0


def choose_node(
    nodes: Sequence[ClusterNode],
    taken: Sequence[Placed],
    side: Side,
    needs: WorkerNeeds,
    avoid: frozenset[str] = frozenset(),
) -> str | None:
    """The node for one more worker beside those that are `taken`; None if it fits on none.

    First choice are nodes without the other side, then the emptiest; nodes of `avoid` only come last."""
    other = {where for placed, where in taken if placed != side}
    num_taken = {each.node: sum(needs.ranks(placed) for placed, where in taken if where == each.node) for each in nodes}
    num_free = {each.node: each.num_workers(needs, side, num_taken[each.node]) for each in nodes}
    open_nodes = [each.node for each in nodes if num_free[each.node] > 0]
    return min(open_nodes, key=lambda node: (node in avoid, node in other, -num_free[node], node), default=None)


def _apart(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Attention and experts on different nodes; None if no split of the nodes fits both."""
    best: tuple[float, frozenset[int]] | None = None
    capacity = [(each.num_workers(needs, "attention"), each.num_workers(needs, "experts")) for each in nodes]
    for num_places, (lost, chosen) in _subsets_by_capacity(capacity):
        others = sum(places for _, places in capacity) - lost
        if num_places >= num_attention and others >= num_experts:
            fullness = max(num_attention / num_places, num_experts / others if num_experts else 0.0)
            if best is None or fullness < best[0]:
                best = (fullness, chosen)
    if best is None:
        return None
    sides: tuple[list[ClusterNode], list[ClusterNode]] = ([], [])
    for index, each in enumerate(nodes):
        sides[index not in best[1]].append(each)
    attention = _spread(sides[0], "attention", num_attention, needs)
    return attention + _spread(sides[1], "experts", num_experts, needs)


def _subsets_by_capacity(capacity: Sequence[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, frozenset[int]]]]:
    """For every number of attention workers that exactly fill some nodes: how many expert workers would fit on those
    nodes instead, and which nodes they are. The choice that costs the fewest. The usual subset-sum table."""
    known: dict[int, tuple[int, frozenset[int]]] = {0: (0, frozenset())}
    for index, (places, lost) in enumerate(capacity):
        if not places:
            continue
        for total, (already, chosen) in list(known.items()):
            entry = already + lost, chosen | {index}
            if total + places not in known or entry[0] < known[total + places][0]:
                known[total + places] = entry
    yield from sorted(known.items(), key=lambda entry: entry[0])


def _spread(nodes: Sequence[ClusterNode], side: Side, count: int, needs: WorkerNeeds) -> list[Placed]:
    placed: list[Placed] = []
    for _ in range(count):
        node = choose_node(nodes, placed, side, needs)
        assert node is not None, "the nodes of a side hold all its workers"
        placed.append((side, node))
    return placed


def _mixed(
    nodes: Sequence[ClusterNode], num_attention: int, num_experts: int, needs: WorkerNeeds
) -> list[Placed] | None:
    """Any nodes, the sides in turn so that each finds nodes without the other while there are some."""
    placed: dict[Side, list[Placed]] = {side: [] for side in SIDES}
    wanted = {"attention": num_attention, "experts": num_experts}
    for _ in range(num_attention + num_experts):
        side = min(SIDES, key=lambda side: len(placed[side]) / wanted[side] if wanted[side] else 1.0)
        node = choose_node(nodes, [*placed["attention"], *placed["experts"]], side, needs)
        if node is None:
            return None
        placed[side].append((side, node))
    return placed["attention"] + placed["experts"]
