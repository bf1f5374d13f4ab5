"""Where an export reads parameters from: a model in memory, or a checkpoint, some rows at a time.

A checkpoint of a large model fits no single machine's memory, its export has to: so a parameter is read by rows (an
expert, a projection) when its tensor is written, from the boxes that ranks stored. `Shapes` has no values: sizes of
files are known before the first byte is read. Rejected: building the model and loading it, which takes all of its
memory in float32.
"""

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
        planner = LoadPlanner()
        boxes = Boxes(shape, [((first, *(0 for _ in shape[1:])), view)], written=False)
        planner.set_up_planner({key: boxes}, self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            raise CheckpointError(f"{self._checkpoint}: {name}: {error}: it is damaged, take another one") from error
        return view
