"""Which ranks work together: one list of ranks, read twice.

    attention   pipeline x data x sequence x tensor
    experts     pipeline x expert data x expert x expert tensor

Both readings have the same number of ranks, so a rank has a place in each. The last axis changes fastest: ranks of one
tensor group are neighbours. A group spans some axes of one reading; its ranks share the place on all others.

Plain numbers here; `Ranks` says who belongs together, `connect` makes process groups of it. Rejected: PyTorch's
`DeviceMesh`. Two readings of the same ranks and groups over two axes need its private calls.

`RollCall` says who is to blame when ranks wait for each other: those that do not wait. A collective that ends late says
nothing about whom it waited for; on most ranks it is a neighbour that waits as well. So a rank that has waited for half
of the timeout writes down for what, in the store that started the ranks. When the timeout is over, the ranks that wrote
nothing are named. All that wait began nearly together, since every step brings all ranks together; one that hangs
writes nothing. A thread writes, because a wait for gloo cannot be interrupted and asked again. It knows only waits that
a rank is in, so it writes nothing for one that hangs elsewhere. Rejected: a beat of the heart. It goes on while the
thread that matters hangs.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from antiphon.base.errors import ResourceError, UserError
from antiphon.comm.launcher import CollectiveLauncher
from antiphon.comm.ledger import Ledger


@dataclass(eq=False)
class _OpenWait:
    """`due_s`: when it is to be reported."""

    what: str
    due_s: float
    is_reported: bool = False


class RollCall:
    """The roll call of `rank` among `ranks`; `timeout_s` is that of their collectives."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waits: list[_OpenWait] = []
        self._reporter: threading.Thread | None = None
        self._is_idle = False  # the reporter sleeps until it is woken

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This rank waits for `what` inside, in a call that ends with a `RuntimeError` after the timeout. That becomes
        a `ResourceError` that names the ranks that hang, and so does a peer's death, which comes earlier; another error
        is raised as it is."""
        began_s = time.monotonic()
        wait = _OpenWait(what, began_s + self._timeout_s / 2)
        with self._changed:
            self._waits.append(wait)
            if self._reporter is None:
                self._reporter = threading.Thread(target=self._report, name="roll call", daemon=True)
                self._reporter.start()
            elif self._is_idle:
                self._changed.notify()
        try:
            yield
        except RuntimeError as error:
            if wait.is_reported:  # and what was written stays: others are about to read it
                raise ResourceError(self._words(what, time.monotonic() - began_s)) from error
            self._over(wait)
            if "by peer" in str(error):  # gloo: a connection was closed, or reset
                raise ResourceError(
                    f"rank {self._rank} waited for {what}, and another rank ended: see what that one said, or its "
                    "machine, then start again"
                ) from error
            raise
        self._over(wait)

    def _over(self, wait: _OpenWait) -> None:
        with self._changed:
            self._waits.remove(wait)
            if wait.is_reported and not any(each.is_reported for each in self._waits):
                self._store.delete_key(self._key(self._rank))

    def _report(self) -> None:
        """What the thread runs. It wakes when the oldest wait that it saw is due, so most waits begin and end
        unnoticed."""
        with self._changed:
            while True:
                for wait in self._waits:
                    if not wait.is_reported and wait.due_s <= time.monotonic():
                        self._store.set(self._key(self._rank), wait.what)
                        wait.is_reported = True
                due_s = min((wait.due_s for wait in self._waits if not wait.is_reported), default=None)
                self._is_idle = due_s is None
                self._changed.wait(None if due_s is None else due_s - time.monotonic())

    def _words(self, what: str, waited_s: float) -> str:
        silent = [each for each in range(self._ranks) if not self._store.check([self._key(each)])]
        names = ", ".join(map(str, silent))
        who = f"ranks {names} do not wait for anybody, so they hang" if silent else "all ranks wait, each for another"
        return f"rank {self._rank} waited {waited_s:.0f} s for {what}: {who}: see their machines, then start again"

    @staticmethod
    def _key(rank: int) -> str:
        return f"antiphon/waits/{rank}"


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
    made = process_group(group.ranks, timeout_s) if group.size > 1 else None
    return Group(group.ranks, group.index, Ledger(), made)


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
        made = process_group(own, timeout_s) if max(len(ranks) for ranks in members) > 1 else None
        groups[axes] = replace(like, ranks=tuple(own), index=own.index(rank), process_group=made)
    return groups


def _lists(sizes: Sizes) -> dict[tuple[str, ...], list[list[int]]]:
    """The ranks of all groups, by their axes."""
    lists = {axes: sizes.groups(axes) for axes in _GROUPS}
    if sizes.pipeline > 1:
        lists[_ENDS] = sizes.ends()
    return lists
