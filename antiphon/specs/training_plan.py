"""A plan to train: what a trainer needs to obey it and a person to judge it; its JSON, written and read strictly.

    {"version": 1, "phase": "train", "model": ..., "layout": {...}, "predicted": {...}, "rejected": [...]}

1. `phase` tells it from a plan to serve, whose phases lie under `phases`
2. sizes must fit together: micro-batches make up the batch, the layout has no more devices than were offered
3. unknown keys and other versions are refused by name

Rejected: one file format for serving and training. They share no size but a device's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import (
    Count,
    CountFromZero,
    Flag,
    NotNegative,
    Positive,
    Text,
    Whole,
    check_version,
    describe,
    plain,
    read,
    read_mapping,
)
from antiphon.specs.cluster import ComputeDtype
from antiphon.specs.model import StorageDtype


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """One way to train. `attention`: "sequence" (Ulysses) or "tensor" parallel, `experts`: "expert" or "tensor"
    parallel, both over `model_parallel` devices, experts over `expert_copies` data-parallel copies of them;
    `dispatch` of expert parallelism; `micro_batch`: sequences per micro-batch.

    `rematerialized`: tensors of a layer that are thrown away in forward and made again in backward (names of
    MegaScale-MoE's Figure 9). `gradient_wire`, `activation_wire`: formats between devices. `overlap`: of communication
    with independent operators ("inter"), with fused products too ("intra"). `deduplicate`: an all-to-all sends a token
    once per rank. `zero`: sharded over data parallelism: 1 optimizer state, 2 gradients too, 3 parameters too."""

    attention: Literal["sequence", "tensor"]
    experts: Literal["expert", "tensor"]
    dispatch: Literal["all_to_all", "all_gather"]
    model_parallel: Count
    expert_copies: Count = 1
    pipeline: Count
    virtual_stages: Count
    data_parallel: Count
    micro_batch: Count
    num_micro_batches: Count
    rematerialized: tuple[str, ...] = ()
    gradient_wire: StorageDtype = "float32"
    activation_wire: StorageDtype = "bfloat16"
    overlap: Literal["none", "inter", "intra"] = "intra"
    deduplicate: Flag = False
    zero: Annotated[Whole, Field(ge=0, le=3)] = 1

    def __post_init__(self) -> None:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise UserError(
                f"virtual_stages is {self.virtual_stages}: a pipeline of 1 stage has nothing to interleave: use 1"
            )
        if self.data_parallel % self.expert_copies or (self.expert_copies > 1 and self.dispatch != "all_to_all"):
            raise UserError(
                f"expert_copies is {self.expert_copies}, data_parallel {self.data_parallel}, dispatch {self.dispatch}: "
                "copies that share experts divide data_parallel, and send rows by all_to_all"
            )
        if self.deduplicate and self.dispatch != "all_to_all":
            raise UserError("deduplicate is true: only an all-to-all can send a token once per rank: use false")

    @property
    def expert_parallel(self) -> int:
        """Devices over which experts are shared out."""
        return self.model_parallel * self.expert_copies

    @property
    def num_devices(self) -> int:
        return self.model_parallel * self.pipeline * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class TrainingPredicted:
    """What the model of costs says of one iteration. `memory_bytes`: of the fullest device, by part. Of `iteration_s`:
    `bubble_s` the pipeline stands, `exposed_s` layers wait for communication, `sync_exposed_s` gradients and
    parameters."""

    iteration_s: Positive
    tokens_per_s: Positive
    tokens_per_s_per_device: Positive
    mfu: Positive
    bubble_s: NotNegative
    communication_s: NotNegative
    exposed_s: NotNegative
    sync_exposed_s: NotNegative
    memory_bytes: dict[str, NotNegative] = field(default_factory=dict)
    bound_by: str = ""


@dataclass(frozen=True, kw_only=True)
class RejectedTraining:
    """An alternative that lost, and to what. `predicted` None: it cannot run at all."""

    name: Text
    reason: Text
    layout: TrainingLayout | None = None
    predicted: TrainingPredicted | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The answer to "how to train this model on these machines". `num_devices`: how many were offered; the
    layout may use fewer. `weights`, `gradients`, `compute`: formats of the copy that is multiplied, of gradients' sums
    over micro-batches, of arithmetic. `model_config`: the `config.json` it was made for, empty if none was given."""

    version: Count = 1
    model: Text
    cluster: Text
    device: Text
    sequence_length: Count
    global_batch: Count
    num_devices: Count
    weights: StorageDtype = "bfloat16"
    gradients: StorageDtype = "float32"
    compute: ComputeDtype = "bfloat16"
    layout: TrainingLayout
    predicted: TrainingPredicted
    rejected: tuple[RejectedTraining, ...] = ()
    notes: tuple[str, ...] = ()
    model_config: dict[str, Any] = field(default_factory=dict)
    num_candidates: CountFromZero = 0
    search_s: NotNegative = 0.0


VERSION = 1
PHASE: Literal["train"] = "train"


def training_plan_to_json(plan: TrainingPlan) -> dict[str, Any]:
    """Plain JSON values in the shape above; an alternative that cannot run has neither layout nor prediction."""
    return {"version": plan.version, "phase": PHASE, **plain(plan)}


def training_plan_from_json(mapping: Mapping[str, Any], where: str = "training plan") -> TrainingPlan:
    """The plan a mapping holds; `UserError` names the key, its value and the fix."""
    if "phases" in mapping:
        raise UserError(f"{where}: this plan is one to serve: make one with `antiphon plan --phase {PHASE}`")
    check_version(mapping, VERSION, where, f"make the plan again with `antiphon plan --phase {PHASE}`")
    if mapping.get("phase") != PHASE:
        raise UserError(f"{where}: phase is {describe(mapping.get('phase'))}: it must be {PHASE!r}")
    plan = read(TrainingPlan, {key: value for key, value in mapping.items() if key != "phase"}, where)
    _check_fits(plan.layout, plan, f"{where}: layout")
    for number, rejected in enumerate(plan.rejected):
        if rejected.layout is not None:
            _check_fits(rejected.layout, plan, f"{where}: rejected[{number}].layout")
    return plan


def read_training_plan(path: str | Path) -> TrainingPlan:
    with a_file_of("plan", Path(path)):
        return training_plan_from_json(read_mapping(Path(path)), str(path))


def _check_fits(layout: TrainingLayout, plan: TrainingPlan, where: str) -> None:
    """`UserError` for a layout that uses more devices than were offered, or makes up another batch."""
    if layout.num_devices > plan.num_devices:
        used = f"{layout.model_parallel} * {layout.pipeline} * {layout.data_parallel} devices"
        raise UserError(f"{where}: {used} are more than the {plan.num_devices} of num_devices: make them fit")
    batch = layout.data_parallel * layout.micro_batch * layout.num_micro_batches
    if batch != plan.global_batch:
        raise UserError(
            f"{where}: data_parallel * micro_batch * num_micro_batches is {batch}: it must be global_batch, "
            f"{plan.global_batch}"
        )
