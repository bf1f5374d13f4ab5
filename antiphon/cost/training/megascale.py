"""What our model says of MegaScale-MoE's tables and figures (arXiv 2505.11432), row by row, on a given cluster.

Every function takes the cluster, so that all rows share its one calibration; only the statements of section 3, 4.1, 7
and A.1 need none. What the paper leaves open is an argument with our choice as default: virtual stages (2), one
sequence per micro-batch, gradients in BF16 on the wire, and one shared expert in the 352B model.

Rejected: constants per row. A row that does not come out stays as it comes out.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.network import network
from antiphon.cost.parts import Number
from antiphon.cost.training.dispatch import crossover_top_k
from antiphon.cost.training.fit_memory import Rematerialize
from antiphon.cost.training.gradient_sync import SyncBytes, sync_time
from antiphon.cost.training.layer_case import layer_case
from antiphon.cost.training.layer_time import layer_time
from antiphon.cost.training.megascale_counts import activation_widths
from antiphon.cost.training.megascale_models import (
    NODE_DEVICES,
    SEQUENCE_LENGTH,
    TABLE_2,
    TABLE_3_BATCH,
    TABLE_3_PIPELINE,
    TableRow,
)
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.overlap import fused_speedup
from antiphon.cost.training.setup import (
    AttentionParallel,
    ExpertParallel,
    OverlapLevel,
    Training,
    TrainingPrecision,
    TrainingSetup,
)
from antiphon.cost.training.step import StepEstimate, estimate_step
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec

COMPRESSED = TrainingPrecision(gradient_wire="bfloat16")
_BOTH: tuple[Rematerialize, ...] = ("none", "cheap")
LADDER: tuple[tuple[AttentionParallel, ExpertParallel, OverlapLevel], ...] = (
    ("tensor", "tensor", "none"),
    ("sequence", "expert", "none"),
    ("sequence", "expert", "inter"),
    ("sequence", "expert", "intra"),
)
STRATEGIES: tuple[tuple[AttentionParallel, ExpertParallel], ...] = (
    ("tensor", "tensor"),
    ("tensor", "expert"),
    ("sequence", "tensor"),
    ("sequence", "expert"),
)


@dataclass(frozen=True, kw_only=True)
class RematerializedMemory:
    """Bytes of the fullest device: parameters, gradients, optimizer and workspace; activations if all that is made
    stays, if all that backward reads stays, and if MegaScale-MoE's choice stays; and MFU of the last two."""

    states: float
    made: float
    needed: float
    kept: float
    mfu_needed: float
    mfu_kept: float

    @property
    def saved_of_activations(self) -> tuple[float, float]:
        """Against all that is made, against what backward reads."""
        return 1 - self.kept / self.made, 1 - self.kept / self.needed

    @property
    def saved_of_total(self) -> tuple[float, float]:
        """The same of the whole device's memory."""
        total = self.states + self.kept
        return 1 - total / (self.states + self.made), 1 - total / (self.states + self.needed)


def strong_scaling(
    cluster: ClusterSpec, num_devices: int, *, batch: int = TABLE_3_BATCH, virtual_stages: int = 2, ladder_step: int = 3
) -> StepEstimate:
    """Table 3: the 352B model on 8 * 15 * d GPUs; Figure 12 with another batch. `ladder_step`: Table 5's line."""
    attention, experts, overlap = LADDER[ladder_step]
    training = _training(cluster, TABLE_2["Internal-352B"].model(), batch)
    setup = TrainingSetup(
        attention=attention,
        experts=experts,
        overlap=overlap,
        precision=COMPRESSED,
        model_parallel=NODE_DEVICES,
        pipeline=TABLE_3_PIPELINE,
        virtual_stages=virtual_stages,
        data_parallel=num_devices // (NODE_DEVICES * TABLE_3_PIPELINE),
    )
    return estimate_step(training, setup, "cheap")


def ladder(cluster: ClusterSpec, num_devices: int = 240) -> tuple[float, ...]:
    """Table 5: throughput over TP+TP without overlap, as SP+EP, inter- and intra-operator overlap are added."""
    rates = [_one(strong_scaling(cluster, num_devices, ladder_step=step).tokens_per_s) for step in range(len(LADDER))]
    return tuple(rate / rates[0] for rate in rates)


def intra_operator_gain(cluster: ClusterSpec, row: TableRow, num_layers: int = 4) -> float:
    """Section 6.2: the fraction by which fusing pairs shortens an iteration (paper: 7.1% to 12.9%), on one node."""
    inter, intra = (
        _one(_one_node(cluster, row, "sequence", "expert", level, num_layers).iteration_s)
        for level in ("inter", "intra")
    )
    return 1 - intra / inter


def strategy_mfu(
    cluster: ClusterSpec, row: TableRow, attention: AttentionParallel, experts: ExpertParallel, num_layers: int = 4
) -> float:
    """Figure 14: MFU on one node, batch 32, no overlap; layers cut to fit (how many hardly matters)."""
    return _one(_one_node(cluster, row, attention, experts, "none", num_layers).mfu)


def sequence_expert_gain(cluster: ClusterSpec, row: TableRow) -> float:
    """Figure 14: how much higher SP+EP's MFU is than TP+TP's (paper: 14.9% to 32.9% over its six models)."""
    return strategy_mfu(cluster, row, "sequence", "expert") / strategy_mfu(cluster, row, "tensor", "tensor") - 1


def fused_pairs(cluster: ClusterSpec, row: TableRow) -> dict[str, float]:
    """Figure 16: speedup of each fused pair in forward, by the exchange's name. The paper's 1.2 to 4.7 times include
    faster kernels; overlap alone cannot exceed 2."""
    setup = TrainingSetup(model_parallel=NODE_DEVICES, dispatch="all_gather")
    operators = layer_operators(layer_case(_training(cluster, row.model(1), 1), setup))
    return {
        name: _one(
            fused_speedup(
                item.time.total_s, operators.products[item.fuses_with].forward.total_s, cluster.efficiency.overlap
            )
        )
        for name, item in operators.communications.items()
    }


def communication_share(cluster: ClusterSpec) -> tuple[float, float]:
    """Section 1: share of an unoptimized 352B layer's time that is communication: (forward, both passes). The paper's
    43.6% and 32% are of "an internal model"."""
    setup = TrainingSetup(attention="tensor", experts="tensor", overlap="none", model_parallel=NODE_DEVICES)
    case = layer_case(_training(cluster, TABLE_2["Internal-352B"].model(), 1), setup)
    time = layer_time(layer_operators(case), "none", 0.0)
    both = _one(time.forward.communication.total_s) + _one(time.backward.communication.total_s)
    forward = _one(time.forward.communication.total_s) / _one(time.forward.total.total_s)
    return forward, both / _one(time.total.total_s)


def dispatch_crossover(cluster: ClusterSpec) -> int:
    """Figure 7: the largest top-k at which all-to-all still beats all-gather, Mixtral-8x7B's rows, n = 8 (paper: 6)."""
    row = TABLE_2["Mixtral-8x7B"]
    net = network(cluster, cluster.groups[0])
    return crossover_top_k(net, SEQUENCE_LENGTH, 2 * row.hidden_size, NODE_DEVICES)


def rematerialized_memory(
    cluster: ClusterSpec,
    row: TableRow,
    *,
    pipeline: int,
    virtual_stages: int = 1,
    num_devices: int = 128,
    batch: int = 512,
) -> RematerializedMemory:
    """Figure 17 on 128 GPUs. The paper states neither pipeline nor batch (which hardly matters)."""
    training = _training(cluster, row.model(), batch)
    setup = TrainingSetup(
        precision=COMPRESSED,
        dispatch="all_gather",
        model_parallel=NODE_DEVICES,
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        data_parallel=num_devices // (NODE_DEVICES * pipeline),
    )
    kept, again = (estimate_step(training, setup, choice) for choice in _BOTH)
    widths = activation_widths(row)
    held = _one(again.memory.activations)
    return RematerializedMemory(
        states=_one(again.memory.states) + _one(again.memory.workspace),
        made=held * widths.made / widths.kept,
        needed=_one(kept.memory.activations),
        kept=held,
        mfu_needed=_one(kept.mfu),
        mfu_kept=_one(again.mfu),
    )


def synchronisation_difference(
    cluster: ClusterSpec, attention_bytes: float, data_parallel: int, expert_bytes: float = 10e9
) -> float:
    """Figure 15: synchronisation with SP attention over that with TP attention, minus 1 (paper: 0.3% to 3.1%).

    `attention_bytes`: of the parameters a GPU holds under SP, 384 to 1,536 MB; 10 GB of experts beside them."""
    net = network(cluster, cluster.groups[0])
    times = []
    for size in (
        SyncBytes(sharded=expert_bytes, replicated=attention_bytes),
        SyncBytes(sharded=expert_bytes + attention_bytes / NODE_DEVICES, replicated=0.0),
    ):
        sync = sync_time(net, degree=NODE_DEVICES, data_parallel=data_parallel, gradients=size, parameters=size)
        times.append(_one(sync.total.total_s))
    return times[0] / times[1] - 1


def devices_compared(cluster: ClusterSpec, *, megascale: bool, batch: int = 128) -> StepEstimate:
    """Figure 13: Mixtral-8x7B on 32 GPUs, DP 4; SP+EP with overlap, or TP+TP without. The batch is not stated."""
    attention, experts, overlap = LADDER[3] if megascale else LADDER[0]
    setup = TrainingSetup(
        attention=attention,
        experts=experts,
        overlap=overlap,
        precision=COMPRESSED,
        model_parallel=NODE_DEVICES,
        data_parallel=4,
    )
    return estimate_step(_training(cluster, TABLE_2["Mixtral-8x7B"].model(), batch), setup, "cheap")


def _one_node(
    cluster: ClusterSpec,
    row: TableRow,
    attention: AttentionParallel,
    experts: ExpertParallel,
    overlap: OverlapLevel,
    num_layers: int,
) -> StepEstimate:
    setup = TrainingSetup(attention=attention, experts=experts, overlap=overlap, model_parallel=NODE_DEVICES)
    return estimate_step(_training(cluster, row.model(num_layers), 32), setup, "none")


def _training(cluster: ClusterSpec, model: ModelSpec, batch: int) -> Training:
    return Training(model=model, cluster=cluster, group=cluster.groups[0], sequence_length=SEQUENCE_LENGTH, batch=batch)


def _one(value: Number) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
