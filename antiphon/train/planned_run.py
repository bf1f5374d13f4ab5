"""A run in the planner's terms: a plan as this trainer's configuration, and what a profile predicts of a run.

A training plan decides the table `parallel` (less what only a run decides, as its row budget), the formats of
`communication`, the tables `memory` and `overlap`, and `micro_batch`. The batch, the length of sequences and the
arithmetic are the run's own: where plan and run differ in them, the prediction would be of something else, so that is
an error.

A prediction is the estimate that `antiphon plan --phase train --profile` makes, for the sizes that a run has: its
step's time, MFU and memory, to stand beside what is measured. Rejected: asking the plan alone. A run may differ from
its plan in batch, ranks or optimizer, and then the plan's figure is of another run.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Sizes
from antiphon.cost.profile import Profile
from antiphon.cost.training.measured import UNMEASURED_S, machine_of_ranks
from antiphon.cost.training.setup import Training
from antiphon.cost.training.step import estimate_step
from antiphon.models.config import refuse_other_model
from antiphon.models.planned import check_planned_for
from antiphon.planner.training_explain import one
from antiphon.specs.model import ModelSpec
from antiphon.specs.training_plan import TrainingLayout, TrainingPlan
from antiphon.train.config import TrainConfig
from antiphon.train.config_tables import MemoryConfig, OverlapConfig
from antiphon.train.memory import MemoryNeed, memory_need, setup_of, tensors_of


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


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What is predicted of one optimizer step. `mfu`: of the machine's fastest product; `memory`: of the fullest rank;
    `parts_s`: where the time goes."""

    step_s: float
    tokens_per_s: float
    mfu: float
    memory: MemoryNeed
    parts_s: dict[str, float]


def predict_step(spec: ModelSpec, config: TrainConfig, sizes: Sizes, profile: Profile) -> StepPrediction:
    """The step of a run whose ranks share the work by `sizes`. `UserError` where the profile does not say: another
    model's sizes, sequence length, dtype or number of ranks, or a form that planning does not have."""
    if profile.model_config:
        refuse_other_model(profile.model_config, spec, "the profile")
    setup = setup_of(config, sizes)
    tables = profile.training_tables(config.sequence_length)
    if tables.dtype != config.dtype:
        raise UserError(f"the profile was measured in {tables.dtype}, dtype is {config.dtype}: profile it with --dtype")
    attention, experts = sizes.sequence * sizes.tensor, sizes.expert * sizes.expert_tensor
    if attention != experts or min(sizes.sequence, sizes.tensor) > 1 or min(sizes.expert, sizes.expert_tensor) > 1:
        raise UserError(
            f"parallel: attention is shared by {sizes.sequence} * {sizes.tensor} ranks, experts by {sizes.expert} * "
            f"{sizes.expert_tensor}: a prediction needs one way and one number of ranks for each"
        )
    cluster = machine_of_ranks(profile, config.sequence_length)
    training = Training(
        model=spec,
        cluster=cluster,
        group=cluster.groups[0],
        sequence_length=config.sequence_length,
        batch=config.batch,
        profile=profile,
        optimizer=config.optimizer.name,
    )
    found = estimate_step(training, setup, "none")
    if one(found.iteration_s) >= UNMEASURED_S:
        measured = ", ".join(map(str, tables.ranks))
        raise UserError(f"the profile does not cover this form on {sizes.world_size} ranks: it has {measured} ranks")
    return StepPrediction(
        step_s=one(found.iteration_s),
        tokens_per_s=one(found.tokens_per_s),
        mfu=one(found.mfu),
        memory=memory_need(spec, config, setup),
        parts_s={
            "layers": one(found.num_micro_batches) * (one(found.forward_s) + one(found.backward_s)),
            "waiting in layers": one(found.exposed_s),
            "bubble": one(found.bubble_s),
            "stages": one(found.pipeline_exposed_s),
            "sums": one(found.sync_s),
            "update": one(found.optimizer_s),
        },
    )
