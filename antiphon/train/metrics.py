"""What a run leaves in its folder beside checkpoints and tokens: `run.json` and `metrics.jsonl`.

`run.json` says what the run is and what was predicted of it, for the page that closes it. It is written before the
first step, so that a run that was killed has it too. `metrics.jsonl` has a line for each logged step; TensorBoard shows
the same numbers where it is installed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingPlan, training_plan_to_json
from antiphon.train.boards import open_boards
from antiphon.train.config import TrainConfig
from antiphon.train.memory import MemoryNeed

_LEARNING, _SPEED, _EXPERTS, _OTHERS = "1 learning", "2 speed", "3 experts", "4 operators and bytes"
_GROUPS = {  # TensorBoard sorts by name, so its groups have numbers
    "loss": _LEARNING,
    "held_out_loss": _LEARNING,
    "held_out_error": _LEARNING,
    "held_out_loss_by_source": _LEARNING,
    "evaluation_loss": _LEARNING,
    "mtp_loss": _LEARNING,
    "learning_rate": _LEARNING,
    "gradient_norm": _LEARNING,
    "balance_loss": _LEARNING,
    "alarm": _LEARNING,
    "tokens_per_s": _SPEED,
    "flops_per_s": _SPEED,
    "mfu": _SPEED,
    "step_s": _SPEED,
    "num_ranks": _SPEED,
    "peak_rss_bytes": _SPEED,
    "fullest_expert_ratio": _EXPERTS,
    "expert_rows": _EXPERTS,
    "dropped_rows": _EXPERTS,
}


class Metrics:
    """Writes `FOLDER/metrics.jsonl` and shows the same on boards (`train.boards`). Steps from `first_step` on that a
    former run wrote after its last checkpoint are taken out again: they are made anew."""

    def __init__(self, folder: Path, first_step: int, wandb_project: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _keep_before(self._path, first_step)
        self._boards = open_boards(folder, first_step, wandb_project)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Values of one step: numbers, texts, numbers by name, numbers by layer or rank, numbers by layer and expert.
        The last are a histogram a layer in TensorBoard: a curve an expert would be thousands."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
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
        for board in self._boards:
            board.show(name, value, step)

    def go_back(self, step: int) -> None:
        """Take out steps from `step` on: they are made anew."""
        self._file.close()
        _keep_before(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()
        for board in self._boards:
            board.close()


def _keep_before(file: Path, step: int) -> None:
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a kill cut it off
            continue
        if entry["step"] < step:
            kept.append(line + "\n")
    file.write_text("".join(kept), encoding="utf-8")


FILE = "run.json"


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
    (folder / FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
