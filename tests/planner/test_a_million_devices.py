"""Clusters of any size: equal nodes are a count, so a million devices take no longer than a thousand."""

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.planner.candidates import MANY_DOMAINS, stage_sizes
from antiphon.planner.rate_match import _packed
from antiphon.planner.search import make_plan, settings_of
from antiphon.planner.what_if import smallest_cluster
from antiphon.reproduce import shipped_cluster, shipped_model, shipped_workload
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.plan import MAX_DEGREE, PhaseName, plan_from_json, plan_to_json
from antiphon.specs.workload import SloSpec, WorkloadSpec

PATIENCE_S = 60.0  # of processor time, on a machine that is shared; a loop over nodes takes minutes
FP8 = PrecisionSpec(weights="fp8", kv="fp8", dispatch="fp8", compute="fp8")
DECODE: tuple[PhaseName, ...] = ("decode",)
BOTH: tuple[PhaseName, ...] = ("prefill", "decode")
slow = pytest.mark.slow


def cluster_of(num_devices: int) -> ClusterSpec:
    cluster = shipped_cluster("h800-h20-64")
    half = num_devices // 2 // 8
    return replace(cluster, groups=tuple(replace(group, num_nodes=half) for group in cluster.groups))


def workload(requests_per_s: float | None) -> WorkloadSpec:
    return replace(shipped_workload("chat"), requests_per_s=requests_per_s, slo=SloSpec(tpot_s=0.1))


@pytest.mark.parametrize(
    ("skew", "phases"), [(0.5, DECODE), *(pytest.param(skew, BOTH, marks=slow) for skew in (0.0, 0.5))], ids=str
)
def test_a_million_devices_in_seconds(skew: float, phases: tuple[PhaseName, ...]) -> None:
    started_s = time.process_time()
    asked = replace(workload(None), expert_skew=skew)
    settings = settings_of(shipped_model("deepseek-v3"), cluster_of(1_000_000), asked, phases=phases, precision=FP8)
    result = make_plan(settings, model_name="deepseek-v3")
    assert time.process_time() - started_s < PATIENCE_S
    used: Counter[str] = Counter()
    for phase in result.plan.phases.values():
        used.update({use.device: use.num_devices for use in phase.devices})
    assert 440_000 < max(used.values()) <= 500_000


@pytest.mark.parametrize("phases", [DECODE, pytest.param(BOTH, marks=slow)])
def test_the_smallest_cluster_for_millions_of_requests(phases: tuple[PhaseName, ...]) -> None:
    started_s = time.process_time()
    settings = settings_of(
        shipped_model("deepseek-v3"), cluster_of(1_000_000), workload(1e6), phases=phases, precision=FP8
    )
    found = smallest_cluster(settings, model_name="deepseek-v3")
    assert time.process_time() - started_s < PATIENCE_S
    assert sum(group.num_nodes for group in found.cluster.groups) < 125_000


@pytest.mark.slow
def test_a_plan_has_no_more_instances_than_its_reader_takes() -> None:
    vast = cluster_of(10**9)
    settings = settings_of(shipped_model("mixtral-8x7b"), vast, workload(None), phases=DECODE, precision=FP8)
    made = make_plan(settings, model_name="mixtral-8x7b").plan
    assert made.phases["decode"].num_instances <= MAX_DEGREE
    assert plan_from_json(json.loads(json.dumps(plan_to_json(made)))) == made


def test_rates_grow_with_the_cluster() -> None:
    model = shipped_model("deepseek-v3")
    rates = [
        make_plan(settings_of(model, cluster_of(num_devices), workload(None), precision=FP8), model_name="deepseek-v3")
        .plan.phases["decode"]
        .predicted.tokens_per_s
        for num_devices in (1_000, 100_000)
    ]
    assert rates[1] > 95 * rates[0]


def packed_one_by_one(free: list[int], asked: list[tuple[int, int]]) -> bool:
    """Every worker into the fullest domain that still has room for it, widest first."""
    for width, count in sorted(asked, reverse=True):
        for _ in range(count):
            roomy = [place for place, size in enumerate(free) if size >= width]
            if not roomy:
                return False
            free[min(roomy, key=lambda place: free[place])] -= width
    return True


@settings(max_examples=300, deadline=None)
@given(
    domains=st.dictionaries(st.integers(1, 9), st.integers(1, 6), min_size=1, max_size=2),
    asked=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=4),
)
def test_packing_by_counts_is_packing_one_by_one(domains: dict[int, int], asked: list[tuple[int, int]]) -> None:
    every = [size for size, count in domains.items() for _ in range(count)]
    assert _packed(tuple(domains.items()), asked) == packed_one_by_one(every, asked)


def test_stages() -> None:
    assert stage_sizes(20, 8, 256) == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert stage_sizes(MANY_DOMAINS * 8, 8, 256)[-1] == MANY_DOMAINS * 8
    assert stage_sizes(10**6, 8, 256)[-4:] == [96 * 8, 128 * 8, 192 * 8, 256 * 8]
