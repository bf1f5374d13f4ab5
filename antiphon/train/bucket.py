"""Parameters that several ranks hold alike, end to end in one tensor, cut into shards: a `Bucket`; and the `Piece`s of
them that this rank updates.

What is cut into shards is kept twice where the arithmetic is narrower than float32 (MegaScale-MoE's multi-precision
optimizer, section 7): the shard, which the optimizer moves, in float32; the whole, which products read, in the format
of the arithmetic. So the parameters are gathered in that format, and no copy of them is made for a product. Weights of
products in FP8 are gathered as E4M3, a quarter of float32; a processor that cannot multiply these keeps the numbers in
the format of the arithmetic. Gradients are added up in the shard's format all the same (`Tensor.grad_dtype`).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.comm.collectives import Pending, part_bounds
from antiphon.comm.float8 import bytes_of_numbers, decode_numbers, encode_numbers
from antiphon.comm.launcher import CollectiveLauncher, Submission
from antiphon.comm.replicas import Replicas
from antiphon.train.weights import Part


@dataclass(frozen=True)
class Matrices:
    """`count` matrices [rows, columns], one after the other in memory."""

    count: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.count * self.rows * self.columns


ALONE_BYTES = 1 << 20  # a gradient as large is summed where it lies; smaller ones are copied together
MatricesOf = Callable[[str, tuple[int, ...]], tuple[Matrices, ...]]


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements of one parameter that this rank updates: `values`, flat, with the summed gradient in `values.grad`, from
    element `start` of the parameter's local tensor. `counted`: here, not on another replica, for norm and checkpoint.
    `matrices`: what the elements are; None where they are not taken as matrices."""

    name: str
    purpose: str
    part: Part
    start: int
    values: Tensor
    counted: bool
    matrices: Matrices | None = None


@dataclass(frozen=True, eq=False)
class Parameter:
    """This rank's part of a parameter, which as a whole belongs to one module."""

    name: str
    purpose: str
    tensor: nn.Parameter
    part: Part
    matrices: tuple[Matrices, ...]

    def blocks(self) -> Iterator[tuple[int, Matrices | None]]:
        """(elements, matrices) in the order of memory."""
        if not self.matrices:
            yield self.tensor.numel(), None
        yield from ((each.size, each) for each in self.matrices)


class Bucket:
    """Parameters of one module that all `replicas` hold; `zero` as in `train.shards`. `launcher`: sums gradients beside
    other work, if there is one. `kept`: the type of whole parameters between their shards' updates; `in_float8`: they
    are gathered as E4M3, and kept are those numbers. `is_begun`: whether
    gradients were reduced since `finish` was called."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        replicas: Replicas,
        zero: int,
        launcher: CollectiveLauncher | None,
        kept: torch.dtype,
        *,
        in_float8: bool = False,
    ) -> None:
        self._parameters = parameters
        self._replicas = replicas
        self._zero = zero if replicas.size > 1 else 0
        self._launcher = launcher if replicas.size > 1 else None
        self._submissions: list[Submission] = []
        self._sums: list[tuple[list[int], Pending]] = []  # of parameters with these places
        self._in_float8 = in_float8
        self._summed = parameters[0].tensor.dtype  # of gradients
        self.is_begun = False
        if self._zero:
            self._sizes = _shard_sizes(parameters, replicas.size)
            first = sum(self._sizes[: replicas.place])
            self._own = first, first + self._sizes[replicas.place]
            whole = parameters[0].tensor.data.new_zeros(sum(self._sizes))
            torch.cat([each.tensor.data.flatten() for each in parameters], out=whole[: _numel(parameters)])
            self._values = whole.to(kept)
            self._num_bytes = self._values.untyped_storage().nbytes()
            shard = whole[slice(*self._own)]
            is_apart = self._zero == 3 or kept != whole.dtype or in_float8
            self._shard = shard.clone() if is_apart else shard
            self._lay_out()
            self.pieces = list(self._cut(self._shard))
            self.release()
        else:
            self.pieces = list(self._whole())

    @property
    def is_of_loss(self) -> bool:
        """Whether it holds what stands behind the last layer, and so gets its gradients first."""
        return any(each.purpose in ("final_norm", "final_norm_bias", "head", "head_bias") for each in self._parameters)

    def _lay_out(self) -> None:
        begin = 0
        for each in self._parameters:
            each.tensor.data = self._values[begin : begin + each.tensor.numel()].view(each.tensor.shape)
            each.tensor.grad_dtype = self._shard.dtype
            begin += each.tensor.numel()

    def _whole(self) -> Iterator[Piece]:
        for each in self._parameters:
            flat, begin = each.tensor.data.view(-1), 0
            for size, matrices in each.blocks():
                values = flat[begin : begin + size].requires_grad_()
                counted = self._replicas.group.index == 0
                yield Piece(each.name, each.purpose, each.part, begin, values, counted, matrices)
                begin += size

    def _cut(self, shard: Tensor) -> Iterator[Piece]:
        """Each parameter's blocks as far as they lie in the shard; whole matrices by `_shard_sizes`."""
        begin = 0
        for each in self._parameters:
            offset = 0
            for size, matrices in each.blocks():
                first, last = max(begin, self._own[0]), min(begin + size, self._own[1])
                if first < last:
                    values = shard[first - self._own[0] : last - self._own[0]].requires_grad_()
                    if matrices is not None:
                        count = (last - first) // (matrices.rows * matrices.columns)
                        matrices = Matrices(count, matrices.rows, matrices.columns)
                    yield Piece(each.name, each.purpose, each.part, offset + first - begin, values, True, matrices)
                begin, offset = begin + size, offset + size

    def reduce(self) -> None:
        """Add the gradients of this rank's parameters, summed over replicas, to those of its pieces. A parameter that
        was not used counts zeros. With a launcher this only begins: `finish` waits."""
        self.is_begun = True
        gradients = [_gradient(each.tensor, self._summed).flatten() for each in self._parameters]
        for each in self._parameters:
            each.tensor.grad = None
        if self._replicas.size == 1:
            blocks = (_blocks(each, flat) for each, flat in zip(self._parameters, gradients, strict=True))
            self._add([part for parts in blocks for part in parts])
            return
        if not self._zero and self._launcher is None:
            self._start_sums(gradients)
            return
        if self._zero:
            padding = sum(self._sizes) - sum(each.shape[0] for each in gradients)
            gradients.append(gradients[0].new_zeros(padding))
        flat = torch.cat(gradients)
        if self._launcher is None:
            self._add(_split(self._sum(flat), self.pieces))
        else:
            self._submissions.append(self._begin(self._launcher, flat))

    def _start_sums(self, gradients: Sequence[Tensor]) -> None:
        """Begins the sums of whole parameters; `finish` waits."""
        is_alone = [
            self._replicas.sums_at_once and each.numel() * each.element_size() >= ALONE_BYTES for each in gradients
        ]
        together = [place for place, alone in enumerate(is_alone) if not alone]
        sets = [[place] for place, alone in enumerate(is_alone) if alone] + ([together] if together else [])
        for places in sets:
            flat = gradients[places[0]] if len(places) == 1 else torch.cat([gradients[place] for place in places])
            self._sums.append((places, self._replicas.start_sum(flat)))

    def _finish_sums(self) -> None:
        summed: dict[int, Tensor] = {}
        for places, under_way in self._sums:
            sizes = [self._parameters[place].tensor.numel() for place in places]
            summed |= zip(places, torch.split(under_way.wait(), sizes), strict=True)
        self._sums.clear()
        blocks = (_blocks(each, summed[place]) for place, each in enumerate(self._parameters))
        self._add([part for parts in blocks for part in parts])

    def finish(self) -> None:
        """Wait until every sum that was begun is in the pieces' gradients."""
        if self._sums:
            self._finish_sums()
        began_s = time.perf_counter()
        for submission in self._submissions:
            with self._replicas.group.waiting(f"the gradients of {submission.name}"):
                submission.wait()
        if self._submissions:
            self._replicas.group.ledger.waited("gradients.sums", time.perf_counter() - began_s)
        self._submissions.clear()
        self.is_begun = False

    def _begin(self, launcher: CollectiveLauncher, flat: Tensor) -> Submission:
        """The sum in chunks, each of which has its part of every shard."""
        shards = torch.split(flat, list(self._sizes)) if self._zero else (flat,)
        found: list[Tensor] = []

        def sum_piece(number: int, num_pieces: int) -> None:
            parts = [each[slice(*part_bounds(each.shape[0], number, num_pieces))] for each in shards]
            if any(part.shape[0] for part in parts):
                found.append(self._sum(torch.cat(parts), [part.shape[0] for part in parts]))
            if number == num_pieces - 1:
                self._add(_split(torch.cat(found), self.pieces))

        return launcher.all_reduce(self._parameters[0].name, flat.numel() * flat.element_size(), sum_piece)

    def _sum(self, flat: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The sum over all replicas; of shards of `sizes`, this rank's. `flat` is used up."""
        if not self._zero:
            return self._replicas.sum(flat)
        return self._replicas.sum_shard(flat, self._sizes if sizes is None else sizes)

    def _add(self, parts: Sequence[Tensor]) -> None:
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.values.grad = part if piece.values.grad is None else piece.values.grad.add_(part)

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters whole from the replicas' shards."""
        if not self._zero:
            return
        storage = self._values.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._num_bytes)
        shard = self._shard.detach()
        if self._in_float8:
            sizes = [bytes_of_numbers(size) for size in self._sizes]
            whole = self._replicas.gather(encode_numbers(shard), sizes)
            self._values.copy_(decode_numbers(whole, self._sizes, self._values.dtype))
        else:
            self._values.copy_(self._replicas.gather(shard.to(self._values.dtype), self._sizes))

    def release(self) -> None:
        """Give back the memory of parameters that are kept in shards; until `gather` they may not be used."""
        if self._zero == 3:
            self._values.untyped_storage().resize_(0)


def _shard_sizes(parameters: Sequence[Parameter], ranks: int) -> tuple[int, ...]:
    """Elements of each rank's shard: equal, the last one padded; whole matrices if there are any, as evenly as they
    come."""
    sizes = [each.rows * each.columns for of in parameters for each in of.matrices for _ in range(each.count)]
    if not sizes:
        return (-(-_numel(parameters) // ranks),) * ranks
    ends = [0, *itertools.accumulate(sizes)]
    cuts = [min(ends, key=lambda end: abs(end * ranks - rank * ends[-1])) for rank in range(ranks + 1)]
    return tuple(last - first for first, last in itertools.pairwise(cuts))


def _split(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    sizes = [piece.values.shape[0] for piece in pieces]
    return list(torch.split(flat[: sum(sizes)], sizes)) if sizes else []


def _blocks(parameter: Parameter, flat: Tensor) -> list[Tensor]:
    return list(torch.split(flat, [size for size, _ in parameter.blocks()]))


def _gradient(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(each.tensor.numel() for each in parameters)
