"""What only a plan's page shows: how layouts trade latency for rate, what-ifs, and a stretch of the chosen pipeline.

Fronts of latency against rate: the search keeps one batch per candidate, the largest under the target, so its own
points crowd below it. Here the best candidates of each layout are taken again with batches from what memory allows down
to one. A front is what is left when everything that something else beats in both is gone. Rejected: all candidates at
all batches, 10^6 evaluations.

The pipeline is bars: simulated where attention and experts take turns, else laid out.

- disaggregated: `sim.ping_pong` over a few layers, one attention and one expert worker, the exchange as their links
- several stages: one token of as many micro-batches as there are stages, each passing all stages
- one stage: the parts of two layers, one after the other
"""

from dataclasses import fields, replace

import numpy as np

from antiphon.planner.candidates import BoolArray, Candidates, IntArray, joined
from antiphon.planner.outcome import outcome_at
from antiphon.planner.room import batch_limits
from antiphon.planner.search import PlanResult
from antiphon.planner.sensitivity import Over, base_value, sensitivity
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepParts
from antiphon.planner.table import CandidateTable, Outcome, front
from antiphon.report.contents import Points, Sensitivity
from antiphon.report.words import PHASE_TITLES, devices_text, plural, short_degrees
from antiphon.sim.gantt import Bar
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong
from antiphon.specs.plan import LAYOUTS, Layout, Objective, PhaseName

TITLES: dict[Over, str] = {
    "slo": "a tighter or a looser target",
    "context": "shorter and longer prompts",
    "network": "a slower or a faster network between nodes",
}
AXES: dict[Over, tuple[str, float]] = {
    "slo": ("{latency}, target (ms)", 1e-3),
    "context": ("Median prompt (tokens)", 1.0),
    "network": ("Bandwidth of all NICs (times this cluster's)", 1.0),
}


def sensitivity_of(result: PlanResult, name: PhaseName, over: Over) -> Sensitivity:
    """The curves of all layouts, in the unit of the axis."""
    setting, table = result.settings[name], result.tables[name]
    points = sensitivity(setting, table, over=over)
    what, scale = AXES[over]
    is_promised = (setting.workload.slo.tpot_s if name == "decode" else setting.workload.slo.ttft_s) is not None
    current = base_value(setting, table, over) / scale if over != "slo" or is_promised else None
    latency = "time per output token" if name == "decode" else "time to first token"
    return Sensitivity(
        title=f"{PHASE_TITLES[name]}: {TITLES[over]}",
        axis=what.format(latency=latency[0].upper() + latency[1:]),
        values=tuple(point.value / scale for point in points),
        scores={layout: tuple(point.best[layout] for point in points) for layout in points[0].best},
        current=current,
    )


NUM_SWEPT = 200
"""Candidates of each layout that are tried at other batches: the best half by rate, the rest spread over the others."""
NUM_BATCHES = 12


def frontier(setting: Setting, table: CandidateTable) -> tuple[Points, ...]:
    """The front of each layout that has a candidate."""
    fronts = []
    for layout in LAYOUTS:
        points = swept(setting, table, layout)
        index = np.flatnonzero(_is_shown(points, setting.objective))
        if index.size:
            best = front(points.latency_s[index], points.score(setting.objective)[index])
            fronts.append(_points(points, layout, index[best], setting.objective))
    return tuple(fronts)


def swept(setting: Setting, table: CandidateTable, layout: Layout) -> CandidateTable:
    """Candidates of `layout` at the search's batch, and some of them at others."""
    all_of_it = np.flatnonzero(table.candidates.layout == LAYOUTS.index(layout))
    chosen = _worth_sweeping(table, all_of_it, setting.objective)
    base = table.candidates.take(chosen)
    limits, instances = batch_limits(setting, base), table.outcome.num_instances[chosen]
    parts = [(table.candidates.take(all_of_it), table.outcome.take(all_of_it))]
    for step in range(NUM_BATCHES):
        batch = np.maximum(limits // 2**step, 1)
        if step and not np.any(limits >= 2**step):
            break
        candidates = base.with_batch(batch)
        parts.append((candidates, outcome_at(setting, candidates, instances)))
    columns = {
        column.name: np.concatenate([getattr(outcome, column.name) for _, outcome in parts])
        for column in fields(Outcome)
    }
    return replace(table, candidates=joined([candidates for candidates, _ in parts]), outcome=Outcome(**columns))


def _worth_sweeping(table: CandidateTable, index: IntArray, objective: Objective) -> IntArray:
    scores = np.nan_to_num(table.score(objective)[index], nan=-np.inf)
    order = index[np.argsort(-scores, kind="stable")]
    if order.size <= NUM_SWEPT:
        return order
    rest = order[NUM_SWEPT // 2 :]
    spread = rest[np.linspace(0, rest.size - 1, NUM_SWEPT - NUM_SWEPT // 2).astype(np.int64)]
    return np.unique(np.concatenate([order[: NUM_SWEPT // 2], spread]))


def _is_shown(table: CandidateTable, objective: Objective) -> BoolArray:
    latency_s = table.latency_s
    return np.asarray(np.isfinite(latency_s) & (latency_s > 0) & (np.nan_to_num(table.score(objective)) > 0))


def _points(table: CandidateTable, layout: Layout, index: IntArray, objective: Objective) -> Points:
    latency_s, scores, batch = table.latency_s, table.score(objective), table.batch
    return Points(
        layout=layout,
        latency_s=tuple(float(value) for value in latency_s[index]),
        scores=tuple(float(value) for value in scores[index]),
        labels=tuple(
            f"{short_degrees(layout, table.parallel(int(row)))}, "
            f"{plural(int(table.micro_batches[row]), 'micro-batch', 'micro-batches')}, batch {int(batch[row]):,}; "
            f"{devices_text(table.devices(int(row)))}"
            for row in index
        ),
    )


NUM_LAYERS = 4
MAX_STAGES = 8
TRACKS = {
    "attention[0]": "attention",
    "attention[0] out": "to experts",
    "experts[0]": "experts",
    "experts[0] out": "to attention",
}


def pipeline_bars(num_moe_layers: int, one: Candidates, step: StepParts) -> tuple[tuple[Bar, ...], str]:
    """The bars of a single candidate whose step has these parts, and what they show."""
    num_layers = min(NUM_LAYERS, num_moe_layers)
    if bool(one.is_disaggregated[0]):
        return _ping_pong(
            step, int(one.micro_batches[0]), num_layers
        ), f"The pipeline: {num_layers} layers of ping-pong"
    stages = int(one.pp[0])
    if stages > 1:
        shown = min(stages, MAX_STAGES)
        which = f"the first {shown} of {stages} stages" if shown < stages else f"{stages} stages"
        return _stages(step, stages, shown), f"The pipeline: {which}, each with its layers"
    num_layers = min(2, num_layers)
    return _layers(step, num_layers), f"{num_layers} layers of one instance"


def _ping_pong(step: StepParts, num_micro_batches: int, num_layers: int) -> tuple[Bar, ...]:
    """Links are occupied for T_c each way; the order of tracks is the way of a micro-batch."""
    pipeline = PingPong(
        num_layers=num_layers,
        num_micro_batches=num_micro_batches,
        attention_s=float(step.attention.moe_layer.at(0).total_s),
        attention_send_s=float(step.dispatch.at(0).total_s),
        experts_s=float(step.experts.at(0).total_s),
        experts_send_s=float(step.combine.at(0).total_s),
    )
    bars = simulate_ping_pong(pipeline).bars
    named = [
        replace(bar, track=TRACKS[bar.track], label=f"layer {bar.layer + 1}, micro-batch {bar.micro_batch + 1}")
        for bar in bars
    ]
    order = list(TRACKS.values())
    return tuple(sorted(named, key=lambda bar: (bar.start_s, order.index(bar.track))))


def _stages(step: StepParts, stages: int, shown: int) -> tuple[Bar, ...]:
    """Every stage takes an equal share of the step, the way to the next one included."""
    turn_s = float(step.step_s[0]) / stages
    hop_s = float(step.hop.at(0).total_s)
    bars = []
    for stage in range(shown):
        for micro_batch in range(stages):
            start_s = (stage + micro_batch) * turn_s
            bars.append(
                Bar(
                    track=f"stage {stage + 1}",
                    label=f"micro-batch {micro_batch + 1}",
                    start_s=start_s,
                    end_s=start_s + turn_s - hop_s,
                    kind="stage",
                    micro_batch=micro_batch,
                )
            )
    return tuple(bars)


def _layers(step: StepParts, num_layers: int) -> tuple[Bar, ...]:
    """Attention, half of the exchange, experts, the other half; nothing overlaps but what the exchange's cost says."""
    half_s = float(step.dispatch.at(0).total_s) / 2
    steps = (
        ("devices", "attention", float(step.attention.moe_layer.at(0).total_s)),
        ("network", "to experts", half_s),
        ("devices", "experts", float(step.experts.at(0).total_s)),
        ("network", "to attention", half_s),
    )
    bars, now_s = [], 0.0
    for layer in range(num_layers):
        for track, kind, duration_s in steps:
            label = f"layer {layer + 1}, {kind}"
            bars.append(Bar(track=track, label=label, start_s=now_s, end_s=now_s + duration_s, kind=kind, layer=layer))
            now_s += duration_s
    return tuple(bars)
