"""MegaScale-Infer by counting: message sizes, the rules for m, eq. 1-8 with hand-worked numbers, Tables 3 and 4.

Hand-worked numbers are of the printed equation; ours come from the functions the planner uses.
"""

import math
from collections.abc import Callable

from antiphon.cost.memory import msi_memory_bytes
from antiphon.cost.network import Link, message_bytes
from antiphon.cost.ping_pong import (
    balanced_attention_workers,
    conditions,
    iteration,
    micro_batch_bounds,
    min_micro_batches,
    throughput_per_cost,
)
from antiphon.cost.roofline import Roof, grouped_gemm
from antiphon.reproduce import shipped
from antiphon.specs.counts import count_parameters
from antiphon.specs.device import DeviceSpec
from antiphon.specs.precision import PrecisionSpec

READ: dict[str, Callable[[DeviceSpec], float]] = {
    "memory": lambda device: device.memory_bytes / 1e9,
    "bandwidth": lambda device: device.memory_bytes_per_s / 1e9,
    "compute": lambda device: device.flops_per_s["bfloat16"] / 1e12,
}


def _message_bytes() -> float:
    model = shipped.model("mixtral-8x22b")
    rows = 128 * model.router.top_k / model.router.num_experts
    return float(message_bytes(rows, model.hidden_size * PrecisionSpec().dispatch_bytes, 2, 1))


def _expert_utilization() -> float:
    """Arithmetic of one projection of all experts over the time its bytes take, 156 tokens spread evenly."""
    model = shipped.model("mixtral-8x22b")
    hidden, width, num_experts = model.hidden_size, model.feed_forward.intermediate, model.router.num_experts
    traffic, rows = Roof(flops_per_s=math.inf, bytes_per_s=2e12), 156 * model.router.top_k
    parts = grouped_gemm(traffic, float(rows), num_experts, hidden, width, PrecisionSpec().weight_bytes, 2.0)
    return float(2 * rows * hidden * width / 312e12 / parts.total_s)


def _eq6_us() -> float:
    """Eq. 6 of the sending side, in bytes: b_a h K / tp_a over W_a Util; Util 0.8 is a message of 4 times the half."""
    size = message_bytes(128 * 2, 6144 * 2.0, 2, 1)
    link = Link(level="scale_out", bytes_per_s=25e9, latency_s=0.0, half_bytes=size / 4)
    return float(link.send_s(size)) * 1e6


def _per_price(name: str, quantity: str) -> float:
    device = shipped.device(name)
    assert device.price is not None, f"Table 3 prices {name}"
    return READ[quantity](device) / device.price


OURS = {
    "message": _message_bytes,
    "dense rows": lambda flops_per_s, bytes_per_s: PrecisionSpec().weight_bytes / 2 * flops_per_s / bytes_per_s,
    "expert utilization": _expert_utilization,
    "fewest micro-batches": min_micro_batches,
    "conditions": lambda *case: ", ".join("yes" if bool(holds) else "no" for holds in conditions(*case)),
    "least time": lambda *case: micro_batch_bounds(*case)[0],
    "most time": lambda *case: micro_batch_bounds(*case)[1],
    "iteration": iteration,
    "eq6": _eq6_us,
    "attention workers": balanced_attention_workers,
    "eq8": lambda *case: msi_memory_bytes(*case) / 1e9,
    "throughput per cost": throughput_per_cost,
    "per price": _per_price,
    "parameters": lambda name: count_parameters(shipped.model(name)).total,
}
