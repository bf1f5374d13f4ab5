"""Everything a report shows, from a search's result: what was chosen, looked at closely, and what else was possible.

What only the page shows (fronts, sensitivity) and what takes further searches is gathered when asked for.

Fronts of latency against rate: the search keeps one batch per candidate, the largest under the target, so its own
points crowd below it. Here the best candidates of each layout are taken again with batches from what memory allows down
to one. A front is what is left when everything that something else beats in both is gone. Rejected: all candidates at
all batches, 10^6 evaluations.
"""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from antiphon.planner.batch_limits import batch_limits
from antiphon.planner.candidates import BoolArray, IntArray, joined
from antiphon.planner.decode import outcome_at as decode_at
from antiphon.planner.prefill import outcome_at as prefill_at
from antiphon.planner.search import PlanResult, Progress
from antiphon.planner.sensitivity import FACTORS, Over, base_value, sensitivity
from antiphon.planner.setting import Setting
from antiphon.planner.smallest_cluster import one_more_node
from antiphon.planner.table import CandidateTable, Outcome, front
from antiphon.report.chosen import layer_parts, look_closely, memory_uses, ping_pong_conditions, pipeline_bars
from antiphon.report.contents import MoreNodes, PhaseContents, Points, Report, Sensitivity
from antiphon.report.words import PHASE_TITLES, devices_text, plural, short_degrees
from antiphon.specs.plan import LAYOUTS, Layout, Objective, PhaseName

Gathered = TypeVar("Gathered")
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


def gather(result: PlanResult, *, for_page: bool, with_more_nodes: bool, on_progress: Progress | None = None) -> Report:
    """The report; phases in the order in which a request passes them. `on_progress(done, total)` counts its parts."""
    setting = next(iter(result.settings.values()))
    names = tuple(result.plan.phases)
    changes = [(name, over) for name in names for over in FACTORS] if for_page else []
    kinds = names if with_more_nodes else ()
    steps = _Steps(len(names) + len(changes) + len(kinds), on_progress)
    return Report(
        plan=result.plan,
        model=setting.model,
        cluster=setting.cluster,
        workload=setting.workload,
        precision=setting.precision,
        profile=setting.profile,
        phases=tuple(steps.after(_phase(result, name, for_page)) for name in names),
        sensitivity=tuple(
            steps.after(_sensitivity(result, name, over)) for name in names for over in FACTORS if for_page
        ),
        more_nodes=tuple(more for name in kinds for more in steps.after(_more_nodes(result, name))),
    )


@dataclass
class _Steps:
    """Tells how far gathering is."""

    total: int
    on_progress: Progress | None
    done: int = 0

    def after(self, gathered: Gathered) -> Gathered:
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return gathered


def _sensitivity(result: PlanResult, name: PhaseName, over: Over) -> Sensitivity:
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


def _more_nodes(result: PlanResult, name: PhaseName) -> list[MoreNodes]:
    layouts = tuple(layout for code, layout in enumerate(LAYOUTS) if result.tables[name].num_considered[code])
    return [
        MoreNodes(phase=name, device=more.device, tokens_per_s=more.tokens_per_s, gain=more.gain)
        for more in one_more_node(result.settings[name], layouts)
    ]


def _phase(result: PlanResult, name: PhaseName, for_page: bool) -> PhaseContents:
    setting, table, phase = result.settings[name], result.tables[name], result.plan.phases[name]
    chosen = look_closely(setting, phase)
    bars, title = pipeline_bars(chosen)
    return PhaseContents(
        name=name,
        phase=phase,
        tokens_per_request=setting.lengths.output if name == "decode" else setting.lengths.prompt,
        fronts=frontier(setting, table) if for_page else (),
        bars=bars,
        bars_title=title,
        memory=memory_uses(chosen),
        parts=layer_parts(chosen),
        conditions=ping_pong_conditions(chosen),
        num_candidates=table.total_considered,
        num_feasible=int(table.feasible.sum()),
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
    at = decode_at if setting.phase == "decode" else prefill_at
    for step in range(NUM_BATCHES):
        batch = np.maximum(limits // 2**step, 1)
        if step and not np.any(limits >= 2**step):
            break
        candidates = base.with_batch(batch)
        parts.append((candidates, at(setting, candidates, instances)))
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
