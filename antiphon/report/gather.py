"""Everything a report shows, from a search's result: what was chosen, looked at closely, and what else was possible.

What only the page shows (fronts, sensitivity) and what takes further searches is gathered when asked for.
"""

from dataclasses import dataclass
from typing import TypeVar

from antiphon.planner.search import PlanResult, Progress
from antiphon.planner.sensitivity import FACTORS, Over, base_value, sensitivity
from antiphon.planner.smallest_cluster import one_more_node
from antiphon.report.chosen import layer_parts, look_closely, memory_uses, ping_pong_conditions
from antiphon.report.contents import MoreNodes, PhaseContents, Report, Sensitivity
from antiphon.report.frontier import frontier
from antiphon.report.pipeline import pipeline_bars
from antiphon.report.words import PHASE_TITLES
from antiphon.specs.plan import LAYOUTS, PhaseName

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
