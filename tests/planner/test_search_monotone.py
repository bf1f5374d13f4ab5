"""Monotone where physics is: better machines are never worse, tighter promises never better, on random clusters."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.planner.search import SearchLimits, evaluate_phase
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.workload import SloSpec, WorkloadSpec
from tests.planner.serving_specimens import cluster, device, group, setting, workload

PHASES = ("prefill", "decode")


MACHINES = st.builds(
    lambda memory, speed, flops, up, out, nodes: cluster(
        group(
            device(
                memory_bytes=int(memory * 1e9),
                memory_bytes_per_s=speed * 1e10,
                flops_per_s={"bfloat16": flops * 1e12},
                scale_up_bytes_per_s=up * 1e9,
                scale_out_bytes_per_s=out * 1e9,
            ),
            nodes,
            2,
        )
    ),
    st.integers(3, 12),
    st.integers(5, 50),
    st.integers(5, 200),
    st.integers(5, 100),
    st.integers(1, 20),
    st.integers(1, 3),
)


def best_score(machines: ClusterSpec, requests: WorkloadSpec, phase: str = "decode") -> float:
    where = setting(cluster=machines, workload=requests, phase=phase, limits=SearchLimits(max_micro_batches=2))
    table = evaluate_phase(where)
    index = table.best("per-gpu")
    return 0.0 if index is None else float(table.per_gpu[index])


def improved(machines: ClusterSpec, what: str) -> ClusterSpec:
    (nodes,) = machines.groups
    if what == "memory":
        nodes = replace(nodes, device=replace(nodes.device, memory_bytes=nodes.device.memory_bytes * 2))
    elif what == "memory bandwidth":
        nodes = replace(nodes, device=replace(nodes.device, memory_bytes_per_s=nodes.device.memory_bytes_per_s * 1.7))
    elif what == "scale-up":
        nodes = replace(nodes, scale_up_bytes_per_s=nodes.scale_up_bytes_per_s * 1.7)
    elif what == "scale-out":
        nodes = replace(nodes, node_scale_out_bytes_per_s=nodes.node_scale_out_bytes_per_s * 1.7)
    else:
        nodes = replace(nodes, num_nodes=nodes.num_nodes + 1)
    return replace(machines, groups=(nodes,))


@pytest.mark.parametrize("what", ["memory", "memory bandwidth", "scale-up", "scale-out", "nodes"])
@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=5, deadline=None)
@given(MACHINES)
def test_a_better_machine_is_never_worse(what: str, phase: str, machines: ClusterSpec) -> None:
    requests = workload(slo=SloSpec(tpot_s=0.03, ttft_s=1.0))
    assert best_score(improved(machines, what), requests, phase) >= best_score(machines, requests, phase) * (1 - 1e-6)


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=8, deadline=None)
@given(MACHINES, st.floats(0.005, 0.1), st.floats(1.0, 5.0), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_tighter_promise_is_never_better(
    phase: str, machines: ClusterSpec, tpot_s: float, factor: float, percentile: float
) -> None:
    loose = workload(slo=SloSpec(tpot_s=tpot_s * factor, ttft_s=20 * tpot_s * factor, percentile=percentile))
    tight = workload(slo=SloSpec(tpot_s=tpot_s, ttft_s=20 * tpot_s, percentile=percentile))
    assert best_score(machines, tight, phase) <= best_score(machines, loose, phase) * (1 + 1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_a_higher_percentile_is_never_better(phase: str) -> None:
    scores = [
        best_score(cluster(), workload(slo=SloSpec(tpot_s=0.02, ttft_s=0.5, percentile=percentile)), phase)
        for percentile in (0.5, 0.9, 0.99)
    ]
    assert scores[0] > scores[1] > scores[2] > 0
