"""Which part of each parameter a rank holds.

A part is a choice of index ranges in each dimension of the whole parameter; the local tensor is what they pick, put
together. Tensor parallelism takes the heads of attention and the width of experts, expert parallelism takes experts;
everything else is held in whole by all ranks of a stage. Where heads do not divide, attention is held in whole too, and
each rank multiplies only its heads: right, but without less memory.

Rejected: DTensor parameters. Its collectives hide what is sent, and gate and up, or q, k and v, of one stacked
parameter are several ranges, which it cannot say.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from antiphon.base.ranges import split_evenly
from antiphon.comm.mesh import Sizes
from antiphon.models.shares import Range, Ranges, head_ranges, pick
from antiphon.specs.model import ModelSpec


@dataclass(frozen=True)
class Part:
    """`shape` of the whole parameter; the `ranges` of each dimension that this rank holds. `axes`: of the mesh, along
    which other ranks hold other parts. `used`: of what is held, the ranges of dimension `used_dim` that this rank
    multiplies; empty: all."""

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    axes: frozenset[str] = frozenset()
    used: Ranges = ()
    used_dim: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole parameter's value."""
        for dim, ranges in enumerate(self.ranges):
            whole = pick(whole, dim, ranges)
        return whole

    def boxes(self, flat: Tensor, start: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """`flat` holds elements from number `start` of the flattened local tensor: the boxes of the whole parameter
        that they make up, each by its offsets and a view of `flat`."""
        for offsets, sizes in _flat_boxes(self.local_shape, start, start + flat.shape[0]):
            first = _flat_index(self.local_shape, offsets) - start
            view = flat[first : first + math.prod(sizes)].view(sizes)
            cuts = (_cut(*each) for each in zip(self.ranges, offsets, sizes, strict=True))
            for cut in itertools.product(*cuts):
                yield tuple(begin for begin, _ in cut), view[tuple(places for _, places in cut)]


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of boxes that are elements [start, stop) of a flattened tensor, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if start < first * row:  # the rest of a row, or all inside one
        yield from _in_row(shape, first - 1, start, min(stop, first * row))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last < stop / row:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    for offsets, sizes in _flat_boxes(shape[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *sizes)


def _flat_index(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    index = 0
    for size, offset in zip(shape, offsets, strict=True):
        index = index * size + offset
    return index


def _cut(ranges: Ranges, offset: int, size: int) -> list[tuple[int, slice]]:
    """Places [offset, offset + size) of a local dimension: where each of its runs begins in the whole one, and its
    slice of these places."""
    found, begin = [], 0
    for start, stop in ranges:
        first, last = max(begin, offset), min(begin + stop - start, offset + size)
        if first < last:
            found.append((start + first - begin, slice(first - offset, last - offset)))
        begin += stop - start
    return found


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank works on. `q_heads`, `kv_heads`: of its tensor rank; `heads_divide` False: KV heads do not divide,
    so every tensor rank has all of them, and holds attention in whole.
    `experts`: numbers; `width`: the columns of each expert; `adds_bias`: whether it adds the experts' second bias."""

    q_heads: Range
    kv_heads: Range
    heads_divide: bool
    experts: Range
    width: Range
    adds_bias: bool

    @staticmethod
    def of(spec: ModelSpec, sizes: Sizes, rank: int) -> "RankShare":
        attention, tensor, slice_ = spec.attention, sizes.place(rank, "tensor"), sizes.place(rank, "expert_tensor")
        q_heads = split_evenly(attention.num_heads, sizes.tensor)[tensor]
        divide = attention.num_kv_heads % sizes.tensor == 0
        kv_heads = split_evenly(attention.num_kv_heads, sizes.tensor)[tensor]
        return RankShare(
            q_heads=q_heads,
            kv_heads=kv_heads if divide else (0, attention.num_kv_heads),
            heads_divide=divide or attention.latent is not None,
            experts=split_evenly(spec.router.num_experts, sizes.expert)[sizes.place(rank, "expert")],
            width=split_evenly(spec.feed_forward.intermediate, sizes.expert_tensor)[slice_],
            adds_bias=slice_ == 0,
        )


def part_of(spec: ModelSpec, share: RankShare, purpose: str, shape: tuple[int, ...]) -> Part:
    """The part of parameter `purpose` that a rank with this share holds."""
    if purpose.startswith("experts."):
        return _of_experts(spec, share, purpose, shape)
    found = head_ranges(spec.attention, purpose, share.q_heads, (share.kv_heads,))
    whole = tuple(((0, size),) for size in shape)
    if found is None:
        return Part(shape, whole)
    dim, ranges = found
    if ranges == whole[dim]:
        return Part(shape, whole)
    if not share.heads_divide or purpose == "down":  # whose latent rows all ranks use: their gradients have to add up
        return Part(shape, whole, used=ranges, used_dim=dim)
    return Part(shape, (*whole[:dim], ranges, *whole[dim + 1 :]), frozenset({"tensor"}))


def _of_experts(spec: ModelSpec, share: RankShare, purpose: str, shape: tuple[int, ...]) -> Part:
    """[E, 2 * width, H] of gate and up, [E, H, width] of down, and their biases."""
    width, (first, last) = spec.feed_forward.intermediate, share.width
    ranges: list[Ranges] = [(share.experts,), *(((0, size),) for size in shape[1:])]
    axes = {"expert"}
    if last - first < width and purpose != "experts.down_bias":
        axes.add("expert_tensor")
        if purpose.startswith("experts.gate_up"):
            ranges[1] = ((first, last), (width + first, width + last))
        else:
            ranges[2] = ((first, last),)
    return Part(shape, tuple(ranges), frozenset(axes))
