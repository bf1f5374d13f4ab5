"""The chosen candidate looked at closely: what its layer is made of, what fills its devices, does ping-pong work out.

Everything is asked of the same functions as the search's, at the plan's own sizes and batch. Rejected: working parts
out from the plan's numbers. A part that bounds nothing leaves no trace in them.
"""

from dataclasses import dataclass

from antiphon.cost.parts import Parts
from antiphon.cost.ping_pong import conditions
from antiphon.planner.batch_limits import weight_bytes
from antiphon.planner.candidates import Candidates
from antiphon.planner.predict import candidate_of, memory_of, step_parts_of
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepParts
from antiphon.report.contents import Condition, MemoryUse
from antiphon.report.words import milliseconds
from antiphon.specs.plan import PhasePlan

BALANCE_TOLERANCE = 0.2


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A candidate alone in its table, at its own batch, and its step in parts."""

    setting: Setting
    candidate: Candidates
    step: StepParts


def look_closely(setting: Setting, phase: PhasePlan) -> Chosen:
    """The candidate that `phase` describes; `UserError` if its devices are not the setting's."""
    candidate = candidate_of(setting, phase)
    return Chosen(setting=setting, candidate=candidate, step=step_parts_of(setting, candidate))


def layer_parts(chosen: Chosen) -> dict[str, Parts]:
    """One MoE layer and micro-batch by what is done; the two ways of the exchange apart where they are two."""
    step = chosen.step
    parts = {"attention": step.attention.moe_layer.at(0)}
    if bool(chosen.candidate.is_disaggregated[0]):
        parts["to experts"] = step.dispatch.at(0)
        parts["experts"] = step.experts.at(0)
        parts["to attention"] = step.combine.at(0)
    else:
        parts["exchange, both ways"] = step.dispatch.at(0)
        parts["experts"] = step.experts.at(0)
    return parts


def memory_uses(chosen: Chosen) -> tuple[MemoryUse, ...]:
    """Weights, keys and values at the plan's batch, and the reserve, on a device of each role."""
    setting, one = chosen.setting, chosen.candidate
    weights, held = weight_bytes(setting, one), memory_of(setting, one)
    attention_bytes, expert_bytes = float(weights.attention[0]), float(weights.experts[0])
    kind, expert_kind = int(one.attention_kind[0]), int(one.expert_kind[0])
    if "both" in held:
        together = attention_bytes + expert_bytes
        return (_use(chosen, "both", kind, together, held["both"] - together),)
    return (
        _use(chosen, "attention", kind, attention_bytes, held["attention"] - attention_bytes),
        _use(chosen, "experts", expert_kind, expert_bytes, held["experts"] - expert_bytes),
    )


def _use(chosen: Chosen, role: str, kind: int, weights: float, kv_bytes: float) -> MemoryUse:
    device = chosen.setting.groups[kind].device
    return MemoryUse(
        role=role,
        device=device.name,
        capacity_bytes=float(device.memory_bytes),
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        reserve_bytes=device.memory_bytes * chosen.setting.cluster.efficiency.memory_reserve,
    )


def ping_pong_conditions(chosen: Chosen) -> tuple[Condition, ...]:
    """Eq. 1 to 3 of MegaScale-Infer with the candidate's times; none where attention and experts are together."""
    if not bool(chosen.candidate.is_disaggregated[0]):
        return ()
    parts = layer_parts(chosen)
    t_a, t_e = (float(parts[name].total_s) for name in ("attention", "experts"))
    t_c = max(float(parts[name].total_s) for name in ("to experts", "to attention"))
    m, t_f = int(chosen.candidate.micro_batches[0]), max(t_a, t_e)
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
