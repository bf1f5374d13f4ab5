"""The ping-pong pipeline at any size: exact times by a recurrence over (layer, micro-batch), arrays over workers.

What happens to micro-batch i of layer l (MegaScale-Infer section 4.1, Figure 4):
1. An attention worker computes it once its reply of layer l - 1 is complete; its outgoing link then sends, in order.
2. An expert worker's incoming link takes bytes from the moment its first sender begins; rows are complete when the link
   has carried them all and the last sender has ended. `latency_s` lies between the two sides.
3. It computes when all participating attention workers' rows are there (the barrier), and replies the same way.
4. Workers and links do one thing at a time, in the order (layer, micro-batch), as the serving engine does.

Every step is a maximum or a sum, so the recurrence is exact; `ping_pong_events` builds the same as events, and tests
compare the two. Rejected: events for each of A x F messages (10^10 at 10,000 devices); sampling a part of the workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.sim.destinations import Destinations, Floats
from antiphon.sim.gantt import Bar

Times = float | Floats
DestinationsOf = Destinations | Callable[[int, int], Destinations]

ATTENTION_TIMES = ("attention_s", "attention_send_s", "attention_receive_s")
EXPERT_TIMES = ("experts_s", "experts_send_s", "experts_receive_s")


@dataclass(frozen=True, kw_only=True, eq=False)
class PingPong:
    """One iteration. Times broadcast to [layers, micro-batches, attention workers] or [..., expert workers].

    `*_send_s`, `*_receive_s`: how long a worker's outgoing or incoming link is occupied by one micro-batch of one layer
    (0: the link does not limit). `latency_s`: one way, after the links: T_c where messages do not queue.
    `destinations`: who sends to whom, for all cells or as a function of (layer, micro-batch); None: all to all.
    """

    num_layers: int
    num_micro_batches: int
    num_attention_workers: int
    num_expert_workers: int
    attention_s: Times
    experts_s: Times
    latency_s: float = 0.0
    attention_send_s: Times = 0.0
    experts_receive_s: Times = 0.0
    experts_send_s: Times = 0.0
    attention_receive_s: Times = 0.0
    destinations: DestinationsOf | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_micro_batches", "num_attention_workers", "num_expert_workers"):
            if getattr(self, name) < 1:
                raise UserError(f"ping-pong: {name} is {getattr(self, name)}: give at least 1")
        for name in (*ATTENTION_TIMES, *EXPERT_TIMES, "latency_s"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if not (np.isfinite(value).all() and (value >= 0).all()):
                raise UserError(f"ping-pong: {name} holds {value.min()}: give finite times, zero or more")
            if name != "latency_s":
                self.times(name)
        if isinstance(self.destinations, Destinations):
            self._check(self.destinations)

    def times(self, name: str) -> Floats:
        """The named times as a view of full shape."""
        workers = self.num_attention_workers if name in ATTENTION_TIMES else self.num_expert_workers
        shape = (self.num_layers, self.num_micro_batches, workers)
        value = np.asarray(getattr(self, name), dtype=np.float64)
        try:
            return np.broadcast_to(value, shape)
        except ValueError:
            raise UserError(f"ping-pong: {name} has shape {value.shape}: give one that broadcasts to {shape}") from None

    def destinations_of(self, layer: int, micro_batch: int) -> Destinations | None:
        found = self.destinations
        if callable(found):
            found = found(layer, micro_batch)
            self._check(found)
        return found

    def _check(self, destinations: Destinations) -> None:
        have = (destinations.num_attention_workers, destinations.num_expert_workers)
        want = (self.num_attention_workers, self.num_expert_workers)
        if have != want:
            raise UserError(
                f"ping-pong: destinations are for {have} attention and expert workers, the pipeline has {want}"
            )


@dataclass(frozen=True, eq=False)
class PingPongResult:
    """`replied_s[l, i]`: all attention workers have layer l's reply for micro-batch i. Busy times are per worker."""

    end_s: float
    replied_s: Floats
    attention_busy_s: Floats
    experts_busy_s: Floats
    links_busy_s: dict[str, Floats]
    bars: list[Bar]

    @property
    def attention_idle_ratio(self) -> float:
        """Mean over attention workers of the share of the iteration in which one did not compute."""
        return 1 - float(self.attention_busy_s.mean()) / self.end_s if self.end_s else 0.0

    @property
    def experts_idle_ratio(self) -> float:
        return 1 - float(self.experts_busy_s.mean()) / self.end_s if self.end_s else 0.0


@dataclass
class _Line:
    """A kind of resource, one per worker, serving in order: when each is free, how long each worked, what to record."""

    name: str
    kind: str
    durations_s: Floats
    recorded: Sequence[int]
    free_s: Floats = field(init=False)
    busy_s: Floats = field(init=False)
    bars: list[Bar] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_s = np.zeros(self.durations_s.shape[2])
        self.busy_s = np.zeros(self.durations_s.shape[2])

    def serve(
        self, layer: int, micro_batch: int, ready_s: Floats, only: NDArray[np.bool_] | None
    ) -> tuple[Floats, Floats]:
        """Starts and ends of the cell on every worker; workers outside `only` have nothing to do."""
        duration_s = self.durations_s[layer, micro_batch]
        if only is not None:
            duration_s = np.where(only, duration_s, 0.0)
        start_s = np.maximum(self.free_s, ready_s)
        end_s = start_s + duration_s
        self.free_s = end_s if only is None else np.where(only, end_s, self.free_s)
        self.busy_s += duration_s
        for worker in self.recorded:
            if duration_s[worker] > 0:
                self._record(worker, layer, micro_batch, float(start_s[worker]), float(end_s[worker]))
        return start_s, end_s

    def _record(self, worker: int, layer: int, micro_batch: int, start_s: float, end_s: float) -> None:
        track = self.name.replace("[]", f"[{worker}]")
        self.bars.append(
            Bar(
                track=track,
                label=f"{layer}.{micro_batch}",
                start_s=start_s,
                end_s=end_s,
                kind=self.kind,
                layer=layer,
                micro_batch=micro_batch,
            )
        )


LINES = {  # times -> (track, kind); [] stands for the worker's number
    "attention_s": ("attention[]", "attention"),
    "attention_send_s": ("attention[] out", "dispatch"),
    "experts_receive_s": ("experts[] in", "dispatch"),
    "experts_s": ("experts[]", "experts"),
    "experts_send_s": ("experts[] out", "combine"),
    "attention_receive_s": ("attention[] in", "combine"),
}


def simulate_ping_pong(
    pipeline: PingPong, *, record_attention: Sequence[int] = (), record_experts: Sequence[int] = ()
) -> PingPongResult:
    """Simulate the iteration; `bars` holds the recorded workers and their links, in order of start."""
    lines = {
        name: _Line(track, kind, pipeline.times(name), record_attention if name in ATTENTION_TIMES else record_experts)
        for name, (track, kind) in LINES.items()
    }
    ready_s = np.zeros((pipeline.num_micro_batches, pipeline.num_attention_workers))
    replied_s = np.zeros((pipeline.num_layers, pipeline.num_micro_batches))
    for layer in range(pipeline.num_layers):
        for micro_batch in range(pipeline.num_micro_batches):
            ready_s[micro_batch] = _cell(pipeline, lines, layer, micro_batch, ready_s[micro_batch])
            replied_s[layer, micro_batch] = ready_s[micro_batch].max()
    bars = sorted((bar for line in lines.values() for bar in line.bars), key=lambda bar: (bar.start_s, bar.end_s))
    return PingPongResult(
        end_s=float(replied_s.max()),
        replied_s=replied_s,
        attention_busy_s=lines["attention_s"].busy_s,
        experts_busy_s=lines["experts_s"].busy_s,
        links_busy_s={name: line.busy_s for name, line in lines.items() if name not in ("attention_s", "experts_s")},
        bars=bars,
    )


def _cell(pipeline: PingPong, lines: dict[str, _Line], layer: int, micro_batch: int, ready_s: Floats) -> Floats:
    """One micro-batch through one layer; returns when each attention worker has its reply."""
    cell = (layer, micro_batch)
    pairs = pipeline.destinations_of(layer, micro_batch)
    senders, receivers = (None, None) if pairs is None else (pairs.has_targets, pairs.has_sources)
    _, computed_s = lines["attention_s"].serve(*cell, ready_s, None)
    start_s, end_s = lines["attention_send_s"].serve(*cell, computed_s, senders)
    first_s, last_s = _reach(pairs, start_s, end_s, pipeline.latency_s, pipeline.num_expert_workers, to_experts=True)
    _, carried_s = lines["experts_receive_s"].serve(*cell, first_s, receivers)
    _, fed_s = lines["experts_s"].serve(*cell, np.maximum(carried_s, last_s), receivers)
    start_s, end_s = lines["experts_send_s"].serve(*cell, fed_s, receivers)
    first_s, last_s = _reach(
        pairs, start_s, end_s, pipeline.latency_s, pipeline.num_attention_workers, to_experts=False
    )
    _, carried_s = lines["attention_receive_s"].serve(*cell, first_s, senders)
    replied_s = np.maximum(carried_s, last_s)
    return replied_s if senders is None else np.where(senders, replied_s, computed_s)


def _reach(
    pairs: Destinations | None,
    start_s: Floats,
    end_s: Floats,
    latency_s: float,
    num_receivers: int,
    *,
    to_experts: bool,
) -> tuple[Floats, Floats]:
    """For each receiver: when the first of its senders begins to arrive, when the last has arrived."""
    if pairs is None:
        return np.full(num_receivers, start_s.min() + latency_s), np.full(num_receivers, end_s.max() + latency_s)
    reduce = pairs.over_sources if to_experts else pairs.over_targets
    return reduce(np.minimum, start_s, 0.0) + latency_s, reduce(np.maximum, end_s, 0.0) + latency_s
