"""A plan to train: what a trainer needs to obey it and a person to judge it; its JSON, written and read strictly.

    {"version": 1, "phase": "train", "model": ..., "layout": {...}, "predicted": {...}, "rejected": [...]}

1. `phase` tells it from a plan to serve, whose phases lie under `phases`
2. sizes must fit together: micro-batches make up the batch, the layout has no more devices than were offered
3. unknown keys and other versions are refused by name

Rejected: one file format for serving and training. They share no size but a device's name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from antiphon.base.errors import UserError
from antiphon.specs.device import ComputeDtype
from antiphon.specs.precision import StorageDtype
from antiphon.specs.strict_table import CountFromZero, NotNegative, Positive, Table, read_json


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """One way to train. `attention`: "sequence" (Ulysses) or "tensor" parallel, `experts`: "expert" or "tensor"
    parallel, both over `model_parallel` devices; `dispatch` of expert parallelism; `micro_batch`: sequences per
    micro-batch.

    `rematerialized`: tensors of a layer that are thrown away in forward and made again in backward (names of
    MegaScale-MoE's Figure 9). `gradient_wire`, `activation_wire`: formats between devices. `overlap`: of communication
    with independent operators ("inter"), with fused products too ("intra"). `deduplicate`: an all-to-all sends a token
    once per rank. `zero`: sharded over data parallelism: 1 optimizer state, 2 gradients too, 3 parameters too."""

    attention: Literal["sequence", "tensor"]
    experts: Literal["expert", "tensor"]
    dispatch: Literal["all_to_all", "all_gather"]
    model_parallel: int
    pipeline: int
    virtual_stages: int
    data_parallel: int
    micro_batch: int
    num_micro_batches: int
    rematerialized: tuple[str, ...] = ()
    gradient_wire: StorageDtype = "float32"
    activation_wire: StorageDtype = "bfloat16"
    overlap: Literal["none", "inter", "intra"] = "intra"
    deduplicate: bool = False
    zero: CountFromZero = 1

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

    name: str
    reason: str
    layout: TrainingLayout | None = None
    predicted: TrainingPredicted | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The answer to "how to train this model on these machines". `num_devices`: how many were offered; the
    layout may use fewer. `weights`, `gradients`, `compute`: formats of the copy that is multiplied, of gradients' sums
    over micro-batches, of arithmetic. `model_config`: the `config.json` it was made for, empty if none was given."""

    version: int = 1
    model: str
    cluster: str
    device: str
    sequence_length: int
    global_batch: int
    num_devices: int
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
MOST_SHARDED = 3  # of ZeRO


def training_plan_to_json(plan: TrainingPlan) -> dict[str, Any]:
    """Plain JSON values in the shape above; an alternative that cannot run has neither layout nor prediction."""
    values = asdict(plan)
    version = values.pop("version")
    values["layout"] = _layout_to_json(plan.layout)
    values["predicted"] = _predicted_to_json(plan.predicted)
    values["rejected"] = [_rejected_to_json(rejected) for rejected in plan.rejected]
    values["notes"] = list(plan.notes)
    return {"version": version, "phase": PHASE, **values}


def training_plan_from_json(mapping: Mapping[str, Any], where: str = "training plan") -> TrainingPlan:
    """The plan a mapping holds; `UserError` names the key, its value and the fix."""
    return _plan(Table(mapping, where))


def read_training_plan(path: str | Path) -> TrainingPlan:
    return _plan(read_json(Path(path)))


def _layout_to_json(layout: TrainingLayout) -> dict[str, Any]:
    return asdict(layout) | {"rematerialized": list(layout.rematerialized)}


def _predicted_to_json(predicted: TrainingPredicted) -> dict[str, Any]:
    values = asdict(predicted)
    if not predicted.bound_by:
        del values["bound_by"]
    return values


def _rejected_to_json(rejected: RejectedTraining) -> dict[str, Any]:
    written: dict[str, Any] = {"name": rejected.name, "reason": rejected.reason}
    if rejected.layout is not None:
        written["layout"] = _layout_to_json(rejected.layout)
    if rejected.predicted is not None:
        written["predicted"] = _predicted_to_json(rejected.predicted)
    return written


def _plan(table: Table) -> TrainingPlan:
    if table.has("phases"):
        raise UserError(f"{table.where}: this plan is one to serve: make one with `antiphon plan --phase {PHASE}`")
    version = table.whole("version", at_least=0)
    if version != VERSION:
        fix = f"make the plan again with `antiphon plan --phase {PHASE}`"
        raise table.error("version", f"this program reads version {VERSION}: {fix}")
    table.choice("phase", (PHASE,))
    num_devices, global_batch = table.whole("num_devices"), table.whole("global_batch")
    rejected = table.tables("rejected") if table.has("rejected") else ()
    return table.read(
        TrainingPlan,
        layout=_layout(table.table("layout"), num_devices, global_batch),
        rejected=tuple(_rejected(entry, num_devices, global_batch) for entry in rejected),
    )


def _layout(table: Table, num_devices: int, global_batch: int) -> TrainingLayout:
    layout = table.read(TrainingLayout)
    _check_layout(table, layout, num_devices, global_batch)
    return layout


def _check_layout(table: Table, layout: TrainingLayout, num_devices: int, global_batch: int) -> None:
    """What each size alone cannot show."""
    if layout.zero > MOST_SHARDED:
        raise table.error("zero", f"it must be at most {MOST_SHARDED}")
    if layout.virtual_stages > 1 and layout.pipeline == 1:
        raise table.error("virtual_stages", "a pipeline of 1 stage has nothing to interleave: use 1")
    if layout.deduplicate and layout.dispatch != "all_to_all":
        raise table.error("deduplicate", "only an all-to-all can send a token once per rank: use false")
    if layout.num_devices > num_devices:
        used = f"{layout.model_parallel} * {layout.pipeline} * {layout.data_parallel} devices"
        raise UserError(f"{table.where}: {used} are more than the {num_devices} of num_devices: make them fit")
    batch = layout.data_parallel * layout.micro_batch * layout.num_micro_batches
    if batch != global_batch:
        raise UserError(
            f"{table.where}: data_parallel * micro_batch * num_micro_batches is {batch}: "
            f"it must be global_batch, {global_batch}"
        )


def _rejected(table: Table, num_devices: int, global_batch: int) -> RejectedTraining:
    layout = _layout(table.table("layout"), num_devices, global_batch) if table.has("layout") else None
    return table.read(RejectedTraining, layout=layout)
