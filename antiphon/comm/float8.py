"""Rows as E4M3 numbers and scales, and collectives that send them (MegaScale-MoE, section 5).

    by token     one scale a row, behind its H bytes: H + 4 bytes a row. For activations, forward
    by channel   one scale a channel and group of 128 rows for the same rank, behind them, as four rows of H bytes a
                 group: H (1 + 4 / 128) bytes a row where groups are full. For gradients, backward

Rows and scales travel in one tensor of bytes. A scale is the largest magnitude over 448, E4M3's largest number, so only
what is infinite is clipped; what is far below the largest becomes zero. PyTorch's cast saturates without a sign of it,
so both are counted.

Each is a `Collective` like its plain form, so `start`, `wait` and their backward are the same. A sum is an all-to-all
whose rows each rank adds in float32, in order of rank: nothing is added in E4M3.

What `RowFormat` chooses from:

    plain                as the arithmetic has them
    float8               all rows on their way to experts and back, sums included
    float8_permutation   only all-to-alls, which move rows and add nothing; where others found a reduce-scatter by FP8
                         all-to-all slower across nodes, this form still gained

Attention's rows between tensor ranks have the same form, with `Float8Rows.tokens` a position.

Rejected: E5M2 for gradients. Scales by channel and group of tokens give them range enough, and E4M3 has a bit more.

Letters: T rows, H width, G groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from antiphon.comm.collectives import (
    AllGather,
    AllToAll,
    Collective,
    MovesRows,
    ReduceScatter,
    Runs,
    moving,
    sum_in_order,
)
from antiphon.comm.mesh import Group

GROUP = 128
SCALE_BYTES = 4
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
Lost = tuple[int, int]  # numbers that were clipped, and those that became zero


def encode_by_token(x_TH: Tensor) -> tuple[Tensor, Lost]:
    """[T, H + 4] bytes."""
    if not x_TH.shape[0]:
        return x_TH.new_empty((0, x_TH.shape[1] + SCALE_BYTES), dtype=torch.uint8), (0, 0)
    scale_T1 = _scale(_magnitude(x_TH).amax(1, keepdim=True))
    bytes_TH, lost = _quantized(x_TH, scale_T1)
    return torch.cat((bytes_TH, scale_T1.view(torch.uint8)), dim=1), lost


def decode_by_token(bytes_TH: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H] from what `encode_by_token` gave."""
    if not bytes_TH.shape[0]:
        return bytes_TH.new_empty((0, bytes_TH.shape[1] - SCALE_BYTES), dtype=dtype)
    scale_T1 = bytes_TH[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    x_TH = bytes_TH[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
    return (x_TH.to(_wide(dtype)) * scale_T1).to(dtype)


def rows_by_channel(rows: int) -> int:
    """Rows of H bytes that this many rows become, scales and all."""
    return rows + SCALE_BYTES * -(-rows // GROUP)


def encode_by_channel(x_TH: Tensor, runs: Sequence[int]) -> tuple[Tensor, Lost]:
    """[sum of `rows_by_channel`, H] bytes; `runs`: how many rows go to each rank, in order."""
    parts, clipped, flushed = [], 0, 0
    for run_TH in torch.split(x_TH, list(runs)):
        groups = list(torch.split(run_TH, GROUP)) if run_TH.shape[0] else []
        scales = [_scale(_magnitude(each).amax(0, keepdim=True)) for each in groups]
        for each, scale_1H in zip(groups, scales, strict=True):
            bytes_TH, lost = _quantized(each, scale_1H)
            parts.append(bytes_TH)
            clipped, flushed = clipped + lost[0], flushed + lost[1]
        parts += [scale_1H.view(torch.uint8).view(SCALE_BYTES, -1) for scale_1H in scales]
    empty = x_TH.new_zeros((0, x_TH.shape[1]), dtype=torch.uint8)
    return torch.cat([empty, *parts]), (clipped, flushed)


def decode_by_channel(bytes_NH: Tensor, runs: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[T, H] from what each rank's `encode_by_channel` gave; `runs`: how many rows came from each, in order."""
    parts = [torch.empty((0, bytes_NH.shape[1]), dtype=dtype, device=bytes_NH.device)]
    for rows, run_NH in zip(runs, torch.split(bytes_NH, [rows_by_channel(rows) for rows in runs]), strict=True):
        if not rows:
            continue
        scales_GH = run_NH[rows:].clone().view(-1, SCALE_BYTES * run_NH.shape[1]).view(torch.float32)
        x_TH = run_NH[:rows].view(torch.float8_e4m3fn).to(_wide(dtype))
        parts.append((x_TH * scales_GH.repeat_interleave(GROUP, dim=0)[:rows]).to(dtype))
    return torch.cat(parts)


def bytes_of_numbers(count: int) -> int:
    """Bytes of so long a run of parameters as E4M3: one each, and the exponent of a scale for each `GROUP`."""
    return count + -(-count // GROUP)


def encode_numbers(x: Tensor) -> Tensor:
    """[`bytes_of_numbers`] of a run of parameters. Scales are powers of two: what is decoded is exact in bfloat16."""
    padded = torch.cat((x.float(), x.new_zeros(-x.shape[0] % GROUP, dtype=torch.float32))).view(-1, GROUP)
    largest = _magnitude(padded).amax(1, keepdim=True)
    exponent = torch.where(largest > 0, (largest / _LARGEST).log2().ceil().clamp(-126, 126), 0.0)
    narrow = (padded / exponent.exp2()).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return torch.cat(
        (narrow.view(torch.uint8).flatten()[: x.shape[0]], exponent.to(torch.int8).view(torch.uint8)[:, 0])
    )


def decode_numbers(encoded: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers of runs of these lengths, one after the other, from what `encode_numbers` made of each."""
    found = []
    for count, run in zip(counts, torch.split(encoded, [bytes_of_numbers(count) for count in counts]), strict=True):
        scale = run[count:].view(torch.int8).float().exp2().repeat_interleave(GROUP)[:count]
        found.append((run[:count].view(torch.float8_e4m3fn).float() * scale).to(dtype))
    return torch.cat(found)


def _magnitude(x: Tensor) -> Tensor:
    """What is not finite counts 0: it takes no part in a scale."""
    return x.detach().abs().nan_to_num(0.0, 0.0, 0.0)


def _scale(largest: Tensor) -> Tensor:
    scale = largest.float() / _LARGEST
    return torch.where(scale > 0, scale, 1.0)


def _quantized(x: Tensor, scale: Tensor) -> tuple[Tensor, Lost]:
    scaled = x.detach() / scale
    narrow = scaled.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    clipped = int((scaled.abs() > _LARGEST * 1.001).sum())  # the largest itself may round up by a last bit
    flushed = int(((narrow.to(torch.float32) == 0) & (scaled != 0)).sum())
    return narrow.view(torch.uint8), (clipped, flushed)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


Format = Literal["plain", "float8", "float8_permutation"]


@dataclass(frozen=True)
class Float8Rows:
    """`plain` with its rows sent as E4M3; they are added in float32 or wider, and come out in `out`. `by_channel`: how
    scales are taken, else by token. `tokens`: of a row, which is [tokens, H] then and not [H]."""

    plain: MovesRows
    out: torch.dtype
    by_channel: bool = False
    tokens: int | None = None

    @property
    def group(self) -> Group:
        return self.plain.group

    @property
    def name(self) -> str:
        return self._bytes.name

    @property
    def sent(self) -> Runs:
        return self.plain.sent

    @property
    def received(self) -> Runs:
        return self.plain.received

    @property
    def _bytes(self) -> MovesRows:
        plain: MovesRows = self.plain
        if isinstance(plain, ReduceScatter):
            plain = AllToAll(plain.group, plain.purpose, plain.sent, plain.received)
        if self.tokens is not None:
            plain = plain.with_sizes(self._in_tokens)
        return plain.with_sizes(lambda runs: tuple(map(rows_by_channel, runs))) if self.by_channel else plain

    def _in_tokens(self, runs: Runs) -> Runs:
        return runs if self.tokens is None else tuple(rows * self.tokens for rows in runs)

    def launch(self, x: Tensor) -> tuple[Tensor, Any]:
        x = x if self.tokens is None else x.flatten(0, 1)
        runs = self._in_tokens(self.sent)
        encoded, lost = encode_by_channel(x, runs) if self.by_channel else encode_by_token(x)
        count_lost(self, lost)
        return self._bytes.launch(encoded)

    def finish(self, buffer: Tensor) -> Tensor:
        rows, wide = self._bytes.finish(buffer), _wide(self.out)
        runs = self._in_tokens(self.received)
        rows = decode_by_channel(rows, runs, wide) if self.by_channel else decode_by_token(rows, wide)
        rows = sum_in_order(rows.chunk(self.group.size)) if isinstance(self.plain, ReduceScatter) else rows
        return (rows if self.tokens is None else rows.view(-1, self.tokens, rows.shape[1])).to(self.out)

    def with_sizes(self, sizes: Callable[[Runs], Runs]) -> "Float8Rows":
        return replace(self, plain=self.plain.with_sizes(sizes))

    def reverse(self) -> "Float8Rows":
        return replace(self, plain=moving(self.plain.reverse()), by_channel=not self.by_channel)


def count_lost(collective: Collective, lost: Lost) -> None:
    """Count in its group's ledger what its rows lost."""
    purpose, _, _ = collective.name.partition(".")
    for kind, number in zip(("clipped", "flushed"), lost, strict=True):
        collective.group.ledger.lost(f"{purpose}.{kind}", number)


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

    def all_to_all(self, group: Group, purpose: str, send: Runs, receive: Runs) -> MovesRows:
        return self._rows(AllToAll(group, purpose, send, receive), self.format != "plain")

    def all_gather(self, group: Group, purpose: str, sizes: Runs) -> MovesRows:
        return self._rows(AllGather(group, purpose, sizes), self.format == "float8")

    def reduce_scatter(self, group: Group, purpose: str, sizes: Runs) -> MovesRows:
        return self._rows(ReduceScatter(group, purpose, sizes), self.format == "float8")

    def _rows(self, plain: MovesRows, narrow: bool) -> MovesRows:
        return Float8Rows(plain, self._wide) if narrow else plain
