"""Ranks that hold the same parameters: how they sum gradients and gather what each of them updates.

1. On one level a sum is an all-reduce, or a reduce-scatter where each rank keeps a shard.
2. On two levels (MegaScale-MoE, Appendix A.1) it is a reduce-scatter inside each node, one across nodes on the part
   that is left, then all-gathers in the reverse order. So one copy travels between nodes, however many a node holds.
   The two levels are different wires, so it goes in chunks: while one chunk is between nodes, the next is inside
   (Figure 5b).
3. In a narrow format (section 5, Figure 11) an all-to-all of bfloat16 takes the place of each reduce-scatter: numbers
   are rounded in place, and each rank adds what it got in the numbers' own format, in order of rank. So a number is
   rounded once, whatever the number of ranks, and half the bytes of float32 are sent. A sum that all ranks keep is
   gathered in that format too, so that every rank has the same bits.

With two levels, shards follow each other in order of (place in the node, node): what a node's rank keeps of the inner
sum is then one run, cut across nodes. Levels are used where every node has equally many of the ranks, and more than
one.

Rejected: an all-reduce over all ranks, which sends each node's copies across nodes; a reduce-scatter in bfloat16, whose
ring adds and rounds at each of its n - 1 steps; and one process group for gradients and parameters, because sums that
run beside backward would have another order on every rank.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.collectives import (
    AllGather,
    AllReduce,
    Collective,
    Pending,
    ReduceScatter,
    joined,
    part_sizes,
    run,
    start,
    start_all_to_all,
    taken,
)
from antiphon.comm.ledger import Ledger
from antiphon.comm.mesh import Group, Mesh, process_group

_BLOCK = 1 << 18  # elements that are rounded at a time


@dataclass(frozen=True)
class NarrowSum:
    """A `Collective` for gradients, outside of autograd: rank i gets the `sizes[i]` elements of its turn, in `wide`.
    What it is launched on is used up."""

    group: Group
    purpose: str
    sizes: tuple[int, ...]
    wide: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.purpose}.all_to_all"

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        count, own = x.shape[0], self.sizes[self.group.index]
        assert count == sum(self.sizes), f"{sum(self.sizes)} elements are to be summed, {count} given"
        narrow = x.detach().view(torch.bfloat16)
        _round_in_place(x.detach(), narrow)
        received = own * self.group.size
        buffer = narrow[count : count + received] if received <= count else narrow.new_empty(received)
        self.group.ledger.sent(self.name, (count - own) * narrow.element_size())
        return buffer, start_all_to_all(self.group, buffer, narrow[:count], [own] * self.group.size, self.sizes)

    def finish(self, buffer: Tensor) -> Tensor:
        parts = buffer.view(self.group.size, self.sizes[self.group.index])
        total = parts[0].to(self.wide)
        for part in parts[1:]:
            total += part
        return total

    def reverse(self) -> "NarrowSum":
        raise AssertionError("gradients of gradients are not summed")


def _round_in_place(x: Tensor, narrow: Tensor) -> None:
    """The first `len(x)` elements of `narrow`, which is the same memory, become those of `x`. A block is read before
    it is written, and what it overwrites lies at or before it."""
    for begin in range(0, x.shape[0], _BLOCK):
        end = min(begin + _BLOCK, x.shape[0])
        narrow[begin:end].copy_(x[begin:end].to(torch.bfloat16))


LEVEL_CHUNKS, LEAST_CHUNK_BYTES = 4, 1 << 16
_REPLICAS: tuple[tuple[str, ...], ...] = (
    ("data", "sequence"),
    ("data", "sequence", "tensor"),
    ("expert_data",),
    ("expert_data", "expert_tensor"),
)


@dataclass(frozen=True)
class Level:
    """A group and what its collectives are called in the ledger behind their purpose."""

    group: Group
    suffix: str = ""


@dataclass(frozen=True)
class Replicas:
    """The ranks of `group`. `sums`, `gathers`: levels for gradients and for parameters, the inner one first. `narrow`:
    gradients travel in bfloat16. `chunks`: in how many at most what goes over two levels is cut."""

    group: Group
    sums: tuple[Level, ...]
    gathers: tuple[Level, ...]
    narrow: bool = False
    chunks: int = LEVEL_CHUNKS

    @staticmethod
    def flat(group: Group) -> "Replicas":
        """On one level, in the format that gradients have."""
        return Replicas(group, (Level(group),), (Level(group),))

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def place(self) -> int:
        """The number of this rank's shard."""
        place = 0
        for level in self.sums:
            place = place * level.group.size + level.group.index
        return place

    @property
    def sums_at_once(self) -> bool:
        """Whether `start_sum` does not wait."""
        return len(self.sums) == 1 and not self.narrow

    def start_sum(self, flat: Tensor) -> Pending:
        """`sum`, begun where one collective is all it takes."""
        if self.sums_at_once:
            return start(AllReduce(self.sums[0].group, "gradients", in_place=True), flat)
        return Pending(self.sum(flat))

    def sum(self, flat: Tensor) -> Tensor:
        """The sum over all ranks, on each of them. `flat` is used up."""
        if self.sums_at_once:
            return self.start_sum(flat).wait()
        count = flat.shape[0]
        sizes = (-(-count // self.size),) * self.size
        padded = torch.cat((flat, flat.new_zeros(sum(sizes) - count))) if sum(sizes) > count else flat
        shard = self.sum_shard(padded, sizes)
        whole = self._gather(self.sums, "gradients", shard.bfloat16() if self.narrow else shard, sizes)
        return whole[:count].to(flat.dtype)

    def sum_shard(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's shard of the sum; shards have these sizes. `flat` is used up."""
        count = self._chunks(self.sums, sizes, flat.element_size())
        if count == 1:
            for level, parts in _levels(self.sums, sizes):
                flat = start(self._sum_of(level, parts, flat.dtype), flat).wait()
            return flat
        under_way: list[Pending] = []  # across nodes
        inside = self._start_inside(flat, sizes, 0, count)
        for number in range(count):
            shard = inside.wait()
            across, parts = _levels(self.sums, part_sizes(sizes, number, count))[1]
            under_way.append(start(self._sum_of(across, parts, flat.dtype), shard))
            if number + 1 < count:
                inside = self._start_inside(flat, sizes, number + 1, count)
        return torch.cat([each.wait() for each in under_way])

    def _start_inside(self, flat: Tensor, sizes: Sequence[int], number: int, count: int) -> Pending:
        inside, parts = _levels(self.sums, part_sizes(sizes, number, count))[0]
        return start(self._sum_of(inside, parts, flat.dtype), taken(flat, tuple(sizes), number, count))

    def _sum_of(self, level: Level, parts: tuple[int, ...], dtype: torch.dtype) -> Collective:
        purpose = f"gradients{level.suffix}"
        if self.narrow:
            return NarrowSum(level.group, purpose, parts, dtype)
        return ReduceScatter(level.group, purpose, parts)

    def gather(self, shard: Tensor, sizes: Sequence[int]) -> Tensor:
        """The parameters of which this rank has a shard."""
        return self._gather(self.gathers, "parameters", shard, sizes)

    def _gather(self, levels: Sequence[Level], purpose: str, shard: Tensor, sizes: Sequence[int]) -> Tensor:
        count = self._chunks(levels, sizes, shard.element_size())
        if count == 1:
            for level, parts in reversed(_levels(levels, sizes)):
                shard = run(AllGather(level.group, purpose + level.suffix, parts), shard)
            return shard
        under_way: list[Pending] = []  # inside nodes
        across = _start_gather(levels, purpose, shard, sizes, 1, (0, count))
        for number in range(count):
            came = across.wait()
            if number + 1 < count:
                across = _start_gather(levels, purpose, shard, sizes, 1, (number + 1, count))
            under_way.append(_start_gather(levels, purpose, came, sizes, 0, (number, count)))
        return joined([each.wait() for each in under_way], tuple(sizes))

    def _chunks(self, levels: Sequence[Level], sizes: Sequence[int], element_bytes: int) -> int:
        """In how many chunks shards of these sizes go, the same on every rank: one where there are not two levels, or
        where a chunk would be small."""
        if len(levels) == 1:
            return 1
        return max(1, min(self.chunks, sum(sizes) * element_bytes // LEAST_CHUNK_BYTES))


def _start_gather(
    levels: Sequence[Level], purpose: str, x: Tensor, sizes: Sequence[int], which: int, part: tuple[int, int]
) -> Pending:
    """Chunk `part` (number, count) over the level at place `which`; across nodes `x` is the whole shard."""
    level, parts = _levels(levels, part_sizes(sizes, *part))[which]
    return start(
        AllGather(level.group, purpose + level.suffix, parts),
        taken(x, (x.shape[0],), *part) if which else x,
    )


def _levels(levels: Sequence[Level], sizes: Sequence[int]) -> list[tuple[Level, tuple[int, ...]]]:
    """Each level with the sizes that its ranks keep of what they have there."""
    found = []
    for level in levels:
        ranks, index = level.group.size, level.group.index
        together = len(sizes) // ranks
        found.append((level, tuple(sum(sizes[rank * together : (rank + 1) * together]) for rank in range(ranks))))
        sizes = sizes[index * together : (index + 1) * together]
    return found


class ReplicaGroups:
    """All replica groups of one rank's mesh. Made by all ranks together, because it may make process groups: for levels
    where `node_size` ranks are neighbours on a node (0: no levels), and, if the mesh has a launcher for sums, others
    for gradients than for parameters."""

    def __init__(self, mesh: Mesh, *, node_size: int = 0, narrow: bool = False, chunks: int = LEVEL_CHUNKS) -> None:
        self._chunks = chunks
        self._found: dict[tuple[int, ...], Replicas] = {}
        lists = [mesh.sizes.groups(axes) for axes in _REPLICAS]
        if mesh.sizes.pipeline > 1:
            lists.append(mesh.sizes.ends())
        for members, _ in itertools.groupby(sorted(lists)):
            own = next((ranks for ranks in members if mesh.rank in ranks), None)
            if own is not None:
                self._found[tuple(own)] = self._of(mesh, members, own, node_size, narrow)

    def of(self, group: Group) -> Replicas:
        """For the ranks of `group`, which is one of the mesh."""
        return self._found[group.ranks]

    def _of(self, mesh: Mesh, members: list[list[int]], own: list[int], node_size: int, narrow: bool) -> Replicas:
        group = next(group for group in mesh.groups.values() if group.ranks == tuple(own))
        if max(map(len, members)) == 1:
            return Replicas.flat(group)
        if has_levels(members, node_size):
            ways = zip(ranks_of_levels(own, mesh.rank, node_size), ("_inside", "_across"), strict=True)
            gathers = tuple(Level(_group(ranks, mesh, mesh.ledger), suffix) for ranks, suffix in ways)
        else:
            gathers = (Level(group),)
        sums = gathers
        if mesh.launcher is not None:
            ledger = mesh.launcher.ledger
            sums = tuple(replace(each, group=_group(each.group.ranks, mesh, ledger)) for each in gathers)
        return Replicas(group, sums, gathers, narrow, self._chunks)


def ranks_of_levels(own: Sequence[int], rank: int, node_size: int) -> tuple[list[int], list[int]]:
    """From the ranks `own`: those on the node of `rank`, and those at its place of every node."""
    inside = [each for each in own if each // node_size == rank // node_size]
    place = inside.index(rank)
    return inside, [each for index, each in enumerate(own) if index % len(inside) == place]


def connect_levels(mesh: Mesh, like: Group, node_size: int) -> tuple[Group, Group]:
    """The groups of `like`'s ranks inside this node and across all, with what belongs to `like`. Waits for the other
    ranks; all ranks of the mesh call it, whose groups of this kind must have levels."""
    inside, across = (
        replace(
            like, ranks=tuple(ranks), index=ranks.index(mesh.rank), process_group=process_group(ranks, mesh.timeout_s)
        )
        for ranks in ranks_of_levels(like.ranks, mesh.rank, node_size)
    )
    return inside, across


def has_levels(members: list[list[int]], node_size: int) -> bool:
    """Whether each of these groups has equally many ranks, more than one, on each of several nodes."""
    if not node_size:
        return False
    shares = {
        tuple(len(list(of_node)) for _, of_node in itertools.groupby(ranks, lambda rank: rank // node_size))
        for ranks in members
    }
    share = shares.pop()
    return not shares and len(share) > 1 and len(set(share)) == 1 and share[0] > 1


def _group(ranks: Sequence[int], mesh: Mesh, ledger: Ledger) -> Group:
    """Waits for the other ranks; all ranks make equally many."""
    made = process_group(ranks, mesh.timeout_s)
    roll = mesh.world.roll if ledger is mesh.ledger else None  # sums of a launcher are waited for as a whole
    return Group(tuple(ranks), list(ranks).index(mesh.rank), ledger, made, roll=roll)
