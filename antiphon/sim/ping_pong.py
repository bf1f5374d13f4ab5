"""The ping-pong pipeline: exact times by a recurrence over (layer, micro-batch), all workers of a side alike.

What happens to micro-batch i of layer l (MegaScale-Infer section 4.1, Figure 4):
1. An attention worker computes it once its reply of layer l - 1 is complete; its outgoing link then sends, in order.
2. An expert worker's incoming link takes bytes from the moment its senders begin; rows are complete when the link has
   carried them all and the senders have ended. `latency_s` lies between the two sides.
3. It computes when all rows are there (the barrier), and replies the same way.
4. Workers and links do one thing at a time, in the order (layer, micro-batch), as the serving engine does.

Every step is a maximum or a sum, so the recurrence is exact; tests build the same as events and compare the two.
Rejected: events for every worker and message. Workers that are alike do the same at the same time.
"""

import math
from dataclasses import dataclass, field, replace

from antiphon.base.errors import UserError
from antiphon.sim.gantt import Bar
from antiphon.specs.plan import PhasePlan

LINES = {  # times -> (track, kind); [] stands for the worker's number
    "attention_s": ("attention[]", "attention"),
    "attention_send_s": ("attention[] out", "dispatch"),
    "experts_receive_s": ("experts[] in", "dispatch"),
    "experts_s": ("experts[]", "experts"),
    "experts_send_s": ("experts[] out", "combine"),
    "attention_receive_s": ("attention[] in", "combine"),
}


@dataclass(frozen=True, kw_only=True)
class PingPong:
    """One iteration; times are of one micro-batch and layer on one worker.

    `*_send_s`, `*_receive_s`: how long a worker's outgoing or incoming link is occupied (0: the link does not limit).
    `latency_s`: one way, after the links: T_c where messages do not queue.
    """

    num_layers: int
    num_micro_batches: int
    attention_s: float
    experts_s: float
    latency_s: float = 0.0
    attention_send_s: float = 0.0
    experts_receive_s: float = 0.0
    experts_send_s: float = 0.0
    attention_receive_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise UserError(f"ping-pong: {name} is {getattr(self, name)}: give at least 1")
        for name in (*LINES, "latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"ping-pong: {name} is {getattr(self, name)}: give a finite time, zero or more")


def plan_pipeline(phase: PhasePlan, num_layers: int) -> PingPong:
    """One iteration of one instance of a planned phase. T_c occupies a link, as in `cost.ping_pong`, so the simulated
    iteration equals the planned one. `UserError` if the phase is not disaggregated."""
    times = (phase.predicted.t_a_s, phase.predicted.t_e_s, phase.predicted.t_c_s)
    t_a_s, t_e_s, t_c_s = times
    if phase.layout != "disaggregated" or t_a_s is None or t_e_s is None or t_c_s is None:
        raise UserError(
            f"a {phase.layout} phase with times {times} has no ping-pong pipeline: "
            "give a disaggregated phase with t_a_s, t_e_s and t_c_s predicted"
        )
    return PingPong(
        num_layers=num_layers,
        num_micro_batches=phase.micro_batches,
        attention_s=t_a_s,
        experts_s=t_e_s,
        attention_send_s=t_c_s,
        experts_receive_s=t_c_s,
        experts_send_s=t_c_s,
        attention_receive_s=t_c_s,
    )


@dataclass(frozen=True)
class PingPongResult:
    """`replied_s[l][i]`: attention has layer l's reply for micro-batch i. `bars`: of one worker of each side and its
    links, in order of start; both are number 0."""

    end_s: float
    replied_s: list[list[float]]
    attention_idle_ratio: float
    experts_idle_ratio: float
    bars: list[Bar]

    def bars_of(self, num_attention: int, num_experts: int) -> list[Bar]:
        """The bars of this many workers of each side, which all do the same."""
        counts = {"attention[0]": num_attention, "experts[0]": num_experts}
        return [
            replace(bar, track=bar.track.replace("[0]", f"[{worker}]"))
            for bar in self.bars
            for worker in range(counts[bar.track.partition(" ")[0]])
        ]


@dataclass
class _Line:
    """A kind of resource serving in order: when it is free, how long it worked, its bars."""

    track: str
    kind: str
    duration_s: float
    free_s: float = 0.0
    busy_s: float = 0.0
    bars: list[Bar] = field(default_factory=list)

    def serve(self, layer: int, micro_batch: int, ready_s: float) -> tuple[float, float]:
        """Start and end of one micro-batch of a layer."""
        start_s = max(self.free_s, ready_s)
        self.free_s = end_s = start_s + self.duration_s
        self.busy_s += self.duration_s
        if self.duration_s > 0:
            label = f"{layer}.{micro_batch}"
            place = {"layer": layer, "micro_batch": micro_batch}
            self.bars.append(Bar(track=self.track, label=label, start_s=start_s, end_s=end_s, kind=self.kind, **place))
        return start_s, end_s


def simulate_ping_pong(pipeline: PingPong) -> PingPongResult:
    """Simulate the iteration."""
    lines = {
        name: _Line(track.replace("[]", "[0]"), kind, getattr(pipeline, name)) for name, (track, kind) in LINES.items()
    }
    ready_s = [0.0] * pipeline.num_micro_batches
    replied_s = []
    for layer in range(pipeline.num_layers):
        ready_s = [_reply_s(pipeline, lines, layer, i, ready_s[i]) for i in range(pipeline.num_micro_batches)]
        replied_s.append(ready_s)
    end_s = max(ready_s)
    bars = sorted((bar for line in lines.values() for bar in line.bars), key=lambda bar: (bar.start_s, bar.end_s))
    idle = [1 - lines[name].busy_s / end_s if end_s else 0.0 for name in ("attention_s", "experts_s")]
    return PingPongResult(end_s, replied_s, idle[0], idle[1], bars)


def _reply_s(pipeline: PingPong, lines: dict[str, _Line], layer: int, micro_batch: int, ready_s: float) -> float:
    """One micro-batch through one layer; when attention has the reply."""
    for computing, sending, receiving in (
        ("attention_s", "attention_send_s", "experts_receive_s"),
        ("experts_s", "experts_send_s", "attention_receive_s"),
    ):
        _, computed_s = lines[computing].serve(layer, micro_batch, ready_s)
        start_s, end_s = lines[sending].serve(layer, micro_batch, computed_s)
        _, carried_s = lines[receiving].serve(layer, micro_batch, start_s + pipeline.latency_s)
        ready_s = max(carried_s, end_s + pipeline.latency_s)
    return ready_s
