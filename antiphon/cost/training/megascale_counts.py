"""What follows from MegaScale-MoE's Table 2 by counting alone: volumes, activations, replicated states."""

from dataclasses import dataclass, replace

import numpy as np

from antiphon.cost.parts import Number
from antiphon.cost.training.activations import LayerShape, all_width, kept_width, layer_activations, total_width
from antiphon.cost.training.megascale_models import NODE_DEVICES, TableRow
from antiphon.cost.training.memory import StageLayers, rank_parameters, state_bytes
from antiphon.cost.training.setup import AttentionParallel, TrainingSetup
from antiphon.cost.training.volumes import expert_to_tensor_ratio, layer_ratio, sequence_to_tensor_ratio

_STRATEGIES: tuple[AttentionParallel, ...] = ("sequence", "tensor")


@dataclass(frozen=True, kw_only=True)
class VolumeRatios:
    """Communication of one model's layer in a node, against tensor parallelism."""

    attention: float
    experts: float
    layer: float


@dataclass(frozen=True, kw_only=True)
class ActivationWidths:
    """Activations of one model's layer in tokens * hidden / n: made, read by backward, kept."""

    made: float
    needed: float
    kept: float

    @property
    def saved_of_made(self) -> float:
        return 1 - self.kept / self.made

    @property
    def saved_of_needed(self) -> float:
        return 1 - self.kept / self.needed


def volume_ratios(row: TableRow, degree: int = NODE_DEVICES) -> VolumeRatios:
    """Eq. 2 / eq. 1, eq. 3 / eq. 4, and both together, for a model of Table 2."""
    return VolumeRatios(
        attention=_one(sequence_to_tensor_ratio(degree, row.heads_per_kv_head)),
        experts=_one(expert_to_tensor_ratio(degree, row.top_k)),
        layer=_one(layer_ratio(degree, row.heads_per_kv_head, row.top_k)),
    )


def activation_widths(row: TableRow, degree: int = NODE_DEVICES) -> ActivationWidths:
    """Section 4.1's formulas for a model of Table 2, and the sum over the tensors that backward reads."""
    ratio = row.expert_width / row.hidden_size
    shape = LayerShape(
        degree=degree,
        top_k=row.top_k,
        width_ratio=ratio,
        heads_per_kv_head=row.heads_per_kv_head,
        sent=row.top_k,
    )
    return ActivationWidths(
        made=_one(all_width(degree, row.top_k, ratio, row.heads_per_kv_head)),
        needed=_one(total_width(layer_activations(shape), "needed")),
        kept=_one(kept_width(row.top_k, ratio, row.heads_per_kv_head)),
    )


def replication_memory(row: TableRow) -> float:
    """Section 6.2: parameters, gradients and optimizer state of SP over TP attention in a layer on one node, minus 1
    (paper: 1.7% to 8.1%). Optimizer state of replicated parameters is sharded over the node."""
    states = []
    for attention in _STRATEGIES:
        setup = TrainingSetup(attention=attention, model_parallel=NODE_DEVICES)
        model = replace(row, num_shared=0).model(1)
        layers = StageLayers(num_moe=1, num_dense=0)
        parts = state_bytes(rank_parameters(model, setup, layers, with_tables=False), setup)
        states.append(sum(_one(part) for part in parts))
    return states[0] / states[1] - 1


def _one(value: Number) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
