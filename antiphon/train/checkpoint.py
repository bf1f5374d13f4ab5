"""Checkpoints of a run: model, optimizer and place in the data, in PyTorch's distributed format; how they are read.

`OUTPUT/checkpoints/step-00000100/` is written under another name and renamed when it is whole (`train.saver`), so a
folder that can be seen is complete: a kill during a save leaves the last one. `run.json` in it says what was trained
and how far, with a digest of each file. All ranks have to see one folder, and take the same checkpoint.
"""

import errno
import hashlib
import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from antiphon.base.errors import CheckpointError, ResourceError, UserError, with_fix
from antiphon.base.logging import get_logger
from antiphon.comm.mesh import Group
from antiphon.specs.checked import CountFromZero, read
from antiphon.train.checkpoint_parts import LoadPlanner, boxes_of
from antiphon.train.config import TrainConfig, config_of
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.ranks import gathered, sums
from antiphon.train.shards import Shards

_NAME = re.compile(r"step-(\d{8})")
VERSION = 2
_SEEN_S = 60.0  # a network file system may show a new folder so late
_log = get_logger("train")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far a run is. `num_samples`: how many were seen or left out; the next has this global number. `recent`: what
    spikes are compared with."""

    step: CountFromZero
    num_samples: CountFromZero
    num_tokens: CountFromZero
    recent: tuple[tuple[float, float], ...] = ()


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.folder) / "checkpoints"


def name_of(step: int) -> str:
    """The folder's."""
    return f"step-{step:08d}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in `folder` with the lowest held-out loss; None if none was evaluated."""
    losses = {path: facts.get("held_out_loss") for path, facts in readable(folder)}
    evaluated = {path: loss for path, loss in losses.items() if isinstance(loss, int | float) and math.isfinite(loss)}
    return min(evaluated, key=evaluated.__getitem__) if evaluated else None


class _Lacks(CheckpointError):
    """It is whole, and of something else."""


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json`: `state` (a `RunState`), `config`, `model_config`, digests of `files`. `CheckpointError` if it is no
    checkpoint of ours, or damaged."""
    try:
        facts = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if _is_of_machine(error):
            raise _not_now(checkpoint, reason_of(error)) from error
        raise CheckpointError(f"{checkpoint}: not a training checkpoint ({error}): name a folder step-…") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("version"), int):
        raise CheckpointError(f"{checkpoint}/run.json has no version: it is damaged, take another one")
    if facts["version"] != VERSION:
        raise _Lacks(f"{checkpoint} is of version {facts['version']}, this is {VERSION}: {_written_by(facts)}")
    digest, facts = digest_of_facts(facts), {"files": {}} | facts  # versions before wrote no digests
    if wrong := [key for key in ("state", "config", "model_config", "files") if not isinstance(facts.get(key), dict)]:
        raise CheckpointError(f"{checkpoint}/run.json has no {wrong[0]}: it is damaged, take another one")
    try:
        state = read(RunState, facts["state"], f"{checkpoint}/run.json: state")
    except UserError as error:
        raise CheckpointError(f"{error}: it is damaged, take another one") from error
    if facts.get("digest", digest) != digest:
        raise _Lacks(
            f"{checkpoint}/run.json was changed after it was written, maybe in what says which samples come next: put "
            'back what it said, remove its "digest" to go on with what it says now, or take another checkpoint'
        )
    if (named := _NAME.fullmatch(checkpoint.name)) and int(named[1]) != state.step:
        raise _Lacks(
            f"{checkpoint} is step {state.step:,} by its run.json: rename it to {name_of(state.step)}, or remove it"
        )
    return facts | {"state": state}


def digest_of_facts(facts: Mapping[str, Any]) -> str:
    """The digest of all that `run.json` says beside it."""
    others = {key: value for key, value in facts.items() if key != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def digest_of_file(file: Path) -> str:
    """The digest of what is on the disk; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""


def changed_file(checkpoint: Path, facts: Mapping[str, Any], ranks: Group) -> str:
    """The name of a file that is not as it was written, or empty. PyTorch sees a file that is cut or missing, and no
    bit that has turned. `ranks` share the reading; all call it together."""
    files = sorted(facts["files"].items())[ranks.index :: ranks.size]
    own = [name for name, digest in files if digest_of_file(checkpoint / name) not in ("", digest)]
    return next((name for of_rank in gathered(ranks, "checkpoint", own) for name in of_rank), "")


def _written_by(facts: Mapping[str, Any]) -> str:
    version = facts.get("written_by", "its version is not recorded")
    return (
        f"go on with the Antiphon that wrote it ({version}), or export it with that one and begin a new output.folder "
        "from the export"
    )


def config_in(facts: Mapping[str, Any], checkpoint: Path) -> TrainConfig:
    """What `checkpoint` was trained with, by its `facts`; `CheckpointError` where this version does not know it."""
    try:
        return config_of(facts["config"], f"{checkpoint}/run.json")
    except UserError as error:
        raise _Lacks(f"{error}; unless it was edited, {_written_by(facts)}") from error


def readable(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints in `folder` whose `run.json` can be read, the oldest first; `CheckpointError` if there are some,
    and none can, or if one is of another version."""
    found, failure = [], None
    for path in find_checkpoints(folder):
        try:
            found.append((path, read_facts(path)))
        except _Lacks:
            raise
        except CheckpointError as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return found


def load(
    checkpoint: Path, model: MoeModel, shards: Shards, optimizer: Optimizer | None, *, new_moments: bool = False
) -> RunState:
    """Fill model and optimizer (None: the model alone). `CheckpointError` if they do not fit or it is damaged,
    `ResourceError` if that cannot be known: another rank ended, or this machine lacks something. On all ranks the same.
    `new_moments`: those that the checkpoint does not have begin anew."""
    facts = read_facts(checkpoint)
    world = model.mesh.world
    try:
        if changed := changed_file(checkpoint, facts, world):
            raise ValueError(f"{changed} is not what was written")
        boxes = _stored(
            boxes_of(model, shards, optimizer, facts["state"].step), checkpoint, world, new_moments=new_moments
        )
        with warnings.catch_warnings(), torch.no_grad(), world.waiting("checkpoint"):
            warnings.simplefilter("ignore")
            state_dict_loader.load(
                boxes,
                checkpoint_id=checkpoint,
                planner=LoadPlanner(),
                process_group=world.process_group,
                no_dist=world.size == 1,
            )
    except BaseException as error:  # of a damaged file it is anything; PyTorch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | ResourceError | _Lacks):
            raise
        if _is_of_machine(error):
            raise _not_now(checkpoint, reason_of(error)) from error
        raise CheckpointError(
            f"{checkpoint}: cannot be loaded ({reason_of(error)}): it is damaged or of another model; remove it or "
            "change output.folder"
        ) from error
    shards.end_step()
    state: RunState = facts["state"]
    return state


def seen_by_all(folder: Path, ranks: Group) -> list[Path]:
    """The checkpoints in `folder`, the oldest first; `ResourceError` if `ranks`, all of which call it together, see
    different ones."""
    deadline_s = time.monotonic() + _SEEN_S
    while True:
        seen = gathered(ranks, "checkpoint", [path.name for path in find_checkpoints(folder)])
        other = next((rank for rank, names in enumerate(seen) if names != seen[0]), None)
        if other is None:
            return [folder / name for name in seen[0]]
        if any(sums(ranks, "checkpoint", time.monotonic() > deadline_s)):
            name = max({*seen[0]} ^ {*seen[other]})
            one, without = (0, other) if name in seen[0] else (other, 0)
            raise ResourceError(
                f"{folder / name} is there for rank {one} and not for rank {without}: output.folder has to be one "
                "folder for all machines: mount it on each"
            )
        time.sleep(1.0)


def load_newest(
    folder: Path, model: MoeModel, shards: Shards, optimizer: Optimizer, *, new_moments: bool = False
) -> RunState | None:
    """The newest checkpoint of `folder` that can be loaded; None if there is none. One that is damaged is put aside,
    loudly, and the one before it taken. `CheckpointError` if none can be loaded, or one is whole and lacks what is
    trained: that one stays where it is. All ranks call it together."""
    found = seen_by_all(folder, model.mesh.world)
    for place, checkpoint in reversed(list(enumerate(found))):
        try:
            state = load(checkpoint, model, shards, optimizer, new_moments=new_moments)
        except CheckpointError as error:
            if not place or isinstance(error, _Lacks):
                raise
            if model.mesh.rank == 0:
                aside = checkpoint.with_name(f".{checkpoint.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.rename(aside)
                _log.error("%s; it is put aside as %s, the run goes on from %s", error, aside, found[place - 1])
        else:
            if model.mesh.rank == 0:
                _log.info("resumed from %s", checkpoint)
            return state
    return None


def _not_now(checkpoint: Path, reason: str) -> ResourceError:
    return ResourceError(f"{checkpoint}: cannot be loaded now ({with_fix(reason)}): it stays as it is, start again")


def _stored(boxes: dict[str, Any], checkpoint: Path, ranks: Group, *, new_moments: bool) -> dict[str, Any]:
    """What the checkpoint has of `boxes`. Missing moments begin anew, with zeros, where they may; `_Lacks` on all ranks
    if one misses anything else. All fail alike if one cannot read what is there."""
    there, failure = dict[str, Any](), None
    try:
        there = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:  # of a damaged file it is anything
        failure = _is_of_machine(error), reason_of(error)
    if failures := [each for each in gathered(ranks, "checkpoint", failure) if each is not None]:
        is_of_machine, reason = max(failures)
        raise _not_now(checkpoint, reason) if is_of_machine else ValueError(reason)
    missing = [name for name in boxes if name not in there]
    lacked = [name for name in missing if not (new_moments and name.startswith("optimizer."))]
    if any(sums(ranks, "checkpoint", bool(lacked))):
        name = lacked[0] if lacked else "part of what another rank trains"
        raise _Lacks(f"{checkpoint}: holds no {name}: another model or optimizer wrote it: change output.folder")
    for name in missing:
        for _, view in boxes[name].boxes:
            view.zero_()
    if missing:
        _log.warning("%s has no %s: %d moments of the optimizer begin anew", checkpoint, missing[0], len(missing))
    return {name: each for name, each in boxes.items() if name not in missing}


def _causes(error: BaseException) -> list[BaseException]:
    """What went wrong on each rank, as PyTorch gathers it, then `error` and what it is from."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
    return [each for each in (*failures, error, error.__cause__, error.__context__) if each is not None]


_OF_DAMAGE = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)


def _is_of_machine(error: BaseException) -> bool:
    """Whether the machine lacked memory, files or a right: that says nothing about what was read."""
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno is not None:
            return each.errno not in _OF_DAMAGE
        if isinstance(each, MemoryError) or "allocate memory" in str(each):
            return True
    return False


def reason_of(error: BaseException) -> str:
    """Why, in one line: what the system said, if it said something, or the last line of the error."""
    causes = _causes(error)
    for each in causes:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror if each.filename is None else f"{Path(str(each.filename)).name}: {each.strerror}"
    text = str(causes[0]).strip()
    if "unexpected pos" in text or "PytorchStreamWriter" in text:  # what PyTorch makes of a write that was cut short
        return "the disk took a part of it only: it is full, or a limit to the size of files was reached"
    return text.splitlines()[-1] if text else type(error).__name__
