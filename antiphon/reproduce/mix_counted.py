"""MixServe by counting and by schedule: eq. 1-13 with hand-worked numbers, bytes of eq. 12 and 13, rounds of Figure 9.

Where a printed equation and the bytes that a collective really sends differ, the row is kept and says so.
"""

from antiphon.cost.memory import mix_memory_bytes
from antiphon.cost.network import all_reduce_bytes, all_to_all_bytes
from antiphon.reproduce.mix_equations import (
    eq4_compute,
    eq5_communicated,
    eq6_service_s,
    mm1_wait,
    throughput,
    ttft,
)
from antiphon.sim.collectives import Exchange, simulate_exchange


def _both_ways(size_bytes: float, num_nodes: int) -> float:
    """What one rank sends to other nodes in dispatch and combine."""
    return 2 * float(all_to_all_bytes(size_bytes, num_nodes, 1).across)


def _exchange(combine: bool) -> Exchange:
    return Exchange(num_nodes=4, combine=combine, inter_s=3e-3, intra_s=1e-3, gather_s=1e-3 if combine else 0.0)


def _count(kind: str, combine: bool) -> float:
    bars = simulate_exchange(_exchange(combine), fused=True).bars()
    tracks = ("node[0] out",) if kind == "inter" else ("node[0] inside",)
    return float(sum(bar.kind == kind and bar.track in tracks for bar in bars))


def _end_ms(combine: bool, fused: bool) -> float:
    return round(1e3 * simulate_exchange(_exchange(combine), fused=fused).end_s, 9)


def _least_by_eq5(num_nodes: int) -> str:
    """Which case of Figure 11 communicates least: (TP, EP, DP) of each."""
    fewer = num_nodes * 2
    cases = {
        "d_DP = d_EP": (8, num_nodes, num_nodes),
        "d_DP > d_EP": (4, num_nodes, fewer),
        "d_DP < d_EP": (8, fewer, num_nodes),
    }
    return min(cases, key=lambda name: float(eq5_communicated(16, 1, 8, *cases[name])))


OURS = {
    "all-reduce": lambda size_bytes, degree: all_reduce_bytes(size_bytes, degree).inside / (degree - 1),
    "all-to-all": lambda size_bytes, degree: all_to_all_bytes(size_bytes, degree).inside,
    "both ways": _both_ways,
    "eq4": eq4_compute,
    "eq6": eq6_service_s,
    "wait": mm1_wait,
    "memory": lambda *case: mix_memory_bytes(*case) / 1e9,
    "ttft": ttft,
    "throughput": throughput,
    "least by eq5": _least_by_eq5,
    "rounds": _count,
    "end": _end_ms,
}
