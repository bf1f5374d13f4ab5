"""MegaScale-MoE by counting: parameters, what each rank sends (eq. 1-4), activations (Figure 9), R (eq. 5-9), eq. 10;
whether Table 3 agrees with itself, and the MFU that follows from its throughputs.

`theirs` of an equation is the printed equation by hand; ours is the sum over tensors or operators that the planner
uses.
"""

from antiphon.cost.network import all_to_all_bytes
from antiphon.cost.training.activations import LayerShape, layer_activations, total_width
from antiphon.cost.training.flops import model_flops_utilization, tokens_per_s
from antiphon.cost.training.gradient_sync import across_to_inside
from antiphon.cost.training.megascale_models import (
    INTERNAL_352B_AS_PRINTED,
    SEQUENCE_LENGTH,
    TABLE_2,
    TABLE_3,
    TABLE_3_BATCH,
    Measured,
    Name,
)
from antiphon.cost.training.overlap import computation_to_communication
from antiphon.cost.training.volumes import (
    expert_parallel_volume,
    expert_to_tensor_ratio,
    layer_ratio,
    sequence_to_tensor_ratio,
)
from antiphon.reproduce import shipped
from antiphon.specs.counts import count_parameters

RANKS = 8


def _ulysses_elements() -> float:
    """What one rank sends of queries, keys, values, and of the output, in units of b s h."""
    row = TABLE_2["Internal-352B"]
    into = (1 + 2 / row.heads_per_kv_head) / RANKS
    return float(all_to_all_bytes(into, RANKS).inside + all_to_all_bytes(1 / RANKS, RANKS).inside)


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
    """Of Table 3's printed time."""
    return float(tokens_per_s(SEQUENCE_LENGTH, TABLE_3_BATCH, _line(system, num_devices).iteration_s))


def _days(system: Name, num_devices: int) -> float:
    return 1e12 / _line(system, num_devices).printed_tokens_per_s / 86400


def _line(system: Name, num_devices: int) -> Measured:
    return next(line for line in TABLE_3[system] if line.num_devices == num_devices)


def _mfu(num_devices: int) -> float:
    """Of Table 3's printed throughput; a GPU does 989 TFLOP/s."""
    rate, model = _line("megascale", num_devices).printed_tokens_per_s, shipped.model("msm-internal-352b")
    return float(model_flops_utilization(model, SEQUENCE_LENGTH, rate, num_devices, 989e12))


def _volume(part: str, name: str) -> float:
    row = TABLE_2[name]
    if part == "layer":
        return float(layer_ratio(RANKS, row.heads_per_kv_head, row.top_k))
    if part == "SP / TP":
        return float(sequence_to_tensor_ratio(RANKS, row.heads_per_kv_head))
    return float(expert_to_tensor_ratio(RANKS, row.top_k))


OURS = {
    "parameters": lambda name: count_parameters(shipped.model(name)).total,
    "parameters as printed": lambda: count_parameters(INTERNAL_352B_AS_PRINTED.model()).total,
    "volume": _volume,
    "elements": _ulysses_elements,
    "activations": _width,
    "activations saved": lambda name: 1 - _width(name, "kept") / _width(name, "all"),
    "R": _r_by_counting,
    "R of many ranks": computation_to_communication,
    "across / inside": across_to_inside,
    "throughput": _throughput,
    "days": _days,
    "MFU": _mfu,
}
