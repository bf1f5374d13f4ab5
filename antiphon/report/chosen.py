"""The chosen candidate looked at closely: what its layer is made of, what fills its devices, does ping-pong work out.

Everything is asked of the same functions as the search's, at the plan's own sizes and batch. Rejected: working parts
out from the plan's numbers. A part that bounds nothing leaves no trace in them.

A stretch of its pipeline is shown as bars: simulated where attention and experts take turns, else laid out.

- disaggregated: `sim.ping_pong` over a few layers, one attention and one expert worker, the exchange as their links
- several stages: one token of as many micro-batches as there are stages, each passing all stages
- one stage: the parts of two layers, one after the other
"""

from dataclasses import dataclass, replace

from antiphon.cost.parts import Parts
from antiphon.cost.ping_pong import conditions
from antiphon.planner.batch_limits import weight_bytes
from antiphon.planner.candidates import Candidates
from antiphon.planner.predict import candidate_of, memory_of, step_parts_of
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepParts
from antiphon.report.contents import Condition, MemoryUse
from antiphon.report.words import milliseconds
from antiphon.sim.gantt import Bar
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong
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


NUM_LAYERS = 4
MAX_STAGES = 8
TRACKS = {
    "attention[0]": "attention",
    "attention[0] out": "to experts",
    "experts[0]": "experts",
    "experts[0] out": "to attention",
}


def pipeline_bars(chosen: Chosen) -> tuple[tuple[Bar, ...], str]:
    """The bars and what they show."""
    num_layers = min(NUM_LAYERS, chosen.setting.model.num_moe_layers)
    if bool(chosen.candidate.is_disaggregated[0]):
        return _ping_pong(chosen, num_layers), f"The pipeline: {num_layers} layers of ping-pong"
    stages = int(chosen.candidate.pp[0])
    if stages > 1:
        shown = min(stages, MAX_STAGES)
        which = f"the first {shown} of {stages} stages" if shown < stages else f"{stages} stages"
        return _stages(chosen, stages, shown), f"The pipeline: {which}, each with its layers"
    num_layers = min(2, num_layers)
    return _layers(chosen, num_layers), f"{num_layers} layers of one instance"


def _ping_pong(chosen: Chosen, num_layers: int) -> tuple[Bar, ...]:
    """Links are occupied for T_c each way; the order of tracks is the way of a micro-batch."""
    parts = layer_parts(chosen)
    pipeline = PingPong(
        num_layers=num_layers,
        num_micro_batches=int(chosen.candidate.micro_batches[0]),
        attention_s=float(parts["attention"].total_s),
        attention_send_s=float(parts["to experts"].total_s),
        experts_s=float(parts["experts"].total_s),
        experts_send_s=float(parts["to attention"].total_s),
    )
    bars = simulate_ping_pong(pipeline).bars
    named = [
        replace(bar, track=TRACKS[bar.track], label=f"layer {bar.layer + 1}, micro-batch {bar.micro_batch + 1}")
        for bar in bars
    ]
    order = list(TRACKS.values())
    return tuple(sorted(named, key=lambda bar: (bar.start_s, order.index(bar.track))))


def _stages(chosen: Chosen, stages: int, shown: int) -> tuple[Bar, ...]:
    """Every stage takes an equal share of the step, the way to the next one included."""
    turn_s = float(chosen.step.step_s[0]) / stages
    hop_s = float(chosen.step.hop.at(0).total_s)
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


def _layers(chosen: Chosen, num_layers: int) -> tuple[Bar, ...]:
    """Attention, half of the exchange, experts, the other half; nothing overlaps but what the exchange's cost says."""
    parts = layer_parts(chosen)
    half_s = float(parts["exchange, both ways"].total_s) / 2
    steps = (
        ("devices", "attention", float(parts["attention"].total_s)),
        ("network", "to experts", half_s),
        ("devices", "experts", float(parts["experts"].total_s)),
        ("network", "to attention", half_s),
    )
    bars, now_s = [], 0.0
    for layer in range(num_layers):
        for track, kind, duration_s in steps:
            label = f"layer {layer + 1}, {kind}"
            bars.append(Bar(track=track, label=label, start_s=now_s, end_s=now_s + duration_s, kind=kind, layer=layer))
            now_s += duration_s
    return tuple(bars)
