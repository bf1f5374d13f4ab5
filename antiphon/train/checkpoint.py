"""Checkpoints of a run: model, optimizer and place in the data, in PyTorch's distributed format.

`OUTPUT/checkpoints/step-00000100/` is written under another name and renamed when it is whole, so a folder that can be
seen is complete: a kill during a save leaves the last one. `run.json` in it says what was trained and how far.
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
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from antiphon.base.errors import CheckpointError
from antiphon.train.config import TrainConfig
from antiphon.train.model import MoeModel

_NAME = re.compile(r"step-(\d{8})")
_VERSION = 1


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
    optimizer: torch.optim.Optimizer,
    state: RunState,
) -> Path:
    """Write a checkpoint and remove the oldest beyond `config.output.keep`. Blocks until it is on disk."""
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state_dict_saver.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial, no_dist=True)
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
    _to_disk(folder)
    for old in find_checkpoints(folder)[: -config.output.keep]:
        shutil.rmtree(old)
    return final


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json`: `state`, `config` and `model_config`. `CheckpointError` if it is not a checkpoint of ours."""
    try:
        facts = json.loads((checkpoint / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: not a training checkpoint ({error}): name a folder step-…") from error
    if not isinstance(facts, dict) or facts.get("version") != _VERSION:
        raise CheckpointError(f"{checkpoint}: of another version of Antiphon: export it with that one")
    return facts


def load(checkpoint: Path, model: MoeModel, optimizer: torch.optim.Optimizer | None) -> RunState:
    """Fill model and optimizer (None: the model alone). `CheckpointError` if they do not fit or it is damaged."""
    facts = read_facts(checkpoint)
    optimizers = [] if optimizer is None else [optimizer]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    wanted = {"model": model_state} | ({"optimizer": optimizer_state} if optimizers else {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(wanted, checkpoint_id=checkpoint, no_dist=True)
    except (Exception, CheckpointException) as error:  # which is not an Exception; for a damaged file it is anything
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{checkpoint}: cannot be loaded ({reason}): it is damaged or of another model; remove it or change "
            "output.folder"
        ) from error
    set_state_dict(model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return RunState(**facts["state"])


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
