"""One iteration: its sum by hand, and what physics demands of it."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.training.counts import StepEstimate
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.setup import OverlapLevel, Training, TrainingPrecision, TrainingSetup, layer_case
from antiphon.cost.training.step import estimate_step, layer_time
from tests.cost.training.specimens import megascale_cluster, round_training, small_model

SETUPS = st.builds(
    TrainingSetup,
    attention=st.sampled_from(["sequence", "tensor"]),
    experts=st.sampled_from(["expert", "tensor"]),
    dispatch=st.sampled_from(["all_to_all", "all_gather"]),
    overlap=st.sampled_from(get_args(OverlapLevel)),
    deduplicate=st.booleans(),
    model_parallel=st.integers(1, 8),
    pipeline=st.sampled_from([1, 2, 3]),
    data_parallel=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
)


def one(value: object) -> float:
    """The number of a single candidate."""
    return float(np.asarray(value).reshape(-1)[0])


def seconds(estimate: StepEstimate) -> float:
    return one(estimate.iteration_s)


def test_parts_and_bubble_add_up() -> None:
    setup = TrainingSetup(model_parallel=4, pipeline=3, data_parallel=2, overlap="none")
    estimate = estimate_step(round_training(small_model(6), nodes=6), setup)
    assert seconds(estimate) == pytest.approx(float((estimate.parts.total_s + estimate.bubble_s)[0]))
    assert float(estimate.num_micro_batches) == 4
    stage = estimate.forward_s + estimate.backward_s
    assert float(estimate.bubble_s[0]) == pytest.approx(2 * float(stage[0]))
    assert one(estimate.sync_exposed_s) == pytest.approx(one(estimate.sync_s))


def test_a_layer_by_hand() -> None:
    """One device, no rematerialization: products at 1 TFLOP/s beside their bytes at 1 GB/s, which are far longer."""
    case = layer_case(round_training(), TrainingSetup())
    operators = layer_operators(case)
    rows = 64
    weights = 3 * 128 * 256 * 8
    moved = weights * 2 + rows * 2 * (128 + 512 + 256 + 128) * 2
    forward = operators.products["experts_in"].forward + operators.products["experts_out"].forward
    assert float(forward.total_s) == pytest.approx(moved / 1e9, rel=1e-2)  # bound by memory at these sizes
    gradient = operators.products["experts_in"].weight_gradient
    assert float(gradient.memory_s) == pytest.approx(
        (2 * 128 * 256 * 8 * 8 + rows * 2 * (128 + 512) * 2) / 1e9, rel=1e-2
    )
    assert all(float(time.total_s) == 0 for time in operators.communications.values())


def test_communication_of_a_layer_by_hand() -> None:
    """4 ranks of 1 GB/s, 64 rows of 128 in BF16: what each strategy sends."""
    training = round_training()
    row = 64 * 128 * 2
    sequence = layer_operators(layer_case(training, TrainingSetup(model_parallel=4))).communications
    # 2 key/value heads on 4 ranks are copied: each rank gets one, so keys and values weigh as 4 heads
    assert float(sequence["before_attention"].total_s) == pytest.approx(row / 4 * 3 / 4 * (1 + 2 * 4 / 8) / 1e9)
    assert float(sequence["after_attention"].total_s) == pytest.approx(row / 4 * 3 / 4 / 1e9)
    assert float(sequence["dispatch"].total_s) == pytest.approx(row / 4 * 3 / 4 * 2 / 1e9)
    tensor = layer_operators(
        layer_case(training, TrainingSetup(attention="tensor", experts="tensor", model_parallel=4))
    ).communications
    assert all(float(time.total_s) == pytest.approx(row * 3 / 4 / 1e9) for time in tensor.values())


def test_uneven_counts_are_an_error() -> None:
    with pytest.raises(UserError, match="batch of 8 sequences cannot be cut evenly"):
        estimate_step(round_training(), TrainingSetup(data_parallel=3))
    with pytest.raises(UserError, match="batch is 0"):
        round_training(batch=0)
    with pytest.raises(UserError, match="zero is 4"):
        TrainingSetup(zero=4)


def test_columns_agree_with_single_candidates() -> None:
    training = round_training(small_model(6))
    degrees = [(1, 1, 1), (2, 3, 2), (3, 2, 4), (4, 1, 8)]
    columns = TrainingSetup(
        model_parallel=np.asarray([float(degree) for degree, _, _ in degrees]),
        pipeline=np.asarray([float(pipeline) for _, pipeline, _ in degrees]),
        data_parallel=np.asarray([float(data) for _, _, data in degrees]),
    )
    together = estimate_step(training, columns, "fit")
    for index, (degree, pipeline, data) in enumerate(degrees):
        alone = estimate_step(
            training, TrainingSetup(model_parallel=degree, pipeline=pipeline, data_parallel=data), "fit"
        )
        assert seconds(alone) == pytest.approx(float(together.iteration_s[index]))
        assert float(alone.memory.total[0]) == pytest.approx(float(together.memory.total[index]))


@settings(max_examples=50, deadline=None)
@given(SETUPS)
def test_what_cannot_be(setup: TrainingSetup) -> None:
    """Never faster than the peak; what is hidden is not more than what is sent; faster links never slow a step."""
    training = round_training(small_model(6))
    estimate = estimate_step(training, setup, "cheap")
    assert 0 < float(np.max(estimate.mfu)) <= 1
    assert float(np.max(estimate.exposed_s)) <= float(np.max(estimate.communication_s)) + 1e-12
    group = training.group
    faster = replace(group, scale_up_bytes_per_s=2e9, node_scale_out_bytes_per_s=8e8)
    better = estimate_step(replace(training, group=faster), setup, "cheap")
    assert seconds(better) <= seconds(estimate) + 1e-12


@settings(max_examples=25, deadline=None)
@given(SETUPS)
def test_overlap_never_slows(setup: TrainingSetup) -> None:
    training = round_training(small_model(6))
    times = [seconds(estimate_step(training, replace(setup, overlap=level))) for level in get_args(OverlapLevel)]
    assert times[0] >= times[1] - 1e-12
    assert times[1] >= times[2] - 1e-12


def test_more_micro_batches_shrink_the_bubble() -> None:
    found = []
    for batch in (6, 12, 24):
        estimate = estimate_step(round_training(small_model(6), batch=batch), TrainingSetup(pipeline=3))
        found.append(float(estimate.bubble_s[0]) / seconds(estimate))
    assert found == sorted(found, reverse=True)


def test_interleaving_divides_the_bubble() -> None:
    training = round_training(small_model(12), batch=12)
    bubbles = [
        float(estimate_step(training, TrainingSetup(pipeline=3, virtual_stages=chunks)).bubble_s[0])
        for chunks in (1, 2, 4)
    ]
    assert np.allclose(bubbles, [bubbles[0], bubbles[0] / 2, bubbles[0] / 4])


def test_compression_halves_what_it_compresses() -> None:
    training = round_training(nodes=6)
    wide = TrainingSetup(model_parallel=4, data_parallel=4, overlap="none")
    narrow = replace(wide, precision=TrainingPrecision(gradient_wire="bfloat16"))
    before, after = (float(estimate_step(training, setup).sync_s) for setup in (wide, narrow))
    assert after / before == pytest.approx(4 / 6, rel=0.02)  # gradients 4 -> 2 bytes, parameters 2


def test_fp8_activations_send_half() -> None:
    training = round_training()
    wide = TrainingSetup(model_parallel=4, overlap="none")
    narrow = replace(wide, precision=TrainingPrecision(activation_wire="fp8"))
    sent = [one(estimate_step(training, setup).communication_s) for setup in (wide, narrow)]
    assert sent[1] / sent[0] == pytest.approx((1 + 4 / 128) / 2)


def test_attention_sees_only_its_window() -> None:
    training = round_training()
    model = replace(training.model, attention=replace(training.model.attention, sliding_window=4))
    case = layer_case(replace(training, model=model), TrainingSetup())
    whole = layer_case(training, TrainingSetup())
    windowed, full = (
        sum(each.total.total_s for each in layer_time(layer_operators(one), "none", 0.0)) for one in (case, whole)
    )
    assert float(windowed) <= float(full)


def test_what_bounds_it() -> None:
    cluster = megascale_cluster()
    from_paper = Training(
        model=small_model(4, hidden_size=4096, num_heads=32, expert_width=14336),
        cluster=cluster,
        group=cluster.groups[0],
        sequence_length=8192,
        batch=64,
    )
    assert estimate_step(from_paper, TrainingSetup(model_parallel=8)).bound_by() == "compute"
    assert estimate_step(round_training(), TrainingSetup()).bound_by() == "memory bandwidth"
    lone = round_training(replace(small_model(8), vocab_size=128), batch=1, nodes=6)
    assert estimate_step(lone, TrainingSetup(pipeline=8)).bound_by() == "pipeline bubble"
