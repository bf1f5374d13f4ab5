"""MegaScale-Infer's pipeline: eq. 5 and the m rules by simulation, Figures 12 and 13 by the planner.

Figures 12 and 13 chose the Ampere cluster's calibration, together with Figure 8.
"""

from functools import cache, partial

from antiphon.planner.setting import SearchLimits
from antiphon.reproduce.msi_plans import (
    MODELS,
    PING_PONG,
    Found,
    best,
    throughput,
)
from antiphon.sim.ping_pong import PingPong, simulate_ping_pong

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
def _pipelined(model: str) -> Found:
    found = best(model, "disaggregated", limits=SearchLimits(micro_batches=(PING_PONG,)))
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
    """What `_replicas` says of so many attention replicas, over the same of one."""
    return _replicas()[count][index] / _replicas()[1][index]


OURS = {
    "iteration": lambda *case: 1e3 * simulate_ping_pong(_pipeline(*case)).end_s,
    "fewest busy": _fewest_busy,
    "gain": _gain,
    "order of gains": lambda: " < ".join(sorted(MODELS, key=lambda model: _gain(model, 2, 3))),
    "largest gain": lambda few, many: max(_gain(model, few, many) for model in MODELS),
    "latency over one": partial(_over_one, index=0),
    "throughput over one": partial(_over_one, index=1),
    "best replicas": lambda: max(REPLICAS, key=lambda count: _replicas()[count][2]),
    "after the best": _after_the_best,
}
