"""Checkpoints of a run: model, optimizer and place in the data, in PyTorch's distributed format.

`OUTPUT/checkpoints/step-00000100/` is written under another name and renamed when it is whole, so a folder that can be
seen is complete: a kill during a save leaves the last one. `run.json` in it says what was trained and how far.

A save copies what it writes and goes on beside the next steps, in a thread and a process group of its own.
"""

import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from antiphon.base.errors import CheckpointError
from antiphon.base.logging import get_logger
from antiphon.comm.collectives import AllReduce, run
from antiphon.comm.mesh import Group, beside
from antiphon.train.checkpoint_parts import Boxes, LoadPlanner, SavePlanner, boxes_of
from antiphon.train.config import TrainConfig
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.shards import Shards

_NAME = re.compile(r"step-(\d{8})")
_VERSION = 2
_log = get_logger("train")


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


_DISK_S = 600.0  # disks differ more than ranks do


class Saver:
    """Writes checkpoints of a run. One that cannot be written is an error in the log, and training goes on: the last
    one is whole, and the next may succeed. Made by all `ranks` together."""

    def __init__(self, config: TrainConfig, model_config: dict[str, Any], ranks: Group) -> None:
        self._config = config
        self._model_config = model_config
        self._group = beside(ranks, max(_DISK_S, config.communication.timeout_s))
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._folder = folder_of(config)

    def save(self, state: RunState, stored: Mapping[str, Boxes]) -> None:
        """Begin to write a copy of `stored`, after the save before it has ended. All ranks call it together."""
        self.close()
        copies = {name: boxes.copy() for name, boxes in stored.items()}
        self._thread = threading.Thread(target=self._try, args=(copies, state), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._config.output.save_beside:
            self.close()

    def close(self) -> None:
        """Wait until what was begun has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait; `CheckpointError` if the last save failed."""
        self.close()
        if self._failure is not None:
            raise self._failure

    def _try(self, boxes: dict[str, Any], state: RunState) -> None:
        final = self._folder / f"step-{state.step:08d}"
        partial = self._folder / f".{final.name}.partial"
        started_s, self._failure = time.monotonic(), None
        try:
            self._write(boxes, state, partial, final)
        except BaseException as error:  # PyTorch's CheckpointException is no Exception
            self._failure = CheckpointError(
                f"{final}: cannot be written ({_reason(error)}): make room or change output.folder; what was written "
                "before it stays"
            )
            if self._group.index == 0:
                shutil.rmtree(partial, ignore_errors=True)
                _log.error("%s", self._failure)
        else:
            if self._group.index == 0:
                _log.debug("%s written in %.1f s", final, time.monotonic() - started_s)

    def _write(self, boxes: dict[str, Any], state: RunState, partial: Path, final: Path) -> None:
        failure: OSError | None = None
        try:
            if self._group.index == 0:
                for old in self._folder.glob(".step-*.partial"):  # of saves that were killed
                    shutil.rmtree(old, ignore_errors=True)
                partial.mkdir(parents=True)
        except OSError as error:
            failure = error
        self._agree(failure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            state_dict_saver.save(
                boxes,
                checkpoint_id=partial,
                planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group.process_group,
                no_dist=self._group.size == 1,
            )
        try:
            if self._group.index == 0:
                self._complete(state, partial, final)
        except OSError as error:
            failure = error
        self._agree(failure)

    def _agree(self, failure: OSError | None) -> None:
        """All ranks fail if the first one did."""
        failed = run(AllReduce(self._group, "checkpoint"), torch.tensor([float(failure is not None)]))
        if failure is not None:
            raise failure
        if float(failed):
            raise OSError("the first rank could not")

    def _complete(self, state: RunState, partial: Path, final: Path) -> None:
        """Make the written folder the newest checkpoint, and remove the oldest beyond `output.keep`."""
        facts = {
            "version": _VERSION,
            "state": asdict(state),
            "config": self._config.as_table(),
            "model_config": self._model_config,
        }
        (partial / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
        _to_disk(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _to_disk(final.parent)
        for old in find_checkpoints(final.parent)[: -self._config.output.keep]:
            shutil.rmtree(old)


def newest_step(config: TrainConfig) -> int:
    """How far the newest checkpoint is; 0 if there is none."""
    found = find_checkpoints(folder_of(config))
    return int(read_facts(found[-1])["state"]["step"]) if found else 0


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
                boxes_of(model, shards, optimizer, facts["state"]["step"]),
                checkpoint_id=checkpoint,
                planner=LoadPlanner(),
                process_group=world.process_group,
                no_dist=world.size == 1,
            )
    except BaseException as error:  # of a damaged file it is anything; PyTorch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(
            f"{checkpoint}: cannot be loaded ({_reason(error)}): it is damaged or of another model; remove it or "
            "change output.folder"
        ) from error
    shards.end_step()
    return RunState(**facts["state"])


def _reason(error: BaseException) -> str:
    """The last line of its text, or its kind."""
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


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
