"""A report of a real search holds the plan's own numbers: parts, memory, pipeline, fronts, what-ifs."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.ping_pong import layer_time
from antiphon.models.config import load_model_spec
from antiphon.planner.candidate_table import front
from antiphon.planner.candidates import Pins
from antiphon.planner.predict import candidate_of, step_parts_of
from antiphon.planner.search import PlanResult, SearchLimits, make_plan, settings_of
from antiphon.planner.step_times import StepParts
from antiphon.report.gather import Report, gather, measured_like, pipeline_bars, swept
from antiphon.sim.gantt import Bar, span_s
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import WEIGHT_FORMATS
from antiphon.specs.plan import LAYOUTS, DeviceUse, Layout, Parallel, PhasePlan
from antiphon.specs.workload import load_workload


def search(layouts: tuple[Layout, ...] = LAYOUTS) -> PlanResult:
    settings = settings_of(
        load_model_spec(shipped_file("model", "mixtral-8x22b")),
        load_cluster("msi-hetero"),
        load_workload("msi-production"),
        phases=("prefill", "decode") if layouts == LAYOUTS else ("decode",),
        objective="per-cost",
    )
    return make_plan(settings, model_name="mixtral-8x22b", layouts=layouts)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return search()


@pytest.fixture(scope="module")
def progress() -> list[tuple[float, float | None]]:
    """Filled while `gathered` is made."""
    return []


@pytest.fixture(scope="module")
def gathered(result: PlanResult, progress: list[tuple[float, float | None]]) -> Report:
    return gather(
        result,
        for_page=True,
        with_more_nodes=True,
        on_progress=lambda done, total: progress.append((done, total)),
    )


@pytest.fixture(scope="module")
def by_layout() -> dict[Layout, PlanResult]:
    return {layout: search((layout,)) for layout in LAYOUTS}


def step_of(found: PlanResult, phase: PhasePlan) -> StepParts:
    setting = found.settings["decode"]
    return step_parts_of(setting, candidate_of(setting, phase))


def bars_of(found: PlanResult, phase: PhasePlan) -> tuple[tuple[Bar, ...], str]:
    setting = found.settings["decode"]
    return pipeline_bars(setting.model.num_moe_layers, candidate_of(setting, phase), step_of(found, phase))


def test_phases_come_in_the_order_of_a_request(gathered: Report, result: PlanResult) -> None:
    assert [contents.name for contents in gathered.phases] == ["prefill", "decode"]
    assert sum(contents.num_candidates for contents in gathered.phases) == result.plan.num_candidates


def test_parts_add_up_to_the_predicted_times(by_layout: dict[Layout, PlanResult]) -> None:
    for layout, found in by_layout.items():
        (contents,) = gather(found, for_page=False, with_more_nodes=False).phases
        predicted = contents.phase.predicted
        total = {name: float(part.total_s) for name, part in contents.parts.items()}
        assert total["attention"] == pytest.approx(predicted.t_a_s)
        assert total["experts"] == pytest.approx(predicted.t_e_s)
        if layout == "disaggregated":
            assert max(total["to experts"], total["to attention"]) == pytest.approx(predicted.t_c_s)
        else:
            assert total["exchange, both ways"] / 2 == pytest.approx(predicted.t_c_s)


def test_memory_is_the_predicted_one_and_fits(gathered: Report, by_layout: dict[Layout, PlanResult]) -> None:
    reports = [gathered, *(gather(found, for_page=False, with_more_nodes=False) for found in by_layout.values())]
    for contents in (contents for report in reports for contents in report.phases):
        assert {use.role for use in contents.memory} == contents.phase.predicted.memory_bytes.keys()
        for use in contents.memory:
            assert use.weight_bytes + use.kv_bytes == pytest.approx(contents.phase.predicted.memory_bytes[use.role])
            assert use.weight_bytes + use.kv_bytes + use.reserve_bytes <= use.capacity_bytes * (1 + 1e-9)
            assert use.weight_bytes > 0
            assert use.kv_bytes >= 0


def test_only_ping_pong_has_its_conditions(by_layout: dict[Layout, PlanResult]) -> None:
    for layout, found in by_layout.items():
        (contents,) = gather(found, for_page=False, with_more_nodes=False).phases
        equations = [equation for equation, *_ in contents.conditions]
        assert equations == (["eq. 1", "eq. 2", "eq. 3"] if layout == "disaggregated" else [])


def test_the_simulated_pipeline_keeps_the_formulas_pace(by_layout: dict[Layout, PlanResult]) -> None:
    """From one layer's first bar to the next one's: the closed form that the plan's latency rests on."""
    found = by_layout["disaggregated"]
    phase = found.plan.phases["decode"]
    bars, title = bars_of(found, phase)
    starts = {bar.layer: bar.start_s for bar in reversed(bars) if bar.track == "attention" and bar.micro_batch == 0}
    predicted = phase.predicted
    assert predicted.t_a_s is not None
    assert predicted.t_e_s is not None
    assert predicted.t_c_s is not None
    expected_s = float(layer_time(phase.micro_batches, predicted.t_a_s, predicted.t_e_s, predicted.t_c_s))
    assert starts[3] - starts[2] == pytest.approx(expected_s, rel=0.05)
    assert title == "The pipeline: 4 layers of ping-pong"
    assert {bar.track for bar in bars} == {"attention", "to experts", "experts", "to attention"}


@pytest.mark.parametrize("stages", [2, 3, 9])
def test_stages_pass_their_micro_batches_on(by_layout: dict[Layout, PlanResult], stages: int) -> None:
    found = by_layout["tp_pp"]
    phase = found.plan.phases["decode"]
    staged = replace(phase, parallel=replace(phase.parallel, pp=stages), micro_batches=stages, batch=64 * stages)
    bars, title = bars_of(found, staged)
    shown = len({bar.track for bar in bars})
    assert shown == min(stages, 8)
    assert ("first 8 of 9" in title) == (stages == 9)
    last_s = max(bar.end_s for bar in bars if bar.micro_batch == 0)
    assert last_s == pytest.approx(float(step_of(found, staged).step_s[0]) * shown / stages, rel=0.05)
    by_track: dict[str, list[Bar]] = {}
    for bar in bars:
        by_track.setdefault(bar.track, []).append(bar)
    for of_track in by_track.values():
        assert [bar.micro_batch for bar in of_track] == list(range(stages))
        assert all(one.end_s <= other.start_s + 1e-12 for one, other in pairwise(of_track))


def test_one_stage_shows_the_parts_of_its_layers(by_layout: dict[Layout, PlanResult]) -> None:
    found = by_layout["hybrid"]
    phase = found.plan.phases["decode"]
    single = replace(phase, parallel=replace(phase.parallel, pp=1), micro_batches=1)
    bars, title = bars_of(found, single)
    assert title == "2 layers of one instance"
    step = step_of(found, single)
    parts = (step.attention.moe_layer, step.dispatch, step.experts)
    assert span_s(bars)[1] == pytest.approx(2 * sum(float(part.at(0).total_s) for part in parts))
    assert [bar.kind for bar in bars] == ["attention", "to experts", "experts", "to attention"] * 2


def test_fronts_are_never_beaten(gathered: Report, result: PlanResult) -> None:
    for contents in gathered.phases:
        setting, table = result.settings[contents.name], result.tables[contents.name]
        assert {points.layout for points in contents.fronts} == set(LAYOUTS)
        for line in contents.fronts:
            assert list(line.latency_s) == sorted(line.latency_s)
            assert list(line.scores) == sorted(line.scores)
            tried = swept(setting, table, line.layout)
            scores = tried.score(setting.objective)
            valid = np.isfinite(tried.latency_s) & (tried.latency_s > 0) & (scores > 0)
            num_reachable = np.searchsorted(line.latency_s, tried.latency_s[valid], side="right")
            assert num_reachable.min() > 0
            assert (np.asarray(line.scores)[num_reachable - 1] >= scores[valid]).all()


def test_the_plan_lies_on_no_worse_than_its_front(by_layout: dict[Layout, PlanResult]) -> None:
    found = by_layout["disaggregated"]
    (contents,) = gather(found, for_page=True, with_more_nodes=False).phases
    predicted = contents.phase.predicted
    assert predicted.per_cost is not None
    assert predicted.tpot_s is not None
    (line,) = contents.fronts
    beaten = [
        score for at_s, score in zip(line.latency_s, line.scores, strict=True) if at_s <= predicted.tpot_s * (1 - 1e-9)
    ]
    assert max(beaten) <= predicted.per_cost * (1 + 1e-9)


def test_sensitivity_meets_the_search_where_nothing_changes(gathered: Report, result: PlanResult) -> None:
    table, setting = result.tables["decode"], result.settings["decode"]
    for changed in gathered.sensitivity[3:]:
        assert changed.title.startswith("Decode: ")
        assert changed.current is not None
        place = changed.values.index(pytest.approx(changed.current))
        for code, layout in enumerate(LAYOUTS):
            index = table.best(setting.objective, np.asarray(table.candidates.layout == code))
            assert index is not None
            assert changed.scores[layout][place] == pytest.approx(float(table.score(setting.objective)[index]))
    assert gathered.sensitivity[0].current is None, "no target for the first token was given"


def test_one_more_node_of_each_kind_in_each_phase(gathered: Report) -> None:
    kinds = [(name, device) for name, found in gathered.more_nodes.items() for device, _, _ in found]
    assert kinds == [(phase, device) for phase in ("prefill", "decode") for device in ("H20", "L40S")]
    assert all(gain >= 1 - 1e-9 for found in gathered.more_nodes.values() for _, _, gain in found)


def test_other_formats_of_weights_in_each_phase(gathered: Report) -> None:
    for found in gathered.formats.values():
        assert [name for name, *_ in found] == list(WEIGHT_FORMATS)
        assert found[0][3] == pytest.approx(1.0), "bfloat16 is what was planned"


def test_progress_ends_at_its_total(progress: list[tuple[float, float | None]], gathered: Report) -> None:
    assert len(progress) == 3 * len(gathered.phases) + len(gathered.sensitivity)
    assert [done for done, _ in progress] == list(range(1, len(progress) + 1))
    assert {total for _, total in progress} == {len(progress)}


@settings(max_examples=50, deadline=None)
@given(points=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=40))
def test_a_front_holds_whom_nobody_beats(points: list[tuple[int, int]]) -> None:
    latency_s, scores = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    found = {points[index] for index in front(latency_s, scores)}
    beaten = {
        (at, score)
        for at, score in points
        if any(other != (at, score) and other[0] <= at and other[1] >= score for other in points)
    }
    assert found == set(points) - beaten


def test_servers_like_measured_ones_are_priced_as_those() -> None:
    """By every engine's constants, in its band; other layouts are not."""
    pins = Pins(attention_tp=8, pp=1)
    settings = settings_of(
        load_model_spec(shipped_file("model", "mixtral-8x22b")),
        load_cluster("msi-hetero"),
        load_workload("msi-production"),
        limits=SearchLimits(pins=pins),
    )
    planned = make_plan(settings, model_name="mixtral-8x22b", layouts=("tp_pp", "disaggregated"))
    (phase,) = planned.plan.phases.values()
    setting = planned.settings["decode"]
    if phase.layout == "disaggregated":
        assert measured_like(setting, phase) == {}
    together = replace(
        phase,
        layout="tp_pp",
        parallel=Parallel(attention_tp=8, expert_tp=8),
        devices=(DeviceUse(device="H20", num_devices=8, role="both"),),
    )
    found = measured_like(setting, together)
    assert set(found) == {"sglang", "trtllm", "vllm"}
    for middle_s, low_s, high_s in found.values():
        assert 0 < low_s < middle_s < high_s
    assert measured_like(setting, replace(together, parallel=Parallel(attention_tp=8, expert_tp=8, pp=2))) == {}
