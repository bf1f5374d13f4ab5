"""Everything a report shows, from a search's result: what was chosen, looked at closely, and what else was possible.

What its layer is made of, what fills its devices and whether ping-pong works out is asked of the same functions as the
search's, at the plan's own sizes and batch. Rejected: working parts out from the plan's numbers. A part that bounds
nothing leaves no trace in them.

What only the page shows (`page_contents.py`) and what takes further searches is gathered when asked for.
"""

from dataclasses import dataclass
from typing import TypeVar

from antiphon.cost.parts import Parts
from antiphon.cost.ping_pong import conditions
from antiphon.planner.candidates import Candidates
from antiphon.planner.predict import candidate_of, memory_of, step_parts_of
from antiphon.planner.room import weight_bytes
from antiphon.planner.search import PlanResult, Progress
from antiphon.planner.sensitivity import FACTORS
from antiphon.planner.setting import Setting
from antiphon.planner.smallest_cluster import one_more_node
from antiphon.planner.step_times import StepParts
from antiphon.report.contents import Condition, MemoryUse, MoreNodes, PhaseContents, Report
from antiphon.report.page_contents import frontier, pipeline_bars, sensitivity_of
from antiphon.report.words import milliseconds
from antiphon.specs.plan import LAYOUTS, PhaseName

Gathered = TypeVar("Gathered")
BALANCE_TOLERANCE = 0.2


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
            steps.after(sensitivity_of(result, name, over)) for name in names for over in FACTORS if for_page
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


def _more_nodes(result: PlanResult, name: PhaseName) -> list[MoreNodes]:
    layouts = tuple(layout for code, layout in enumerate(LAYOUTS) if result.tables[name].num_considered[code])
    return [
        MoreNodes(phase=name, device=more.device, tokens_per_s=more.tokens_per_s, gain=more.gain)
        for more in one_more_node(result.settings[name], layouts)
    ]


def _phase(result: PlanResult, name: PhaseName, for_page: bool) -> PhaseContents:
    setting, table, phase = result.settings[name], result.tables[name], result.plan.phases[name]
    one = candidate_of(setting, phase)
    step = step_parts_of(setting, one)
    parts = layer_parts(one, step)
    bars, title = pipeline_bars(setting.model.num_moe_layers, one, step) if for_page else ((), "")
    return PhaseContents(
        name=name,
        phase=phase,
        tokens_per_request=setting.lengths.output if name == "decode" else setting.lengths.prompt,
        fronts=frontier(setting, table) if for_page else (),
        bars=bars,
        bars_title=title,
        memory=memory_uses(setting, one),
        parts=parts,
        conditions=ping_pong_conditions(one, parts),
        num_candidates=table.total_considered,
        num_feasible=int(table.feasible.sum()),
    )


def layer_parts(one: Candidates, step: StepParts) -> dict[str, Parts]:
    """One MoE layer and micro-batch by what is done; the two ways of the exchange apart where they are two."""
    parts = {"attention": step.attention.moe_layer.at(0)}
    if bool(one.is_disaggregated[0]):
        parts["to experts"] = step.dispatch.at(0)
        parts["experts"] = step.experts.at(0)
        parts["to attention"] = step.combine.at(0)
    else:
        parts["exchange, both ways"] = step.dispatch.at(0)
        parts["experts"] = step.experts.at(0)
    return parts


def memory_uses(setting: Setting, one: Candidates) -> tuple[MemoryUse, ...]:
    """Weights, keys and values at the plan's batch, and the reserve, on a device of each role."""
    weights, held = weight_bytes(setting, one), memory_of(setting, one)
    attention_bytes, expert_bytes = float(weights.attention[0]), float(weights.experts[0])
    kind, expert_kind = int(one.attention_kind[0]), int(one.expert_kind[0])
    if "both" in held:
        together = attention_bytes + expert_bytes
        return (_use(setting, "both", kind, together, held["both"] - together),)
    return (
        _use(setting, "attention", kind, attention_bytes, held["attention"] - attention_bytes),
        _use(setting, "experts", expert_kind, expert_bytes, held["experts"] - expert_bytes),
    )


def _use(setting: Setting, role: str, kind: int, weights: float, kv_bytes: float) -> MemoryUse:
    device = setting.groups[kind].device
    return MemoryUse(
        role=role,
        device=device.name,
        capacity_bytes=float(device.memory_bytes),
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        reserve_bytes=device.memory_bytes * setting.cluster.efficiency.memory_reserve,
    )


def ping_pong_conditions(one: Candidates, parts: dict[str, Parts]) -> tuple[Condition, ...]:
    """Eq. 1 to 3 of MegaScale-Infer with the candidate's times; none where attention and experts are together."""
    if not bool(one.is_disaggregated[0]):
        return ()
    t_a, t_e = (float(parts[name].total_s) for name in ("attention", "experts"))
    t_c = max(float(parts[name].total_s) for name in ("to experts", "to attention"))
    m, t_f = int(one.micro_batches[0]), max(t_a, t_e)
    balanced, hidden, filled = (bool(holds) for holds in conditions(m, t_a, t_e, t_c, BALANCE_TOLERANCE))
    return (
        Condition(
            equation="eq. 1",
            says=f"T_a ≈ T_e, within {BALANCE_TOLERANCE:.0%}",
            numbers=f"{milliseconds(t_a)} and {milliseconds(t_e)}",
            holds=balanced,
        ),
        Condition(
            equation="eq. 2",
            says="T_c < T_f",
            numbers=f"{milliseconds(t_c)} against {milliseconds(t_f)}",
            holds=hidden,
        ),
        Condition(
            equation="eq. 3",
            says="m T_f ≥ 2 (T_f + T_c)",
            numbers=f"{m} × {milliseconds(t_f)} = {milliseconds(m * t_f)} against {milliseconds(2 * (t_f + t_c))}",
            holds=filled,
        ),
    )
