"""MixServe's Figures 3, 4, 10, 11 and 12 by the planner's cost model, on the Ascend 910B cluster and the H20 cluster.

Figure 10 (TTFT, ITL, throughput) chose the calibrations; rows that did say so in `note`, all others are checks.
"""

from collections.abc import Callable

from antiphon.cost.network import Network, network
from antiphon.reproduce import shipped
from antiphon.reproduce.mix_cases import (
    ASCEND,
    CASES,
    H20,
    IN_FLIGHT,
    MIXSERVE,
    QWEN,
    R1,
    WORKLOAD,
    itl_s,
    pass_times,
    tokens_per_s,
    ttft_s,
)

BASELINES = ("TP+PP", "DP+EP TP8", "DP+EP TP4", "Tutel TP8", "Tutel TP4")


def _net() -> Network:
    cluster = shipped.cluster(ASCEND)
    return network(cluster, cluster.groups[0])


def _rows_bytes() -> float:
    model = shipped.model(R1)
    return IN_FLIGHT * shipped.workload(WORKLOAD).input_tokens.mean * model.hidden_size * 2.0


def _all_reduce_s(degree: int) -> float:
    return float(_net().all_reduce(_rows_bytes(), degree).total_s)


def _exchange_s(degree: int) -> float:
    """Dispatch and combine; each rank holds its share of the rows, top-k copies of each."""
    copies = _rows_bytes() / degree * shipped.model(R1).router.top_k
    return 2 * float(_net().all_to_all(copies, degree).total_s)


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
OURS = {
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
