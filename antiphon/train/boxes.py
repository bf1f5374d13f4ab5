"""Parts of tensors as PyTorch's distributed checkpoints know them: boxes of whole tensors.

Every rank writes the parts that it is the first to hold and reads the boxes that it needs, so a checkpoint does not
know how many ranks wrote it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.partition import Part
from antiphon.train.shards import Shards
from antiphon.train.weights import attribute_of, parts_of


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

    def copy(self) -> "Boxes":
        """What this rank writes of them, as it is now."""
        boxes = self.boxes if self.written else []
        return replace(self, boxes=[(offsets, view.clone()) for offsets, view in boxes])

    def at(self, index: MetadataIndex) -> Tensor:
        return next(view for offsets, view in self.boxes if torch.Size(offsets) == index.offset)


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
