"""Lina's claims: the backward pass of Figure 7, counted rows, and whole steps by simulation.

A section a source, whose assumptions stand at its head; `OURS` has what rows of `data/lina.toml` name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from antiphon.cost.network import network
from antiphon.cost.training.setup import TrainingPrecision
from antiphon.reproduce import shipped_cluster
from antiphon.sim.schedules import SCHEDULES, Contention, Schedule
from antiphon.sim.training_step import (
    BackwardLayer,
    BackwardOptions,
    BackwardTimeline,
    Gradient,
    PackingNetwork,
    choose_packing,
    packed_layer,
    simulate_backward,
)
from antiphon.specs.checked import read, read_mapping
from antiphon.specs.model import BYTES_OF

DATA = Path(__file__).parent / "data" / "lina.toml"

# --- Figure 7 ---
#
# The backward pass of Lina's Figure 7 (419M parameters, 16 experts), its numbers as data, its timelines simulated.
#
# Printed: all-to-all 7.6 ms, FFN 1.6, gate 2.1, bucket all-reduce 7.9, gradients ready at 4.1, combine done at 5.7.
# Not printed, and what is taken here:
# - how the 7.9 ms divide over the three gradients. The last one takes 23.8 - 22.5 = 1.3 ms in (d); the second fits the
#   FFN's gap of 1.6 ms; the first then takes 5.0 ms, so that it ends at 5.7 only if it is ready by 0.7 ms. With pieces
#   of a third of it Figure 8(a) follows too: three micro-ops before the first all-to-all, one in the gap, one after.
# - how two transfers slow each other down in the measured (a): from 5.7 to 14.7 ms the all-reduce does its last 6.3 ms
#   of work, rate 6.3/9.0; the all-to-all does 7.6 - 3.0 ms, rate 4.6/9.0. With fair halves (a) ends at 30.9 like (b),
#   which is what the paper says of theory. Rejected: fitting a rate to each schedule.

MEASURED_CONTENTION = Contention(all_to_all_rate=4.6 / 9.0, all_reduce_rate=6.3 / 9.0)
CHUNK_BYTES = 30_000_000  # section 7.1
MICRO_OPS = BackwardOptions(schedule="micro_ops", chunk_bytes=CHUNK_BYTES)
BYTES_PER_S = 3 * CHUNK_BYTES / 5.0e-3  # gradient i is three micro-ops in Figure 8(a)

LAYER = BackwardLayer(
    gradient_s=4.1e-3,
    gradients=(
        Gradient(name="G_i", size_bytes=round(5.0e-3 * BYTES_PER_S), all_reduce_s=5.0e-3, ready_s=0.7e-3),
        Gradient(name="G_i-1", size_bytes=round(1.6e-3 * BYTES_PER_S), all_reduce_s=1.6e-3, ready_s=4.1e-3),
        Gradient(name="G_i-2", size_bytes=round(1.3e-3 * BYTES_PER_S), all_reduce_s=1.3e-3, ready_s=4.1e-3),
    ),
    combine_s=1.6e-3,
    all_to_all_s=7.6e-3,
    ffn_s=1.6e-3,
    gate_s=2.1e-3,
    all_to_all_bytes=round(7.6e-3 * BYTES_PER_S),
)


def figure_7() -> dict[Schedule, BackwardTimeline]:
    """(a) `baseline`, (b) `priority`, (c) `deferral`, (d) `known`; and Figure 8(a), `micro_ops`."""
    return {
        schedule: simulate_backward(
            [LAYER], BackwardOptions(schedule=schedule, contention=MEASURED_CONTENTION, chunk_bytes=CHUNK_BYTES)
        )
        for schedule in SCHEDULES
    }


def figure_8b() -> BackwardTimeline:
    """Micro-ops with all-to-all in parts and the FFN pipelined."""
    return simulate_backward([LAYER], replace(MICRO_OPS, pipeline=True))


# --- By counting and by timelines ---
#
# Lina by counting and by its own timelines: Table 1, eq. 1, and Figures 7 and 8 event by event.
#
# The timelines' inputs are the paper's printed times, above; what is compared are the ends that
# follow under each schedule.
#
# Lina's models are Transformers with two-matrix experts, which no `ModelSpec` can describe. Here they have only what
# the paper's figures need: parameters, bytes exchanged, FLOPs. Training uses top-2, inference top-1 (Lina section 7.1).
# Rejected: an ungated feed-forward in `FeedForwardSpec`, which every engine would have to carry for models that
# are not served.

FEED_FORWARD_MATRICES = 2


@dataclass(frozen=True, kw_only=True)
class TwoMatrixModel:
    """`attention_matrices`: how many hidden x hidden matrices one layer's attention has."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_matrices: int
    source: str

    @property
    def expert_parameters(self) -> int:
        return FEED_FORWARD_MATRICES * self.hidden_size * self.intermediate_size

    @property
    def attention_parameters(self) -> int:
        return self.attention_matrices * self.hidden_size**2

    def parameters(self, num_experts: int, num_layers: int | None = None) -> int:
        """Matrices of all layers (by default the model's own number), without embeddings, norms and gates."""
        layers = self.num_layers if num_layers is None else num_layers
        return layers * (self.attention_parameters + num_experts * self.expert_parameters)


@cache
def lina_models() -> dict[str, TwoMatrixModel]:
    entries = read_mapping(DATA)["models"].items()
    return {name: read(TwoMatrixModel, {"name": name, **entry}, f"{DATA}: {name}") for name, entry in entries}


# Table 1, all-to-all's share of the step: of 4 and of 16 experts, by layers, in training and in inference.
SHARES = (0.367, 0.274, 0.354, 0.262, 0.382, 0.283, 0.395, 0.325, 0.376, 0.317, 0.368, 0.274)
PATHS = [(0.5, 0.25, 0.25, 0.0)] * 3 + [(0.0, 0.5, 0.0, 0.5)]  # of four tokens: expert popularity on their two paths


def _transformer_xl(num_experts: int, num_layers: int) -> float:
    model = lina_models()["transformer-xl"]
    biases = num_experts * (model.intermediate_size + model.hidden_size)
    gate = num_experts * model.hidden_size
    return float(model.parameters(num_experts, num_layers) + num_layers * (biases + gate))


_timelines = cache(figure_7)


def _end_ms(schedule: Schedule, part: str) -> float:
    return _end_of(_timelines()[schedule], part)


def _end_of(timeline: BackwardTimeline, part: str) -> float:
    return 1e3 * (timeline.compute_end_s if part == "compute" else timeline.all_reduce_end_s)


OURS: dict[str, Callable[..., Any]] = {
    "parameters": _transformer_xl,
    "mean share": lambda: sum(SHARES) / len(SHARES),
    "devices of expert": lambda expert: 16 * sum(path[expert] for path in PATHS) / len(PATHS),  # eq. 1
    "end": _end_ms,
    "end of Figure 8(b)": lambda part: _end_of(figure_8b(), part),
    "slowdown": lambda: _timelines()["baseline"].all_to_all_s()[0] / LAYER.all_to_all_s,
    "earlier": lambda: 1 - _end_ms("micro_ops", "all-reduce") / _end_ms("deferral", "all-reduce"),
}

# --- Whole steps ---
#
# Lina's steps by simulation: speed-ups of Figure 10, pipelining efficiency of Table 3, all-to-all's share of Figure 4.
#
# 1. A layer backward is that of Figure 7 (16 experts on 16 GPUs); forward has no gradients, half their time for
#    attention, and so much else that all-to-all is 74.9% of the layer (Figure 2). Twelve layers.
# 2. Other numbers of experts, and packing, scale all-to-all and all-reduce by bytes over the cluster's two networks.
# 3. Packed experts run one after another with their own kernels (section 6.2), so FFN time grows with their number:
#    measured FFN time (1.6 ms) is many times its arithmetic, it follows kernels, not rows.
# 4. Baseline: transfers share the network. Lina: its own scheduler, all-to-all in parts, packing of section 7.2.
#
# The cluster's one constant that matters, how much faster a node's inside is, was chosen with the four speed-ups.
# Rejected: Table 1's times. They are of whole steps of other runs, which Figure 7 does not add up to.

CLUSTER = "lina-a100"
NUM_LAYERS = 12
MEASURED_DEVICES = 16  # of Figure 7's run
ALL_TO_ALL_SHARE = 0.749  # of a forward layer, Figure 2
# Section 7.2.1, by number of experts: packing of each of the three models; Transformer-XL packs four of sixteen.
PACKED = {2: (2, 2, 2), 4: (2, 2, 2), 8: (2, 2, 2), 16: (4, 2, 2)}


def packing_network(num_devices: int) -> PackingNetwork:
    """The cluster's two networks as they are reached, with fewer devices."""
    cluster = shipped_cluster(CLUSTER)
    net = network(cluster, cluster.groups[0])
    return PackingNetwork(
        num_devices=num_devices,
        devices_per_node=cluster.groups[0].devices_per_node,
        inter_bytes_per_s=float(net.scale_out.bytes_per_s),
        intra_bytes_per_s=float(net.scale_up.bytes_per_s),
    )


def _all_reduce_scale(net: PackingNetwork) -> float:
    """Seconds per byte of a hierarchical all-reduce: inside each node, then across nodes on what each GPU keeps."""
    inside = min(net.num_devices, net.devices_per_node)
    num_nodes = -(-net.num_devices // net.devices_per_node)
    within = 2 * (inside - 1) / inside / net.intra_bytes_per_s
    return within + 2 * (num_nodes - 1) / num_nodes / inside / net.inter_bytes_per_s


def layer_of(num_experts: int, packed: int) -> BackwardLayer:
    """Figure 7's layer with other numbers of experts (as many GPUs) and of experts per GPU."""
    measured, net = packing_network(MEASURED_DEVICES), packing_network(num_experts)
    exchange = net.all_to_all_s(1.0, packed) / measured.all_to_all_s(1.0, 1)
    reduction = _all_reduce_scale(net) / _all_reduce_scale(measured)
    return replace(
        LAYER,
        all_to_all_s=LAYER.all_to_all_s * exchange,
        all_to_all_bytes=LAYER.all_to_all_bytes if exchange else 0,
        ffn_s=LAYER.ffn_s * packed,
        gradients=tuple(replace(one, all_reduce_s=one.all_reduce_s * reduction) for one in LAYER.gradients),
    )


def forward_of(layer: BackwardLayer) -> BackwardLayer:
    """The forward layer: gate, FFN and combine in backward's proportions, together what Figure 2 leaves beside
    all-to-all."""
    beside_s = 2 * LAYER.all_to_all_s * (1 / ALL_TO_ALL_SHARE - 1)
    scale = beside_s / (LAYER.gate_s + LAYER.ffn_s + LAYER.combine_s)
    return replace(
        layer,
        gradients=(),
        gradient_s=LAYER.gradient_s / 2,
        gate_s=layer.gate_s * scale,
        ffn_s=layer.ffn_s * scale,
        combine_s=layer.combine_s * scale,
    )


@cache
def step_s(num_experts: int, packed: int, lina: bool) -> float:
    """One step of twelve layers, forward and backward."""
    layer, options = layer_of(num_experts, packed), _options(num_experts, packed, lina)
    backward_s = simulate_backward([layer] * NUM_LAYERS, options).end_s
    forward = options if lina else BackwardOptions(schedule="priority")
    return backward_s + simulate_backward([forward_of(layer)] * NUM_LAYERS, forward).end_s


def _options(num_experts: int, packed: int, lina: bool) -> BackwardOptions:
    """How the backward pass shares the network; with all experts on every device no all-to-all is left to cut."""
    if lina:
        return replace(MICRO_OPS, pipeline=packed < num_experts)
    return BackwardOptions(schedule="baseline", contention=MEASURED_CONTENTION)


def _gain(num_experts: int, time: Callable[[int, bool], float]) -> float:
    """The baseline's time over Lina's, `time(experts of a device, whether of Lina)`; mean over the three models, which
    differ in packing only."""
    baseline, packings = time(1, False), PACKED[num_experts]
    return sum(baseline / time(packed, True) for packed in packings) / len(packings)


def _exchange_gain(num_experts: int) -> float:
    """All-to-all of the backward pass; the baseline's is beside all-reduce."""

    def exchange_s(packed: int, lina: bool) -> float:
        run = simulate_backward([layer_of(num_experts, packed)] * NUM_LAYERS, _options(num_experts, packed, lina))
        return sum(run.all_to_all_s())

    return _gain(num_experts, exchange_s)


def _layer_gain(num_experts: int, backward: bool) -> float:
    """MoE layers of one pass (gate, experts, combine and their exchanges). Backward the baseline's exchanges run beside
    all-reduce."""

    def layers_s(packed: int, lina: bool) -> float:
        layer = layer_of(num_experts, packed)
        options = _options(num_experts, packed, lina)
        if not backward:
            layer = forward_of(layer)
            options = options if lina else BackwardOptions(schedule="priority")
        run = simulate_backward([layer] * NUM_LAYERS, options)
        return run.compute_end_s - NUM_LAYERS * layer.gradient_s

    return _gain(num_experts, layers_s)


def _chunk_step(num_bytes: float) -> float:
    """The backward pass of twelve layers of 16 experts without packing, with chunks of this size, over that with the
    paper's 30 MB (Figure 15)."""

    def end_s(chunk_bytes: int) -> float:
        options = replace(MICRO_OPS, pipeline=True, chunk_bytes=chunk_bytes)
        return simulate_backward([layer_of(16, 1)] * NUM_LAYERS, options).end_s

    return end_s(round(num_bytes)) / end_s(CHUNK_BYTES)


def _share(num_experts: int) -> float:
    """All-to-all alone (four a layer) over the baseline's step."""
    return 4 * NUM_LAYERS * layer_of(num_experts, 1).all_to_all_s / step_s(num_experts, 1, False)


def _layer_at(without: float) -> BackwardLayer:
    """A layer whose FFN is the share `without` of its two all-to-alls: that is its efficiency without packing."""
    return replace(LAYER, gradients=(), ffn_s=2 * without * LAYER.all_to_all_s)


def _chosen(without: float) -> float:
    steps = choose_packing(_layer_at(without), packing_network(MEASURED_DEVICES))
    return float(steps[-1].experts_per_device)


def _packed_efficiency(without: float, experts: int) -> float:
    layer = packed_layer(_layer_at(without), packing_network(MEASURED_DEVICES), experts, float(experts))
    run = simulate_backward([layer], replace(MICRO_OPS, pipeline=True))
    return run.pipelining_efficiency()


# --- Memory of packed experts (Table 4) ---
#
# A device that holds p experts of a layer instead of one has p - 1 more in its state: BF16 parameters, FP32 gradients,
# main parameters and moments (`cost.training.memory`). Its rows stay as many: a group of 1 / p of the devices shares
# the experts, and each device gets the rows of p of them from that group. So activations stay what they are.

DEVICE_BYTES = 40e9  # of an A100, section 7.1


def packed_bytes(name: str, packed: int) -> float:
    """What packing adds to a device's state, 16 experts on 16 devices."""
    model, precision = lina_models()[name], TrainingPrecision()
    biases = model.intermediate_size + model.hidden_size
    held = BYTES_OF[precision.weights] + BYTES_OF[precision.gradients] + precision.optimizer_bytes
    return (packed - 1) * model.num_layers * (model.expert_parameters + biases) * held


OURS |= {
    "packing adds": lambda name, packed: packed_bytes(name, packed) / DEVICE_BYTES,
    "speed-up": lambda num_experts: _gain(num_experts, partial(step_s, num_experts)),
    "exchange gain": _exchange_gain,
    "layer gain": _layer_gain,
    "chunk step": _chunk_step,
    "exchange over": lambda few, many: layer_of(few, 1).all_to_all_s / layer_of(many, 1).all_to_all_s,
    "share": _share,
    "order of shares": lambda: " < ".join(str(count) for count in sorted(PACKED, key=_share)),
    "packed": _chosen,
    "efficiency": _packed_efficiency,
}
