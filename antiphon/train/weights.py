"""The parameters of a trainable model: which there are, which part of each a rank holds, their first values, their use.

A parameter is what serving calls a purpose (`models/tensors`): several tensors of a checkpoint may be stacked in it.
So a family is described once, and a checkpoint is read and written by one plan.

A part is a choice of index ranges in each dimension of the whole parameter; the local tensor is what they pick, put
together. Tensor parallelism takes the heads of attention and the width of experts, expert parallelism takes experts;
everything else is held in whole by all ranks of a stage. Where heads do not divide, attention is held in whole too, and
each rank multiplies only its heads: right, but without less memory. Rejected: DTensor parameters. Its collectives hide
what is sent, and gate and up, or q, k and v, of one stacked parameter are several ranges, which it cannot say.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.mesh import Sizes
from antiphon.kernels.ops.products import Products
from antiphon.models.config import tensor_names
from antiphon.models.shares import Range, Ranges, head_ranges, pick
from antiphon.models.tensors import LoadPlan, NoCheckpoint, attention_layer_plan, outer_plan
from antiphon.specs.model import ModelSpec
from antiphon.train.device import HOST, SHAPES_ONLY, moved

GATE_UP, DOWN = "experts.gate_up", "experts.down"
Shape = tuple[int, ...]
PRODUCT_WEIGHTS = ("qkv", "down", "out", "dense.gate_up", "dense.down", "shared.gate_up", "shared.down", GATE_UP, DOWN)
READ_WIDE = ("router", "router_bias")  # in float32 whatever the arithmetic
NOT_TRAINED = "score_bias"  # steers the choice of experts; no gradient reaches it


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its purpose in the model, its whole shape, and how it begins."""

    purpose: str
    shape: tuple[int, ...]
    begins: str  # "normal", "ones" or "zeros"

    @property
    def attribute(self) -> str:
        """Its name in a module, where a dot would mean a module of its own."""
        return attribute_of(self.purpose)


def attribute_of(purpose: str) -> str:
    """A parameter's name in its module."""
    return purpose.replace(".", "_")


def outer_parameters(spec: ModelSpec) -> list[ParameterSpec]:
    """Embedding, final norm and head."""
    return list(_of_plan(outer_plan(spec, tensor_names(spec))))


def layer_parameters(spec: ModelSpec, layer: int) -> list[ParameterSpec]:
    """All of one layer, its routed experts last."""
    found = list(_of_plan(attention_layer_plan(spec, tensor_names(spec), layer, NoCheckpoint())))
    if spec.moe_layers[layer]:
        experts, hidden, width = spec.router.num_experts, spec.hidden_size, spec.feed_forward.intermediate
        found.append(ParameterSpec(GATE_UP, (experts, 2 * width, hidden), "normal"))
        found.append(ParameterSpec(DOWN, (experts, hidden, width), "normal"))
        if spec.feed_forward.expert_bias:
            found.append(ParameterSpec(GATE_UP + "_bias", (experts, 2 * width), "zeros"))
            found.append(ParameterSpec(DOWN + "_bias", (experts, hidden), "zeros"))
    return found


def _of_plan(plan: LoadPlan) -> Iterator[ParameterSpec]:
    for purpose, refs in plan.items():
        rows = sum(ref.shape[0] for ref in refs)
        shape = (rows, *refs[0].shape[1:])
        if purpose == "kv_up" or len(shape) > 1:
            begins = "normal"
        elif purpose.endswith("norm"):
            begins = "ones"
        else:
            begins = "zeros"
        yield ParameterSpec(purpose, shape, begins)


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
            first = int(np.ravel_multi_index(offsets, self.local_shape)) - start
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


def register(
    module: nn.Module,
    specs: list[ParameterSpec],
    where: str,
    first: "FirstValues",
    part_of: Callable[[str, Shape], Part],
) -> None:
    """Give `module` this rank's parts of these parameters, in float32, and `module.parts`, by purpose."""
    parts: dict[str, Part] = {}
    for each in specs:
        part = parts[each.purpose] = part_of(each.purpose, each.shape)
        value = first.of(each, f"{where}.{each.purpose}", part)
        if each.purpose == NOT_TRAINED:
            module.register_buffer(each.attribute, value)
        else:
            module.register_parameter(each.attribute, nn.Parameter(value))
    module.parts = parts  # type: ignore[assignment]


@dataclass(frozen=True)
class FirstValues:
    """First values that depend on seed and name alone: matrices are normal with deviation `std`. Each expert draws by
    itself, so that a rank draws only its own. They are drawn in host memory, so that every `device` begins with the
    same bits; without memory (`SHAPES_ONLY`), they have shapes alone."""

    seed: int = 0
    std: float = 0.02
    device: torch.device = HOST

    def of(self, spec: ParameterSpec, name: str, part: Part) -> Tensor:
        """The value of this part."""
        if self.device == SHAPES_ONLY:
            return torch.empty(part.local_shape, device=self.device)
        return moved(self._drawn(spec, name, part), self.device)

    def _drawn(self, spec: ParameterSpec, name: str, part: Part) -> Tensor:
        if spec.begins != "normal":
            number = 1.0 if spec.begins == "ones" else 0.0
            return torch.full(part.local_shape, number, device=HOST)
        if not spec.purpose.startswith("experts."):
            return part.of(self._normal(spec.shape, name)).contiguous()
        experts = [expert for start, stop in part.ranges[0] for expert in range(start, stop)]
        value = torch.empty(part.local_shape, device=HOST)
        for place, expert in enumerate(experts):
            one = self._normal(spec.shape[1:], f"{name}.{expert}")
            value[place] = Part(spec.shape[1:], part.ranges[1:]).of(one)
        return value

    def _normal(self, shape: Shape, name: str) -> Tensor:
        return torch.empty(shape, device=HOST).normal_(std=self.std, generator=_generator(name, self.seed))


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def parts_of(module: nn.Module) -> dict[str, Part]:
    """What this rank holds of the parameters that `register` gave `module`, by purpose."""
    parts = module.parts
    assert isinstance(parts, dict)
    return parts


class Weights:
    """`weights["qkv"]` is what this rank uses of that parameter of `module`, as `dtype`; gradients reach the parameter
    itself."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self.dtype = dtype

    def __getitem__(self, purpose: str) -> Tensor:
        part = parts_of(self._module)[purpose]
        value = self.stored(purpose).to(self.dtype)
        return pick(value, part.used_dim, part.used) if part.used else value

    def whole(self, purpose: str) -> nn.Parameter | None:
        """The parameter itself where ``self[purpose]`` is all of it; its gradient is then that of
        ``self[purpose]``, in the parameter's type. Else None."""
        found = self.stored(purpose)
        return found if isinstance(found, nn.Parameter) and not parts_of(self._module)[purpose].used else None

    def stored(self, purpose: str) -> Tensor:
        """The parameter as it is kept, in float32 or wider."""
        found = getattr(self._module, attribute_of(purpose))
        assert isinstance(found, Tensor)
        return found

    def optional(self, purpose: str) -> Tensor | None:
        """None where the model has no such part."""
        return self[purpose] if hasattr(self._module, attribute_of(purpose)) else None


class Recorder(Weights):
    """Notes which parameters are asked for, so that their gradients can be asked for in turn. `products`: how rows are
    multiplied by them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, products: Products) -> None:
        super().__init__(module, dtype)
        self.products = products
        self._asked: dict[str, nn.Parameter] = {}
        self._places: set[int] = set()

    def __getitem__(self, purpose: str) -> Tensor:
        value = super().__getitem__(purpose)
        self._places.add(value.untyped_storage().data_ptr())
        return value

    def stored(self, purpose: str) -> Tensor:
        found = super().stored(purpose)
        self._places.add(found.untyped_storage().data_ptr())
        if isinstance(found, nn.Parameter):
            self._asked[purpose] = found
        return found

    def take(self) -> tuple[list[nn.Parameter], set[int]]:
        """The parameters asked for since this was called last, and where in memory lies what was given for them."""
        asked, places = list(self._asked.values()), self._places
        self._asked, self._places = {}, set()
        return asked, places

    def parameters(self) -> list[nn.Parameter]:
        """All of the module."""
        return list(self._module.parameters(recurse=False))
