"""Checkpoints of a run: model, optimizer and place in the data, in PyTorch's distributed format.

`OUTPUT/checkpoints/step-00000100/` is written under another name and renamed when it is whole, so a folder that can be
seen is complete: a kill during a save leaves the last one. `run.json` in it says what was trained and how far.

A save copies what it writes and goes on beside the next steps, in a thread and a process group of its own. Without
`output.save_beside`, and where state lies in a mapped file, the steps wait, and it writes from where the numbers are.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from antiphon import __version__
from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.comm.mesh import Group, beside
from antiphon.specs.checked import CountFromZero, read
from antiphon.train.checkpoint_parts import Boxes, LoadPlanner, SavePlanner, boxes_of
from antiphon.train.config import TrainConfig, config_of
from antiphon.train.device import HOST, settle
from antiphon.train.model import MoeModel
from antiphon.train.optimizer import Optimizer
from antiphon.train.ranks import gathered, sums
from antiphon.train.shards import Shards

_NAME = re.compile(r"step-(\d{8})")
_VERSION = 2
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


def _name(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


_DISK_S = 600.0  # disks differ more than ranks do


class Saver:
    """Writes checkpoints of a run. One that cannot be written is an error in the log, and training goes on: the last
    one is whole, and the next may succeed. Made by all `ranks` together."""

    def __init__(
        self,
        config: TrainConfig,
        model_config: dict[str, Any],
        text: str,
        ranks: Group,
        device: torch.device = HOST,
    ) -> None:
        """`text`: the digest of what is trained on. `device`: where that is."""
        self._device = device
        self._facts: dict[str, Any] = {"config": config.as_table(), "model_config": model_config, "text": text}
        self._keep, self._keep_best = config.output.keep, config.output.keep_best
        self._group = beside(ranks, max(_DISK_S, config.communication.timeout_s))
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._save_beside = config.output.save_beside
        if self._save_beside and config.memory.offload != "none":
            self._save_beside = False
            if ranks.index == 0:
                _log.info("memory.offload is %r: steps wait for checkpoints, which need no copy", config.memory.offload)
        self._folder = folder_of(config)
        if ranks.index == 0:
            self._folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the first save

    def save(self, state: RunState, stored: Mapping[str, Boxes], held_out_loss: float | None = None) -> None:
        """Begin to write a copy of `stored`, after the save before it has ended; or write `stored`. All ranks call it
        together.
        `held_out_loss`: of this state, where it was evaluated."""
        self.close()
        self._facts["held_out_loss"] = held_out_loss
        is_live = not self._save_beside and self._device.type == HOST.type  # from a GPU all goes by way of host memory
        written = {name: boxes.written_ones() if is_live else boxes.copy() for name, boxes in stored.items()}
        settle(self._device)
        self._thread = threading.Thread(target=self._try, args=(written, state), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._save_beside:
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
        final = self._folder / _name(state.step)
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
        self._by_first(lambda: self._begin(partial))
        own = sum(view.nbytes for each in boxes.values() for _, view in each.boxes)
        (needed,) = sums(self._group, "checkpoint", own, dtype=torch.float64)
        self._by_first(lambda: self._check_room(int(needed)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            state_dict_saver.save(
                boxes,
                checkpoint_id=partial,
                planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group.process_group,
                no_dist=self._group.size == 1,
            )
        own = [*partial.glob(f"__{self._group.index}_*"), *([] if self._group.index else [partial / ".metadata"])]
        digests = gathered(self._group, "checkpoint", {file.name: _digest_of(file) for file in own})
        files = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        self._by_first(lambda: self._complete(state, files, partial, final))

    def _by_first(self, work: Callable[[], None]) -> None:
        """`work` on the first rank. All ranks fail if that does."""
        failure: OSError | None = None
        try:
            if self._group.index == 0:
                work()
        except OSError as error:
            failure = error
        (num_failed,) = sums(self._group, "checkpoint", failure is not None)
        if failure is not None:
            raise failure
        if num_failed:
            raise OSError("the first rank could not")

    def _begin(self, partial: Path) -> None:
        for old in self._folder.glob(".step-*.partial"):  # of saves that were killed
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)

    def _check_room(self, needed: int) -> None:
        """`OSError` before anything is written if the disk has no room for all of it."""
        if (free := shutil.disk_usage(self._folder).free) < needed:
            raise OSError(errno.ENOSPC, f"it needs {format_bytes(needed)}, {format_bytes(free)} are free")

    def _complete(self, state: RunState, files: dict[str, str], partial: Path, final: Path) -> None:
        """Make the written folder the newest checkpoint, and remove the oldest beyond `output.keep`. `files`: their
        digests by name."""
        if lost := [name for name, digest in files.items() if not digest]:
            raise OSError(f"{lost[0]} cannot be read again")
        facts = {"version": _VERSION, "written_by": __version__, "state": asdict(state), "files": files, **self._facts}
        facts["digest"] = _digest(json.loads(json.dumps(facts)))  # as it will be read
        (partial / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
        _to_disk(partial)
        _remove(final)
        partial.rename(final)
        _to_disk(final.parent)
        best = best_checkpoint(final.parent) if self._keep_best else None
        for old in find_checkpoints(final.parent)[: -self._keep]:
            if old != best:
                try:
                    _remove(old)
                except OSError as error:
                    _log.warning("%s cannot be removed (%s): remove it by hand", old, error.strerror)


def _remove(checkpoint: Path) -> None:
    """What a link points to stays."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        shutil.rmtree(checkpoint)
    else:
        checkpoint.unlink(missing_ok=True)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in `folder` with the lowest held-out loss; None if none was evaluated."""
    losses = {path: facts.get("held_out_loss") for path, facts in readable(folder)}
    evaluated = {path: float(loss) for path, loss in losses.items() if isinstance(loss, int | float)}
    return min(evaluated, key=evaluated.__getitem__) if evaluated else None


class _Lacks(CheckpointError):
    """It is whole, and of something else."""


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """`run.json`: `state` (a `RunState`), `config`, `model_config`, digests of `files`. `CheckpointError` if it is no
    checkpoint of ours, or damaged."""
    try:
        facts = json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: not a training checkpoint ({error}): name a folder step-…") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("version"), int):
        raise CheckpointError(f"{checkpoint}/run.json has no version: it is damaged, take another one")
    if facts["version"] != _VERSION:
        raise _Lacks(f"{checkpoint} is of version {facts['version']}, this is {_VERSION}: {_written_by(facts)}")
    digest, facts = _digest(facts), {"files": {}} | facts  # versions before wrote no digests
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
            f"{checkpoint} is step {state.step:,} by its run.json: rename it to {_name(state.step)}, or remove it"
        )
    return facts | {"state": state}


def _digest(facts: Mapping[str, Any]) -> str:
    """Of all that `run.json` says beside it."""
    others = {key: value for key, value in facts.items() if key != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _digest_of(file: Path) -> str:
    """Of what is on the disk; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""


def changed_file(checkpoint: Path, facts: Mapping[str, Any], ranks: Group) -> str:
    """The name of a file that is not as it was written, or empty. PyTorch sees a file that is cut or missing, and no
    bit that has turned. `ranks` share the reading; all call it together."""
    files = sorted(facts["files"].items())[ranks.index :: ranks.size]
    own = [name for name, digest in files if _digest_of(checkpoint / name) not in ("", digest)]
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
    """Fill model and optimizer (None: the model alone). `CheckpointError` if they do not fit or it is damaged.
    `new_moments`: those that the checkpoint does not have begin anew."""
    facts = read_facts(checkpoint)
    world = model.mesh.world
    try:
        if changed := changed_file(checkpoint, facts, world):
            raise ValueError(f"{changed} is not what was written")
        boxes = _stored(
            boxes_of(model, shards, optimizer, facts["state"].step), checkpoint, world, new_moments=new_moments
        )
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            state_dict_loader.load(
                boxes,
                checkpoint_id=checkpoint,
                planner=LoadPlanner(),
                process_group=world.process_group,
                no_dist=world.size == 1,
            )
    except BaseException as error:  # of a damaged file it is anything; PyTorch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | _Lacks):
            raise
        raise CheckpointError(
            f"{checkpoint}: cannot be loaded ({_reason(error)}): it is damaged or of another model; remove it or "
            "change output.folder"
        ) from error
    shards.end_step()
    state: RunState = facts["state"]
    return state


def load_newest(
    folder: Path, model: MoeModel, shards: Shards, optimizer: Optimizer, *, new_moments: bool = False
) -> RunState | None:
    """The newest checkpoint of `folder` that can be loaded; None if there is none. One that is damaged is put aside,
    loudly, and the one before it taken. `CheckpointError` if none can be loaded, or one is whole and lacks what is
    trained: that one stays where it is. All ranks call it together."""
    found = find_checkpoints(folder)
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


def _stored(boxes: dict[str, Any], checkpoint: Path, ranks: Group, *, new_moments: bool) -> dict[str, Any]:
    """What the checkpoint has of `boxes`. Missing moments begin anew, with zeros, where they may; `_Lacks` on all ranks
    if one misses anything else."""
    there = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
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


def _reason(error: BaseException) -> str:
    """Why, in one line: what the system said, if it said something, or the last line of the error."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
    for each in (*failures, error, error.__cause__, error.__context__):
        if isinstance(each, OSError) and each.strerror:
            return each.strerror if each.filename is None else f"{Path(str(each.filename)).name}: {each.strerror}"
    text = str(failures[0] if failures else error).strip()
    if "unexpected pos" in text or "PytorchStreamWriter" in text:  # what PyTorch makes of a write that was cut short
        return "the disk took a part of it only: it is full, or a limit to the size of files was reached"
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
