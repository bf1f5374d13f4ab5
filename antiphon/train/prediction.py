"""What a profile of this machine says of a run: its step's time, MFU and memory, to stand beside what is measured.

The same estimate as `antiphon plan --phase train --profile` makes, for the sizes that a run has. Rejected: asking the
plan alone. A run may differ from its plan in batch, ranks or optimizer, and then the plan's figure is of another run.
"""

from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Sizes
from antiphon.cost.profile import Profile
from antiphon.cost.training.measured import UNMEASURED_S, machine_of_ranks
from antiphon.cost.training.setup import Training
from antiphon.cost.training.step import estimate_step
from antiphon.models.config import refuse_other_model
from antiphon.planner.training_explain import one
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig
from antiphon.train.memory_check import MemoryNeed, memory_need, setup_of


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
