"""The backward pass of one rank: compute stream, all-to-all and all-reduce, under each schedule of `schedules.py`.

Per MoE layer, in the order of the backward pass (Lina Figure 7): gradients of what is not an expert are computed and
become ready for all-reduce; combine; all-to-all; expert FFN; all-to-all; gate. All-to-all blocks computation,
all-reduce does not, but the step is over only when both are. The network of a rank is one resource.

Times of whole operations alone on the network come from the caller (profile or cost model). Rejected: one event per
network packet, which would need the inside of a collective library.

`packed_layer`: what packing several experts on a device does to a layer's all-to-all and to pipelining (Lina sections
4.2, 7.2.1).

N experts on N devices, p per device: all-to-all runs in groups of N/p devices, each device sending an equal share of
its rows to every member of its group. Fewer members means a larger share stays on the device or its node; the slower of
the two networks sets the time. The rows a device computes stay the same in number; each expert gets 1/p of them, so
that the FFN takes between as long as before (`ffn_growth` 1: time follows rows) and p times as long (time follows
kernels). Rejected: one measured factor for all packings, which says nothing about another cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from antiphon.base.errors import UserError
from antiphon.comm.micro_ops import (
    DEFAULT_CHUNK_BYTES,
    MicroOpScheduler,
    PackingStep,
    choose_experts_per_device,
    partition,
)
from antiphon.sim.events import EventGraph, Run
from antiphon.sim.gantt import Bar, covered_s
from antiphon.sim.resources import Priority, Shared
from antiphon.sim.schedules import (
    ALL_REDUCE,
    ALL_TO_ALL,
    Contention,
    Deferral,
    KnownTimes,
    Payload,
    PolicyDiscipline,
    Schedule,
)

COMPUTE, NETWORK = "compute", "network"
STREAM_OF = {ALL_TO_ALL: "all-to-all", ALL_REDUCE: "all-reduce"}


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """A gradient tensor to be all-reduced, ready `ready_s` after its layer's gradient computation began."""

    name: str
    size_bytes: int
    all_reduce_s: float
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class BackwardLayer:
    """One MoE layer and what precedes it in the backward pass. `all_to_all_s`: each of its two all-to-alls, alone."""

    gradient_s: float
    gradients: tuple[Gradient, ...]
    combine_s: float
    all_to_all_s: float
    ffn_s: float
    gate_s: float
    all_to_all_bytes: int = 0

    def __post_init__(self) -> None:
        for gradient in self.gradients:
            if gradient.size_bytes < 1 or not 0 <= gradient.ready_s <= self.gradient_s:
                raise UserError(
                    f"gradient {gradient.name!r}: {gradient.size_bytes} bytes, ready after {gradient.ready_s} s: "
                    f"give at least one byte and a time within the {self.gradient_s} s of its computation"
                )


@dataclass(frozen=True, kw_only=True)
class BackwardOptions:
    """`chunk_bytes` and `pipeline` (all-to-all in parts, the FFN starting with the first) belong to `micro_ops`;
    `contention` to `baseline`."""

    schedule: Schedule
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    pipeline: bool = False
    contention: Contention = field(default_factory=Contention)

    def __post_init__(self) -> None:
        if self.pipeline and self.schedule != "micro_ops":
            raise UserError(f"pipeline with schedule {self.schedule!r}: only 'micro_ops' cuts all-to-all into parts")


@dataclass(frozen=True)
class BackwardTimeline:
    """`compute_end_s`: the last gate's gradients are computed; `end_s`: all-reduce is over, too."""

    bars: list[Bar]
    compute_end_s: float
    all_reduce_end_s: float
    end_s: float

    def all_to_all_s(self) -> list[float]:
        """Duration of each all-to-all transfer or part, contention included, in order."""
        return [bar.duration_s for bar in self.bars if bar.kind == ALL_TO_ALL]

    def pipelining_efficiency(self) -> float:
        """Share of the time of all-to-all in which the compute stream worked (Lina section 7.2.1); 0 without any."""
        transfers = [bar for bar in self.bars if bar.kind == ALL_TO_ALL]
        compute = [bar for bar in self.bars if bar.track == COMPUTE]
        total_s = covered_s(transfers)
        return sum(covered_s(compute, bar.start_s, bar.end_s) for bar in transfers) / total_s if total_s else 0.0


def simulate_backward(layers: Sequence[BackwardLayer], options: BackwardOptions) -> BackwardTimeline:
    """The backward pass of `layers`, in the order in which it visits them."""
    starts_s: list[float] = []
    if options.schedule == "known":
        alone = _Builder(BackwardOptions(schedule="priority"), ()).run(
            [replace(layer, gradients=()) for layer in layers]
        )
        starts_s = [bar.start_s for bar in alone.bars() if bar.kind == ALL_TO_ALL]
    run = _Builder(options, starts_s).run(layers)
    bars = [replace(bar, track=STREAM_OF.get(bar.kind, bar.track)) for bar in run.bars()]
    ends = {
        kind: max((bar.end_s for bar in bars if bar.track == kind), default=0.0) for kind in (COMPUTE, "all-reduce")
    }
    return BackwardTimeline(bars, ends[COMPUTE], ends["all-reduce"], run.end_s)


class _Builder:
    """Turns layers into activities for one schedule."""

    def __init__(self, options: BackwardOptions, all_to_all_starts_s: Sequence[float]) -> None:
        self._options = options
        self._graph = EventGraph()
        self._payloads: dict[int, Payload] = {}
        self._policy = MicroOpScheduler(options.chunk_bytes)
        self._graph.resource(COMPUTE)  # declared first: a combine is seen before the network chooses at that moment
        match options.schedule:
            case "baseline":
                self._graph.resource(NETWORK, Shared(options.contention.rates))
            case "priority":
                self._graph.resource(NETWORK, Priority())
            case "deferral":
                self._graph.resource(NETWORK, Deferral())
            case "known":
                self._graph.resource(NETWORK, KnownTimes(all_to_all_starts_s))
            case "micro_ops":
                self._graph.resource(NETWORK, PolicyDiscipline(self._policy, self._payloads))
        self._last_all_reduce: list[int] = []

    def run(self, layers: Sequence[BackwardLayer]) -> Run:
        previous: list[int] = []
        for number, layer in enumerate(layers):
            gradients = self._compute("gradients", layer.gradient_s, previous, number)
            self._add_all_reduces(layer, number, gradients)
            combine = self._graph.add(
                "combine",
                layer.combine_s,
                COMPUTE,
                after=[gradients],
                kind="combine",
                layer=number,
                on_start=self._policy.combine_begins,
            )
            returned = self._add_experts(layer, number, combine)
            previous = [self._compute("gate", layer.gate_s, returned, number)]
        return self._graph.run()

    def _compute(self, name: str, duration_s: float, after: Sequence[int], layer: int) -> int:
        return self._graph.add(name, duration_s, COMPUTE, after=after, kind=name, layer=layer)

    def _add_all_reduces(self, layer: BackwardLayer, number: int, gradients: int) -> None:
        """Micro-ops and full knowledge work on single gradients; the others on one bucket of all (as DDP does)."""
        listed = list(layer.gradients)
        if self._options.schedule not in ("micro_ops", "known") and listed:
            bucket = Gradient(
                name=f"{listed[0].name}..{listed[-1].name}" if len(listed) > 1 else listed[0].name,
                size_bytes=sum(g.size_bytes for g in listed),
                all_reduce_s=sum(g.all_reduce_s for g in listed),
                ready_s=max(g.ready_s for g in listed),
            )
            listed = [bucket]
        for gradient in listed:
            index = self._graph.add(
                f"all-reduce {gradient.name}",
                gradient.all_reduce_s,
                NETWORK,
                after=self._last_all_reduce if self._options.schedule == "baseline" else (),
                after_first_start=[gradients],
                latency_s=gradient.ready_s,
                kind=ALL_REDUCE,
                priority=1,
                layer=number,
            )
            self._payloads[index] = Payload(tensor=f"{number}/{gradient.name}", size_bytes=gradient.size_bytes)
            self._last_all_reduce = [index]

    def _add_experts(self, layer: BackwardLayer, number: int, combine: int) -> list[int]:
        """All-to-all, FFN, all-to-all in parts (one unless pipelined); returns what the gate waits for."""
        parts = [(0, layer.all_to_all_bytes)]
        if self._options.pipeline:
            parts = partition(layer.all_to_all_bytes, self._options.chunk_bytes) or parts
        arrived = [self._all_to_all(layer, number, 1, part, parts, combine) for part in range(len(parts))]
        share = 1 / len(parts)
        computed = [self._compute("FFN", layer.ffn_s * share, [arrival], number) for arrival in arrived]
        return [self._all_to_all(layer, number, 2, part, parts, computed[part]) for part in range(len(parts))]

    def _all_to_all(
        self, layer: BackwardLayer, number: int, which: int, part: int, parts: Sequence[tuple[int, int]], after: int
    ) -> int:
        index = self._graph.add(
            f"all-to-all {which}" + (f" part {part + 1}" if len(parts) > 1 else ""),
            layer.all_to_all_s / len(parts),
            NETWORK,
            after=[after],
            kind=ALL_TO_ALL,
            layer=number,
        )
        self._payloads[index] = Payload(
            tensor=f"{number}/{which}", size_bytes=parts[part][1], number=part, num_pieces=len(parts)
        )
        return index


@dataclass(frozen=True, kw_only=True)
class PackingNetwork:
    """Devices and what each can send: `inter_bytes_per_s` is a device's share of its node's network card."""

    num_devices: int
    devices_per_node: int
    inter_bytes_per_s: float
    intra_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node", "inter_bytes_per_s", "intra_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"packing network: {name} is {getattr(self, name)}: give more than 0")

    def all_to_all_s(self, size_bytes: float, experts_per_device: int) -> float:
        """`size_bytes` of rows per device, spread evenly over its group of N / experts_per_device devices."""
        if experts_per_device < 1 or self.num_devices % experts_per_device:
            raise UserError(
                f"{experts_per_device} experts per device for {self.num_devices} experts on as many devices: "
                "give a divisor, so that every group holds each expert once"
            )
        group = self.num_devices // experts_per_device
        inside = min(group, self.devices_per_node)
        intra_bytes = size_bytes * (inside - 1) / group
        inter_bytes = size_bytes * (group - inside) / group
        return max(intra_bytes / self.intra_bytes_per_s, inter_bytes / self.inter_bytes_per_s)


def packed_layer(
    layer: BackwardLayer, network: PackingNetwork, experts_per_device: int, ffn_growth: float = 1.0
) -> BackwardLayer:
    """`layer`, whose times are of one expert per device, with more; its FFN takes `ffn_growth` times as long."""
    if not 1 <= ffn_growth <= experts_per_device:
        raise UserError(f"ffn_growth of {ffn_growth}: give 1 to {experts_per_device}, the number of packed experts")
    unpacked_s = network.all_to_all_s(1.0, 1)
    shrunk = network.all_to_all_s(1.0, experts_per_device) / unpacked_s if unpacked_s else 0.0
    return replace(layer, all_to_all_s=layer.all_to_all_s * shrunk, ffn_s=layer.ffn_s * ffn_growth)


def choose_packing(layer: BackwardLayer, network: PackingNetwork) -> list[PackingStep]:
    """Lina's search with the times of this model, FFN time following rows."""

    def measure(experts_per_device: int) -> tuple[float, float]:
        packed = packed_layer(layer, network, experts_per_device)
        return packed.ffn_s, packed.all_to_all_s

    return choose_experts_per_device(measure, network.num_devices)
