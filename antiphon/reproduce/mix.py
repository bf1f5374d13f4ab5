"""MixServe: equations as printed, counted volumes, its evaluation.

A section a source, whose assumptions stand at its head; `OURS` has what rows of `data/mix.toml` name.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from antiphon.cost.memory import mix_memory_bytes
from antiphon.cost.network import collective_bytes
from antiphon.cost.roofline import Number
from antiphon.planner.candidates import Candidates, Pins
from antiphon.planner.search import evaluate_phase, settings_of
from antiphon.planner.setting import SearchLimits, Setting
from antiphon.planner.step_times import StepTimes, step_times
from antiphon.reproduce import shipped_cluster, shipped_model, shipped_network, shipped_workload
from antiphon.sim.collectives import simulate_exchange
from antiphon.sim.events import Run
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import Layout, PhaseName

# --- Equations as printed ---
#
# MixServe's equations as printed, in units of the sizes they are given: eq. 1 to 7, 9 and 11.
#
# What the planner computes with is `cost.network`, `cost.exchange` and `planner.outcome`; the difference is rows of
# `antiphon reproduce`. At rho >= 1 a queue grows without end: every wait is infinite. Rejected: clipping rho below 1.


def eq1_reduce_scatter(size: Number, degree: Number) -> Number:
    """Eq. 1, also all-gather: proportional to size / degree (bytes of one round to one peer)."""
    return size / degree


def eq2_all_reduce(size: Number, degree: Number) -> Number:
    """Eq. 2 as printed: RS(size / d, d) + AG(size / d, d). It divides by d twice, where the counted bytes of one
    round are 2 size / d."""
    return 2 * eq1_reduce_scatter(size / degree, degree)


def eq3_all_to_all(size: Number, degree: Number) -> Number:
    """Eq. 3: proportional to (size / degree) (degree - 1), which is what a rank sends."""
    return size / degree * (degree - 1)


def eq4_compute(parameters: Number, tp: Number, ep: Number, dp: Number, batch: Number, width: Number) -> Number:
    """Eq. 4: proportional to Psi / (d_TP d_EP) * b / d_DP * s h; `width` is s h."""
    return parameters / (tp * ep) * batch / dp * width


def eq5_communicated(batch: Number, width: Number, top_k: Number, tp: Number, ep: Number, dp: Number) -> Number:
    """Eq. 5, with eq. 1-3 for the collectives: 2 AR + 2 A2A; of d_DP and d_EP the larger shares out the batch and the
    smaller is the degree."""
    exchanged = eq3_all_to_all(batch / np.maximum(dp, ep) * width * top_k, np.minimum(dp, ep))
    return 2 * eq2_all_reduce(batch / dp * width, tp) + 2 * exchanged


def eq6_service_s(
    num_layers: Number, compute_s: Number, communication_s: Number, pp: Number = 1, hop_s: Number = 0.0
) -> Number:
    """Eq. 6: l (tau + lambda) + (d_PP - 1) P2P."""
    return num_layers * (compute_s + communication_s) + (pp - 1) * hop_s


def mm1_wait(arrivals_per_s: Number, service_per_s: Number) -> Number:
    """Mean wait before service, MixServe eq. 7; infinite at or above saturation."""
    rho = np.asarray(arrivals_per_s / service_per_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(rho < 1, rho / (service_per_s * (1 - rho)), np.inf)
    result: Number = wait if wait.ndim else float(wait)
    return result


def ttft(wait_s: Number, prefill_s: Number) -> Number:
    """MixServe eq. 9: wait, then service of the whole prompt."""
    return wait_s + prefill_s


def throughput(
    input_tokens: Number, output_tokens: Number, wait_s: Number, prefill_s: Number, decode_s: Number
) -> Number:
    """MixServe eq. 11: tokens per second of one request, prompt and output counted. 0 where the wait is infinite.

    It is one request's rate; times the number of requests served side by side it is the system's."""
    return (input_tokens + output_tokens) / (wait_s + prefill_s + output_tokens * decode_s)


# --- By counting ---
#
# MixServe by counting and by schedule: eq. 1-13 with hand-worked numbers, bytes of eq. 12 and 13, rounds of Figure 9.
#
# Where a printed equation and the bytes that a collective really sends differ, the row is kept and says so.


def _both_ways(size_bytes: float, num_nodes: int) -> float:
    """What one rank sends to other nodes in dispatch and combine."""
    return 2 * float(collective_bytes("all_to_all", size_bytes, num_nodes, 1)[1])


def _exchange(combine: bool, fused: bool) -> Run:
    return simulate_exchange(4, 3e-3, 1e-3, 1e-3 if combine else None, fused=fused)


def _count(kind: str, combine: bool) -> float:
    bars = _exchange(combine, fused=True).bars()
    tracks = ("node[0] out",) if kind == "inter" else ("node[0] inside",)
    return float(sum(bar.kind == kind and bar.track in tracks for bar in bars))


def _end_ms(combine: bool, fused: bool) -> float:
    return round(1e3 * _exchange(combine, fused).end_s, 9)


def _least_by_eq5(num_nodes: int) -> str:
    """Which case of Figure 11 communicates least: (TP, EP, DP) of each."""
    fewer = num_nodes * 2
    cases = {
        "d_DP = d_EP": (8, num_nodes, num_nodes),
        "d_DP > d_EP": (4, num_nodes, fewer),
        "d_DP < d_EP": (8, fewer, num_nodes),
    }
    return min(cases, key=lambda name: float(eq5_communicated(16, 1, 8, *cases[name])))


OURS: dict[str, Callable[..., Any]] = {
    "all-reduce": lambda size_bytes, degree: collective_bytes("all_reduce", size_bytes, degree)[0] / (degree - 1),
    "all-to-all": lambda size_bytes, degree: collective_bytes("all_to_all", size_bytes, degree)[0],
    "both ways": _both_ways,
    "eq4": eq4_compute,
    "eq6": eq6_service_s,
    "wait": mm1_wait,
    "memory": lambda *case: mix_memory_bytes(*case) / 1e9,
    "ttft": ttft,
    "eq. 11": throughput,
    "least by eq5": _least_by_eq5,
    "rounds": _count,
    "end": _end_ms,
}

# --- Layouts of the evaluation ---
#
# MixServe's evaluation as our planner sees it: the layouts of its Table II and Figure 11 on both clusters.
#
# Not stated in the paper and taken here, for all rows:
# 1. Sixteen requests are in flight (the maximum batch size), spread over the DP ranks; TP+PP passes them through its
#    stages as one batch. Contexts and prompts are those of the workload files (ShareGPT's published means).
# 2. TTFT is eq. 9 without waiting: a pass with the prompts of all sixteen. At 2 to 8 requests/s and the printed ITL
#    every configuration is over capacity, so that eq. 7 has no finite wait.
# 3. Throughput is eq. 11 times sixteen. DP+EP does not share rows out among a TP group (eq. 12); hybrid TP-EP does (eq.
#    13). No layout sends rows once per node, and none but the
#    fused one hides them.
#    A pass takes whole prompts, so DP ranks wait for the one with the longest.
# 4. DeepSeek-R1 in its published FP8 on the H20, in BF16 on the 910B, which has no FP8.

ASCEND, H20 = "mix-ascend", "mix-h20"
R1, QWEN = "deepseek-r1", "qwen3-235b-a22b"
WORKLOAD = "mix-sharegpt-4"
IN_FLIGHT = 16


Case = tuple[Layout, SearchLimits]
"""One configuration: its layout, and the limits of a search that finds only its parallel degrees."""


def _case(
    layout: Layout, attention_tp: int, attention_dp: int, expert_tp: int = 1, pp: int = 1, *, fused: bool = True
) -> Case:
    """`fused`: the collectives of hybrid TP-EP overlap."""
    return layout, SearchLimits(
        pins=Pins(attention_tp=attention_tp, attention_dp=attention_dp, expert_tp=expert_tp, pp=pp),
        collectives="fused" if fused else "synchronous",
        sliced=layout == "hybrid",
        overlapped=False,
        per_node=False,
        whole_prompts=True,
        extra_slots=(0,),
    )


CASES: dict[str, dict[str, Case]] = {
    ASCEND: {
        "TP+PP": _case("tp_pp", 8, 1, 8, pp=4),
        "DP+EP TP8": _case("dp_ep", 8, 4),
        "DP+EP TP4": _case("dp_ep", 4, 8),
        "d_DP = d_EP": _case("hybrid", 8, 4, 8),
        "d_DP > d_EP": _case("hybrid", 4, 8, 8),
        "d_DP < d_EP": _case("hybrid", 8, 4, 4),
    },
    H20: {
        "TP+PP": _case("tp_pp", 8, 1, 8, pp=2),
        "DP+EP TP8": _case("dp_ep", 8, 2),
        "DP+EP TP4": _case("dp_ep", 4, 4),
        "Tutel TP8": _case("hybrid", 8, 2, 8, fused=False),
        "Tutel TP4": _case("hybrid", 4, 4, 4, fused=False),
        "d_DP = d_EP": _case("hybrid", 8, 2, 8),
        "d_DP > d_EP": _case("hybrid", 4, 4, 8),
        "d_DP < d_EP": _case("hybrid", 8, 2, 4),
    },
}
MIXSERVE = {ASCEND: "d_DP = d_EP", H20: "d_DP < d_EP"}
"""What the paper's own search takes (Figure 11)."""


def _precision(model: str, cluster_name: str) -> PrecisionSpec:
    return PrecisionSpec(weights="fp8") if (model, cluster_name) == (R1, H20) else PrecisionSpec()


@cache
def _prepared(model: str, cluster_name: str, case: Case, phase: PhaseName) -> tuple[Setting, Candidates]:
    layout, limits = case
    setting = settings_of(
        shipped_model(model),
        shipped_cluster(cluster_name),
        replace(shipped_workload(WORKLOAD), requests_per_s=None),
        phases=(phase,),
        precision=_precision(model, cluster_name),
        limits=limits,
    )[phase]
    candidates = evaluate_phase(setting, (layout,)).candidates
    assert len(candidates) == 1, f"{model} on {cluster_name}: {len(candidates)} candidates for {case}"
    return setting, candidates


def pass_times(model: str, cluster_name: str, name: str, phase: PhaseName, *, fused: bool | None = None) -> StepTimes:
    """One pass of all sixteen: a token each (decode), or their prompts (prefill)."""
    layout, limits = CASES[cluster_name][name]
    if fused is not None:
        limits = replace(limits, collectives="fused" if fused else "synchronous")
    setting, candidates = _prepared(model, cluster_name, (layout, limits), phase)
    each = IN_FLIGHT / (limits.pins.attention_dp or 1)
    if phase == "prefill":
        each *= setting.lengths.prompt
    return step_times(setting, candidates.having(batch=np.array([max(round(each), 1)])))


def itl_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 10."""
    return float(pass_times(model, cluster_name, name, "decode", fused=fused).step_s[0])


def ttft_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 9 without its wait."""
    return float(pass_times(model, cluster_name, name, "prefill", fused=fused).step_s[0])


def tokens_per_s(model: str, cluster_name: str, name: str, *, fused: bool | None = None) -> float:
    """Eq. 11, of sixteen requests side by side."""
    workload = shipped_workload(WORKLOAD)
    prefill_s = ttft_s(model, cluster_name, name, fused=fused)
    decode_s = itl_s(model, cluster_name, name, fused=fused)
    one = throughput(workload.input_tokens.mean, workload.output_tokens.mean, 0.0, prefill_s, decode_s)
    return IN_FLIGHT * float(one)


# --- The figures ---
#
# MixServe's Figures 3, 4, 10, 11 and 12 by the planner's cost model, on the Ascend 910B cluster and the H20 cluster.
#
# Figure 10 (TTFT, ITL, throughput) chose the calibrations; rows that did say so in `note`, all others are checks.

BASELINES = ("TP+PP", "DP+EP TP8", "DP+EP TP4", "Tutel TP8", "Tutel TP4")


def _rows_bytes() -> float:
    model = shipped_model(R1)
    return IN_FLIGHT * shipped_workload(WORKLOAD).input_tokens.mean * model.hidden_size * 2.0


def _all_reduce_s(degree: int) -> float:
    return float(shipped_network(ASCEND).all_reduce(_rows_bytes(), degree).total_s)


def _exchange_s(degree: int) -> float:
    """Dispatch and combine; each rank holds its share of the rows, top-k copies of each."""
    copies = _rows_bytes() / degree * shipped_model(R1).router.top_k
    return 2 * float(shipped_network(ASCEND).all_to_all(copies, degree).total_s)


def _exchanged_s(name: str, *, fused: bool | None = None) -> float:
    return float(pass_times(R1, ASCEND, name, "prefill", fused=fused).t_c_s[0])


def _best_case(model: str, cluster: str, metric: str) -> str:
    names = [name for name in CASES[cluster] if name.startswith("d_DP")]
    best = min if metric == "TTFT" else max
    return best(names, key=lambda name: READ[metric](model, cluster, name))


def _fusing_improves() -> str:
    """What is better with fused collectives."""
    fused, plain = ([read(R1, ASCEND, MIXSERVE[ASCEND], fused=on) for read in READ.values()] for on in (True, False))
    better = (fused[0] < plain[0], fused[1] < plain[1], fused[2] > plain[2])
    return ", ".join(name for name, is_better in zip(READ, better, strict=True) if is_better)


def _over(metric: str, cluster: str, model: str, name: str) -> float:
    """A configuration over the paper's own."""
    read = READ[metric]
    return read(model, cluster, name) / read(model, cluster, MIXSERVE[cluster])


def _throughput_gain(cluster: str, model: str, name: str) -> float:
    """The paper's own configuration over another."""
    return tokens_per_s(model, cluster, MIXSERVE[cluster]) / tokens_per_s(model, cluster, name)


def _over_baselines(metric: str) -> list[float]:
    return [_over(metric, H20, model, name) for model in (R1, QWEN) for name in BASELINES]


def _over_ep() -> list[float]:
    return [
        _throughput_gain(cluster, model, name)
        for cluster in (ASCEND, H20)
        for model in (R1, QWEN)
        for name in BASELINES[1:]
        if name in CASES[cluster]
    ]


READ: dict[str, Callable[..., float]] = {"TTFT": ttft_s, "ITL": itl_s, "throughput": tokens_per_s}


def _recommended(model: str, cluster_name: str) -> str:
    """The layout that the search recommends for sixteen requests in flight, by their time per token on the cluster."""
    workload = replace(shipped_workload(WORKLOAD), requests_per_s=None, max_batch=IN_FLIGHT)
    precision = _precision(model, cluster_name)
    setting = settings_of(
        shipped_model(model), shipped_cluster(cluster_name), workload, objective="tpot", precision=precision
    )["decode"]
    table = evaluate_phase(setting)
    index = table.best(setting.objective)
    return "none" if index is None else table.candidates.layout_of(index)


OURS |= {
    "recommended": _recommended,
    **READ,
    "over": _over,
    "best DP+EP": lambda model: min(_over("TTFT", ASCEND, model, name) for name in ("DP+EP TP8", "DP+EP TP4")),
    "throughput gain": _throughput_gain,
    "least over": lambda metric: min(_over_baselines(metric)),
    "most over": lambda metric: max(_over_baselines(metric)),
    "least over EP": lambda: min(_over_ep()),
    "most over EP": lambda: max(_over_ep()),
    "all-reduce over": lambda degree, fewer: _all_reduce_s(degree) / _all_reduce_s(fewer),
    "slower at": lambda degree: "TP > EP" if _all_reduce_s(degree) > _exchange_s(degree) else "TP < EP",
    "exchange over hybrid": lambda: _exchanged_s("DP+EP TP8") / _exchanged_s("d_DP = d_EP", fused=False),
    "best case": _best_case,
    "fusing improves": _fusing_improves,
    "fused exchange": lambda name: _exchanged_s(name, fused=True) / _exchanged_s(name, fused=False),
}
