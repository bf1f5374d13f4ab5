"""A run's folder, beside checkpoints and tokens: its lock, `run.json`, `metrics.jsonl`, and curves on boards.

`run.json` says what the run is and what was predicted of it, for the page that closes it. It is written before the
first step, so that a run that was killed has it too. `metrics.jsonl` has a line for each logged step. Boards show the
same numbers: TensorBoard where it is installed, Weights & Biases where a project is named. Both are optional packages;
a run that names a project without the package is refused before its first step.

One run at a time writes a folder. The lock is the kernel's (`flock`), on a file that says who has it. It goes with the
process, however that ends, so there is no stale lock to remove. Rejected: a file that exists while a run lives; a kill
leaves it behind.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import replace_text
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingPlan, training_plan_to_json
from antiphon.train.config import TrainConfig
from antiphon.train.memory import MemoryNeed

FILE = "run.json"
_LOCK = "lock"
_Board = tuple[Callable[[str, Any, int], None], Callable[[], None]]  # shows a number, a text or numbers; ends
_log = get_logger("train")
_OTHERS = "4 operators and bytes"
_GROUPS = {  # TensorBoard sorts by name, so its groups have numbers
    name: group
    for group, names in (
        ("1 learning", "loss held_out_loss held_out_error held_out_loss_by_source evaluation_loss mtp_loss"),
        ("1 learning", "learning_rate gradient_norm balance_loss alarm"),
        ("2 speed", "tokens_per_s flops_per_s mfu step_s num_ranks peak_rss_bytes"),
        ("3 experts", "fullest_expert_ratio expert_rows dropped_rows"),
    )
    for name in names.split()
}


class Metrics:
    """Writes `FOLDER/metrics.jsonl` and shows the same on boards. Steps from `first_step` on that a
    former run wrote after its last checkpoint are taken out again: they are made anew. A disk that is full does not end
    a run: lines wait in memory until there is room, and a board that fails is left alone from then on."""

    def __init__(self, folder: Path, first_step: int, wandb_project: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _keep_before(self._path, first_step)
        boards = (_weights_and_biases(folder, wandb_project), _tensorboard(folder, first_step))
        self._boards = [each for each in boards if each is not None]
        self._file = self._path.open("ab", buffering=0)
        self._late = ""  # what the disk did not take yet

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Values of one step: numbers, texts, numbers by name, numbers by layer or rank, numbers by layer and expert.
        The last are a histogram a layer in TensorBoard: a curve an expert would be thousands."""
        was_full = bool(self._late)
        self._late += json.dumps({"step": step, **json_values(values)}) + "\n"
        if (reason := self._write_late()) and not was_full:
            _log.error("%s cannot be written (%s): the run goes on, and its lines wait for room", self._path, reason)
        for name, value in values.items():
            if isinstance(value, list):
                of = "rank" if name.startswith("rank_") else "layer"
                for index, entry in enumerate(value):
                    self._show(f"{name}/{of}_{index:02d}", entry, step)
            elif isinstance(value, dict):
                for key, entry in value.items():
                    self._show(f"{name}/{key.replace(' ', '_')}", entry, step)
            else:
                self._show(name, value, step)

    def _show(self, name: str, value: Any, step: int) -> None:
        name = f"{_GROUPS.get(name.partition('/')[0], _OTHERS)}/{name}"
        for board in list(self._boards):
            try:
                board[0](name, value, step)
            except Exception as error:  # of a library: a disk, a service
                self._boards.remove(board)
                _log.error("step %d: a board of curves failed (%s): the run goes on without it", step, error)

    def _write_late(self) -> str:
        """Why it could not be written; empty: it is."""
        descriptor, rest = self._file.fileno(), self._late.encode()
        size = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            os.ftruncate(descriptor, size)  # to whole lines
            return error.strerror or str(error)
        self._late = ""
        return ""

    def go_back(self, step: int) -> None:
        """Take out steps from `step` on: they are made anew."""
        self._file.close()
        self._late = _before(self._late, step)
        _keep_before(self._path, step)
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        if reason := self._write_late():
            _log.error("%s cannot be written (%s): lines of the last steps are lost", self._path, reason)
        self._file.close()
        for _, close in self._boards:
            with suppress(Exception):  # what could not be shown was said before
                close()


def json_values(values: Any) -> Any:
    """The same as JSON has it, which knows neither infinity nor NaN: they are null."""
    if isinstance(values, Mapping):
        return {name: json_values(each) for name, each in values.items()}
    if isinstance(values, list):
        return [json_values(each) for each in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _keep_before(file: Path, step: int) -> None:
    if file.exists():
        replace_text(file, _before(file.read_text(encoding="utf-8", errors="replace"), step))


def _before(lines: str, step: int) -> str:
    """Those of the steps before `step`."""
    kept = []
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a kill cut it off
            continue
        if isinstance(entry, dict) and entry.get("step", step) < step:
            kept.append(line + "\n")
    return "".join(kept)


def check_boards(wandb_project: str) -> None:
    """`UserError` if the package of a named project is missing; nothing is begun."""
    if wandb_project and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"output.wandb is {wandb_project!r} and the package is missing: pip install wandb, or leave the key out"
        )


def _quiet_boards(failed: threading.ExceptHookArgs) -> None:
    """Shows what ended a thread, but for TensorBoard's: `Metrics` hears of that at the next number, and says it."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failed)


def _tensorboard(folder: Path, first_step: int) -> _Board | None:
    try:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency
    except ImportError:
        _log.info("no TensorBoard: pip install 'antiphon[train]' for its curves")
        return None
    threading.excepthook = _quiet_boards
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def show(name: str, value: Any, step: int) -> None:
        if isinstance(value, list):
            writer.add_histogram(name, np.asarray(value), step)
        elif isinstance(value, str):
            writer.add_text(name, value, step)
        else:
            writer.add_scalar(name, value, step)

    return show, writer.close


def _weights_and_biases(folder: Path, project: str) -> _Board | None:
    """One run of the project for each output folder, however often that is gone on with. Steps are a number of their
    own, because the service's only grow, and a run that goes on makes some again. `UserError` if it cannot be used."""
    check_boards(project)
    if not project:
        return None
    import wandb  # an optional dependency

    service: Any = wandb
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    try:
        run = service.init(
            project=project, dir=str(folder), id=name, name=folder.name, resume="allow", config=read_run_facts(folder)
        )
    except Exception as error:  # of a service: no key, no network, a project that may not be written
        raise UserError(
            f"output.wandb: {' '.join(str(error).split())[:200]}: log in (wandb login), or set WANDB_MODE=offline"
        ) from error
    run.define_metric("*", step_metric="step")

    def show(name: str, value: Any, step: int) -> None:
        run.log({"step": step, name: service.Histogram(value) if isinstance(value, list) else value})

    return show, run.finish


def read_run_facts(folder: Path) -> Mapping[str, Any]:
    """What `write_run_facts` left in the folder, if that can be read; else nothing."""
    try:
        facts: Mapping[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts


def write_run_facts(
    config: TrainConfig,
    spec: ModelSpec,
    need: MemoryNeed,
    *,
    num_ranks: int = 1,
    plan: TrainingPlan | None = None,
    dispatch: Mapping[str, Any] | None = None,
) -> None:
    """`need`: of one rank, as `check_memory` gave it. `plan`: the one that the run obeys. `dispatch`: what was measured
    to choose the way of rows to experts. To be called by one rank, before it builds its model: what the process holds
    by then is the runtime's."""
    counts = count_parameters(spec)
    facts = {
        "config": config.as_table(),
        "model": spec.family,
        "num_parameters": counts.total,
        "num_active_parameters": counts.active,
        "moe_layers": list(spec.expert_layers),
        "num_experts": spec.router.num_experts,
        "top_k": spec.router.top_k,
        "num_ranks": num_ranks,
        "num_threads": torch.get_num_threads(),
        "memory_need": asdict(need) | {"total": need.total},
        "rss_before_bytes": psutil.Process().memory_info().rss,
        "dispatch": dispatch,
        "plan": None if plan is None else training_plan_to_json(plan),
    }
    folder = Path(config.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / FILE, json.dumps(facts, indent=1) + "\n")


class OutputLock:
    """Holds `folder` until `close`, or until this process ends. `UserError` if another run has it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _LOCK
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output.folder {folder}: cannot be written ({error.strerror}): name another") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                _log.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)
                return
            raise UserError(
                f"output.folder {folder} is in use by {holder}: wait for it, stop it, or name another folder"
            ) from error
        facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk; then others are not told who it is
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps(facts).encode())

    def close(self) -> None:
        """Let others have it; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def _holder(self) -> str:
        try:
            facts = json.loads(self._file.read_text(encoding="utf-8"))
            return f"process {facts['process']} on {facts['host']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another run"
