"""`OUTPUT/run.json`: what a run is and what was predicted of it, for the page that closes it.

It is written before the first step, so that a run that was killed has it too; its numbers are in `metrics.jsonl`.
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
from antiphon.train.config import TrainConfig
from antiphon.train.memory_check import MemoryNeed

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
