"""Everything a report shows of a plan, as plain data, from a search's result: what was chosen, looked at closely, and
what else was possible. Terminal and page only draw it, so a test can hold a figure's numbers against these.

The layer's parts, the memory of a device and the ping-pong conditions come from the functions of the search, at the
plan's own sizes and batch. Rejected: working parts out from the plan's numbers. A part that bounds nothing leaves no
trace in them.

Fronts of latency against rate: the search keeps one batch per candidate, the largest under the target, so its own
points crowd below it. Here the best candidates of each layout are taken again with batches from what memory allows down
to one. A front is what is left when everything that something else beats in both is gone. Rejected: all candidates at
all batches, 10^6 evaluations.

The pipeline is bars: simulated over a few layers where attention and experts take turns, one worker of each and the
exchange as their links; else one token of as many micro-batches as there are stages, each passing all stages; with one
stage, the parts of two layers, one after the other.
"""

from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import TypeVar

import numpy as np

from antiphon.base.units import milliseconds
from antiphon.cost.engine_step import load_engine, server_load
from antiphon.cost.exchange import Degrees
from antiphon.cost.ping_pong import conditions
from antiphon.cost.profile import Profile
from antiphon.cost.roofline import Parts
from antiphon.planner.candidate_table import CandidateTable, Outcome, front
from antiphon.planner.candidates import Candidates, IntArray, joined
from antiphon.planner.explain import account
from antiphon.planner.outcome import outcome_at
from antiphon.planner.predict import candidate_of, memory_of, step_parts_of
from antiphon.planner.room import batch_limits, weight_bytes
from antiphon.planner.search import PlanResult, Progress
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepParts
from antiphon.planner.what_if import FACTORS, Over, base_value, one_more_node, other_formats, sensitivity
from antiphon.report.words import PHASE_TITLES, devices_text, plural, short_degrees
from antiphon.sim.gantt import Bar
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong
from antiphon.specs import catalog
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec, PrecisionSpec
from antiphon.specs.plan import LAYOUTS, Layout, Objective, PhaseName, PhasePlan, Plan
from antiphon.specs.workload import WorkloadSpec

Gathered = TypeVar("Gathered")
BALANCE_TOLERANCE = 0.2


@dataclass(frozen=True, kw_only=True)
class Points:
    """The front of one layout: latency (TPOT in decode, TTFT in prefill), the objective's rate, a line of words."""

    layout: Layout
    latency_s: tuple[float, ...]
    scores: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What lies in one device of a role. `reserve_bytes`: kept free for activations and the runtime."""

    role: str
    device: str
    capacity_bytes: float
    weight_bytes: float
    kv_bytes: float
    reserve_bytes: float

    @property
    def free_bytes(self) -> float:
        return max(0.0, self.capacity_bytes - self.weight_bytes - self.kv_bytes - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What the best plan gives when one thing changes: for each value, each layout's rate (None: it cannot run).
    `current`: the value the plan was made for, in the axis's own unit; None if it has none, such as no target."""

    title: str
    axis: str
    values: tuple[float, ...]
    scores: dict[Layout, tuple[float | None, ...]]
    current: float | None


@dataclass(frozen=True, kw_only=True)
class PhaseContents:
    """One phase. `tokens_per_request`: those that it computes, on average; `parts`: seconds of a layer and micro-batch
    by part; `conditions`: those of MegaScale-Infer (section 4.1) as (equation, what it says, this plan's numbers,
    whether it holds); `accounts`: of the plan and the best of each other layout, what a token takes, by what it is
    spent on, in seconds of the objective's resource (none for a latency); `measured_like`: by engine, seconds a token
    by constants fitted to its measured servers, and between what four of five lie (none where no such server was
    measured); `fronts` and `bars`, a stretch of the pipeline, are empty where no page is made."""

    name: PhaseName
    phase: PhasePlan
    tokens_per_request: float
    fronts: tuple[Points, ...]
    bars: tuple[Bar, ...]
    bars_title: str
    memory: tuple[MemoryUse, ...]
    parts: dict[str, Parts]
    conditions: tuple[tuple[str, str, str, str], ...]
    accounts: dict[Layout, dict[str, float]]
    measured_like: dict[str, tuple[float, float, float]]
    num_candidates: int
    num_feasible: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """The plan, what it was made from, and what is shown of each phase. `profile`: measurements it was priced by."""

    plan: Plan
    model: ModelSpec
    cluster: ClusterSpec
    workload: WorkloadSpec
    precision: PrecisionSpec
    phases: tuple[PhaseContents, ...]
    profile: Profile | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    more_nodes: dict[PhaseName, list[tuple[str, float, float]]] = field(default_factory=dict)
    formats: dict[PhaseName, list[tuple[str, float, float, float]]] = field(default_factory=dict)


def gather(result: PlanResult, *, for_page: bool, with_more_nodes: bool, on_progress: Progress | None = None) -> Report:
    """The report; phases in the order in which a request passes them. `on_progress(done, total)` counts its parts."""
    setting = next(iter(result.settings.values()))
    names = tuple(result.plan.phases)
    changes = [(name, over) for name in names for over in FACTORS] if for_page else []
    kinds = names if with_more_nodes else ()
    done, total = count(1), len(names) + len(changes) + 2 * len(kinds)

    def step(gathered: Gathered) -> Gathered:
        if on_progress is not None:
            on_progress(next(done), total)
        return gathered

    return Report(
        plan=result.plan,
        model=setting.model,
        cluster=setting.cluster,
        workload=setting.workload,
        precision=setting.precision,
        profile=setting.profile,
        phases=tuple(step(_phase(result, name, for_page)) for name in names),
        sensitivity=tuple(step(sensitivity_of(result, name, over)) for name, over in changes),
        more_nodes={name: step(one_more_node(*_searched(result, name))) for name in kinds},
        formats={name: step(other_formats(*_searched(result, name))) for name in kinds},
    )


def _searched(result: PlanResult, name: PhaseName) -> tuple[Setting, tuple[Layout, ...]]:
    """The phase's setting and the layouts that were searched, to ask for tokens/s."""
    considered = result.tables[name].space.num_considered
    return _by_rate(result.settings[name]), tuple(layout for code, layout in enumerate(LAYOUTS) if considered[code])


def _by_rate(setting: Setting) -> Setting:
    return replace(setting, objective="per-gpu") if setting.wants_latency else setting


def _phase(result: PlanResult, name: PhaseName, for_page: bool) -> PhaseContents:
    setting, table, phase = result.settings[name], result.tables[name], result.plan.phases[name]
    one = candidate_of(setting, phase)
    step = step_parts_of(setting, one)
    parts = layer_parts(one, step)
    bars, title = pipeline_bars(setting.model.num_moe_layers, one, step) if for_page else ((), "")
    return PhaseContents(
        name=name,
        phase=phase,
        tokens_per_request=setting.tokens_of_request,
        fronts=frontier(setting, table) if for_page else (),
        bars=bars,
        bars_title=title,
        memory=memory_uses(setting, one),
        parts=parts,
        conditions=ping_pong_conditions(one, parts),
        accounts={} if setting.wants_latency else accounts(setting, table, phase),
        measured_like=measured_like(setting, phase),
        num_candidates=table.total_considered,
        num_feasible=int(table.feasible.sum()),
    )


def accounts(setting: Setting, table: CandidateTable, phase: PhasePlan) -> dict[Layout, dict[str, float]]:
    """What a token takes under the plan, then under the best candidate of each layout that lost."""
    found = {phase.layout: account(setting, candidate_of(setting, phase), phase.num_instances)}
    for loser in phase.rejected:
        of_layout = np.asarray(table.candidates.layout == LAYOUTS.index(loser.layout))
        index = table.best(setting.objective, of_layout)
        if index is not None:
            found[loser.layout] = account(setting, table.one(index), int(table.outcome.num_instances[index]))
    return found


MEASURED_DEVICES = 8  # the most of a server that the engines' constants were fitted to


def measured_like(setting: Setting, phase: PhasePlan) -> dict[str, tuple[float, float, float]]:
    """The plan's time per token by the constants of each engine (`cost.engine_step`), which `antiphon reproduce
    --deployments` judges, and the ends of its band; empty for servers unlike those that were measured."""
    sizes, predicted, workload = phase.parallel, phase.predicted, setting.workload
    num_devices = sizes.attention_tp * sizes.attention_dp
    group = next(group for group in setting.groups if group.device.name == phase.devices[0].device)
    unlike = phase.layout == "disaggregated" or sizes.pp > 1 or num_devices > MEASURED_DEVICES
    unlike = unlike or bool(workload.draft_tokens or workload.prefix_hit) or group.device.kind == "cpu"
    if unlike or predicted.tpot_s is None:
        return {}
    at_once = predicted.tokens_per_s * predicted.tpot_s / phase.num_instances
    load = server_load(
        setting.model,
        ClusterSpec(name=setting.cluster.name, groups=(group,)),
        Degrees(**{one.name: getattr(sizes, one.name) for one in fields(Degrees)}),
        setting.precision,
        in_flight=np.array([at_once / sizes.attention_dp]),
        prompt=np.array([setting.lengths.prompt]),
        output=np.array([setting.lengths.output]),
        decodes_only=setting.phase == "decode",
    )
    found = {}
    for engine in (load_engine(name) for name in catalog.names("engine")):
        seconds = float(load.tpot_s(engine)[0])
        found[engine.name] = (seconds, engine.low * seconds, engine.high * seconds)
    return found


def layer_parts(one: Candidates, step: StepParts) -> dict[str, Parts]:
    """One MoE layer and micro-batch by what is done; the two ways of the exchange apart where they are two."""
    apart = bool(one.is_disaggregated[0])
    parts = {
        "attention": step.attention.moe_layer.at(0),
        "to experts" if apart else "exchange, both ways": step.dispatch.at(0),
        "experts": step.experts.at(0),
    }
    return parts | ({"to attention": step.combine.at(0)} if apart else {})


def memory_uses(setting: Setting, one: Candidates) -> tuple[MemoryUse, ...]:
    """Weights, keys and values at the plan's batch, and the reserve, on a device of each role."""
    weights, reserve = weight_bytes(setting, one), setting.cluster.efficiency.memory_reserve
    by_role = {"attention": float(weights[0][0]), "experts": float(weights[1][0])}
    by_role["both"] = by_role["attention"] + by_role["experts"]
    uses = []
    for role, held_bytes in memory_of(setting, one).items():
        kind = one.expert_kind if role == "experts" else one.attention_kind
        device = setting.groups[int(kind[0])].device
        uses.append(
            MemoryUse(
                role=role,
                device=device.name,
                capacity_bytes=float(device.memory_bytes),
                weight_bytes=by_role[role],
                kv_bytes=held_bytes - by_role[role],
                reserve_bytes=device.memory_bytes * reserve,
            )
        )
    return tuple(uses)


def ping_pong_conditions(one: Candidates, parts: dict[str, Parts]) -> tuple[tuple[str, str, str, str], ...]:
    """Eq. 1 to 3 of MegaScale-Infer with the candidate's times; none where attention and experts are together."""
    if not bool(one.is_disaggregated[0]):
        return ()
    t_a, t_e = (float(parts[name].total_s) for name in ("attention", "experts"))
    t_c = max(float(parts[name].total_s) for name in ("to experts", "to attention"))
    m, t_f = int(one.micro_batches[0]), max(t_a, t_e)
    turns = f"{m} × {milliseconds(t_f)} = {milliseconds(m * t_f)} against {milliseconds(2 * (t_f + t_c))}"
    numbers = (
        ("eq. 1", f"T_a ≈ T_e, within {BALANCE_TOLERANCE:.0%}", f"{milliseconds(t_a)} and {milliseconds(t_e)}"),
        ("eq. 2", "T_c < T_f", f"{milliseconds(t_c)} against {milliseconds(t_f)}"),
        ("eq. 3", "m T_f ≥ 2 (T_f + T_c)", turns),
    )
    holds = conditions(m, t_a, t_e, t_c, BALANCE_TOLERANCE)
    return tuple((*row, "yes" if bool(held) else "no") for row, held in zip(numbers, holds, strict=True))


CHANGES: dict[Over, tuple[str, str, float]] = {
    "slo": ("a tighter or a looser target", "{latency}, target (ms)", 1e-3),
    "context": ("shorter and longer prompts", "Median prompt (tokens)", 1.0),
    "network": ("a slower or a faster network between nodes", "Bandwidth of all NICs (times this cluster's)", 1.0),
}
"""(what changes, the axis of its values, the size of one of its units) of each what-if."""


def sensitivity_of(result: PlanResult, name: PhaseName, over: Over) -> Sensitivity:
    """The curves of all layouts, in the unit of the axis."""
    setting, table = result.settings[name], result.tables[name]
    points = sensitivity(setting, table, over=over)
    title, axis, scale = CHANGES[over]
    is_promised = (setting.workload.slo.tpot_s if setting.decodes else setting.workload.slo.ttft_s) is not None
    current = base_value(setting, table, over) / scale if over != "slo" or is_promised else None
    latency = "time per output token" if setting.decodes else "time to first token"
    return Sensitivity(
        title=f"{PHASE_TITLES[name]}: {title}",
        axis=axis.format(latency=latency[0].upper() + latency[1:]),
        values=tuple(value / scale for value in points),
        scores={layout: tuple(best[layout] for best in points.values()) for layout in next(iter(points.values()))},
        current=current,
    )


NUM_SWEPT = 200
"""Candidates of each layout that are tried at other batches: the best half by rate, the rest spread over the others."""
NUM_BATCHES = 12


def frontier(setting: Setting, table: CandidateTable) -> tuple[Points, ...]:
    """The front of each layout that has a candidate."""
    setting, fronts = _by_rate(setting), []  # a front of latencies against themselves shows nothing
    for layout in LAYOUTS:
        points = swept(setting, table, layout)
        shown = np.isfinite(points.latency_s) & (points.latency_s > 0)
        index = np.flatnonzero(shown & (np.nan_to_num(points.score(setting.objective)) > 0))
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
        candidates = base.having(batch=batch, step_tokens=table.outcome.step_tokens[chosen])
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
    best, rest = np.split(order, [NUM_SWEPT // 2])
    spread = rest[np.linspace(0, rest.size - 1, NUM_SWEPT - NUM_SWEPT // 2).astype(np.int64)]
    return np.unique(np.concatenate([best, spread]))


def _points(table: CandidateTable, layout: Layout, index: IntArray, objective: Objective) -> Points:
    batch, turns = table.batch, table.candidates.micro_batches
    return Points(
        layout=layout,
        latency_s=tuple(map(float, table.latency_s[index])),
        scores=tuple(map(float, table.score(objective)[index])),
        labels=tuple(
            f"{short_degrees(layout, table.candidates.parallel_of(int(row)))}, "
            f"{plural(int(turns[row]), 'micro-batch', 'micro-batches')}, batch {int(batch[row]):,}; "
            f"{devices_text(table.devices(int(row)))}"
            for row in index
        ),
    )


NUM_LAYERS, MAX_STAGES = 4, 8
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
        bars = _ping_pong(step, int(one.micro_batches[0]), num_layers)
        return bars, f"The pipeline: {num_layers} layers of ping-pong"
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
    named = [
        replace(bar, track=TRACKS[bar.track], label=f"layer {bar.layer + 1}, micro-batch {bar.micro_batch + 1}")
        for bar in simulate_ping_pong(pipeline).bars
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
