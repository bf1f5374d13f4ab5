"""A training plan as this trainer's configuration.

A training plan decides the table `parallel` (less what only a run decides, as its row budget), the formats of
`communication`, the tables `memory` and `overlap`, and `micro_batch`. The batch, the length of sequences and the
arithmetic are the run's own: where plan and run differ in them, the prediction would be of something else, so that is
an error.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.models.planned import check_planned_for
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingLayout, TrainingPlan
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import MemoryConfig, OverlapConfig
from antiphon.train.memory import tensors_of


def planned_config(
    plan: TrainingPlan, config: TrainConfig, spec: ModelSpec, file: Path, changes: Sequence[str] = ()
) -> TrainConfig:
    """`config` for the layout of `plan`, which was read from `file`. `changes`: what the command line sets besides;
    none of it may be the plan's business. `UserError` names what differs and the fix."""
    check_planned_for(spec, plan.model_config, plan.model, file)
    for name, theirs, ours, fix in (
        ("sequence_length", plan.sequence_length, config.sequence_length, "--set sequence_length={}"),
        ("global_batch", plan.global_batch, config.batch, "--set batch={}"),
        ("compute", plan.compute, config.dtype, "--set dtype={}"),
    ):
        if theirs != ours:
            raise UserError(f"{file}: {name} is {theirs}, this run has {ours}: plan anew, or use {fix.format(theirs)}")
    _refuse_unknown_ways(plan, file)
    tensors_of(plan.layout.rematerialized)  # which refuses what it does not know
    layout = plan.layout
    memory = MemoryConfig(again=layout.rematerialized)
    overlap = OverlapConfig(beside=layout.overlap != "none", inside=layout.overlap == "intra")
    decided = {
        "parallel": _parallel(layout),
        "communication": _formats(layout),
        "memory": asdict(memory),
        "overlap": asdict(overlap),
    }
    keys = {"micro_batch", *(f"{table}.{name}" for table, names in decided.items() for name in names)}
    for change in changes:
        key = change.partition("=")[0]
        if key in keys:
            raise UserError(f"--set {change}: {file} decides {key}: leave one of them out")
    return replace(
        config,
        micro_batch=layout.micro_batch * layout.data_parallel,
        parallel=replace(config.parallel, **decided["parallel"]),
        communication=replace(config.communication, **decided["communication"]),
        memory=memory,
        overlap=overlap,
    )


def _parallel(layout: TrainingLayout) -> dict[str, Any]:
    """The keys of `ParallelConfig` that the layout decides."""
    sequence, expert = layout.attention == "sequence", layout.experts == "expert"
    degree = layout.model_parallel
    return {
        "pipeline": layout.pipeline,
        "virtual_stages": layout.virtual_stages,
        "sequence": degree if sequence else 1,
        "tensor": 1 if sequence else degree,
        "expert": degree * layout.expert_copies if expert else 1,
        "expert_tensor": 1 if expert else degree,
        "zero": layout.zero,
        "dispatch": "all_to_all" if layout.dispatch == "all_to_all" else "gather_scatter",
        "deduplicate": layout.deduplicate,
    }


def _formats(layout: TrainingLayout) -> dict[str, Any]:
    """The keys of `CommunicationConfig` that the layout decides."""
    tensor = layout.attention == "tensor" and layout.model_parallel > 1
    return {
        "gradients": layout.gradient_wire,
        "activations": "float8" if layout.activation_wire == "fp8" else "plain",
        "attention": "float8" if layout.activation_wire == "fp8" and tensor else "plain",
    }


def _refuse_unknown_ways(plan: TrainingPlan, file: Path) -> None:
    """`UserError` for what the trainer does not do: the prediction would be of another run."""
    layout = plan.layout
    if plan.gradients != "float32":
        raise UserError(
            f"{file}: gradients is {plan.gradients}, which the trainer cannot do: "
            f"plan with --precision gradients=float32"
        )
    if layout.activation_wire not in ("fp8", plan.compute):
        raise UserError(
            f"{file}: activation_wire is {layout.activation_wire}, compute {plan.compute}: rows travel as they are "
            f"computed, or as fp8: plan with --precision wire={plan.compute}"
        )
