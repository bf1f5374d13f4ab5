"""plan.json: the contract's shape, strict reading, round trips of any plan."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.model import BYTES_OF, PrecisionSpec
from antiphon.specs.plan import (
    LAYOUTS,
    OBJECTIVES,
    DeviceUse,
    Parallel,
    PhasePlan,
    Plan,
    Predicted,
    Rejected,
    plan_from_json,
    plan_to_json,
    read_plan,
)

DECODE = PhasePlan(
    layout="disaggregated",
    parallel=Parallel(attention_tp=2, attention_dp=3, expert_tp=1, expert_workers=2),
    num_instances=1,
    micro_batches=3,
    batch=96,
    devices=(
        DeviceUse(role="attention", device="H20", num_devices=6),
        DeviceUse(role="experts", device="L40S", num_devices=2),
    ),
    placement=(((0, 1.0),), ((0, 0.25), (1, 0.75)), ((1, 1.0),)),
    predicted=Predicted(
        tpot_s=0.05,
        tokens_per_s=1920.0,
        per_gpu=240.0,
        per_cost=160.0,
        per_power=0.5,
        t_a_s=1e-4,
        t_e_s=9e-5,
        t_c_s=2e-5,
        memory_bytes={"attention": 8e10, "experts": 4e10},
        bound_by={"attention": "memory bandwidth"},
    ),
    rejected=(
        Rejected(layout="dp_ep", reason="20% less per GPU", parallel=Parallel(attention_dp=8, expert_ep=8), batch=64),
        Rejected(layout="tp_pp", reason="the weights do not fit: 12 GB are missing"),
    ),
    notes=("attention is balanced with the experts within 10%",),
)
PLAN = Plan(
    model="tiny",
    cluster="msi-hetero",
    workload="msi-production",
    objective="per-cost",
    phases={"decode": DECODE},
    model_config={"model_type": "mixtral", "head_dim": None},
    num_candidates=12,
    search_s=0.5,
)


def written(**phase_changes: Any) -> dict[str, Any]:
    """The JSON of `PLAN`; None removes a key of the decode phase."""
    mapping = json.loads(json.dumps(plan_to_json(PLAN)))
    decode = mapping["phases"]["decode"]
    for key, value in phase_changes.items():
        decode[key] = value
        if value is None:
            del decode[key]
    return mapping


def test_what_a_search_makes_of_extreme_prices_is_read_back() -> None:
    predicted = replace(DECODE.predicted, per_cost=1e34)
    made = replace(PLAN, phases={"decode": replace(DECODE, predicted=predicted)})
    assert plan_from_json(json.loads(json.dumps(plan_to_json(made)))) == made
    with pytest.raises(UserError, match=r"decode: predicted.tpot_s is -1: it must be at least 0"):
        plan_from_json(written(predicted={"tpot_s": -1}))


def test_the_shape_of_the_contract() -> None:
    mapping = written()
    assert {"version", "model", "cluster", "workload", "objective", "phases"} <= mapping.keys()
    decode = mapping["phases"]["decode"]
    assert (decode["layout"], decode["attention_tp"], decode["attention_dp"], decode["expert_workers"]) == (
        "disaggregated",
        2,
        3,
        2,
    )
    assert decode["placement"] == {"0": {"0": 1.0}, "1": {"0": 0.25, "1": 0.75}, "2": {"1": 1.0}}
    assert decode["predicted"]["tpot_s"] == 0.05
    assert "ttft_s" not in decode["predicted"]
    assert [loser["layout"] for loser in decode["rejected"]] == ["dp_ep", "tp_pp"]
    assert "attention_tp" not in decode["rejected"][1]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(PLAN)))
    assert read_plan(path) == PLAN
    with pytest.raises(UserError, match=r"^\S*missing\.json: cannot be read"):
        read_plan(tmp_path / "missing.json")
    path.write_text("{")
    with pytest.raises(UserError, match=r"plan\.json: not valid JSON"):
        read_plan(path)
    path.write_text("[]")
    with pytest.raises(UserError, match=r"plan\.json: holds a list: an object is needed"):
        read_plan(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layout": "mixed"},
            "plan: phases.decode: layout is 'mixed': it must be 'disaggregated', 'hybrid', 'tp_pp' or 'dp_ep'",
        ),
        ({"layout": None}, "decode: layout is missing"),
        ({"attention_tp": 0}, "attention_tp is 0: it must be at least 1"),
        ({"pp": 10**7}, "pp is 10000000: it must be at most 1048576"),
        ({"attention_tp": 1.5}, "attention_tp is 1.5: it must be a valid integer"),
        ({"expert_workers": 0}, "expert_workers is 0: a disaggregated layout needs at least 1"),
        ({"micro_batches": None}, "micro_batches is missing"),
        ({"micro_batches": True}, "micro_batches is true: it must be a valid integer"),
        ({"batch": 1e308}, r"batch is 1e\+308: it must be at most 1000000000"),
        ({"num_instances": 1 << 21}, "num_instances is 2097152: it must be at most 1048576"),
        ({"placement": {"0": {"9" * 5000: 1.0}}}, "worker '9{20}' does not exist"),
        ({"batch": -3}, "batch is -3: it must be at least 1"),
        ({"microbatches": 3}, r"unknown key microbatches: did you mean micro_batches\?"),
        ({"devices": [{"role": "both", "device": "H20"}]}, r"devices\[0\].num_devices is missing"),
        ({"devices": [{"role": "cook", "device": "H20", "num_devices": 1}]}, "role is 'cook': it must be 'attention'"),
        ({"placement": {"0": {"0": 1.0}, "2": {"0": 1.0}}}, "placement: expert 1 is missing: place every expert"),
        (
            {"placement": {"0": {"0": 0.5, "1": 0.4}}},
            "placement: expert 0: the fractions add up to 0.9: make them add up to 1",
        ),
        ({"placement": {"0": {"2": 1.0}}}, "placement: expert 0: worker '2' does not exist: use 0 to 1"),
        ({"placement": {"0": {"-1": 1.0}}}, "worker '-1' does not exist"),
        ({"placement": {"0": {"0": 0.0, "1": 1.0}}}, "placement: expert 0: the share of worker 0 is 0.0"),
        ({"placement": {"0": {}}}, "the fractions add up to 0"),
        ({"placement": [[0, 1.0]]}, "it must be an object"),
        ({"predicted": {"tpot_s": "fast"}}, "predicted.tpot_s is 'fast': it must be a valid number"),
        ({"predicted": {"tpot": 1}}, "unknown key predicted.tpot: did you mean tpot_s"),
        (
            {"predicted": {"memory_bytes": {"attention": None}}},
            "memory_bytes.attention is null: it must be a valid number",
        ),
        ({"rejected": [{"layout": "dp_ep"}]}, r"rejected\[0\].reason is missing"),
        ({"rejected": [{"layout": "dp_ep", "reason": "x", "why": 1}]}, r"unknown key rejected\[0\].why"),
        ({"notes": [1]}, r"notes\[0\] is 1: it must be a valid string"),
    ],
)
def test_a_wrong_phase_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_from_json(written(**changes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 2, "plan: version is 2: this program reads version 1: make the plan again with `antiphon plan`"),
        ("version", None, "version is missing"),
        ("phase", "train", "phase is 'train': this is a plan to train, not to serve"),
        ("phases", {}, "phases is {}: give at least one of prefill, decode"),
        ("phases", {"training": {}}, "unknown key phases.training: it must be 'prefill', 'decode' or 'serve'"),
        (
            "precision",
            {"weights": "fp9"},
            "precision.weights is 'fp9': it must be 'float32', 'bfloat16', 'float16', 'fp8'",
        ),
        (
            "objective",
            "fastest",
            "objective is 'fastest': it must be 'per-gpu', 'per-cost', 'per-power', 'ttft' or 'tpot'",
        ),
        ("model", 7, "model is 7: it must be a valid string"),
        ("models", "x", r"unknown key models: did you mean model\?"),
        ("model_config", 3, "model_config is 3: it must be an object"),
    ],
)
def test_a_wrong_plan_is_refused(key: str, value: Any, message: str) -> None:
    mapping = written()
    mapping[key] = value
    if value is None:
        del mapping[key]
    with pytest.raises(UserError, match=message):
        plan_from_json(mapping)


def test_a_colocated_placement_names_ranks_of_expert_parallelism() -> None:
    mapping = written(layout="dp_ep", expert_workers=0, expert_ep=2, rejected=[])
    assert plan_from_json(mapping).phases["decode"].parallel.expert_ep == 2
    with pytest.raises(UserError, match="worker '1' does not exist: use 0 to 0"):
        plan_from_json(written(layout="dp_ep", expert_workers=0, expert_ep=1))


def test_reading_changes_nothing_in_the_mapping() -> None:
    mapping = written()
    before = copy.deepcopy(mapping)
    plan_from_json(mapping)
    assert mapping == before


amounts = st.floats(0, 1e12)
times = st.none() | st.floats(1e-9, 1e3)
counts = st.integers(1, 512)
words = st.text("abc _", min_size=1, max_size=9)
devices = st.builds(DeviceUse, role=st.sampled_from(["attention", "experts", "both"]), device=words, num_devices=counts)
predictions = st.builds(
    Predicted,
    tpot_s=times,
    ttft_s=times,
    tokens_per_s=amounts,
    per_gpu=amounts,
    per_cost=st.none() | amounts,
    per_power=amounts,
    t_a_s=times,
    t_e_s=times,
    t_c_s=times,
    queueing_s=times,
    memory_bytes=st.dictionaries(words, amounts, max_size=2),
    bound_by=st.dictionaries(words, words, max_size=2),
)
workers = st.integers(1, 9)
parallels = st.builds(
    Parallel,
    attention_tp=counts,
    attention_dp=counts,
    expert_tp=counts,
    expert_ep=workers,
    expert_workers=workers,
    pp=counts,
)
losers = st.builds(
    Rejected,
    layout=st.sampled_from(LAYOUTS),
    reason=words,
    parallel=st.none() | parallels,
    micro_batches=st.none() | counts,
    batch=st.none() | counts,
    devices=st.lists(devices, max_size=2).map(tuple),
    predicted=st.none() | predictions,
)


@st.composite
def phases(draw: st.DrawFn) -> PhasePlan:
    layout, parallel = draw(st.sampled_from(LAYOUTS)), draw(parallels)
    num_workers = parallel.expert_workers if layout == "disaggregated" else parallel.expert_ep
    placement = []
    for _ in range(draw(st.integers(1, 6))):
        owners = draw(st.lists(st.integers(0, num_workers - 1), min_size=1, unique=True))
        weights = [draw(st.floats(0.1, 1)) for _ in owners]
        placement.append(tuple((owner, w / sum(weights)) for owner, w in zip(owners, weights, strict=True)))
    return PhasePlan(
        layout=layout,
        parallel=parallel,
        num_instances=draw(counts),
        micro_batches=draw(counts),
        batch=draw(counts),
        devices=tuple(draw(st.lists(devices, max_size=3))),
        placement=tuple(placement),
        predicted=draw(predictions),
        rejected=tuple(draw(st.lists(losers, max_size=2))),
        notes=tuple(draw(st.lists(words, max_size=2))),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    given_phases = draw(st.sampled_from([("prefill",), ("decode",), ("prefill", "decode")]))
    return Plan(
        model=draw(words),
        cluster=draw(words),
        workload=draw(words),
        objective=draw(st.sampled_from(OBJECTIVES)),
        precision=PrecisionSpec(
            weights=draw(st.sampled_from(sorted(BYTES_OF))), compute=draw(st.sampled_from(["bfloat16", "fp8"]))
        ),
        phases={name: draw(phases()) for name in given_phases},
        model_config=draw(st.dictionaries(words, st.none() | st.integers() | words, max_size=2)),
        num_candidates=draw(st.integers(0, 10**6)),
        search_s=draw(st.floats(0, 99)),
    )


@settings(max_examples=50, deadline=None)
@given(plan=plans())
def test_json_round_trip(plan: Plan) -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
