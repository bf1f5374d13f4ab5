"""Parts of tensors as PyTorch's distributed checkpoints know them: boxes of whole tensors.

Every rank writes the parts that it is the first to hold and reads the boxes that it needs, so a checkpoint does not
know how many ranks wrote it.

`move` takes what is trained from one division of the experts among ranks to another, bit for bit. Both divisions are
boxes of whole tensors. All ranks learn who holds which boxes and who needs which. Then each tensor of the experts makes
one all-to-all: a rank sends, of the boxes that it is the first to hold, what others need. Everything else lies where it
lay and is copied. Rejected: a checkpoint, written and read again. It is the same move by way of the disk.

A checkpoint of a large model fits no single machine's memory, its export has to. So `StoredParameters` reads some rows
of a parameter (an expert, a projection) from the boxes that ranks stored. A box is read whole, so the last one of each
of two parameters (an expert's two projections) is kept while its next rows may be asked for. Rejected: building the
model and loading it, which takes all of its memory in float32.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from antiphon.base.errors import CheckpointError
from antiphon.comm.collectives import AllToAll, run
from antiphon.comm.mesh import Group
from antiphon.specs.model import ModelSpec
from antiphon.train.device import HOST, host_copy
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.ranks import gathered
from antiphon.train.shards import Shards
from antiphon.train.weights import Part, attribute_of, parts_of

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


Slices = tuple[slice, ...]


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
        sent = [[sources[source][place] for source, place, _, _ in to] for to in leaving]
        filled = [[targets[target][place] for _, _, target, place in of] for of in coming]
        counts = [tuple(sum(part.numel() for part in of_rank) for of_rank in way) for way in (sent, filled)]
        exchange = AllToAll(ranks, "packing", *counts)
        came = run(exchange, torch.cat([nothing, *(part.flatten() for to in sent for part in to)]))
        parts = [part for of in filled for part in of]
        for part, values in zip(parts, torch.split(came, [part.numel() for part in parts]), strict=True):
            part.copy_(values.view(part.shape))


def _common(held: Sequence[Place], wanted: Sequence[Place]) -> list[tuple[int, Slices, int, Slices]]:
    """What two ranks' lists have in common, in one order on both: the number of a box in `held` and the place in it,
    the number of a box in `wanted` and the place in that."""
    found = []
    for i, (mine, my_sizes) in enumerate(held):
        for j, (theirs, their_sizes) in enumerate(wanted):
            both = zip(mine, my_sizes, theirs, their_sizes, strict=True)
            ranges = [(max(begin, other), min(begin + size, other + its_size)) for begin, size, other, its_size in both]
            if all(first < last for first, last in ranges):
                in_source, in_target = (
                    tuple(slice(first - begin, last - begin) for (first, last), begin in zip(ranges, of, strict=True))
                    for of in (mine, theirs)
                )
                found.append((i, in_source, j, in_target))
    return found


def _all_places(boxes: Mapping[str, Sequence[tuple[Offsets, Tensor]]], ranks: Group) -> list[dict[str, list[Place]]]:
    """The places of the experts' tensors, by rank and name."""
    of_experts = {name: each for name, each in boxes.items() if _EXPERTS in name}
    places = {name: [(offsets, tuple(view.shape)) for offsets, view in each] for name, each in of_experts.items()}
    return gathered(ranks, "packing", places)


_KEPT_PARAMETERS = 2


class StoredParameters:
    """Those of a training checkpoint. `CheckpointError` if it is damaged or lacks one."""

    def __init__(self, checkpoint: Path, spec: ModelSpec, *, further: bool = False) -> None:
        self.spec, self.further = spec, further
        self._checkpoint = checkpoint
        self._kept: dict[str, dict[tuple[int, ...], Tensor]] = {}  # boxes by their offsets, by parameter
        self._reader = FileSystemReader(checkpoint)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        except Exception as error:  # of a damaged file it is anything
            raise CheckpointError(f"{checkpoint}: cannot be read ({error}): it is damaged, take another one") from error

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        key = f"model.{name}"
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._checkpoint}: holds no {name}: it is of another model")
        shape = tuple(stored.size)
        end = shape[0] if last is None else last
        view = torch.empty((end - first, *shape[1:]), dtype=stored.properties.dtype, device=HOST)
        kept = self._kept.pop(key, {})
        self._kept = {**dict(list(self._kept.items())[1 - _KEPT_PARAMETERS :]), key: {}}
        found = 0
        for chunk in stored.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            begin, stop = max(first, offsets[0]), min(end, offsets[0] + sizes[0])
            if begin >= stop:
                continue
            box = kept[offsets] if offsets in kept else self._box(key, stored, offsets, sizes)
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
            view[(slice(begin - first, stop - first), *place)] = box[begin - offsets[0] : stop - offsets[0]]
            found += (stop - begin) * math.prod(sizes[1:])
            if end < offsets[0] + sizes[0]:
                self._kept[key][offsets] = box
        if found != view.numel():
            raise CheckpointError(f"{self._checkpoint}: {name}: a part of it is missing: take another one")
        return view

    def _box(self, key: str, stored: TensorStorageMetadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        box = torch.empty(sizes, dtype=stored.properties.dtype, device=HOST)
        planner = LoadPlanner()
        boxes = {key: Boxes(tuple(stored.size), [(offsets, box)], written=False)}
        planner.set_up_planner(boxes, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            raise CheckpointError(f"{self._checkpoint}: {key}: {error}: it is damaged, take another one") from error
        return box
