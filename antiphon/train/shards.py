"""The model's parameters as the optimizer sees them: which elements this rank updates, from which summed gradient.

A loss is a sum over rows, divided by their number in the whole step, so gradients of ranks add up. Ranks that hold the
same part of a parameter (its replicas) may share the work and the memory behind it (ZeRO, Rajbhandari 2020):

    zero 0   every replica updates all of it                                   all-reduce of gradients
    zero 1   each updates a shard, and the shards are gathered                 reduce-scatter, all-gather
    zero 2   gradients too are kept in shards: summed behind each layer        the same, once a pass
    zero 3   parameters too: gathered before a layer, forward and backward     two all-gathers, once a pass

From 1 on, parameters of a module lie end to end in one tensor, a bucket, which is cut into shards. Parameters are
gathered in the format of the arithmetic (`train.bucket`). A `Piece` is what
this rank updates of one parameter. Each element counts once in the norm, whichever ranks hold copies of it: the classic
mistake is to take experts, which differ between ranks, for copies.

Rejected: FSDP2. It wants DTensor parameters, one mesh for all parameters of a module, and hides what it sends.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.replicas import ReplicaGroups, Replicas
from antiphon.train.bucket import Bucket, MatricesOf, Parameter, Piece
from antiphon.train.config_tables import CommunicationConfig
from antiphon.train.layer import MoeLayer, around
from antiphon.train.model import MoeModel
from antiphon.train.weights import PRODUCT_WEIGHTS, READ_WIDE, attribute_of, parts_of


class Shards:
    """All parameters of `model`. `matrices` says of a purpose and a local shape what is to be updated as matrices,
    which are never cut between shards; empty: nothing. Made by all ranks together.

    From zero 2 on, the model's layers do their part in forward and backward by themselves; what belongs to no layer is
    gathered by `begin_step` and summed by `reduce`. With a mesh that has a launcher, sums run beside backward: layers
    begin theirs behind their last backward of a step, final norm and head before the last layer's, and `reduce` waits
    for all."""

    def __init__(
        self,
        model: MoeModel,
        zero: int = 0,
        matrices: MatricesOf = lambda purpose, shape: (),
        communication: CommunicationConfig = CommunicationConfig(),
    ) -> None:
        self._world = model.mesh.world
        self._device = model.device
        self._zero = zero
        self._is_last_pass = False
        replicas = ReplicaGroups(
            model.mesh,
            node_size=communication.ranks_per_node(self._world.size),
            narrow=communication.gradients == "bfloat16",
            chunks=communication.level_chunks,
        )
        make = partial(_buckets, model=model, replicas=replicas, zero=zero, matrices=matrices)
        self._outer = make(model, "")
        self._layers = [make(layer, f"layers.{layer.layer}.") for layer in model.layers]
        self._buckets = [*self._outer, *itertools.chain.from_iterable(self._layers)]
        if zero >= 2 or model.mesh.launcher is not None:
            for layer, buckets in zip(model.layers, self._layers, strict=True):
                _attach(layer, buckets, lambda: zero >= 2 or self._is_last_pass, gathered=zero == 3)
        if model.mesh.launcher is not None and model.spec.num_layers - 1 in model.layers:
            early = [bucket for bucket in self._outer if bucket.is_of_loss]
            last = model.layers[model.spec.num_layers - 1]  # what is behind it is summed before its backward begins
            around(last, before_backward=partial(_reduce, early, lambda: self._is_last_pass))

    @property
    def pieces(self) -> list[Piece]:
        return [piece for bucket in self._buckets for piece in bucket.pieces]

    def begin_step(self) -> None:
        """Call it before the first pass of a step, or of an evaluation."""
        if self._zero == 3:
            for bucket in self._outer:
                bucket.gather()

    def before_pass(self, *, is_last: bool) -> None:
        """Call it before a backward; `is_last`: of this step, for these layers."""
        self._is_last_pass = is_last

    def end_step(self) -> None:
        """Call it after the pieces were updated, or after an evaluation: parameters become the pieces' values."""
        for bucket in self._outer if self._zero == 3 else self._buckets:
            bucket.release() if self._zero == 3 else bucket.gather()

    def reduce(self) -> None:
        """After the last pass of a step: every piece has its gradient. Waits for the replicas."""
        self._is_last_pass = False
        for bucket in self._outer if self._zero >= 2 else self._buckets:
            if not bucket.is_begun:
                bucket.reduce()
        for bucket in self._buckets:
            bucket.finish()

    def norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, in float32 at least, after `reduce`. Waits for all ranks."""
        gradients = [piece.values.grad for piece in self.pieces if piece.counted and piece.values.grad is not None]
        squares = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)).square()
            for each in gradients
        ]
        if self._world.size == 1:
            return torch.stack(squares).sum().sqrt()
        mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float32, device=self._device)
        return run(AllReduce(self._world, "norm"), mine.double().view(1)).sqrt().squeeze(0)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients."""
        for piece in self.pieces:
            if piece.values.grad is not None:
                piece.values.grad.mul_(factor.to(piece.values.dtype))

    def zero_grad(self) -> None:
        for bucket in self._buckets:
            bucket.finish()
        for piece in self.pieces:
            piece.values.grad = None


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """The factor that brings gradients of this norm to `limit`; None: there is no limit (0), or, on CPUs, the norm is
    within it."""
    if not limit:
        return None
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return None if factor.is_cpu and float(factor) == 1.0 else factor


def _buckets(
    module: nn.Module,
    where: str,
    model: MoeModel,
    replicas: ReplicaGroups,
    zero: int,
    matrices: MatricesOf,
) -> list[Bucket]:
    """The buckets of one module: a bucket for each group of replicas; matrices apart, and those of which other ranks
    hold parts apart again, so that these ranks cut their shards alike. The embedding, whose gradient comes last, is
    apart from the head, whose gradient comes first: a chunk of a sum never waits for its other half. The router, which
    is read in float32 at least, is apart from what is read in the model's own type, and so are weights of products in
    FP8."""
    found: dict[tuple[int, bool, bool, bool, bool, bool], tuple[Replicas, list[Parameter]]] = {}
    multiplied = PRODUCT_WEIGHTS if isinstance(module, MoeLayer) and module.products.kind != "plain" else ()
    for purpose, part in parts_of(module).items():
        tensor = getattr(module, attribute_of(purpose))
        if isinstance(tensor, nn.Parameter):
            is_narrow = model.dtype.itemsize < tensor.dtype.itemsize
            tied = purpose == "embedding" and model.spec.tie_embeddings  # held by the first and by the last stage
            group = model.mesh.ends if tied else model.mesh.replicas(part.axes)
            taken = matrices(purpose, tuple(tensor.shape))
            key = (
                id(group),
                bool(taken),
                bool(part.axes),
                purpose == "embedding",
                is_narrow and purpose in READ_WIDE,
                purpose in multiplied,
            )
            parameter = Parameter(where + attribute_of(purpose), purpose, tensor, part, taken)
            found.setdefault(key, (replicas.of(group), []))[1].append(parameter)
    buckets = []
    for (*_, is_wide, in_float8), (alike, parameters) in found.items():
        stored = parameters[0].tensor.dtype
        kept = stored if is_wide or model.dtype.itemsize >= stored.itemsize else model.dtype
        buckets.append(Bucket(parameters, alike, zero, model.mesh.launcher, kept, in_float8=in_float8))
    return buckets


def _attach(layer: MoeLayer, buckets: Sequence[Bucket], is_due: Callable[[], bool], *, gathered: bool) -> None:
    """Sum the layer's gradients as soon as its backward is done, if that `is_due`; if `gathered`, its parameters are
    there while the layer runs, forward and backward, and not between."""

    def gather() -> None:
        for bucket in buckets:
            bucket.gather()

    def release() -> None:
        for bucket in buckets:
            bucket.release()

    summed = partial(_reduce, buckets, is_due)
    if gathered:
        around(layer, before=gather, behind=release, before_backward=gather, behind_backward=summed)
    else:
        around(layer, behind_backward=summed)


def _reduce(buckets: Sequence[Bucket], is_due: Callable[[], bool]) -> None:
    for bucket in buckets if is_due() else ():
        bucket.reduce()
        bucket.release()
