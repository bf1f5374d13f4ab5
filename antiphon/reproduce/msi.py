"""MegaScale-Infer's claims: by counting, by the simulated pipeline, and as our planner sees its deployments.

A section a source, whose assumptions stand at its head; `OURS` has what rows of `data/msi.toml` name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

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
from antiphon.planner.candidate_table import CandidateTable, Outcome
from antiphon.planner.candidates import Pins
from antiphon.planner.outcome import outcome_at
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.reproduce import shipped_cluster, shipped_device, shipped_model, shipped_workload
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong
from antiphon.specs.cluster import ClusterSpec, DeviceSpec
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import LAYOUTS, Layout, Objective, PhaseName

# --- By counting ---
#
# MegaScale-Infer by counting: message sizes, the rules for m, eq. 1-8 with hand-worked numbers, Tables 3 and 4.
#
# Hand-worked numbers are of the printed equation; ours come from the functions the planner uses.

READ: dict[str, Callable[[DeviceSpec], float]] = {
    "memory": lambda device: device.memory_bytes / 1e9,
    "bandwidth": lambda device: device.memory_bytes_per_s / 1e9,
    "compute": lambda device: device.flops_per_s["bfloat16"] / 1e12,
}


def _message_bytes() -> float:
    model = shipped_model("mixtral-8x22b")
    rows = 128 * model.router.top_k / model.router.num_experts
    return float(message_bytes(rows, model.hidden_size * PrecisionSpec().dispatch_bytes, 2, 1))


def _expert_utilization() -> float:
    """Arithmetic of one projection of all experts over the time its bytes take, 156 tokens spread evenly."""
    model = shipped_model("mixtral-8x22b")
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
    device = shipped_device(name)
    assert device.price is not None, f"Table 3 prices {name}"
    return READ[quantity](device) / device.price


OURS: dict[str, Callable[..., Any]] = {
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
    "parameters": lambda name: count_parameters(shipped_model(name)).total,
}

# --- Deployments as our planner sees them ---
#
# MegaScale-Infer's deployments as our planner sees them: plans of a layout, the same plan with other m or attention
# DP.
#
# Micro-batch sizes are the planner's: the largest under memory and the 150 ms per token. "vLLM" and "TensorRT-LLM" are
# one and the same here: the model on TP 8, with PP 2 over two nodes for Scaled-MoE (section 7.2), all kernels as ours.

AMPERE, MIXED = "msi-ampere", "msi-hetero"
MODELS = ("mixtral-8x22b", "dbrx", "scaled-moe")
NODE = 8
BASELINE_PP = {"mixtral-8x22b": 1, "dbrx": 1, "scaled-moe": 2}
PING_PONG = 3  # micro-batches of Figure 13, and Algorithm 1's least


@dataclass(frozen=True)
class Pick:
    """One candidate of a table."""

    setting: Setting
    table: CandidateTable
    index: int

    def alone(self, *, micro_batches: int | None = None, attention_dp: int | None = None) -> Outcome:
        """One instance of it, its micro-batch size kept, with other numbers of micro-batches or attention workers."""
        picked = np.array([self.index])
        one = self.table.candidates.take(picked).having(batch=self.table.outcome.batch[picked])
        if micro_batches is not None:
            one = replace(one, micro_batches=np.array([micro_batches]))
        if attention_dp is not None:
            one = replace(one, attention_dp=np.array([attention_dp]))
        return outcome_at(self.setting, one, np.ones(1, dtype=np.int64))

    def devices(self) -> tuple[str, str]:
        """(kind of attention, kind of experts)."""
        uses = self.table.devices(self.index)
        return uses[0].device, uses[-1].device


@cache
def best(
    model: str,
    layout: Layout,
    cluster_name: str = AMPERE,
    objective: Objective = "per-gpu",
    limits: SearchLimits | None = None,
    kind: str = "",
    phase: PhaseName = "decode",
) -> Pick | None:
    """The planner's best candidate of `layout`, on devices of `kind` alone if given; None if there is none."""
    cluster = shipped_cluster(cluster_name)
    setting = settings_of(
        shipped_model(model),
        only(cluster, kind) if kind else cluster,
        shipped_workload("msi-production"),
        objective=objective,
        limits=limits,
        phases=(phase,),
    )[phase]
    table = evaluate_phase(setting, (layout,))
    index = table.best(objective)
    return None if index is None else Pick(setting, table, index)


def only(cluster: ClusterSpec, kind: str) -> ClusterSpec:
    """The cluster without its other devices."""
    return replace(cluster, groups=tuple(group for group in cluster.groups if group.device.name == kind))


def score(found: Pick | None, objective: Objective = "per-gpu") -> float:
    """Tokens/s per GPU or price; 0 if there is no such plan."""
    return 0.0 if found is None else float(found.table.score(objective)[found.index])


def colocated(model: str, cluster_name: str = AMPERE, objective: Objective = "per-gpu", kind: str = "") -> Pick | None:
    """TP over the node (and PP where one node is too small): how the baselines are deployed."""
    pp = BASELINE_PP[model] if not kind or kind == "H20" else None
    limits = SearchLimits(pins=Pins(attention_tp=NODE, expert_tp=NODE, pp=pp))
    return best(model, "tp_pp", cluster_name, objective, limits, kind)


def throughput(found: Pick, micro_batches: int) -> float:
    """Tokens per second of one instance with that many micro-batches of the plan's size."""
    return float(found.alone(micro_batches=micro_batches).capacity[0])


# --- The pipeline: Figures 12 and 13 ---
#
# MegaScale-Infer's pipeline: eq. 5 and the m rules by simulation, Figures 12 and 13 by the planner.
#
# Figures 12 and 13 chose the Ampere cluster's calibration, together with Figure 8.

REPLICAS = (1, 2, 4, 8, 16)


def _pipeline(num_micro_batches: int, t_a: float, t_e: float, t_c: float) -> PingPong:
    return PingPong(
        num_layers=56,
        num_micro_batches=num_micro_batches,
        attention_s=t_a,
        experts_s=t_e,
        latency_s=t_c,
    )


def _fewest_busy(ratio: float) -> float:
    for count in range(1, 9):
        if simulate_ping_pong(_pipeline(count, 1e-3, 1e-3, ratio * 1e-3)).experts_idle_ratio < 0.05:
            return float(count)
    return float("inf")


@cache
def _pipelined(model: str) -> Pick:
    found = best(model, "disaggregated", limits=SearchLimits(pins=Pins(micro_batches=PING_PONG)))
    assert found is not None, f"{model} fits on the Ampere cluster"
    return found


def _gain(model: str, few: int, many: int) -> float:
    return throughput(_pipelined(model), many) / throughput(_pipelined(model), few)


@cache
def _replicas() -> dict[int, tuple[float, float, float]]:
    """By attention replicas: (time per token, tokens/s, tokens/s per GPU) of DBRX's plan."""
    plan = _pipelined("dbrx")
    chosen, index = plan.table.candidates, plan.index
    found = {}
    for count in REPLICAS:
        outcome = plan.alone(attention_dp=count)
        num_devices = int(chosen.attention_tp[index]) * count + int(chosen.expert_devices[index])
        rate = float(outcome.capacity[0])
        found[count] = (float(outcome.step_s[0]), rate, rate / num_devices)
    return found


def _after_the_best() -> str:
    eight, sixteen = _replicas()[8], _replicas()[16]
    latency = "rises" if sixteen[0] > eight[0] * 1.05 else "stays"
    return f"{latency}, {'falls' if sixteen[2] < eight[2] else 'rises'}"


def _over_one(count: int, index: int) -> float:
    """What `_replicas` says of this many attention replicas, over the same of one."""
    return _replicas()[count][index] / _replicas()[1][index]


OURS |= {
    "iteration, simulated": lambda *case: 1e3 * simulate_ping_pong(_pipeline(*case)).end_s,
    "fewest busy": _fewest_busy,
    "gain": _gain,
    "order of gains": lambda: " < ".join(sorted(MODELS, key=lambda model: _gain(model, 2, 3))),
    "largest gain": lambda few, many: max(_gain(model, few, many) for model in MODELS),
    "latency over one": partial(_over_one, index=0),
    "throughput over one": partial(_over_one, index=1),
    "best replicas": lambda: max(REPLICAS, key=lambda count: _replicas()[count][2]),
    "after the best": _after_the_best,
}

# --- Colocated systems: Figures 8 and 9 ---
#
# MegaScale-Infer against colocated systems, by the planner: Figure 8 (Ampere GPUs), Figure 9 (H20 and L40S).
#
# Figure 8 chose the Ampere cluster's calibration, together with Figures 12 and 13; Figure 9's cluster has the same and
# is a check of it.


def _over_colocated(model: str) -> float:
    return score(best(model, "disaggregated")) / score(colocated(model))


@cache
def _mixed(model: str, objective: Objective = "per-cost") -> Pick | None:
    return best(model, "disaggregated", MIXED, objective)


def _pair(model: str) -> str:
    found = _mixed(model)
    if found is None:
        return "no plan"
    attention, experts = found.devices()
    return f"{attention} for attention, {experts} for experts"


def _over_h20(model: str, objective: Objective = "per-cost") -> float:
    return score(_mixed(model, objective), objective) / score(colocated(model, MIXED, objective, "H20"), objective)


def _request_over_h20(model: str) -> float:
    """Requests per watt: prompts on the better kind of device, answers apart, over both on H20."""
    workload = shipped_workload("msi-production")

    def joules(prefill: float, decode: float) -> float:
        return workload.input_tokens.median / prefill + workload.output_tokens.median / decode

    prompts = {
        kind: score(best(model, "tp_pp", MIXED, "per-power", kind=kind, phase="prefill"), "per-power")
        for kind in ("H20", "L40S")
    }
    alone = joules(prompts["H20"], score(colocated(model, MIXED, "per-power", "H20"), "per-power"))
    return alone / joules(max(prompts.values()), score(_mixed(model, "per-power"), "per-power"))


def _better_alone(model: str) -> str:
    scores = {kind: score(colocated(model, MIXED, "per-cost", kind), "per-cost") for kind in ("H20", "L40S")}
    return " > ".join(sorted(scores, key=lambda kind: -scores[kind]))


def _recommended(model: str, cluster_name: str, objective: Objective) -> str:
    """The layout that the search recommends, all of them allowed."""
    scores = {layout: score(best(model, layout, cluster_name, objective), objective) for layout in LAYOUTS}
    return max(scores, key=lambda layout: scores[layout])


OURS |= {
    "recommended": _recommended,
    "over colocated": _over_colocated,
    "best pair": _pair,
    "better alone": _better_alone,
    "best over H20": lambda objective="per-cost": max(_over_h20(model, objective) for model in MODELS),
    "requests over H20": lambda: max(_request_over_h20(model) for model in MODELS),
}
