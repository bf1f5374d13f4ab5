"""The space of degrees: complete, without straddling, and growing with the number of devices."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.training.memory import fullest_stage, rank_parameters
from antiphon.cost.training.setup import Training, TrainingSetup
from antiphon.cost.training.step import estimate_step
from antiphon.planner.training import (
    MICRO_BATCHES,
    VIRTUAL_STAGES,
    candidates,
    divisors,
    model_parallel_degrees,
    num_groups,
    stage_counts,
)
from antiphon.specs.cluster import ClusterSpec, NodeGroup, load_device
from tests.cost.specimens import deepseek_v3
from tests.cost.training.specimens import small_model


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(49) == [1, 7, 49]
    assert divisors(1) == [1]


@pytest.mark.parametrize(
    ("num_devices", "domain", "degree", "groups"),
    [(16, 8, 3, 4), (7, 8, 3, 2), (7, 8, 7, 1), (7, 8, 8, 0), (24, 8, 16, 1), (144, 72, 72, 2), (5, 1, 1, 5)],
)
def test_groups_do_not_straddle(num_devices: int, domain: int, degree: int, groups: int) -> None:
    assert num_groups(num_devices, domain, degree) == groups


def test_stage_counts_are_the_fewest_for_their_length() -> None:
    assert stage_counts(7) == [1, 2, 3, 4, 7]
    assert stage_counts(1) == [1]


def test_degrees_by_strategy() -> None:
    model = small_model(num_experts=5)  # 8 heads, 5 experts
    assert model_parallel_degrees(model, 8, "sequence", "expert") == [1, 2, 3, 4, 5]
    assert model_parallel_degrees(model, 4, "sequence", "tensor") == [1, 2, 3, 4, 8]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 12), st.integers(1, 7))
def test_against_brute_force(num_devices: int, domain: int, batch: int, num_layers: int) -> None:
    model = small_model(num_layers)
    found = candidates(
        model, domain=domain, num_devices=num_devices, batch=batch, attention="sequence", experts="expert"
    )
    expected = set()
    for degree, stages, chunks, data, micro in itertools.product(
        model_parallel_degrees(model, domain, "sequence", "expert"),
        stage_counts(num_layers),
        VIRTUAL_STAGES,
        range(1, batch + 1),
        MICRO_BATCHES,
    ):
        count, left = divmod(batch, data * micro)
        if left or stages * chunks > num_layers or stages * data > num_groups(num_devices, domain, degree):
            continue
        if chunks > 1 and (stages == 1 or count % stages):
            continue
        expected.add((degree, stages, chunks, data, micro, 1))
    listed = list(zip(*found.values(), strict=True))
    assert set(listed) == expected
    assert len(listed) == len(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 9))
def test_more_devices_contain_fewer(first: int, second: int, domain: int) -> None:
    few, many = sorted((first, second))
    spaces = []
    for count in (few, many):
        space = candidates(
            small_model(), domain=domain, num_devices=count, batch=6, attention="tensor", experts="tensor"
        )
        spaces.append(set(zip(*space.values(), strict=True)))
    assert spaces[0] <= spaces[1]


def test_copies_share_experts_where_a_token_goes_to_a_rank_once() -> None:
    model = replace(deepseek_v3(), num_layers=8, moe_layers=(False,) * 3 + (True,) * 5)
    found = candidates(
        model, domain=8, num_devices=64, batch=64, attention="sequence", experts="expert", shares_experts=True
    )
    assert set(found["expert_copies"]) == {1, 2, 4, 8, 16, 32, 64}
    assert (found["data_parallel"] % found["expert_copies"] == 0).all()
    wide = found["expert_copies"] > 1
    assert (found["model_parallel"] * found["expert_copies"])[wide].max() <= model.router.num_experts
    pinned = candidates(
        model, domain=8, num_devices=64, batch=64, attention="sequence", experts="expert", pins={"shared": 4}
    )
    assert pinned["pipeline"].size == 0, "only where it is asked for with an all-to-all"


def test_shared_experts_are_held_once_and_sent_further() -> None:
    group = NodeGroup(
        device=load_device("H800"),
        num_nodes=8,
        devices_per_node=8,
        scale_up_domain=8,
        scale_up_bytes_per_s=2e11,
        node_scale_out_bytes_per_s=4e11,
    )
    training = Training(
        model=deepseek_v3(),
        cluster=ClusterSpec(name="eight", groups=(group,)),
        group=group,
        sequence_length=4096,
        batch=512,
    )
    alone = TrainingSetup(model_parallel=1, pipeline=4, data_parallel=16, micro_batch=1, deduplicate=True)
    shared = replace(alone, expert_copies=16)
    layers = fullest_stage(training.model, 4, 1)
    parameters = [rank_parameters(training.model, setup, layers) for setup in (alone, shared)]
    assert parameters[0].experts == pytest.approx(16 * parameters[1].experts)
    assert parameters[0].owned(alone) == pytest.approx(parameters[1].owned(shared)), "all ranks together own the same"
    steps = [estimate_step(training, setup, "fit") for setup in (alone, shared)]
    assert float(np.ravel(steps[0].memory.parameters)[0]) > 10 * float(np.ravel(steps[1].memory.parameters)[0])
    assert float(np.ravel(steps[0].communication_s)[0]) < float(np.ravel(steps[1].communication_s)[0])
