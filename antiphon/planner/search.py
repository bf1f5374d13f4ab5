"""`make_plan`: from model, cluster and workload to a plan, with every layout that lost and why.

1. By phase: the space (devices, then memory), all candidates' numbers at once, the best by objective.
2. One phase: the best candidate; a simpler layout that the model cannot tell from it is named beside it
   (`planner.predict`), and taken with `SearchLimits.prefer_simple`. Both phases: numbers of prefill and decode
   instances that keep each other busy (`planner.rate_match`). `serve`: servers that do both, or pools.
3. The best candidate of every other layout is explained against the winner (`planner.explain`).
4. Nothing feasible: `NoPlan` with the nearest promise, rate or size.

Rejected: a solver. The space is a product of a few small degrees; columns of 10^5 candidates take about a second.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.profile import Profile
from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidate_table import RATE, CandidateTable, Outcome
from antiphon.planner.candidates import Candidates, IntArray, joined
from antiphon.planner.explain import RESOURCES, NoPlan, no_plan, rejected_layouts
from antiphon.planner.least_latency import least_latency
from antiphon.planner.outcome import best_outcome
from antiphon.planner.predict import EQUAL, phase_plan, request_tokens_per_s, simplest_of_ties
from antiphon.planner.rate_match import Match, rate_match
from antiphon.planner.room import batch_limits, usable_instances
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.planner.space import Space, make_space
from antiphon.planner.step_times import step_times
from antiphon.specs.cluster import ClusterSpec, cluster_to_json
from antiphon.specs.model import ModelSpec, PrecisionSpec
from antiphon.specs.plan import (
    LATENCIES,
    LAYOUTS,
    ONE_POOL,
    PHASES,
    TWO_POOLS,
    Layout,
    Objective,
    PhaseName,
    PhasePlan,
    Plan,
)
from antiphon.specs.workload import WorkloadSpec, workload_to_json

__all__ = ["NoPlan", "PlanResult", "SearchLimits", "evaluate_phase", "make_plan", "settings_of"]

Progress = Callable[[float, float | None], None]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The plan, and by phase all candidates it was chosen from and the setting they were evaluated in."""

    plan: Plan
    tables: dict[PhaseName, CandidateTable]
    settings: dict[PhaseName, Setting]

    @property
    def cluster(self) -> ClusterSpec:
        return next(iter(self.settings.values())).cluster


def make_plan(
    settings: dict[PhaseName, Setting],
    *,
    model_name: str,
    layouts: tuple[Layout, ...] = LAYOUTS,
    on_progress: Progress | None = None,
) -> PlanResult:
    """The best plan of `layouts` by the objective of `settings_of` under the workload's promises; `NoPlan` if there is
    none.

    `on_progress(done, total)` is called with candidates looked at; the total is None until it is known."""
    started_s = time.monotonic()
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown or not layouts:
        raise UserError(f"layouts are {tuple(layouts)}: give some of {', '.join(LAYOUTS)}")
    tables = evaluate_phases(settings, layouts, on_progress)
    chosen = _choose(settings, tables)
    plans = {name: _explained(settings[name], tables[name], chosen, name, layouts) for name in chosen.index}
    asked = next(iter(settings.values()))
    plan = Plan(
        model=model_name,
        cluster=asked.cluster.name,
        workload=asked.workload.name,
        objective=asked.objective,
        precision=asked.precision,
        phases=plans,
        cluster_config=cluster_to_json(asked.cluster),
        workload_config=workload_to_json(asked.workload),
        request_tokens_per_s=request_tokens_per_s(settings, plans),
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
    wrong = {"ttft": "decode", "tpot": "prefill"}.get(objective)
    if objective in LATENCIES and (len(phases) != 1 or wrong in phases):
        others = ", ".join(name for name in PHASES if name != wrong)
        raise UserError(
            f"objective {objective} is of one kind of server that has that time, not of {' and '.join(phases)}: plan "
            f"one of the phases {others}"
        )
    if not phases or len(set(phases)) != len(phases) or not set(phases) <= set(PHASES):
        raise UserError(f"phases are {phases}: give some of {', '.join(PHASES)}, each once")
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
            transfers_kv=name != "serve" and {"prefill", "decode"} <= set(phases),
        )
        for name in phases
    }


def evaluate_phases(
    settings: dict[PhaseName, Setting], layouts: tuple[Layout, ...] = LAYOUTS, on_progress: Progress | None = None
) -> dict[PhaseName, CandidateTable]:
    """The table of each phase."""
    tables: dict[PhaseName, CandidateTable] = {}
    for name in sorted(settings, key=PHASES.index):  # decode before serve, which it bounds
        if name == "serve":
            tables[name] = _serving_table(settings[name], layouts, tables.get("decode"), on_progress)
        else:
            tables[name] = evaluate_phase(settings[name], layouts, on_progress)
    return tables


def evaluate_phase(
    setting: Setting, layouts: tuple[Layout, ...] = LAYOUTS, on_progress: Progress | None = None
) -> CandidateTable:
    """All candidates of `layouts` with their numbers; of servers that compute prompts, too, the most promising."""
    if setting.phase == "serve":
        return _serving_table(setting, layouts, None, on_progress)
    space = make_space(setting, layouts)
    total = int(space.num_considered.sum())
    if on_progress is not None:
        on_progress(total - len(space.candidates), total)
    table = table_of(setting, space)
    if on_progress is not None:
        on_progress(total, total)
    return table


BLOCK, MOST_BLOCKS = 256, 8
"""Candidates of a layout that are evaluated together, and how many times at most."""


def _serving_table(
    setting: Setting, layouts: tuple[Layout, ...], decoded: CandidateTable | None, on_progress: Progress | None
) -> CandidateTable:
    """Candidates of phase `serve`, each layout's from the best in decode alone downwards: what a candidate decodes
    beside prompts is never more. Enough when none that is left can beat what was found."""
    if decoded is None:
        decoded = evaluate_phase(replace(setting, phase="decode"), layouts, on_progress)
    soonest = setting.objective == "ttft"
    scores = _one_prompt_per_s(setting, decoded) if soonest else _promise_of(setting, decoded)
    parts: list[CandidateTable] = []
    for code in np.unique(decoded.candidates.layout):
        order = np.flatnonzero(decoded.candidates.layout == code)
        order = order[np.argsort(-scores[order], kind="stable")]
        best = -np.inf
        for start in range(0, min(order.size, BLOCK * MOST_BLOCKS), BLOCK):
            block = order[start : start + BLOCK]
            if scores[block[0]] <= best or (start and not soonest and not decoded.feasible[block[0]]):
                break
            table = again(setting, decoded, block)
            parts.append(table)
            reached = np.where(table.feasible, np.nan_to_num(table.score(setting.objective)), -np.inf)
            best = max(best, float(reached.max(initial=-np.inf)))
    if not parts:
        return table_of(setting, make_space(setting, layouts))
    columns = {one.name: np.concatenate([getattr(part.outcome, one.name) for part in parts]) for one in fields(Outcome)}
    return replace(decoded, candidates=joined([part.candidates for part in parts]), outcome=Outcome(**columns))


def _promise_of(setting: Setting, decoded: CandidateTable) -> FloatArray:
    """How promising candidates are by what they do in decode alone: by score; then those that only a rate is too high
    for, by tokens/s; then by their step."""
    most = np.maximum(decoded.outcome.tokens_per_s, 1e-9)
    beyond = np.where(decoded.outcome.why_not == RATE, -1 / most, -1e12 - decoded.outcome.step_s)
    return np.where(decoded.feasible, np.nan_to_num(decoded.score(setting.objective)), beyond)


def _one_prompt_per_s(setting: Setting, decoded: CandidateTable) -> FloatArray:
    """How promising candidates are for the time to the first token: one over that of a prompt by itself."""
    alone = replace(setting, phase="prefill")
    tokens = np.full(len(decoded), math.ceil(setting.new_tokens(setting.lengths.prompt)), dtype=np.int64)
    return np.asarray(1 / step_times(alone, decoded.candidates.having(batch=tokens)).step_s)


def again(setting: Setting, table: CandidateTable, index: IntArray) -> CandidateTable:
    """Some of a table's candidates in another setting of the same kinds of devices: another phase, promise, network."""
    candidates = table.candidates.take(index)
    limits = setting.limits.pins.batches(candidates, batch_limits(setting, candidates))
    candidates, limits = candidates.take(limits > 0), limits[limits > 0]
    instances = usable_instances(setting, candidates)
    return replace(table, candidates=candidates, outcome=_outcome_of(setting, candidates, limits, instances))


def _outcome_of(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    of = least_latency if setting.wants_latency else best_outcome
    return of(setting, candidates, limits, instances)


def table_of(setting: Setting, space: Space) -> CandidateTable:
    """A space's candidates with their numbers under the setting's promises and rate."""
    return CandidateTable(
        candidates=space.candidates,
        outcome=_outcome_of(setting, space.candidates, space.limits, space.instances),
        kinds=tuple(group.device for group in setting.groups),
        space=space,
    )


def _choose(settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]) -> Match:
    """What is recommended, and what is to be said of what comes near it. With `serve` among the phases, servers that do
    both or a pool for each, whichever is better by the objective."""
    if "serve" not in tables:
        _check_feasible(settings, tables)
        return rate_match(settings, tables) if len(tables) > 1 else _best_of(settings, tables)
    found: dict[str, Match] = {}
    missing: dict[str, NoPlan] = {}
    for kind, names in (("servers", SERVERS), ("pools", POOLS)):
        if set(names) <= set(tables):
            of_kind: dict[PhaseName, CandidateTable] = {name: tables[name] for name in names}
            try:
                _check_feasible(settings, of_kind)
                found[kind] = rate_match(settings, of_kind) if len(names) > 1 else _best_of(settings, of_kind)
            except NoPlan as error:
                missing[kind] = error
    if not found:  # where both say which rate they take, the larger one
        raise max(missing.values(), key=lambda error: error.nearest.get("requests_per_s", 0.0))
    best = max(found, key=lambda kind: (found[kind].score, kind == "servers"))
    if settings["serve"].limits.prefer_simple and "servers" in found:
        near = found["servers"].score >= found[best].score * (1 - TIE_OF_KINDS)
        best = "servers" if near else best
    other = next((kind for kind in KINDS if kind != best), best)
    said = _other_kind(settings["serve"], best, found[best], found.get(other), missing.get(other))
    chosen = found[best]
    return replace(chosen, notes={name: (*said, *notes) for name, notes in chosen.notes.items()})


SERVERS: tuple[PhaseName, ...] = ("serve",)
POOLS: tuple[PhaseName, ...] = ("prefill", "decode")
KINDS = {"servers": ONE_POOL, "pools": TWO_POOLS}
TIE_OF_KINDS = 0.1
"""Servers and pools closer than that are alike as far as the model can tell."""


def _other_kind(
    setting: Setting, best: str, chosen: Match, other: Match | None, missing: NoPlan | None
) -> tuple[str, ...]:
    name = next((KINDS[kind] for kind in KINDS if kind != best), "")
    if missing is not None:
        return (f"{KINDS[best]}: {name} is not possible: {missing}",)
    if other is None:
        return ()
    unit = RESOURCES[setting.objective][0].replace("tokens", "requests")
    ratio = other.score / chosen.score
    tie = ", as near as the model can tell" if ratio >= 1 - TIE_OF_KINDS else ""
    simple = "; simpler: --prefer simple" if tie and best == "pools" else ""
    return (f"{KINDS[best]}: {name} would give {ratio:.0%} of its {unit}{tie}{simple}",)


def _load_of(setting: Setting) -> str:
    """At what load a plan for the least time has it."""
    rate, at_once = setting.workload.requests_per_s, setting.workload.max_batch
    if rate is not None:
        return f"the least time at {rate:g} requests/s, on as many instances as fit"
    if at_once is not None:
        return f"the least time of {'one request' if at_once == 1 else f'{at_once:,} requests'} at once"
    return "the least time of one request at once: no rate is given (--rate) and no number in flight (--in-flight)"


def _check_feasible(settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]) -> None:
    for name, table in tables.items():
        if table.best(settings[name].objective) is None:
            raise no_plan(settings[name], table)


def _best_of(settings: dict[PhaseName, Setting], tables: dict[PhaseName, CandidateTable]) -> Match:
    """The best of one phase alone, which has a feasible candidate."""
    ((name, table),) = tables.items()
    setting = settings[name]
    index = table.best(setting.objective)
    assert index is not None
    simplest, said = simplest_of_ties(setting, table, index)
    scores = table.score(setting.objective)
    if setting.limits.prefer_simple or scores[index] <= scores[simplest] * (1 + EQUAL):
        index = simplest
    return Match(
        index={name: index},
        num_instances={name: int(table.outcome.num_instances[index])},
        notes={name: (said,) if said else ()},
        share_of_layout={},
        score=float(scores[index]) / setting.tokens_of_request,
    )


def _explained(
    setting: Setting, table: CandidateTable, chosen: Match, name: PhaseName, layouts: tuple[Layout, ...]
) -> PhasePlan:
    plan = phase_plan(setting, table, chosen.index[name], chosen.num_instances[name])
    rejected = rejected_layouts(setting, table, chosen.index[name], layouts, chosen.share_of_layout.get(name))
    return replace(plan, rejected=rejected, notes=(*chosen.notes[name], *_notes_of(setting, plan)))


def _mixed_roles(setting: Setting, plan: PhasePlan) -> list[str]:
    """Where one role is on CPUs and the other is not, what runs where."""
    groups = {group.device.name: group for group in setting.cluster.groups}
    of_role = {use.role: groups[use.device] for use in plan.devices}
    if len({group.device.kind == "cpu" for group in of_role.values()}) < 2:
        return []
    where = {role: "cpu" if group.device.kind == "cpu" else "cuda" for role, group in of_role.items()}
    attention, experts = of_role["attention"], of_role["experts"]
    beside = "in the same machines" if attention.num_nodes == experts.num_nodes else "in machines of their own"
    return [
        f"attention on {attention.device.name}, experts on {experts.device.name} {beside}: antiphon serve --plan "
        f"starts attention workers on {where['attention']} and expert workers on {where['experts']}"
    ]


def _notes_of(setting: Setting, plan: PhasePlan) -> list[str]:
    """What a reader could take for a finding and is only a missing target, or devices left over."""
    notes = []
    if setting.wants_latency:
        notes.append(_load_of(setting))
    elif setting.phase == "prefill" and setting.workload.slo.ttft_s is None:
        notes.append(
            "no target for the time to the first token: passes are as long as memory allows, and that time is of a "
            "full one; give a target for shorter passes, or --objective ttft for the shortest"
        )
    used = {use.device for use in plan.devices}
    if idle := [group.device.name for group in setting.cluster.groups if group.device.name not in used]:
        notes.append(f"{', '.join(idle)}: not used in this phase, the plan without is better by the objective")
    notes += _mixed_roles(setting, plan)
    on_cores = any(group.device.kind == "cpu" and group.device.name in used for group in setting.cluster.groups)
    chosen = setting.limits.collectives == "auto" and plan.collectives == "fused"
    if chosen and on_cores and not setting.cluster.efficiency.round_s:
        notes.append(
            "fused exchanges are taken because the cluster's file does not say what a round of one takes (round_s), as "
            "older files do not: measure it anew with antiphon profile MODEL --folder DIR"
        )
    return notes
