"""An iteration from a measured machine's tables: its sums by hand, and what cannot be faster than what."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.training.counts import StepEstimate
from antiphon.cost.training.measured import UNMEASURED_S, machine_of_ranks
from antiphon.cost.training.setup import Training, TrainingSetup, trained_in
from antiphon.cost.training.step import estimate_step
from antiphon.specs.counts import count_parameters
from tests.cost.training.specimens import WAYS, small_model, training_profile

LENGTH, BATCH, LAYERS = 64, 8, 4
PROFILE = training_profile(LENGTH)
CLUSTER = machine_of_ranks(PROFILE, LENGTH)
TRAINING = Training(
    model=small_model(LAYERS),
    cluster=CLUSTER,
    group=CLUSTER.groups[0],
    sequence_length=LENGTH,
    batch=BATCH,
    profile=PROFILE,
)
SETUP = TrainingSetup(overlap="none", zero=0, micro_batch=2, precision=trained_in("float32"))
A_PASS_S, HEAD_S = LAYERS * 3e-3 * 2 * LENGTH, 0.5e-3 * 2 * LENGTH  # of a micro-batch of two sequences, on a core
PARAMETERS = count_parameters(TRAINING.model).total


def estimate(**changes: object) -> StepEstimate:
    return estimate_step(TRAINING, replace(SETUP, **changes), "none")  # type: ignore[arg-type]


def one(value: object) -> float:
    return float(np.asarray(value).reshape(-1)[0])


def seconds(**changes: object) -> float:
    return one(estimate(**changes).iteration_s)


def test_alone_layers_head_update_and_the_rest_add_up() -> None:
    found = 4 * (A_PASS_S + HEAD_S) + 1e-9 * PARAMETERS + 1e-3
    assert seconds() == pytest.approx(found, rel=1e-3)  # the final norm is no part of the parameters that are counted


def test_data_parallel_ranks_share_the_batch_and_sum_gradients() -> None:
    alone, two = estimate(), estimate(data_parallel=2)
    assert one(two.sync_s) == pytest.approx(4e-9 * PARAMETERS, rel=1e-3)
    work = one(alone.iteration_s) - 1e-9 * PARAMETERS - 1e-3
    assert one(two.iteration_s) == pytest.approx(work / 2 + 5e-9 * PARAMETERS + 1e-3, rel=1e-3)


def test_more_ranks_than_cores_gain_nothing() -> None:
    two, four = estimate(data_parallel=2), estimate(data_parallel=4)
    layers_s = [one(each.num_micro_batches) * one(each.forward_s + each.backward_s) for each in (two, four)]
    assert layers_s[1] == pytest.approx(layers_s[0])


def test_a_pipeline_on_cores_of_its_own_has_1f1b_s_bubble() -> None:
    found = estimate(pipeline=2)
    assert one(found.bubble_s) == pytest.approx(A_PASS_S / 2)
    path = 4 * (A_PASS_S / 2 + HEAD_S) + A_PASS_S / 2
    rest = one(found.pipeline_exposed_s + found.optimizer_s) + 1e-3
    assert one(found.iteration_s) == pytest.approx(path + rest)


def test_a_pipeline_of_more_stages_than_cores_takes_its_work() -> None:
    """4 stages of a layer each, 4 micro-batches: the path is (4 + 3) passes, the work of all four 4 passes on two cores
    at half the speed."""
    found = estimate(pipeline=4)
    path = 4 * (A_PASS_S / 4 + HEAD_S) + 3 * A_PASS_S / 4
    work = 4 * 2 * (A_PASS_S / 4 + HEAD_S / 4)
    rest = one(found.pipeline_exposed_s + found.optimizer_s) + 2e-3
    assert one(found.iteration_s) == pytest.approx(max(path, work) + rest)


def test_what_was_not_measured_is_never_chosen() -> None:
    assert seconds(model_parallel=3) >= UNMEASURED_S
    assert seconds(data_parallel=8, micro_batch=1) >= UNMEASURED_S
    both = estimate(model_parallel=np.array([2, 3]))
    assert (np.asarray(both.iteration_s) < UNMEASURED_S).tolist() == [True, False]


@settings(deadline=None, max_examples=30)
@given(
    way=st.sampled_from(WAYS),
    degree=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
)
def test_every_form_of_up_to_four_ranks_has_a_time(
    way: tuple[str, str, str], degree: int, pipeline: int, data: int, zero: int
) -> None:
    found = estimate(
        attention=way[0],
        experts=way[1],
        dispatch=way[2],
        model_parallel=degree,
        pipeline=pipeline,
        data_parallel=data,
        zero=zero,
    )
    covered = degree * pipeline * data <= 4
    assert (one(found.iteration_s) < UNMEASURED_S) == covered
    if covered:
        # No form is faster than all the work on two cores.
        assert one(found.iteration_s) >= 4 * (A_PASS_S + HEAD_S) / 2
        assert one(found.parts.total_s) + one(found.bubble_s) == pytest.approx(one(found.iteration_s))
