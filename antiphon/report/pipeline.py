"""A stretch of the chosen pipeline as bars: simulated where attention and experts take turns, else laid out.

- disaggregated: `sim.ping_pong` over a few layers, one attention and one expert worker, the exchange as their links
- several stages: one token of as many micro-batches as there are stages, each passing all stages
- one stage: the parts of two layers, one after the other
"""

from dataclasses import replace

from antiphon.report.chosen import Chosen, layer_parts
from antiphon.sim.gantt import Bar
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong

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
