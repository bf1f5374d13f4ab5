"""`make_plan`: from model, cluster and workload to a plan, with every layout that lost and why.

1. By phase: the space (devices, then memory), all candidates' numbers at once, the best by objective.
2. One phase: the simplest layout that the model cannot tell from the best (`planner.predict`). Both phases: numbers of
   prefill and decode instances that keep each other busy (`planner.rate_match`).
3. The best candidate of every other layout is explained against the winner (`planner.explain`).
4. Nothing feasible: `NoPlan` with the nearest promise, rate or size.

Rejected: a solver. The space is a product of a few small degrees; columns of 10^5 candidates take about a second.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from antiphon.base.errors import UserError
from antiphon.cost.profile import Profile
from antiphon.planner.explain import rejected_layouts
from antiphon.planner.no_plan import NoPlan, no_plan
from antiphon.planner.outcome import best_outcome
from antiphon.planner.predict import phase_plan, simplest_of_ties
from antiphon.planner.rate_match import Match, rate_match
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.planner.space import Space, make_space
from antiphon.planner.table import CandidateTable
from antiphon.specs.cluster import ClusterSpec, cluster_to_json
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import LAYOUTS, Layout, Objective, PhaseName, PhasePlan, Plan
from antiphon.specs.precision import PrecisionSpec
from antiphon.specs.workload import WorkloadSpec, workload_to_json

__all__ = ["NoPlan", "PlanResult", "SearchLimits", "evaluate_phase", "make_plan", "settings_of"]

Progress = Callable[[float, float | None], None]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The plan, and by phase all candidates it was chosen from and the setting they were evaluated in."""

    plan: Plan
    tables: dict[PhaseName, CandidateTable]
    settings: dict[PhaseName, Setting]


def make_plan(
    model: ModelSpec,
    *,
    model_name: str,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    phases: tuple[PhaseName, ...] = ("decode",),
    layouts: tuple[Layout, ...] = LAYOUTS,
    objective: Objective = "per-gpu",
    precision: PrecisionSpec | None = None,
    profile: Profile | None = None,
    limits: SearchLimits | None = None,
    on_progress: Progress | None = None,
) -> PlanResult:
    """The best plan of `layouts` by `objective` under the workload's promises; `NoPlan` if there is none.

    `on_progress(done, total)` is called with candidates looked at; the total is None until it is known."""
    started_s = time.monotonic()
    _check(phases, layouts)
    settings = settings_of(
        model,
        cluster,
        workload,
        phases=phases,
        objective=objective,
        precision=precision,
        profile=profile,
        limits=limits,
    )
    tables = {name: evaluate_phase(setting, layouts, on_progress) for name, setting in settings.items()}
    chosen, ties = _choose(settings, tables)
    plans = {name: _explained(settings[name], tables[name], chosen, ties, name, layouts) for name in settings}
    plan = Plan(
        model=model_name,
        cluster=cluster.name,
        workload=workload.name,
        objective=objective,
        precision=precision or PrecisionSpec(),
        phases=plans,
        cluster_config=cluster_to_json(cluster),
        workload_config=workload_to_json(workload),
        num_candidates=sum(table.total_considered for table in tables.values()),
        search_s=time.monotonic() - started_s,
    )
    return PlanResult(plan=plan, tables=tables, settings=settings)


def settings_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    *,
    phases: tuple[PhaseName, ...] = ("decode",),
    objective: Objective = "per-gpu",
    precision: PrecisionSpec | None = None,
    profile: Profile | None = None,
    limits: SearchLimits | None = None,
) -> dict[PhaseName, Setting]:
    """The setting of each phase; with both, prefill hands its KV cache to another pool."""
    return {
        name: Setting(
            model=model,
            cluster=cluster,
            workload=workload,
            phase=name,
            objective=objective,
            precision=precision or PrecisionSpec(),
            profile=profile,
            limits=limits or SearchLimits(),
            transfers_kv=len(phases) > 1,
        )
        for name in phases
    }


def _check(phases: tuple[PhaseName, ...], layouts: tuple[Layout, ...]) -> None:
    if not phases or len(set(phases)) != len(phases) or not set(phases) <= {"prefill", "decode"}:
        raise UserError(f"phases are {phases}: give prefill, decode, or both, each once")
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown or not layouts:
        raise UserError(f"layouts are {tuple(layouts)}: give some of {', '.join(LAYOUTS)}")


def evaluate_phase(
    setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS, on_progress: Progress | None = None
) -> CandidateTable:
    """All candidates of `layouts` with their numbers."""
    space = make_space(setting, layouts)
    total = int(space.num_considered.sum())
    if on_progress is not None:
        on_progress(total - len(space.candidates), total)
    table = table_of(setting, space)
    if on_progress is not None:
        on_progress(total, total)
    return table


def table_of(setting: Setting, space: Space) -> CandidateTable:
    """A space's candidates with their numbers under the setting's promises and rate."""
    devices = [group.device for group in setting.groups]
    return CandidateTable(
        candidates=space.candidates,
        outcome=best_outcome(setting, space.candidates, space.limits, space.instances),
        device_names=tuple(device.name for device in devices),
        prices=tuple(float("nan") if device.price is None else device.price for device in devices),
        powers_w=tuple(device.power_w for device in devices),
        num_considered=space.num_considered,
        num_without_devices=space.num_without_devices,
        num_without_memory=space.num_without_memory,
        least_missing_bytes=space.least_missing_bytes,
    )


def _choose(
    settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]
) -> tuple[Match | dict[PhaseName, int], dict[PhaseName, str]]:
    """What is recommended, and what is to be said of ties: one phase alone takes the simplest of them."""
    best: dict[PhaseName, int] = {}
    for name, table in tables.items():
        index = table.best(settings[name].objective)
        if index is None:
            raise no_plan(settings[name], table)
        best[name] = index
    if len(tables) > 1:
        return rate_match(settings, tables), {}
    ((name, index),) = best.items()
    simplest, said = simplest_of_ties(settings[name], tables[name], index)
    return {name: simplest}, {name: said} if said else {}


def _explained(
    setting: Setting,
    table: CandidateTable,
    chosen: Match | dict[PhaseName, int],
    ties: dict[PhaseName, str],
    name: PhaseName,
    layouts: tuple[Layout, ...],
) -> PhasePlan:
    if isinstance(chosen, Match):
        index, instances, notes = chosen.index[name], chosen.num_instances[name], chosen.notes[name]
        pairs = chosen.share_of_layout[name]
    else:
        index, instances, notes, pairs = chosen[name], None, (), None
    plan = phase_plan(setting, table, index, instances)
    rejected = rejected_layouts(setting, table, index, layouts, pairs)
    tie = [ties[name]] if name in ties else []
    return replace(plan, rejected=rejected, notes=(*notes, *tie, *_notes_of(setting, plan)))


def _notes_of(setting: Setting, plan: PhasePlan) -> list[str]:
    """What a reader could take for a finding and is only a missing target, or devices left over."""
    notes = []
    if setting.phase == "prefill" and setting.workload.slo.ttft_s is None:
        notes.append(
            "no target for the time to the first token: passes are as long as memory allows, and that time is of a "
            "full one; give a target for shorter passes"
        )
    used = {use.device for use in plan.devices}
    if idle := [group.device.name for group in setting.cluster.groups if group.device.name not in used]:
        notes.append(f"{', '.join(idle)}: not used in this phase, the plan without is better by the objective")
    on_cores = any(group.device.kind == "cpu" and group.device.name in used for group in setting.cluster.groups)
    chosen = setting.limits.collectives == "auto" and plan.collectives == "fused"
    if chosen and on_cores and not setting.cluster.efficiency.round_s:
        notes.append(
            "fused exchanges are taken because the cluster's file does not say what a round of one takes (round_s), as "
            "older files do not: measure it anew with antiphon profile MODEL --folder DIR"
        )
    engine = None if setting.profile is None else setting.profile.engine
    sizes, is_decode = plan.parallel, setting.phase == "decode"
    shares_experts = plan.layout != "disaggregated" and sizes.attention_dp * sizes.expert_ep > 1
    if is_decode and shares_experts and engine is not None and engine.row_calls is None:
        notes.append(
            "steps are predicted too short: the profile does not say what ranks compute to send rows to experts, as "
            "older files do not; measure it anew with antiphon profile MODEL --folder DIR"
        )
    return notes
