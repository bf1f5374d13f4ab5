"""Parts of tensors as PyTorch's distributed checkpoints know them: boxes of whole tensors.

Every rank writes the parts that it is the first to hold and reads the boxes that it needs, so a checkpoint does not
know how many ranks wrote it.

`move` takes what is trained from one division of the experts among ranks to another, bit for bit. Both divisions are
boxes of whole tensors. All ranks learn who holds which boxes and who needs which. Then each tensor of the experts makes
one all-to-all: a rank sends, of the boxes that it is the first to hold, what others need. Everything else lies where it
lay and is copied. Rejected: a checkpoint, written and read again. It is the same move by way of the disk.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from antiphon.comm.collectives import AllGather, AllToAll, gather_sizes, run
from antiphon.comm.mesh import Group
from antiphon.train.device import HOST, host_copy
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.partition import Part
from antiphon.train.shards import Shards
from antiphon.train.weights import attribute_of, parts_of

BOX_BYTES = 256 << 20
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Boxes:
    """Parts of a whole tensor as PyTorch's checkpoints know them: offsets in it, and a view each. `written`: by this
    rank."""

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], Tensor]]
    written: bool

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.size()),
                    properties=TensorProperties.create_from_tensor(view),
                    size=self.size(),
                ),
            )
            for index, (offsets, view) in enumerate(self.boxes if self.written else [])
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.size()) for offsets, view in self.boxes]

    def written_ones(self) -> "Boxes":
        """What this rank writes of them, cut small: views."""
        boxes = self.boxes if self.written else []
        return replace(self, boxes=[part for offsets, view in boxes for part in _small(offsets, view)])

    def copy(self) -> "Boxes":
        """The same in host memory, as it is now: there once the device has settled."""
        return replace(self, boxes=[(offsets, host_copy(view)) for offsets, view in self.written_ones().boxes])

    def at(self, index: MetadataIndex) -> Tensor:
        return next(view for offsets, view in self.boxes if torch.Size(offsets) == index.offset)


def _small(offsets: Offsets, view: Tensor) -> Iterator[tuple[Offsets, Tensor]]:
    """A box in boxes of at most `BOX_BYTES`, or of a row: what is read of one is read with all of it."""
    step = max(1, BOX_BYTES * view.shape[0] // max(1, view.nbytes)) if view.ndim and view.shape[0] else 1
    for first in range(0, view.shape[0], step):
        yield (offsets[0] + first, *offsets[1:]), view[first : first + step]


class SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the boxes as they are; PyTorch's own replaces what is no tensor by None."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].at(index)
        return found


def boxes_of(model: MoeModel, shards: Shards, optimizer: Optimizer | None, step: int) -> dict[str, Any]:
    """Everything that is stored, by its name: parameters, the optimizer's moments, and what is not trained."""
    found: dict[str, Boxes] = {}

    def add(name: str, part: Part, flat: Tensor, start: int, written: bool) -> None:
        boxes = found.setdefault(name, Boxes(part.shape, [], written))
        boxes.boxes.extend(part.boxes(flat.detach(), start))

    for piece in shards.pieces:
        add(f"model.{piece.name}", piece.part, piece.values, piece.start, piece.counted)
    for key, piece, moment in () if optimizer is None else optimizer.moments(step):
        add(f"optimizer.{piece.name}.{key}", piece.part, moment, piece.start, piece.counted)
    for layer in model.layers:
        for purpose, part in parts_of(layer).items():
            tensor = getattr(layer, attribute_of(purpose))
            if not isinstance(tensor, nn.Parameter):
                written = model.mesh.replicas(part.axes).index == 0
                add(f"model.layers.{layer.layer}.{attribute_of(purpose)}", part, tensor.view(-1), 0, written)
    return found


Place = tuple[Offsets, Offsets]  # of a box: offsets and sizes
_EXPERTS = ".experts_"


@dataclass(frozen=True)
class _Common:
    """What box number `held` of one list and number `wanted` of another have in common: where it lies in either."""

    held: int
    wanted: int
    in_held: Offsets
    in_wanted: Offsets
    sizes: Offsets


def move(old: Mapping[str, Boxes], new: Mapping[str, Boxes], ranks: Group) -> None:
    """Fill the boxes of `new` from those of `old`, the same tensors in another division. All of `ranks` call it
    together; with shards (ZeRO), a rank may have no box of a tensor before or after."""
    held = _all_places({name: each.boxes if each.written else [] for name, each in old.items()}, ranks)
    wanted = _all_places({name: each.boxes for name, each in new.items()}, ranks)
    nothing = next(view for boxes in old.values() for _, view in boxes.boxes).new_empty(0)
    for name, boxes in new.items():
        if _EXPERTS not in name:
            for (_, target), (_, source) in zip(boxes.boxes, old[name].boxes, strict=True):
                target.copy_(source)
    for name in sorted({name for places in wanted for name in places}):
        sources, targets = ([view for _, view in of[name].boxes] if name in of else [] for of in (old, new))
        leaving = [_common(held[ranks.index].get(name, []), each.get(name, [])) for each in wanted]
        coming = [_common(each.get(name, []), wanted[ranks.index].get(name, [])) for each in held]
        sent = [_cut(sources[each.held], each.in_held, each.sizes) for to in leaving for each in to]
        filled = [_cut(targets[each.wanted], each.in_wanted, each.sizes) for of in coming for each in of]
        exchange = AllToAll(ranks, "packing", _counts(leaving), _counts(coming))
        came = run(exchange, torch.cat([nothing, *(part.flatten() for part in sent)]))
        for part, values in zip(filled, torch.split(came, [part.numel() for part in filled]), strict=True):
            part.copy_(values.view(part.shape))


def _counts(common: Sequence[Sequence[_Common]]) -> tuple[int, ...]:
    """Elements for each rank."""
    return tuple(sum(math.prod(each.sizes) for each in of_rank) for of_rank in common)


def _common(held: Sequence[Place], wanted: Sequence[Place]) -> list[_Common]:
    """What two ranks' lists have in common, in one order on both."""
    found = []
    for i, (mine, my_sizes) in enumerate(held):
        for j, (theirs, their_sizes) in enumerate(wanted):
            first = tuple(map(max, mine, theirs))
            sizes = _minus(tuple(map(min, _plus(mine, my_sizes), _plus(theirs, their_sizes))), first)
            if min(sizes) > 0:
                found.append(_Common(i, j, _minus(first, mine), _minus(first, theirs), sizes))
    return found


def _plus(first: Offsets, second: Offsets) -> Offsets:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _minus(first: Offsets, second: Offsets) -> Offsets:
    return tuple(a - b for a, b in zip(first, second, strict=True))


def _cut(view: Tensor, offsets: Offsets, sizes: Offsets) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, offset, size)
    return view


def _all_places(boxes: Mapping[str, Sequence[tuple[Offsets, Tensor]]], ranks: Group) -> list[dict[str, list[Place]]]:
    """The places of the experts' tensors, by rank and name."""
    of_experts = {name: each for name, each in boxes.items() if _EXPERTS in name}
    places = {name: [(offsets, tuple(view.shape)) for offsets, view in each] for name, each in of_experts.items()}
    own = torch.frombuffer(bytearray(json.dumps(places).encode()), dtype=torch.uint8).to(HOST)
    sizes = gather_sizes(ranks, own.shape[0], own.device)
    texts = torch.split(run(AllGather(ranks, "packing", sizes), own), list(sizes))
    return [json.loads(bytes(each.tolist())) for each in texts]
