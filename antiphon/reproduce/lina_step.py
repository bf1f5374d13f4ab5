"""Lina's steps by simulation: speed-ups of Figure 10, pipelining efficiency of Table 3, all-to-all's share of Figure 4.

1. A layer backward is that of Figure 7 (16 experts on 16 GPUs); forward has no gradients, half their time for
   attention, and so much else that all-to-all is 74.9% of the layer (Figure 2). Twelve layers.
2. Other numbers of experts, and packing, scale all-to-all and all-reduce by bytes over the cluster's two networks.
3. Packed experts run one after another with their own kernels (section 6.2), so FFN time grows with their number:
   measured FFN time (1.6 ms) is many times its arithmetic, it follows kernels, not rows.
4. Baseline: transfers share the network. Lina: its own scheduler, all-to-all in parts, packing of section 7.2.

The cluster's one constant that matters, how much faster a node's inside is, was chosen with the four speed-ups.
Rejected: Table 1's times. They are of whole steps of other runs, which Figure 7 does not add up to.
"""

from dataclasses import replace
from functools import cache

from antiphon.cost.network import network
from antiphon.reproduce import shipped
from antiphon.sim.expert_packing import PackingNetwork, choose_packing, packed_layer
from antiphon.sim.lina_figure_7 import LAYER, MEASURED_CONTENTION
from antiphon.sim.training_step import BackwardLayer, BackwardOptions, simulate_backward

CLUSTER = "lina-a100"
NUM_LAYERS = 12
MEASURED_DEVICES = 16  # of Figure 7's run
ALL_TO_ALL_SHARE = 0.749  # of a forward layer, Figure 2
# Section 7.2.1, by number of experts: packing of each of the three models; Transformer-XL packs four of sixteen.
PACKED = {2: (2, 2, 2), 4: (2, 2, 2), 8: (2, 2, 2), 16: (4, 2, 2)}


def packing_network(num_devices: int) -> PackingNetwork:
    """The cluster's two networks as they are reached, with fewer devices."""
    cluster = shipped.cluster(CLUSTER)
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
        return BackwardOptions(schedule="micro_ops", pipeline=packed < num_experts)
    return BackwardOptions(schedule="baseline", contention=MEASURED_CONTENTION)


def _speedup(num_experts: int) -> float:
    """Mean over the three models, which differ in packing only."""
    packings = PACKED[num_experts]
    gains = [step_s(num_experts, 1, False) / step_s(num_experts, packed, True) for packed in packings]
    return sum(gains) / len(gains)


def _exchange_gain(num_experts: int) -> float:
    """All-to-all of the backward pass, the baseline's beside all-reduce, over Lina's; mean over the three models."""
    sums = []
    for packed, lina in ((1, False), *((packed, True) for packed in PACKED[num_experts])):
        run = simulate_backward([layer_of(num_experts, packed)] * NUM_LAYERS, _options(num_experts, packed, lina))
        sums.append(sum(run.all_to_all_s()))
    return sum(sums[0] / one for one in sums[1:]) / len(sums[1:])


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
    run = simulate_backward([layer], BackwardOptions(schedule="micro_ops", pipeline=True))
    return run.pipelining_efficiency()


OURS = {
    "speed-up": _speedup,
    "exchange gain": _exchange_gain,
    "exchange over": lambda few, many: layer_of(few, 1).all_to_all_s / layer_of(many, 1).all_to_all_s,
    "share": _share,
    "order of shares": lambda: " < ".join(str(count) for count in sorted(PACKED, key=_share)),
    "packed": _chosen,
    "efficiency": _packed_efficiency,
}
