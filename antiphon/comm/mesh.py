"""Which ranks work together: one list of ranks, read twice.

    attention   pipeline x data x sequence x tensor
    experts     pipeline x expert data x expert x expert tensor

Both readings have the same number of ranks, so a rank has a place in each. The last axis changes fastest: ranks of one
tensor group are neighbours. A group spans some axes of one reading; its ranks share the place on all others.

Plain numbers here; `Ranks` says who belongs together, `connect` makes process groups of it. Rejected: PyTorch's
`DeviceMesh`. Two readings of the same ranks and groups over two axes need its private calls.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from antiphon.base.errors import UserError
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.ledger import Ledger
from antiphon.comm.roll_call import RollCall

ATTENTION = ("pipeline", "data", "sequence", "tensor")
EXPERTS = ("pipeline", "expert_data", "expert", "expert_tensor")
_ENDS = ("first and last stage",)
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("pipeline",),
    ("sequence",),
    ("tensor",),
    ("expert",),
    ("expert_tensor",),
    ("data", "sequence"),
    ("data", "sequence", "tensor"),
    ("expert_data",),
    ("expert_data", "expert_tensor"),
    ("pipeline", "data", "sequence", "tensor"),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many ranks on each axis; `data` and `expert_data` follow from `world_size`."""

    world_size: int = 1
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        for kind, axes in (("attention", ("sequence", "tensor")), ("experts", ("expert", "expert_tensor"))):
            sizes = {"pipeline": self.pipeline} | {axis: int(getattr(self, axis)) for axis in axes}
            product = math.prod(sizes.values())
            if self.world_size % product:
                parts = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
                raise UserError(
                    f"{kind}: {parts} is {product}, which does not divide the {self.world_size} ranks: "
                    "change these sizes or the number of ranks"
                )

    @property
    def data(self) -> int:
        return self.world_size // (self.pipeline * self.sequence * self.tensor)

    @property
    def expert_data(self) -> int:
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    def of(self, axis: str) -> int:
        return int(getattr(self, axis))

    def place(self, rank: int, axis: str) -> int:
        """Where `rank` stands on `axis`."""
        axes = ATTENTION if axis in ATTENTION else EXPERTS
        after = axes[axes.index(axis) + 1 :]
        return rank // math.prod(self.of(each) for each in after) % self.of(axis)

    def ends(self) -> list[list[int]]:
        """The ranks of the first and the last stage, and all others."""
        at_end: tuple[list[int], list[int]] = [], []
        for rank in range(self.world_size):
            at_end[self.place(rank, "pipeline") not in (0, self.pipeline - 1)].append(rank)
        return list(at_end)

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """All groups that span `axes`, which belong to one reading; ranks of each in order."""
        reading = ATTENTION if all(axis in ATTENTION for axis in axes) else EXPERTS
        others = [axis for axis in reading if axis not in axes]
        places = itertools.product(*(range(self.of(axis)) for axis in others))
        found: dict[tuple[int, ...], list[int]] = {place: [] for place in places}
        for rank in range(self.world_size):
            found[tuple(self.place(rank, axis) for axis in others)].append(rank)
        return list(found.values())


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, and this rank's place among them. `process_group` None: it is alone, and every
    collective is the identity. `launcher` None: its collectives are launched at once. `roll`: names the ranks that
    hang."""

    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    process_group: dist.ProcessGroup | None = None
    launcher: CollectiveLauncher | None = None
    roll: RollCall | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """This rank waits inside for `what` of these ranks; see `RollCall.waiting`."""
        return nullcontext() if self.roll is None else self.roll.waiting(what)


@dataclass(frozen=True)
class Mesh:
    """The groups of this rank by their axes. `launcher`: runs the sums of gradients beside backward; None: they are
    made behind it."""

    sizes: Sizes
    rank: int
    ledger: Ledger
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    launcher: CollectiveLauncher | None = None
    timeout_s: float = 600.0

    def group(self, *axes: str) -> Group:
        return self.groups[axes]

    @property
    def world(self) -> Group:
        return self.groups[ATTENTION]

    @property
    def stage(self) -> Group:
        """The ranks that share the rows of a micro-batch."""
        return self.groups[ATTENTION[1:]]

    @property
    def ends(self) -> Group:
        """The ranks of the first and the last stage, which share what is tied. To be asked for by one of them."""
        return self.groups[_ENDS] if self.sizes.pipeline > 1 else self.stage

    def replicas(self, axes: frozenset[str]) -> Group:
        """The ranks of this stage that hold the same part of a parameter which is cut along `axes`."""
        reading = EXPERTS if axes & set(EXPERTS) else ATTENTION
        return self.groups[tuple(axis for axis in reading[1:] if axis not in axes)]

    def close(self) -> None:
        """End what runs beside the caller. Process groups stay: PyTorch names a new one after how many there are."""
        if self.launcher is not None:
            self.launcher.close()


def beside(group: Group, timeout_s: float) -> Group:
    """The same ranks with a process group and a ledger of their own, for collectives that run beside `group`'s. Blocks
    until the other ranks have called it too."""
    if group.size == 1:
        return Group(group.ranks, group.index, Ledger())
    with group.waiting("connections of other ranks"):
        made = process_group(group.ranks, timeout_s)
    roll = None if group.roll is None else group.roll.beside(timeout_s)
    return Group(group.ranks, group.index, Ledger(), made, roll=roll)


def process_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """Blocks until the other ranks have called it too. PyTorch names a group after its ranks and how many this process
    made: all have to make equally many."""
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
    )
    return made


def regrouped(mesh: Mesh, sizes: Sizes) -> Mesh:
    """The mesh of the same ranks under other sizes; groups that stay as they were are the same. As `connect`."""
    return replace(mesh, sizes=sizes, groups=_groups(sizes, mesh.rank, mesh.timeout_s, mesh.world, mesh))


def connect(
    sizes: Sizes,
    rank: int,
    timeout_s: float = 600.0,
    launcher: CollectiveLauncher | None = None,
    roll: RollCall | None = None,
    *,
    first: bool = False,
) -> Mesh:
    """The mesh of `rank`. Blocks until the other ranks of its groups have called it too; their collectives end with an
    error after `timeout_s`. `first`: the groups' collectives go through `launcher` too, before sums."""
    ledger = Ledger()
    plain = Group((rank,), 0, ledger, None, launcher if first else None, roll)
    groups = _groups(sizes, rank, timeout_s, plain, None)
    return Mesh(sizes, rank, ledger, groups, launcher, timeout_s)


def _groups(
    sizes: Sizes, rank: int, timeout_s: float, like: Group, before: Mesh | None
) -> dict[tuple[str, ...], Group]:
    """By axes, with what belongs to `like`; those that `before` has with all their ranks are taken from there."""
    groups = {}
    for axes, members in _lists(sizes).items():
        if before is not None and _lists(before.sizes).get(axes) == members:
            groups[axes] = before.groups[axes]
            continue
        own = next(ranks for ranks in members if rank in ranks)
        with like.waiting("connections of other ranks"):
            made = process_group(own, timeout_s) if max(len(ranks) for ranks in members) > 1 else None
        groups[axes] = replace(like, ranks=tuple(own), index=own.index(rank), process_group=made)
    return groups


def _lists(sizes: Sizes) -> dict[tuple[str, ...], list[list[int]]]:
    """The ranks of all groups, by their axes."""
    lists = {axes: sizes.groups(axes) for axes in _GROUPS}
    if sizes.pipeline > 1:
        lists[_ENDS] = sizes.ends()
    return lists
