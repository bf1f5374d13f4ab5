"""MegaScale-MoE: rows by counting, training speed by the cost model, figures.

A section a source, whose assumptions stand at its head; `OURS` has what rows of `data/msm.toml` name.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np

from antiphon.cost.network import collective_bytes
from antiphon.cost.roofline import roofs
from antiphon.cost.training.counts import (
    StepEstimate,
    causal_imbalance,
    context_to_tensor_ratio,
    expert_parallel_volume,
    expert_to_tensor_ratio,
    layer_ratio,
    model_flops_utilization,
    sequence_to_tensor_ratio,
    tokens_per_s,
)
from antiphon.cost.training.memory import fullest_stage, rank_parameters, state_bytes
from antiphon.cost.training.operators import FUSES_WITH, crossover_top_k, layer_operators
from antiphon.cost.training.rematerialize import LayerShape, Rematerialize, layer_activations, total_width
from antiphon.cost.training.setup import LayerCase, Training, TrainingPrecision, TrainingSetup
from antiphon.cost.training.step import (
    SyncBytes,
    SyncTime,
    across_to_inside,
    computation_to_communication,
    estimate_step,
    fused_speedup,
    sync_time,
)
from antiphon.reproduce import shipped_cluster, shipped_model, shipped_network
from antiphon.reproduce.msm_models import (
    INTERNAL_352B_AS_PRINTED,
    NODE_DEVICES,
    SEQUENCE_LENGTH,
    TABLE_2,
    TABLE_3,
    TABLE_3_BATCH,
    TABLE_3_PIPELINE,
    Name,
)
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec

# --- By counting ---
#
# MegaScale-MoE by counting: parameters, what each rank sends (eq. 1-4), activations (Figure 9), R (eq. 5-9), eq. 10;
# whether Table 3 agrees with itself, and the MFU that follows from its throughputs.
#
# `theirs` of an equation is the printed equation by hand; ours is the sum over tensors or operators that the planner
# uses.

RANKS = 8


def _ulysses_elements() -> float:
    """What one rank sends of queries, keys, values, and of the output, in units of b s h."""
    row = TABLE_2["Internal-352B"]
    sizes = ((1 + 2 / row.heads_per_kv_head) / RANKS, 1 / RANKS)
    return float(sum(collective_bytes("all_to_all", size, RANKS)[0] for size in sizes))


def _width(name: str, which: str) -> float:
    activations = layer_activations(LayerShape.of(TABLE_2[name].model(), RANKS))
    return float(total_width(activations, "all" if which == "all" else "kept"))


def _r_by_counting() -> float:
    """FLOPs of the experts over bytes of dispatch and combine, of one rank, BF16."""
    row = TABLE_2["Mixtral-8x7B"]
    flops = 2 * 3 * row.top_k * row.expert_width / RANKS
    sent = 2 * float(expert_parallel_volume(RANKS, row.top_k))
    return (flops / 989e12) / (sent / 400e9)


def _throughput(system: Name, num_devices: int) -> float:
    """The throughput that follows from Table 3's printed time."""
    iteration_s, _ = TABLE_3[system][num_devices]
    return float(tokens_per_s(SEQUENCE_LENGTH, TABLE_3_BATCH, iteration_s))


def _days(system: Name, num_devices: int) -> float:
    return 1e12 / TABLE_3[system][num_devices][1] / 86400


def _printed_mfu(num_devices: int) -> float:
    """The MFU that follows from Table 3's printed throughput; a GPU does 989 TFLOP/s."""
    rate, model = TABLE_3["megascale"][num_devices][1], shipped_model("msm-internal-352b")
    return float(model_flops_utilization(model, SEQUENCE_LENGTH, rate, num_devices, 989e12))


def _volume(part: str, name: str) -> float:
    row = TABLE_2[name]
    if part == "layer":
        return float(layer_ratio(RANKS, row.heads_per_kv_head, row.top_k))
    if part == "SP / TP":
        return float(sequence_to_tensor_ratio(RANKS, row.heads_per_kv_head))
    return float(expert_to_tensor_ratio(RANKS, row.top_k))


OURS: dict[str, Callable[..., Any]] = {
    "parameters": lambda name: count_parameters(shipped_model(name)).total,
    "parameters as printed": lambda: count_parameters(INTERNAL_352B_AS_PRINTED.model()).total,
    "volume": _volume,
    "elements": _ulysses_elements,
    "activations": _width,
    "activations saved": lambda name: 1 - _width(name, "kept") / _width(name, "all"),
    "R": _r_by_counting,
    "R of many ranks": computation_to_communication,
    "across / inside": across_to_inside,
    "throughput as printed": _throughput,
    "days": _days,
    "MFU as printed": _printed_mfu,
}

# --- Steps of the evaluation ---
#
# How MegaScale-MoE's evaluation is set up for our cost model, and the estimates that several rows share.
#
# Not stated in the paper and taken here: micro-batches of one sequence, two virtual stages per pipeline stage.
# "Megatron-LM" is our model of tensor parallelism for attention and experts without overlap, as is the baseline of
# Table 5.

H800 = "msm-h800"
VIRTUAL_STAGES = 2
Variant = Literal["tp_tp", "sp_tp", "tp_ep", "sp_ep", "inter", "intra", "megascale"]
SETUPS: dict[Variant, TrainingSetup] = {
    "tp_tp": TrainingSetup(attention="tensor", experts="tensor", dispatch="all_gather", overlap="none"),
    "sp_tp": TrainingSetup(attention="sequence", experts="tensor", dispatch="all_gather", overlap="none"),
    "tp_ep": TrainingSetup(attention="tensor", experts="expert", dispatch="all_to_all", overlap="none"),
    "sp_ep": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="none"),
    "inter": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="inter"),
    "intra": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="intra"),
    "megascale": TrainingSetup(
        attention="sequence",
        experts="expert",
        dispatch="all_to_all",
        overlap="intra",
        precision=TrainingPrecision(gradient_wire="bfloat16"),
    ),
}


def _training(model: ModelSpec, batch: int, cluster_name: str = H800) -> Training:
    cluster = shipped_cluster(cluster_name)
    return Training(model=model, cluster=cluster, group=cluster.groups[0], sequence_length=SEQUENCE_LENGTH, batch=batch)


def _setup(variant: Variant, num_devices: int, pipeline: int = 1, virtual_stages: int = 1) -> TrainingSetup:
    """Groups of one node each, the rest of the devices in data parallelism."""
    return replace(
        SETUPS[variant],
        model_parallel=NODE_DEVICES,
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        data_parallel=num_devices // (NODE_DEVICES * pipeline),
    )


@cache
def step_352b(variant: Variant, num_devices: int, batch: int = TABLE_3_BATCH) -> StepEstimate:
    """One iteration of the 352B model, pipeline 15."""
    training = _training(shipped_model("msm-internal-352b"), batch)
    return estimate_step(training, _setup(variant, num_devices, TABLE_3_PIPELINE, VIRTUAL_STAGES))


@cache
def step_one_node(
    name: str, variant: Variant, cluster_name: str = H800, num_devices: int = NODE_DEVICES, batch: int = 32
) -> StepEstimate:
    """One iteration of a Table 2 model without pipeline, nothing made again (section 6.2: one node, batch 32; section
    6.1, Figure 13: four nodes). Layers are left as they are: time per layer does not depend on how many there are."""
    training = _training(TABLE_2[name].model(), batch, cluster_name)
    return estimate_step(training, _setup(variant, num_devices), "none")


@cache
def step_for_memory(name: str, num_devices: int, rematerialize: Rematerialize) -> StepEstimate:
    """`name` on that many H800 with the shortest pipeline that has room for all activations (Figure 17 ran without SAR;
    its configuration is not stated), one micro-batch per stage in flight."""
    training = _training(TABLE_2[name].model(), num_devices)
    for pipeline in (1, 2, 4, 8, 16):
        setup = _setup("megascale", num_devices, pipeline)
        if float(np.max(estimate_step(training, setup, "none").memory.total)) <= training.usable_bytes:
            return estimate_step(training, setup, rematerialize)
    raise AssertionError(f"no pipeline has room for {name}")


def number(value: object) -> float:
    """The one value of an estimate that holds one candidate."""
    return float(np.max(np.asarray(value, dtype=np.float64)))


# --- Training speed ---
#
# MegaScale-MoE's training speed by the cost model: Table 3, the ladder of Table 5, Figures 7, 12 and 13.
#
# Table 3's MegaScale-MoE times, Table 5 and Figure 7 chose the calibration of the H800 cluster; the rest are checks of
# it.

FIGURE_13 = {"H800": H800, "A100": "msm-a100", "H20": "msm-h20"}


def _crossover() -> float:
    row_bytes = 2.0 * TABLE_2["Mixtral-8x7B"].hidden_size
    return float(crossover_top_k(shipped_network(H800), SEQUENCE_LENGTH, row_bytes, NODE_DEVICES))


def _rate(variant: Variant, num_devices: int) -> float:
    return number(step_352b(variant, num_devices).tokens_per_s)


def _over(better: Variant, worse: Variant, num_devices: int) -> float:
    return _rate(better, num_devices) / _rate(worse, num_devices)


def _mfu(num_devices: int) -> float:
    return number(step_352b("megascale", num_devices).mfu)


def _ladder_order() -> str:
    names: dict[Variant, str] = {"tp_tp": "TP+TP", "sp_ep": "SP+EP", "inter": "inter", "intra": "intra"}
    return " < ".join(names[one] for one in sorted(names, key=lambda one: _rate(one, 240)))


def _figure_13(device: str, variant: Variant) -> float:
    return number(step_one_node("Mixtral-8x7B", variant, FIGURE_13[device], 4 * NODE_DEVICES, 128).mfu)


def _figure_13_order() -> str:
    return " > ".join(sorted(FIGURE_13, key=lambda name: -_figure_13(name, "megascale")))


def _kept(variant: Variant) -> float:
    first, last = (number(step_352b(variant, n, batch).tokens_per_s) / n for n, batch in ((480, 360), (1440, 1080)))
    return last / first


OURS |= {
    "crossover": _crossover,
    "throughput": _rate,
    "over": _over,
    "MFU": _mfu,
    "ladder": _ladder_order,
    "kept": _kept,
    "communication": lambda *case: number(step_352b(*case).communication_s) / number(step_352b(*case).iteration_s),
    "order of MFU": _figure_13_order,
    "largest gain in MFU": lambda: max(_figure_13(name, "megascale") / _figure_13(name, "tp_tp") for name in FIGURE_13),
}

# --- The figures ---
#
# MegaScale-MoE's ablations by the cost model: Figures 14 to 17, memory of sequence parallelism, compression.
#
# None of them chose the cluster's calibration: all rows are checks.


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
    variants: tuple[Variant, ...] = ("sp_ep", "tp_ep")
    for row in TABLE_2.values():
        if row.num_shared:
            continue
        model = row.model()
        layers = fullest_stage(model, 1)
        sizes = []
        for variant in variants:
            setup = _setup(variant, NODE_DEVICES)
            sizes.append(sum(number(part) for part in state_bytes(rank_parameters(model, setup, layers), setup)))
        found.append(sizes[0] / sizes[1])
    return tuple(found)


def _sync(size: SyncBytes, data_parallel: int) -> SyncTime:
    return sync_time(
        shipped_network(H800), degree=NODE_DEVICES, data_parallel=data_parallel, gradients=size, parameters=size
    )


@cache
def _sync_ratios() -> tuple[float, ...]:
    """10 GB of experts per GPU; attention of P bytes on each GPU (SP) or P / 8 (TP)."""
    found = []
    for data_parallel in (4, 8):
        for attention_bytes in (384e6, 768e6, 1536e6):
            sequence, tensor = (10e9, attention_bytes), (10e9 + attention_bytes / NODE_DEVICES, 0.0)
            sums = (_sync(size, data_parallel) for size in (sequence, tensor))
            times = [number((gradients + parameters).total_s) for gradients, parameters in sums]
            found.append(times[0] / times[1])
    return tuple(found)


PACKED_DOCUMENTS = (3000, 1700, 2492, 1000)  # of a sequence of 8,192: any that differ show the order


def _attention_order() -> str:
    """The busiest rank's attention over the mean, least first: SP has all positions of some heads."""
    busiest = {
        "SP": 1.0,
        "CP zigzag": causal_imbalance(PACKED_DOCUMENTS, NODE_DEVICES, zigzag=True),
        "CP": causal_imbalance((SEQUENCE_LENGTH,), NODE_DEVICES, zigzag=False),
    }
    return " < ".join(sorted(busiest, key=lambda name: busiest[name]))


def _attention_volumes(heads_per_kv_head: int) -> str:
    """What a rank sends for attention, least first."""
    sent = {
        "SP": float(sequence_to_tensor_ratio(RANKS, heads_per_kv_head)),
        "CP": float(context_to_tensor_ratio(heads_per_kv_head)),
    }
    return " < ".join(sorted(sent, key=lambda name: sent[name]))


def _gradient_time(element_bytes: float) -> float:
    return number(_sync((5e9 * element_bytes, 0.0), 8)[0].total_s)


@cache
def _pair_speedups() -> tuple[float, ...]:
    """Figure 16, forward, all pairs of all models: time one after the other over time fused."""
    cluster = shipped_cluster(H800)
    efficiency = cluster.efficiency
    found = []
    for row in TABLE_2.values():
        case = LayerCase(
            model=row.model(),
            setup=_setup("intra", NODE_DEVICES),
            roofs=roofs(cluster.groups[0].device, efficiency),
            network=shipped_network(H800),
            sequence_length=SEQUENCE_LENGTH,
        )
        operators = layer_operators(case)
        for name, time in operators.communications.items():
            product = operators.products[FUSES_WITH[name]].forward
            speedup = fused_speedup(number(time.total_s), number(product.total_s), efficiency.overlap)
            found.append(number(speedup))
    return tuple(found)


EXTREMES: dict[str, Callable[[], tuple[float, ...]]] = {
    "gain": _gains,
    "speed-up": _pair_speedups,
    "saving": _intra_savings,
    "states": _state_ratios,
    "synchronisation": _sync_ratios,
}
OURS |= {
    **{f"least {name}": lambda values=values: min(values()) for name, values in EXTREMES.items()},
    **{f"most {name}": lambda values=values: max(values()) for name, values in EXTREMES.items()},
    "best with": lambda layout: sum(_best_layout(name) == layout for name in TABLE_2),
    "memory saved": _saved,
    "speed kept": _speed,
    "compression": lambda few, many: _gradient_time(few) / _gradient_time(many),
    "order of attention": _attention_order,
    "order of volumes": _attention_volumes,
}
