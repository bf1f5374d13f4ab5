"""Checkpoints of a run: model, optimizer and place in the data, in PyTorch's distributed format.

`OUTPUT/checkpoints/step-00000100/` is written under another name and renamed when it is whole, so a folder that can be
seen is complete: a kill during a save leaves the last one. `run.json` in it says what was trained and how far.

Every rank writes the parts that it is the first to hold, as boxes of whole tensors, and reads the boxes that it needs:
a checkpoint does not know how many ranks wrote it.
"""

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from antiphon.base.errors import CheckpointError
from antiphon.comm.collectives import barrier
from antiphon.train.config import TrainConfig
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.partition import Part
from antiphon.train.shards import Shards
from antiphon.train.weights import attribute_of, parts_of

_NAME = re.compile(r"step-(\d{8})")
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far a run is. `num_samples`: how many were seen; the next has this global number."""

    step: int
    num_samples: int
    num_tokens: int


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.folder) / "checkpoints"


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def save(
    config: TrainConfig,
    model_config: dict[str, Any],
    model: MoeModel,
    shards: Shards,
    optimizer: Optimizer,
    state: RunState,
) -> Path:
    """Write a checkpoint and remove the oldest beyond `config.output.keep`. Blocks until it is on disk, and all ranks
    have written."""
    folder, world = folder_of(config), model.mesh.world
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    if world.index == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    barrier(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state_dict_saver.save(
            _boxes(model, shards, optimizer, state.step),
            checkpoint_id=partial,
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=world.process_group,
            no_dist=world.size == 1,
        )
    if world.index == 0:
        _finish(config, model_config, state, partial, final)
    barrier(world)
    return final


def _finish(config: TrainConfig, model_config: dict[str, Any], state: RunState, partial: Path, final: Path) -> None:
    """Make the written folder the newest checkpoint."""
    facts = {
        "version": _VERSION,
        "state": asdict(state),
        "config": config.as_table(),
        "model_config": model_config,
    }
    (partial / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    _to_disk(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _to_disk(final.parent)
    for old in find_checkpoints(final.parent)[: -config.output.keep]:
        shutil.rmtree(old)


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json`: `state`, `config` and `model_config`. `CheckpointError` if it is not a checkpoint of ours."""
    try:
        facts = json.loads((checkpoint / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: not a training checkpoint ({error}): name a folder step-…") from error
    if not isinstance(facts, dict) or facts.get("version") != _VERSION:
        raise CheckpointError(f"{checkpoint}: of another version of Antiphon: export it with that one")
    return facts


def load(checkpoint: Path, model: MoeModel, shards: Shards, optimizer: Optimizer | None) -> RunState:
    """Fill model and optimizer (None: the model alone). `CheckpointError` if they do not fit or it is damaged."""
    facts = read_facts(checkpoint)
    world = model.mesh.world
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            state_dict_loader.load(
                _boxes(model, shards, optimizer, facts["state"]["step"]),
                checkpoint_id=checkpoint,
                planner=_LoadPlanner(),
                process_group=world.process_group,
                no_dist=world.size == 1,
            )
    except (Exception, CheckpointException) as error:  # which is not an Exception; for a damaged file it is anything
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{checkpoint}: cannot be loaded ({reason}): it is damaged or of another model; remove it or change "
            "output.folder"
        ) from error
    shards.end_step()
    return RunState(**facts["state"])


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

    def at(self, index: MetadataIndex) -> Tensor:
        return next(view for offsets, view in self.boxes if torch.Size(offsets) == index.offset)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].at(index)


class _LoadPlanner(DefaultLoadPlanner):
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


def _boxes(model: MoeModel, shards: Shards, optimizer: Optimizer | None, step: int) -> dict[str, Any]:
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


def _to_disk(path: Path) -> None:
    """Files and names under `path` survive a power cut from here on."""
    for each in (path, *path.iterdir()):
        if each.name.startswith(".") or (each.is_dir() and each != path):
            continue
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
