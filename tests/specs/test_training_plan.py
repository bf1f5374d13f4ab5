"""A training plan's file: it comes back as it was, and everything a trainer could not obey is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.model import BYTES_OF
from antiphon.specs.plan import plan_from_json
from antiphon.specs.training_plan import (
    RejectedTraining,
    TrainingLayout,
    TrainingPlan,
    TrainingPredicted,
    read_training_plan,
    training_plan_from_json,
    training_plan_to_json,
)
from tests.specs.training_specimen import PLAN, PREDICTED

FORMATS = st.sampled_from(sorted(BYTES_OF))
SECONDS = st.floats(0, 1e6)
TEXTS = st.text(min_size=1, max_size=20)


def written(place: str = "", **changes: Any) -> dict[str, Any]:
    """The JSON of `PLAN` with keys of the table at `place` changed; None removes one."""
    mapping = json.loads(json.dumps(training_plan_to_json(PLAN)))
    table = mapping
    for step in place.split(".") if place else ():
        table = table[int(step)] if step.isdecimal() else table[step]
    for key, value in changes.items():
        table[key] = value
        if value is None:
            del table[key]
    return mapping


def test_the_shape() -> None:
    mapping = written()
    assert list(mapping)[:4] == ["version", "phase", "model", "cluster"]
    assert (mapping["version"], mapping["phase"], mapping["model"], mapping["cluster"]) == (
        1,
        "train",
        "some-moe",
        "nodes",
    )
    assert mapping["layout"]["rematerialized"] == ["ln1_out", "fc2_in"]
    assert mapping["predicted"]["memory_bytes"]["usable"] == 72e9
    assert mapping["rejected"][1].keys() == {"name", "reason"}
    assert mapping["model_config"] == {"model_type": "mixtral", "head_dim": None}
    assert training_plan_from_json(mapping) == PLAN


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(training_plan_to_json(PLAN)))
    assert read_training_plan(path) == PLAN
    with pytest.raises(UserError, match=r"missing\.json: cannot be read"):
        read_training_plan(tmp_path / "missing.json")


def test_what_may_be_left_out_has_its_default() -> None:
    layout = dict.fromkeys(("gradient_wire", "activation_wire", "overlap", "deduplicate", "zero"))
    read = training_plan_from_json(written("layout", **layout)).layout
    assert (read.gradient_wire, read.activation_wire, read.overlap) == ("float32", "bfloat16", "intra")
    assert (read.deduplicate, read.zero) == (False, 1)
    bare = written(rejected=None, notes=None, model_config=None, num_candidates=None, search_s=None)
    assert training_plan_from_json(bare).rejected == ()


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("", "version", 2, r"version is 2: this program reads version 1: .*antiphon plan --phase train"),
        ("", "phase", "decode", "phase is 'decode': it must be 'train'"),
        ("", "phases", {}, "this plan is one to serve: make one with .*--phase train"),
        ("", "model", None, "model is missing: add it"),
        ("", "cluster", "", "cluster is '': it must have at least 1 character"),
        ("", "device", 7, "device is 7: it must be a valid string"),
        ("", "compute", "int4", "compute is 'int4': it must be 'float32', 'bfloat16', 'fp8' or 'fp4'"),
        ("", "sequence_length", 0, "sequence_length is 0: it must be at least 1"),
        ("", "global_batch", 2.5, "global_batch is 2.5: it must be a valid integer"),
        ("", "num_devices", 23, r"layout: 4 \* 3 \* 2 devices are more than the 23 of num_devices"),
        ("", "gpus", 8, "unknown key gpus"),
        ("", "notes", [1], r"notes\[0\] is 1: it must be a valid string"),
        ("layout", "attention", "expert", "layout.attention is 'expert': it must be 'sequence' or 'tensor'"),
        ("layout", "dispatch", "broadcast", "layout.dispatch is 'broadcast': it must be 'all_to_all' or 'all_gather'"),
        ("layout", "num_micro_batches", 14, "num_micro_batches is 28: it must be global_batch, 30"),
        ("layout", "pipeline", 0, "layout.pipeline is 0: it must be at least 1"),
        ("layout", "model_parallel", True, "layout.model_parallel is true: it must be a valid integer"),
        ("layout", "zero", 4, "layout.zero is 4: it must be at most 3"),
        ("layout", "zero", -1, "layout.zero is -1: it must be at least 0"),
        ("layout", "pipeline", 1, "layout: virtual_stages is 2: a pipeline of 1 stage has nothing to interleave"),
        ("layout", "gradient_wire", "fp4", "layout.gradient_wire is 'fp4': it must be 'float32'"),
        ("layout", "rematerialized", "ln1_out", "layout.rematerialized is 'ln1_out': it must be an array"),
        ("layout", "tp", 4, "unknown key layout.tp"),
        ("predicted", "iteration_s", 0, "predicted.iteration_s is 0: it must be above 0"),
        ("predicted", "tokens_per_s", float("nan"), "predicted.tokens_per_s is nan: it must be a finite number"),
        ("predicted", "bubble_s", -1, "predicted.bubble_s is -1: it must be at least 0"),
        ("predicted", "mfu", None, "predicted.mfu is missing: add it"),
        ("predicted.memory_bytes", "total", "much", "memory_bytes.total is 'much': it must be a valid number"),
        ("rejected.0", "reason", None, r"rejected\[0\].reason is missing"),
        ("rejected.0.layout", "deduplicate", True, r"rejected\[0\].layout: deduplicate is true: only an all-to-all"),
        ("rejected.3.predicted", "speed", 1, r"unknown key rejected\[3\].predicted.speed"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_its_place(place: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^mine: .*{message}"):
        training_plan_from_json(written(place, **{key: value}), "mine")


def test_the_two_kinds_of_plan_are_not_taken_for_each_other() -> None:
    with pytest.raises(UserError, match=r"phase is .train.: this is a plan to train, not to serve"):
        plan_from_json(written())


@st.composite
def layouts(draw: st.DrawFn, batch_parts: tuple[int, int, int]) -> TrainingLayout:
    data, micro, count = batch_parts
    pipeline = draw(st.integers(1, 9))
    dispatch = draw(st.sampled_from(["all_to_all", "all_gather"]))
    return TrainingLayout(
        attention=draw(st.sampled_from(["sequence", "tensor"])),
        experts=draw(st.sampled_from(["expert", "tensor"])),
        dispatch=dispatch,
        model_parallel=draw(st.integers(1, 9)),
        pipeline=pipeline,
        virtual_stages=draw(st.integers(1, 8)) if pipeline > 1 else 1,
        data_parallel=data,
        micro_batch=micro,
        num_micro_batches=count,
        rematerialized=tuple(draw(st.lists(TEXTS, max_size=3))),
        gradient_wire=draw(FORMATS),
        activation_wire=draw(FORMATS),
        overlap=draw(st.sampled_from(["none", "inter", "intra"])),
        deduplicate=draw(st.booleans()) if dispatch == "all_to_all" else False,
        zero=draw(st.integers(0, 3)),
    )


@st.composite
def predictions(draw: st.DrawFn) -> TrainingPredicted:
    above = st.floats(1e-9, 1e12)
    return TrainingPredicted(
        iteration_s=draw(above),
        tokens_per_s=draw(above),
        tokens_per_s_per_device=draw(above),
        mfu=draw(st.floats(1e-6, 1)),
        bubble_s=draw(SECONDS),
        communication_s=draw(SECONDS),
        exposed_s=draw(SECONDS),
        sync_exposed_s=draw(SECONDS),
        memory_bytes=draw(st.dictionaries(st.sampled_from(["parameters", "total", "usable"]), st.floats(0, 1e15))),
        bound_by=draw(st.sampled_from(["", "compute", "pipeline bubble"])),
    )


@st.composite
def plans(draw: st.DrawFn) -> TrainingPlan:
    data, micro, count = (draw(st.integers(1, 6)) for _ in range(3))
    layout = draw(layouts((data, micro, count)))
    rejected = RejectedTraining(
        name=draw(TEXTS),
        reason=draw(TEXTS),
        layout=draw(st.none() | st.just(layout)),
        predicted=draw(st.none() | predictions()),
    )
    return replace(
        PLAN,
        global_batch=data * micro * count,
        num_devices=layout.num_devices + draw(st.integers(0, 9)),
        weights=draw(FORMATS),
        gradients=draw(FORMATS),
        layout=layout,
        predicted=draw(predictions()),
        rejected=draw(st.sampled_from([(), (rejected,)])),
        notes=tuple(draw(st.lists(st.text(max_size=9), max_size=2))),
    )


@settings(max_examples=50, deadline=None)
@given(plans())
def test_json_round_trip(plan: TrainingPlan) -> None:
    assert training_plan_from_json(json.loads(json.dumps(training_plan_to_json(plan), allow_nan=False))) == plan


def test_reading_changes_nothing_in_the_mapping() -> None:
    mapping = written()
    training_plan_from_json(mapping)
    assert mapping == written()
    assert training_plan_from_json(mapping).predicted == PREDICTED
