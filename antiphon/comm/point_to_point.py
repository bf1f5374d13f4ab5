"""Tensors from one rank of a group to another, split into start and wait, counted in the group's ledger.

Any number may be under way between two ranks; a tag tells which is which, so they may be waited for in any order.
Shapes are known on both sides: nothing but the tensor travels. No gradients pass here: a pipeline runs the backward of
each stage by itself.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from antiphon.base.errors import PeerLost
from antiphon.comm.mesh import Group


@dataclass(frozen=True)
class Parcel:
    """A tensor on its way to or from the rank at place `peer` of `group`. `what`: for errors, what it is."""

    group: Group
    peer: int
    what: str
    name: str
    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        """The tensor, filled if it was received; what was sent may be written to again. `PeerLost` names the peer if
        it is gone, or silent for longer than the timeout of the group."""
        begin = time.perf_counter()
        roll = self.group.roll
        try:
            with nullcontext() if roll is None else roll.waiting(f"{self.name}, {self.what}"):
                self.work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.group.ranks[self.peer]}", f"{self.name}, {self.what}: {error}") from error
        self.group.ledger.waited(self.name, time.perf_counter() - begin)
        return self.tensor


def start_send(group: Group, peer: int, tag: int, what: str, x: Tensor) -> Parcel:
    """Begin to send `x`, which stays as it is until the wait."""
    x = x.contiguous()
    group.ledger.sent("pipeline.send", x.numel() * x.element_size())
    work = dist.isend(x, group=group.process_group, group_dst=peer, tag=tag)
    return Parcel(group, peer, what, "pipeline.send", x, work)


def start_receive(group: Group, peer: int, tag: int, what: str, buffer: Tensor) -> Parcel:
    """Begin to fill `buffer`."""
    work = dist.irecv(buffer, group=group.process_group, group_src=peer, tag=tag)
    return Parcel(group, peer, what, "pipeline.receive", buffer, work)
