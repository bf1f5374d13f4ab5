"""A `TrainingPlan` to JSON and back, strictly: a trainer obeys what it reads, so nothing is guessed or skipped.

    {"version": 1, "phase": "train", "model": ..., "layout": {...}, "predicted": {...}, "rejected": [...]}

1. `phase` tells it from a plan to serve, whose phases lie under `phases`
2. sizes must fit together: micro-batches make up the batch, the layout has no more devices than were offered
3. unknown keys and other versions are refused by name

Rejected: one file format for serving and training. They share no size but a device's name.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from antiphon.base.errors import UserError
from antiphon.specs.device import ComputeDtype
from antiphon.specs.precision import StorageDtype
from antiphon.specs.strict_table import Table, read_json, write_json
from antiphon.specs.training_plan import RejectedTraining, TrainingLayout, TrainingPlan, TrainingPredicted

VERSION = 1
PHASE: Literal["train"] = "train"
ATTENTION: tuple[Literal["sequence", "tensor"], ...] = ("sequence", "tensor")
EXPERTS: tuple[Literal["expert", "tensor"], ...] = ("expert", "tensor")
DISPATCH: tuple[Literal["all_to_all", "all_gather"], ...] = ("all_to_all", "all_gather")
OVERLAP: tuple[Literal["none", "inter", "intra"], ...] = ("none", "inter", "intra")
FORMATS: tuple[StorageDtype, ...] = get_args(StorageDtype)
COMPUTE: tuple[ComputeDtype, ...] = get_args(ComputeDtype)
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
    """The plan a mapping holds; `UserError` names the key, its value and the mend."""
    return _plan(Table(mapping, where))


def read_training_plan(path: str | Path) -> TrainingPlan:
    return _plan(read_json(Path(path)))


def write_training_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Replaces the file at `path`."""
    write_json(training_plan_to_json(plan), Path(path))


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
        mend = f"make the plan again with `antiphon plan --phase {PHASE}`"
        raise table.error("version", f"this program reads version {VERSION}: {mend}")
    table.choice("phase", (PHASE,))
    num_devices, global_batch = table.whole("num_devices"), table.whole("global_batch")
    plan = TrainingPlan(
        version=version,
        model=table.text("model"),
        cluster=table.text("cluster"),
        device=table.text("device"),
        sequence_length=table.whole("sequence_length"),
        global_batch=global_batch,
        num_devices=num_devices,
        weights=table.choice("weights", FORMATS, "bfloat16"),
        gradients=table.choice("gradients", FORMATS, "float32"),
        compute=table.choice("compute", COMPUTE, "bfloat16"),
        layout=_layout(table.table("layout"), num_devices, global_batch),
        predicted=_predicted(table.table("predicted")),
        rejected=tuple(_rejected(entry, num_devices, global_batch) for entry in table.tables("rejected"))
        if table.has("rejected")
        else (),
        notes=_texts(table, "notes"),
        model_config=table.mapping("model_config"),
        num_candidates=table.whole("num_candidates", 0, at_least=0),
        search_s=table.number("search_s", 0.0, above=-1e-9),
    )
    table.finish()
    return plan


def _layout(table: Table, num_devices: int, global_batch: int) -> TrainingLayout:
    layout = TrainingLayout(
        attention=table.choice("attention", ATTENTION),
        experts=table.choice("experts", EXPERTS),
        dispatch=table.choice("dispatch", DISPATCH),
        model_parallel=table.whole("model_parallel"),
        pipeline=table.whole("pipeline"),
        virtual_stages=table.whole("virtual_stages"),
        data_parallel=table.whole("data_parallel"),
        micro_batch=table.whole("micro_batch"),
        num_micro_batches=table.whole("num_micro_batches"),
        rematerialized=_texts(table, "rematerialized"),
        gradient_wire=table.choice("gradient_wire", FORMATS, "float32"),
        activation_wire=table.choice("activation_wire", FORMATS, "bfloat16"),
        overlap=table.choice("overlap", OVERLAP, "intra"),
        deduplicate=table.flag("deduplicate", False),
        zero=table.whole("zero", 1, at_least=0),
    )
    table.finish()
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


def _predicted(table: Table) -> TrainingPredicted:
    memory = table.optional_table("memory_bytes")
    predicted = TrainingPredicted(
        iteration_s=table.number("iteration_s", above=0),
        tokens_per_s=table.number("tokens_per_s", above=0),
        tokens_per_s_per_device=table.number("tokens_per_s_per_device", above=0),
        mfu=table.number("mfu", above=0),
        bubble_s=table.number("bubble_s", above=-1e-9),
        communication_s=table.number("communication_s", above=-1e-9),
        exposed_s=table.number("exposed_s", above=-1e-9),
        sync_exposed_s=table.number("sync_exposed_s", above=-1e-9),
        memory_bytes={part: memory.number(part, above=-1e-9) for part in memory.names()},
        bound_by=table.text("bound_by", ""),
    )
    table.finish()
    return predicted


def _rejected(table: Table, num_devices: int, global_batch: int) -> RejectedTraining:
    rejected = RejectedTraining(
        name=table.text("name"),
        reason=table.text("reason"),
        layout=_layout(table.table("layout"), num_devices, global_batch) if table.has("layout") else None,
        predicted=_predicted(table.table("predicted")) if table.has("predicted") else None,
    )
    table.finish()
    return rejected


def _texts(table: Table, key: str) -> tuple[str, ...]:
    texts = tuple(table.items(key)) if table.has(key) else ()
    if not all(isinstance(text, str) for text in texts):
        raise table.error(key, "a list of texts is needed")
    return texts
