"""MegaScale-MoE's ablations by the cost model: Figures 14 to 17, memory of sequence parallelism, compression.

None of them chose the cluster's calibration: all rows are checks.
"""

from functools import cache

from antiphon.cost.network import network
from antiphon.cost.roofline import roofs
from antiphon.cost.training.gradient_sync import SyncBytes, sync_time
from antiphon.cost.training.layer_case import LayerCase
from antiphon.cost.training.megascale_models import NODE_DEVICES, SEQUENCE_LENGTH, TABLE_2
from antiphon.cost.training.memory import fullest_stage, rank_parameters, state_bytes
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.overlap import fused_speedup
from antiphon.reproduce import shipped
from antiphon.reproduce.msm_cases import (
    H800,
    SETUPS,
    Variant,
    number,
    setup_of_one_node,
    step_for_memory,
    step_one_node,
)


@cache
def _gains() -> tuple[float, ...]:
    return tuple(
        number(step_one_node(name, "sp_ep").mfu) / number(step_one_node(name, "tp_tp").mfu) for name in TABLE_2
    )


def _best_layout(name: str) -> Variant:
    layouts: tuple[Variant, ...] = ("tp_tp", "sp_tp", "tp_ep", "sp_ep")
    return max(layouts, key=lambda layout: number(step_one_node(name, layout).mfu))


@cache
def _intra_savings() -> tuple[float, ...]:
    return tuple(
        1 - number(step_one_node(name, "intra").iteration_s) / number(step_one_node(name, "inter").iteration_s)
        for name in TABLE_2
    )


def _saved(name: str, part: str) -> float:
    kept, everything = (step_for_memory(name, 128, how).memory for how in ("cheap", "none"))
    if part == "total":
        return 1 - number(kept.total) / number(everything.total)
    return 1 - number(kept.activations) / number(everything.activations)


def _speed(name: str) -> float:
    return number(step_for_memory(name, 128, "cheap").mfu) / number(step_for_memory(name, 128, "none").mfu)


@cache
def _state_ratios() -> tuple[float, ...]:
    """EP for experts on both sides, attention by SP against TP, one node (section 6.2)."""
    found = []
    for row in TABLE_2.values():
        if row.num_shared:
            continue
        model = row.model()
        layers = fullest_stage(model, 1)
        sizes = []
        for variant in ("sp_ep", "tp_ep"):
            setup = setup_of_one_node(SETUPS[variant], data_parallel=1)
            sizes.append(sum(number(part) for part in state_bytes(rank_parameters(model, setup, layers), setup)))
        found.append(sizes[0] / sizes[1])
    return tuple(found)


@cache
def _sync_ratios() -> tuple[float, ...]:
    """10 GB of experts per GPU; attention of P bytes on each GPU (SP) or P / 8 (TP)."""
    cluster = shipped.cluster(H800)
    net = network(cluster, cluster.groups[0])
    found = []
    for data_parallel in (4, 8):
        for attention_bytes in (384e6, 768e6, 1536e6):
            times = []
            for size in (
                SyncBytes(sharded=10e9, replicated=attention_bytes),
                SyncBytes(sharded=10e9 + attention_bytes / NODE_DEVICES, replicated=0.0),
            ):
                total = sync_time(
                    net, degree=NODE_DEVICES, data_parallel=data_parallel, gradients=size, parameters=size
                ).total
                times.append(number(total.total_s))
            found.append(times[0] / times[1])
    return tuple(found)


def _gradient_time(element_bytes: float) -> float:
    cluster = shipped.cluster(H800)
    size = SyncBytes(sharded=5e9 * element_bytes, replicated=0.0)
    return number(
        sync_time(
            network(cluster, cluster.groups[0]), degree=NODE_DEVICES, data_parallel=8, gradients=size, parameters=size
        ).gradients.total_s
    )


@cache
def _pair_speedups() -> tuple[float, ...]:
    """Figure 16, forward, all pairs of all models: time one after the other over time fused."""
    cluster = shipped.cluster(H800)
    group, efficiency = cluster.groups[0], cluster.efficiency
    found = []
    for row in TABLE_2.values():
        case = LayerCase(
            model=row.model(),
            setup=setup_of_one_node(SETUPS["intra"], data_parallel=1),
            roofs=roofs(group.device, efficiency),
            network=network(cluster, group),
            sequence_length=SEQUENCE_LENGTH,
        )
        operators = layer_operators(case)
        for item in operators.communications.values():
            product = operators.products[item.fuses_with].forward
            speedup = fused_speedup(number(item.time.total_s), number(product.total_s), efficiency.overlap)
            found.append(number(speedup))
    return tuple(found)


OURS = {
    "least gain": lambda: min(_gains()),
    "most gain": lambda: max(_gains()),
    "best with": lambda layout: sum(_best_layout(name) == layout for name in TABLE_2),
    "least speed-up": lambda: min(_pair_speedups()),
    "most speed-up": lambda: max(_pair_speedups()),
    "least saving": lambda: min(_intra_savings()),
    "most saving": lambda: max(_intra_savings()),
    "memory saved": _saved,
    "speed kept": _speed,
    "least states": lambda: min(_state_ratios()),
    "most states": lambda: max(_state_ratios()),
    "most synchronisation": lambda: max(_sync_ratios()),
    "compression": lambda few, many: _gradient_time(few) / _gradient_time(many),
}
