"""Tensors from one rank of a group to another, split into start and wait, counted in the group's ledger.

Any number may be under way between two ranks; a tag tells which is which, so they may be waited for in any order.
Shapes are known on both sides: nothing but the tensor travels. No gradients pass here: a pipeline runs the backward of
each stage by itself.

An all-to-all over gloo is made of the same parts, with all receives posted before the sends. Gloo announces a receive
on the connection that carries the data of the other direction. Its own all-to-all sends first, so the announcement
waits behind that data, and a slow link is used in one direction at a time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from antiphon.base.errors import PeerLost
from antiphon.comm.mesh import Group

# PyTorch 2.13 has it under a new name and warns of the old one.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        it is gone, or silent for longer than the timeout of the group; with a roll call, `ResourceError` names the
        ranks that hang."""
        begin = time.perf_counter()
        try:
            with self.group.waiting(f"{self.name}, {self.what}"):
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


def start_all_to_all(group: Group, buffer: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> Any:
    """Begin to fill `buffer` with `receive[i]` rows from the rank at place i, in order, and to send it `send[i]` of
    `x`; both are contiguous. Ranks start the collectives of a group in one order. The `wait` of the result blocks until
    all have arrived and `x` may be written to; `RuntimeError` if a peer is gone or the group's timeout is over."""
    if is_gloo(group):
        return _Exchange.start(group, torch.split(buffer, list(receive)), torch.split(x, list(send)))
    sizes = list(receive), list(send)
    return dist.all_to_all_single(buffer, x, *sizes, group=group.process_group, async_op=True)


def start_all_gather(group: Group, buffer: Tensor, x: Tensor) -> Any:
    """As `start_all_to_all`; `buffer` gets the equally many rows `x` of all ranks. Over gloo and between more than two
    it is a ring, in which no connection carries data in both directions."""
    if is_gloo(group) and group.size == 2:
        return _Exchange.start(group, buffer.chunk(2), (x, x))
    return all_gather_single(buffer, x, group=group.process_group, async_op=True)


def is_gloo(group: Group) -> bool:
    """Whether the group's collectives are those of gloo."""
    return dist.get_backend(group.process_group) == "gloo"


@dataclass(frozen=True)
class _Exchange:
    """Under way between all ranks of a group. `sent` stays as it is, and alive, until the wait."""

    sent: Sequence[Tensor]
    works: Sequence[Any]

    @staticmethod
    def start(group: Group, received: Sequence[Tensor], sent: Sequence[Tensor]) -> "_Exchange":
        """`received[i]` comes from the rank at place i, `sent[i]` goes there."""
        received[group.index].copy_(sent[group.index])
        peers, own = [place for place in range(group.size) if place != group.index], group.process_group
        works = [dist.irecv(received[each], group=own, group_src=each) for each in peers if received[each].numel()]
        works += [dist.isend(sent[each], group=own, group_dst=each) for each in peers if sent[each].numel()]
        return _Exchange(sent, works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
