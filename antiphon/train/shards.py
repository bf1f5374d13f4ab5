"""The model's parameters as the optimizer sees them: which elements this rank updates, from which summed gradient.

A loss is a sum over rows, divided by their number in the whole step, so gradients of ranks add up. Ranks that hold the
same part of a parameter (its replicas) may share the work and the memory behind it (ZeRO, Rajbhandari 2020):

    zero 0   every replica updates all of it                                   all-reduce of gradients
    zero 1   each updates a shard, and the shards are gathered                 reduce-scatter, all-gather
    zero 2   gradients too are kept in shards: summed behind each layer        the same, once a pass
    zero 3   parameters too: gathered before a layer, forward and backward     two all-gathers, once a pass

From 1 on, parameters of a module lie end to end in one tensor, a bucket, which is cut into shards. A `Piece` is what
this rank updates of one parameter. Each element counts once in the norm, whichever ranks hold copies of it: the classic
mistake is to take experts, which differ between ranks, for copies.

Rejected: FSDP2. It wants DTensor parameters, one mesh for all parameters of a module, and hides what it sends.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.comm.collectives import AllGather, AllReduce, ReduceScatter, run
from antiphon.comm.mesh import Group
from antiphon.train.model import MoeModel
from antiphon.train.partition import Part
from antiphon.train.weights import attribute_of, parts_of


@dataclass(frozen=True)
class Matrices:
    """`count` matrices [rows, columns], one after the other in memory."""

    count: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.count * self.rows * self.columns


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
class _Parameter:
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
    """Parameters of one module that the ranks of `group` all hold; `zero` as in the module's text."""

    def __init__(self, parameters: Sequence[_Parameter], group: Group, zero: int) -> None:
        self._parameters = parameters
        self._group = group
        self._zero = zero if group.size > 1 else 0
        if self._zero:
            self._sizes = _shard_sizes(parameters, group.size)
            self._values = torch.zeros(sum(self._sizes), dtype=parameters[0].tensor.dtype)
            self._num_bytes = self._values.untyped_storage().nbytes()
            first = sum(self._sizes[: group.index])
            self._own = first, first + self._sizes[group.index]
            self._lay_out()
            shard = self._values[slice(*self._own)]
            self._shard = shard.clone() if self._zero == 3 else shard
            self.pieces = list(self._cut(self._shard))
            self.release()
        else:
            self.pieces = list(self._whole())

    def _lay_out(self) -> None:
        begin = 0
        for each in self._parameters:
            view = self._values[begin : begin + each.tensor.numel()].view(each.tensor.shape)
            each.tensor.data = view.copy_(each.tensor.data)
            begin += each.tensor.numel()

    def _whole(self) -> Iterator[Piece]:
        for each in self._parameters:
            flat, begin = each.tensor.data.view(-1), 0
            for size, matrices in each.blocks():
                values = flat[begin : begin + size].requires_grad_()
                counted = self._group.index == 0
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
        was not used counts zeros."""
        gradients = [_gradient(each.tensor).flatten() for each in self._parameters]
        for each in self._parameters:
            each.tensor.grad = None
        if self._zero:
            padding = sum(self._sizes) - sum(each.shape[0] for each in gradients)
            flat = torch.cat([*gradients, gradients[0].new_zeros(padding)])
            parts = _split(run(ReduceScatter(self._group, "gradients", self._sizes), flat), self.pieces)
        elif self._group.size > 1:
            parts = _split(run(AllReduce(self._group, "gradients"), torch.cat(gradients)), self.pieces)
        else:
            parts = [
                part for each, flat in zip(self._parameters, gradients, strict=True) for part in _blocks(each, flat)
            ]
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
        self._values.copy_(run(AllGather(self._group, "parameters", self._sizes), self._shard.detach()))

    def release(self) -> None:
        """Give back the memory of parameters that are kept in shards; until `gather` nobody may use them."""
        if self._zero == 3:
            self._values.untyped_storage().resize_(0)


class Shards:
    """All parameters of `model`. `matrices` says of a purpose and a local shape what is to be updated as matrices,
    which are never cut between shards; empty: nothing.

    From zero 2 on, the model's layers do their part in forward and backward by themselves; what belongs to no layer is
    gathered by `begin_step` and summed by `reduce`."""

    def __init__(
        self,
        model: MoeModel,
        zero: int = 0,
        matrices: MatricesOf = lambda purpose, shape: (),
    ) -> None:
        self._world = model.mesh.world
        self._zero = zero
        self._outer = _buckets(model, "", model, zero, matrices)
        self._layers = [_buckets(layer, f"layers.{layer.layer}.", model, zero, matrices) for layer in model.layers]
        self._buckets = [*self._outer, *itertools.chain.from_iterable(self._layers)]
        if zero >= 2:
            for layer, buckets in zip(model.layers, self._layers, strict=True):
                _attach(layer, buckets, gathered=zero == 3)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for bucket in self._buckets for piece in bucket.pieces]

    def begin_step(self) -> None:
        """To be called before the first pass of a step, or of an evaluation."""
        if self._zero == 3:
            for bucket in self._outer:
                bucket.gather()

    def end_step(self) -> None:
        """To be called after the pieces were updated, or after an evaluation: parameters are the pieces' values."""
        for bucket in self._outer if self._zero == 3 else self._buckets:
            bucket.release() if self._zero == 3 else bucket.gather()

    def reduce(self) -> None:
        """After the last pass of a step: every piece has its gradient. Waits for the replicas."""
        for bucket in self._outer if self._zero >= 2 else self._buckets:
            bucket.reduce()

    def norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, in float32 at least, after `reduce`. Waits for all ranks."""
        gradients = [piece.values.grad for piece in self.pieces if piece.counted and piece.values.grad is not None]
        squares = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)).square()
            for each in gradients
        ]
        if self._world.size == 1:
            return torch.stack(squares).sum().sqrt()
        mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float32)
        return run(AllReduce(self._world, "norm"), mine.double().view(1)).sqrt().squeeze(0)

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scale all gradients so that their norm is at most `limit`; 0 means no limit."""
        if not limit:
            return
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for piece in self.pieces:
            if piece.values.grad is not None:
                piece.values.grad.mul_(scale.to(piece.values.dtype))

    def zero_grad(self) -> None:
        for piece in self.pieces:
            piece.values.grad = None


def _buckets(
    module: nn.Module,
    where: str,
    model: MoeModel,
    zero: int,
    matrices: MatricesOf,
) -> list[Bucket]:
    """Of one module: a bucket for each group of replicas; matrices apart, and those of which other ranks hold parts
    apart again, so that these ranks cut their shards alike."""
    found: dict[tuple[int, bool, bool], tuple[Group, list[_Parameter]]] = {}
    for purpose, part in parts_of(module).items():
        tensor = getattr(module, attribute_of(purpose))
        if isinstance(tensor, nn.Parameter):
            tied = purpose == "embedding" and model.spec.tie_embeddings  # held by the first and by the last stage
            group = model.mesh.ends if tied else model.mesh.replicas(part.axes)
            taken = matrices(purpose, tuple(tensor.shape))
            key = id(group), bool(taken), bool(part.axes)
            parameter = _Parameter(where + attribute_of(purpose), purpose, tensor, part, taken)
            found.setdefault(key, (group, []))[1].append(parameter)
    return [Bucket(parameters, group, zero) for group, parameters in found.values()]


def _shard_sizes(parameters: Sequence[_Parameter], ranks: int) -> tuple[int, ...]:
    """Elements of each rank's shard: equal, the last one padded; whole matrices if there are any, as evenly as they
    come."""
    sizes = [each.rows * each.columns for of in parameters for each in of.matrices for _ in range(each.count)]
    if not sizes:
        return (-(-sum(each.tensor.numel() for each in parameters) // ranks),) * ranks
    ends = [0, *itertools.accumulate(sizes)]
    cuts = [min(ends, key=lambda end: abs(end * ranks - rank * ends[-1])) for rank in range(ranks + 1)]
    return tuple(last - first for first, last in itertools.pairwise(cuts))


def _split(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    sizes = [piece.values.shape[0] for piece in pieces]
    return list(torch.split(flat[: sum(sizes)], sizes)) if sizes else []


def _blocks(parameter: _Parameter, flat: Tensor) -> list[Tensor]:
    return list(torch.split(flat, [size for size, _ in parameter.blocks()]))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _attach(layer: nn.Module, buckets: Sequence[Bucket], *, gathered: bool) -> None:
    """Sum the layer's gradients as soon as its backward is done; if `gathered`, its parameters are there while the
    layer runs, forward and backward, and not between.

    Backward runs in the opposite order of forward, and a parameter's gradient is added as soon as it is known. So a
    node at the layer's end comes before all of the layer's, one at its begin after all of them."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for bucket in buckets if gathered else ():
            bucket.gather()
        return (_AtBegin.apply(args[0], buckets), *args[1:])  # type: ignore[no-untyped-call]

    def behind(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if not gathered:
            return out
        for bucket in buckets:
            bucket.release()
        found: Tensor = _AtEnd.apply(out, buckets)  # type: ignore[no-untyped-call]
        return found

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(behind)


class _AtBegin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        ctx.buckets = buckets
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for bucket in ctx.buckets:
            bucket.reduce()
            bucket.release()
        return grad, None


class _AtEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buckets: Sequence[Bucket]) -> Tensor:
        ctx.buckets = buckets
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for bucket in ctx.buckets:
            bucket.gather()
        return grad, None
