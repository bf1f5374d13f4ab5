"""Writes checkpoints of a run, beside its steps.

A checkpoint is written under another name and renamed when it is whole. A save copies what it writes and goes on beside
the next steps, in a thread and a process group of its own. Without `output.save_beside`, and where state lies in a
mapped file, the steps wait, and it writes from where the numbers are.
"""

import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from antiphon import __version__
from antiphon.base.errors import CheckpointError, ResourceError, why_unwritten
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.comm.mesh import Group, beside
from antiphon.train.checkpoint import (
    VERSION,
    RunState,
    best_checkpoint,
    digest_of_facts,
    digest_of_file,
    find_checkpoints,
    folder_of,
    name_of,
    reason_of,
)
from antiphon.train.checkpoint_parts import Boxes, SavePlanner
from antiphon.train.config import TrainConfig
from antiphon.train.device import HOST, settle
from antiphon.train.ranks import gathered, sums

_log = get_logger("train")
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
        self._failure: CheckpointError | ResourceError | None = None
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
        together. `held_out_loss`: of this state, where it was evaluated."""
        self.close()
        self._facts["held_out_loss"] = held_out_loss
        is_live = not self._save_beside and self._device.type == HOST.type  # from a GPU all goes by way of host memory
        written = {name: boxes.written_ones() if is_live else boxes.copy() for name, boxes in stored.items()}
        settle(self._device)
        thread = threading.Thread(target=self._try, args=(written, state), name="checkpoint", daemon=True)
        thread.start()
        self._thread = thread  # one that could not be started is not waited for
        if not self._save_beside:
            self.close()

    def close(self) -> None:
        """Wait until what was begun has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait; `CheckpointError` if the last save failed, `ResourceError` if that was for another rank's end."""
        self.close()
        if self._failure is not None:
            raise self._failure

    def _try(self, boxes: dict[str, Any], state: RunState) -> None:
        final = self._folder / name_of(state.step)
        partial = self._folder / f".{final.name}.partial"
        started_s, self._failure = time.monotonic(), None
        try:
            self._write(boxes, state, partial, final)
        except BaseException as error:  # PyTorch's CheckpointException is no Exception
            self._failure = CheckpointError(
                f"{final}: cannot be written ({why_unwritten(reason_of(error))}): make room or change output.folder; "
                "what was written before it stays"
            )
            if isinstance(error, ResourceError):  # another rank ended or hangs
                self._failure = ResourceError(f"{final} is not written: {error}")
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
        with warnings.catch_warnings(), self._group.waiting("checkpoint"):
            warnings.simplefilter("ignore")  # that there is no process group
            state_dict_saver.save(
                boxes,
                checkpoint_id=partial,
                planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group.process_group,
                no_dist=self._group.size == 1,
            )
        own = [*partial.glob(f"__{self._group.index}_*"), *([] if self._group.index else [partial / ".metadata"])]
        digests = gathered(self._group, "checkpoint", {file.name: digest_of_file(file) for file in own})
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
        if lost := [name for name in files if not (partial / name).is_file()]:
            raise OSError(f"{lost[0]} of another rank is not here: output.folder has to be one for all machines")
        facts = {"version": VERSION, "written_by": __version__, "state": asdict(state), "files": files, **self._facts}
        facts["digest"] = digest_of_facts(json.loads(json.dumps(facts)))  # as it will be read
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


def _to_disk(path: Path) -> None:
    """Files and names under `path` survive a power cut from here on."""
    for each in (path, *path.iterdir()):
        if each.is_dir() and each != path:
            continue
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
