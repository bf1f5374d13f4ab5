"""Collectives of rows that send E4M3 (MegaScale-MoE, section 5): per token forward, per channel backward.

Each is a `Collective` like its plain form, so `start`, `wait` and their backward are the same. A sum is an all-to-all
whose rows each rank adds in float32, in order of rank: nothing is added in E4M3.

What `RowFormat` chooses from:

    plain                as the arithmetic has them
    float8               all rows on their way to experts and back, sums included
    float8_permutation   only all-to-alls, which move rows and add nothing; where others found a reduce-scatter by FP8
                         all-to-all slower across nodes, this form still gained

Rejected: E5M2 for gradients. Scales by channel and group of tokens give them range enough, and E4M3 has a bit more.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, AllToAll, Collective, ReduceScatter
from antiphon.comm.float8_rows import (
    decode_by_channel,
    decode_by_token,
    encode_by_channel,
    encode_by_token,
    rows_by_channel,
)
from antiphon.comm.mesh import Group

Format = Literal["plain", "float8", "float8_permutation"]


@dataclass(frozen=True)
class Float8AllToAll:
    """`AllToAll` of rows; they come out in `out`. `by_channel`: how scales are taken, else by token."""

    group: Group
    purpose: str
    send: tuple[int, ...]
    receive: tuple[int, ...]
    out: torch.dtype
    by_channel: bool = False

    @property
    def name(self) -> str:
        return self._bytes.name

    @property
    def _bytes(self) -> AllToAll:
        if not self.by_channel:
            return AllToAll(self.group, self.purpose, self.send, self.receive)
        send, receive = (tuple(map(rows_by_channel, rows)) for rows in (self.send, self.receive))
        return AllToAll(self.group, self.purpose, send, receive)

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        return self._bytes.launch(_encoded(self.group, self.purpose, x, self.send if self.by_channel else None))

    def finish(self, buffer: Tensor) -> Tensor:
        if self.by_channel:
            return decode_by_channel(buffer, self.receive, self.out)
        return decode_by_token(buffer, self.out)

    def reverse(self) -> Collective:
        wide = torch.promote_types(self.out, torch.float32)
        return replace(self, send=self.receive, receive=self.send, out=wide, by_channel=not self.by_channel)


@dataclass(frozen=True)
class Float8AllGather:
    """`AllGather` of rows; they come out in `out`."""

    group: Group
    purpose: str
    sizes: tuple[int, ...]
    out: torch.dtype
    by_channel: bool = False

    @property
    def name(self) -> str:
        return self._bytes.name

    @property
    def _bytes(self) -> AllGather:
        sizes = tuple(map(rows_by_channel, self.sizes)) if self.by_channel else self.sizes
        return AllGather(self.group, self.purpose, sizes)

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        own = self.sizes[self.group.index]
        return self._bytes.launch(_encoded(self.group, self.purpose, x, (own,) if self.by_channel else None))

    def finish(self, buffer: Tensor) -> Tensor:
        rows = self._bytes.finish(buffer)
        return decode_by_channel(rows, self.sizes, self.out) if self.by_channel else decode_by_token(rows, self.out)

    def reverse(self) -> Collective:
        wide = torch.promote_types(self.out, torch.float32)
        return Float8ReduceScatter(self.group, self.purpose, self.sizes, wide, not self.by_channel)


@dataclass(frozen=True)
class Float8ReduceScatter:
    """`ReduceScatter` of rows, added in `out`, float32 or wider."""

    group: Group
    purpose: str
    sizes: tuple[int, ...]
    out: torch.dtype
    by_channel: bool = False

    @property
    def name(self) -> str:
        return self._exchange.name

    @property
    def _exchange(self) -> Float8AllToAll:
        receive = (self.sizes[self.group.index],) * self.group.size
        return Float8AllToAll(self.group, self.purpose, self.sizes, receive, self.out, self.by_channel)

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        return self._exchange.launch(x)

    def finish(self, buffer: Tensor) -> Tensor:
        first, *others = self._exchange.finish(buffer).chunk(self.group.size)
        total = first.clone()
        for each in others:
            total += each
        return total

    def reverse(self) -> Collective:
        return Float8AllGather(self.group, self.purpose, self.sizes, self.out, not self.by_channel)


@dataclass(frozen=True)
class RowFormat:
    """How rows travel; the arithmetic is in `dtype`."""

    format: Format = "plain"
    dtype: torch.dtype = torch.float32

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def summed(self, x: Tensor) -> Tensor:
        """`x` in the format in which its gradients are to be added."""
        return x if self.format == "plain" else x.to(self._wide)

    def all_to_all(self, group: Group, purpose: str, send: tuple[int, ...], receive: tuple[int, ...]) -> Collective:
        if self.format == "plain":
            return AllToAll(group, purpose, send, receive)
        return Float8AllToAll(group, purpose, send, receive, self._wide)

    def all_gather(self, group: Group, purpose: str, sizes: tuple[int, ...]) -> Collective:
        if self.format != "float8":
            return AllGather(group, purpose, sizes)
        return Float8AllGather(group, purpose, sizes, self._wide)

    def reduce_scatter(self, group: Group, purpose: str, sizes: tuple[int, ...]) -> Collective:
        if self.format != "float8":
            return ReduceScatter(group, purpose, sizes)
        return Float8ReduceScatter(group, purpose, sizes, self._wide)


def _encoded(group: Group, purpose: str, x: Tensor, runs: tuple[int, ...] | None) -> Tensor:
    encoded, (clipped, flushed) = encode_by_token(x) if runs is None else encode_by_channel(x, runs)
    group.ledger.lost(f"{purpose}.clipped", clipped)
    group.ledger.lost(f"{purpose}.flushed", flushed)
    return encoded
