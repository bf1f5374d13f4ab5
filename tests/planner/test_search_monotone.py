"""Monotone where physics is: better machines are never worse, tighter promises never better, on random clusters."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.planner.search import SearchLimits, evaluate_phase
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.plan import Objective
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec
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


PROMISES = (st.floats(0.005, 0.1), st.floats(1.0, 5.0), st.sampled_from([0.5, 0.9, 0.99]))


def best_score(
    machines: ClusterSpec, requests: WorkloadSpec, phase: str = "decode", objective: Objective = "per-gpu"
) -> float:
    limits = SearchLimits(max_micro_batches=2)
    where = setting(cluster=machines, workload=requests, phase=phase, limits=limits, objective=objective)
    table = evaluate_phase(where)
    index = table.best(objective)
    return 0.0 if index is None else float(table.score(objective)[index])


def improved(machines: ClusterSpec, what: str) -> ClusterSpec:
    (nodes,) = machines.groups
    if what == "memory":
        nodes = replace(nodes, device=replace(nodes.device, memory_bytes=nodes.device.memory_bytes * 2))
    elif what == "memory bandwidth":
        nodes = replace(nodes, device=replace(nodes.device, memory_bytes_per_s=nodes.device.memory_bytes_per_s * 1.7))
    elif what == "arithmetic":
        rates = {dtype: rate * 1.7 for dtype, rate in nodes.device.flops_per_s.items()}
        nodes = replace(nodes, device=replace(nodes.device, flops_per_s=rates))
    elif what == "latency":
        up_s, out_s = machines.scale_up_latency_s / 3, machines.scale_out_latency_s / 3
        return replace(machines, scale_up_latency_s=up_s, scale_out_latency_s=out_s)
    elif what == "scale-up":
        nodes = replace(nodes, scale_up_bytes_per_s=nodes.scale_up_bytes_per_s * 1.7)
    elif what == "scale-out":
        nodes = replace(nodes, node_scale_out_bytes_per_s=nodes.node_scale_out_bytes_per_s * 1.7)
    else:
        nodes = replace(nodes, num_nodes=nodes.num_nodes + 1)
    return replace(machines, groups=(nodes,))


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=1, deadline=None)
@given(MACHINES)
def test_a_better_machine_is_never_worse(phase: str, machines: ClusterSpec) -> None:
    better_is_never_worse(phase, machines)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=20, deadline=None)
@given(MACHINES)
def test_many_better_machines_are_never_worse(phase: str, machines: ClusterSpec) -> None:
    better_is_never_worse(phase, machines)


def better_is_never_worse(phase: str, machines: ClusterSpec) -> None:
    requests = workload(slo=SloSpec(tpot_s=0.03, ttft_s=1.0))
    least = best_score(machines, requests, phase) * (1 - 1e-6)
    for what in ("memory", "memory bandwidth", "arithmetic", "latency", "scale-up", "scale-out", "nodes"):
        assert best_score(improved(machines, what), requests, phase) >= least, what


@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=3, deadline=None)
@given(MACHINES, *PROMISES)
def test_a_tighter_promise_is_never_better(
    phase: str, machines: ClusterSpec, tpot_s: float, factor: float, percentile: float
) -> None:
    tighter_is_never_better(phase, machines, tpot_s, factor, percentile)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=20, deadline=None)
@given(MACHINES, *PROMISES)
def test_many_tighter_promises_are_never_better(
    phase: str, machines: ClusterSpec, tpot_s: float, factor: float, percentile: float
) -> None:
    tighter_is_never_better(phase, machines, tpot_s, factor, percentile)


def tighter_is_never_better(phase: str, machines: ClusterSpec, tpot_s: float, factor: float, percentile: float) -> None:
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


@settings(max_examples=4, deadline=None)
@given(MACHINES, st.integers(20, 2000), st.integers(1, 2000), st.sampled_from([0.5, 0.99]))
def test_longer_prompts_are_never_better_for_decode(
    machines: ClusterSpec, prompt: int, more: int, percentile: float
) -> None:
    slo = SloSpec(tpot_s=0.03, percentile=percentile)
    short, long = (
        workload(slo=slo, input_tokens=LengthSpec(median=length, sigma=0.5)) for length in (prompt, prompt + more)
    )
    assert best_score(machines, long) <= best_score(machines, short) * (1 + 1e-6)


@pytest.mark.parametrize(("objective", "changes"), [("per-cost", {"price": 0.5}), ("per-power", {"power_w": 50.0})])
@pytest.mark.parametrize("phase", PHASES)
@settings(max_examples=2, deadline=None)
@given(MACHINES)
def test_half_the_price_or_power_is_twice_the_score(
    objective: Objective, changes: dict[str, float], phase: str, machines: ClusterSpec
) -> None:
    (nodes,) = machines.groups
    cheaper = replace(machines, groups=(replace(nodes, device=replace(nodes.device, **changes)),))
    requests = workload(slo=SloSpec(tpot_s=0.03, ttft_s=1.0))
    scores = [best_score(where, requests, phase, objective) for where in (machines, cheaper)]
    assert scores[1] == pytest.approx(2 * scores[0])
