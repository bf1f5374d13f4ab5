"""Where an export reads parameters from: a model in memory, or a checkpoint, some rows at a time.

A checkpoint of a large model fits no single machine's memory, its export has to: so a parameter is read by rows (an
expert, a projection) when its tensor is written, from the boxes that ranks stored. `Shapes` has no values: sizes of
files are known before the first byte is read. A box is read whole, so the last one of each of two parameters (an
expert's two projections) is kept while its next rows may be asked for. Rejected: building the model and loading it,
which takes all of its memory in float32.
"""

import math
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from antiphon.base.errors import CheckpointError
from antiphon.specs.model import ModelSpec
from antiphon.train.checkpoint_parts import Boxes, LoadPlanner
from antiphon.train.device import HOST, SHAPES_ONLY
from antiphon.train.further_token import further_parameters, with_further
from antiphon.train.model import MoeModel
from antiphon.train.weights import layer_parameters, outer_parameters

_KEPT_PARAMETERS = 2


class Parameters(Protocol):
    """`spec`: of their model; `further`: whether it has a layer for a further token too. Names are those of patterns:
    "embedding", "layers.3.experts_down"."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def further(self) -> bool: ...

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) of a parameter, in host memory, as it is kept; None: to its end."""


class LiveParameters:
    """Those of a whole model."""

    def __init__(self, model: MoeModel) -> None:
        self.spec = model.spec
        self.further = model.spec.num_layers in model.layers
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        return self._tensors[name].detach()[first:last].to(HOST)


class Shapes:
    """Of a model that is nowhere."""

    def __init__(self, spec: ModelSpec, *, further: bool = False) -> None:
        self.spec, self.further = spec, further
        layers = with_further(spec) if further else spec
        self._shapes = {each.attribute: each.shape for each in outer_parameters(spec)}
        for layer in range(layers.num_layers):
            parameters = layer_parameters(layers, layer)
            parameters += further_parameters(spec) if layer == spec.num_layers else []
            self._shapes |= {f"layers.{layer}.{each.attribute}": each.shape for each in parameters}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        return torch.empty(self._shapes[name], device=SHAPES_ONLY)[first:last]


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
