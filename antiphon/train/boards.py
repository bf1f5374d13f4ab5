"""Where a run's numbers are shown as curves: TensorBoard, and Weights & Biases, behind one small interface.

Both are optional packages. TensorBoard is written where it is installed; Weights & Biases where a project is named,
and a run that names one without the package is refused before its first step.
"""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger

_log = get_logger("train")


class Board(Protocol):
    def show(self, name: str, value: Any, step: int) -> None:
        """A number, a text, or numbers, which are shown as a histogram."""

    def close(self) -> None: ...


def open_boards(folder: Path, first_step: int, wandb_project: str) -> list[Board]:
    """Those of the run in `folder`, which begins with `first_step`. `wandb_project` empty: without Weights & Biases.
    `UserError` if that cannot be used."""
    boards: list[Board] = [_WeightsAndBiases(folder, wandb_project)] if wandb_project else []
    try:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency
    except ImportError:
        _log.info("no TensorBoard: pip install 'antiphon[train]' for its curves")
    else:
        boards.append(_TensorBoard(SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)))
    return boards


def check_boards(wandb_project: str) -> None:
    """`UserError` if the package of a named project is missing; nothing is begun."""
    if wandb_project and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"output.wandb is {wandb_project!r} and the package is missing: pip install wandb, or leave the key out"
        )


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def show(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, list):
            self._writer.add_histogram(name, np.asarray(value), step)
        elif isinstance(value, str):
            self._writer.add_text(name, value, step)
        else:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run of the project for each output folder, however often that is gone on with. Steps are a number of their
    own, because the service's only grow, and a run that goes on makes some again."""

    def __init__(self, folder: Path, project: str) -> None:
        check_boards(project)
        import wandb  # an optional dependency

        self._wandb: Any = wandb
        name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        try:
            self._run = wandb.init(
                project=project, dir=str(folder), id=name, name=folder.name, resume="allow", config=_config(folder)
            )
        except Exception as error:  # of a service: no key, no network, a project that may not be written
            raise UserError(
                f"output.wandb: {' '.join(str(error).split())[:200]}: log in (wandb login), or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def show(self, name: str, value: Any, step: int) -> None:
        shown = self._wandb.Histogram(value) if isinstance(value, list) else value
        self._run.log({"step": step, name: shown})

    def close(self) -> None:
        self._run.finish()


def _config(folder: Path) -> Mapping[str, Any]:
    """What the run is, if that was written."""
    try:
        facts: Mapping[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts
