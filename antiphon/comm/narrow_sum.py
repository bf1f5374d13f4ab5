"""A reduce-scatter that sends bfloat16 and adds in the numbers' own format (MegaScale-MoE, section 5, Figure 11).

1. Numbers are rounded to bfloat16 once, in place: they fill the first half of a float32 buffer.
2. An all-to-all brings each rank its shard from every rank, into the second half of the same buffer.
3. Each rank adds what it got in the wide format, in order of rank. So a number is rounded once, whatever the number of
   ranks, and the bytes sent are half of a reduce-scatter's in float32.

Rejected: a reduce-scatter in bfloat16. A ring adds and rounds at each of its n - 1 steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.mesh import Group
from antiphon.comm.point_to_point import start_all_to_all

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
