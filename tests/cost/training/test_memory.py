"""Memory of training: parameters by part, ZeRO, activations in flight; and Figure 17's reductions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.training.memory import (
    RankParameters,
    StageLayers,
    fullest_stage,
    layers_in_flight,
    logits_bytes,
    rank_parameters,
    stage_layers,
    state_bytes,
)
from antiphon.cost.training.setup import TrainingPrecision, TrainingSetup
from antiphon.cost.training.step import estimate_step
from antiphon.specs.counts import count_parameters
from tests.cost.training.specimens import round_training, small_model


def test_layers_of_stages() -> None:
    model = replace(small_model(7), moe_layers=(False, *(True,) * 6))
    assert stage_layers(model, 3) == ((2, 1), (2, 0), (2, 0))
    layers = fullest_stage(model, 3)
    assert (float(layers.num_moe), float(layers.num_dense)) == (2, 1)
    with pytest.raises(UserError, match="8 pipeline chunks for 7 layers"):
        stage_layers(model, 8)


def test_virtual_stages_are_dealt_out() -> None:
    """7 layers in 2 x 3 chunks: 2 1 1 1 1 1; stage 0 has chunks 0, 2, 4."""
    layers = fullest_stage(small_model(7), np.asarray([2, 7, 1]), np.asarray([3, 1, 1]))
    assert layers.total.tolist() == [4, 1, 7]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_every_layer_is_somewhere(num_layers: int, pipeline: int, chunks: int) -> None:
    if pipeline * chunks > num_layers:
        return
    model = small_model(num_layers)
    assert sum(moe + dense for moe, dense in stage_layers(model, pipeline * chunks)) == num_layers
    assert float(fullest_stage(model, pipeline, chunks).total) >= num_layers / pipeline


def test_one_rank_alone_holds_the_model() -> None:
    model = small_model()
    parameters = rank_parameters(model, TrainingSetup(), StageLayers(num_moe=4, num_dense=0))
    counts = count_parameters(model)
    assert float(parameters.total) == counts.total - counts.final_norm


def test_parameters_by_strategy() -> None:
    """Sequence parallelism keeps attention whole; both cut the experts into equal bytes."""
    model, layers = small_model(), StageLayers(num_moe=1, num_dense=0)
    attention, expert = 128 * (128 + 64 + 128), 3 * 128 * 256
    small = 2 * 128 + 128 * 8
    for experts in ("expert", "tensor"):
        sequence = rank_parameters(model, TrainingSetup(experts=experts, model_parallel=2), layers, with_tables=False)
        assert (sequence.sharded, sequence.replicated) == (8 * expert / 2, attention + small)
    tensor = rank_parameters(model, TrainingSetup(attention="tensor", model_parallel=2), layers, with_tables=False)
    assert (tensor.sharded, tensor.replicated) == (8 * expert / 2 + attention / 2, small)


def test_five_experts_on_three_ranks() -> None:
    model = small_model(num_experts=5)
    setup = TrainingSetup(model_parallel=3)
    parameters = rank_parameters(model, setup, StageLayers(num_moe=1, num_dense=0), with_tables=False)
    assert parameters.sharded == 2 * 3 * 128 * 256


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, (2, 4, 12)), (1, (2, 4, 12 / 4)), (2, (2, 4 / 4, 12 / 4)), (3, (2 / 4, 4 / 4, 12 / 4))],
)
def test_zero_by_hand(zero: int, expected: tuple[float, float, float]) -> None:
    setup = TrainingSetup(zero=zero, data_parallel=4, model_parallel=2)
    only_sharded = RankParameters(sharded=1000.0, replicated=0.0)
    assert np.allclose(state_bytes(only_sharded, setup), np.multiply(expected, 1000))
    replicated = state_bytes(RankParameters(sharded=0.0, replicated=1000.0), setup)
    assert float(replicated[2]) == pytest.approx(expected[2] * 1000 / (2 if zero else 1))


def test_fp8_parameters_halve() -> None:
    setup = TrainingSetup(precision=TrainingPrecision(weights="fp8", compute="fp8"))
    assert state_bytes(RankParameters(sharded=10.0, replicated=0.0), setup)[0] == 10


def test_layers_in_flight_by_hand() -> None:
    assert float(layers_in_flight(2, 4, 1, 100)) == 8
    assert float(layers_in_flight(2, 4, 2, 100)) == pytest.approx(8 * (1 + 3 / 8))
    assert float(layers_in_flight(2, 4, 2, 3)) == 6
    assert float(layers_in_flight(2, 1, 1, 100)) == 2


def test_logits_by_hand() -> None:
    assert float(logits_bytes(small_model(), TrainingSetup(model_parallel=3), 10)) == 10 * 21846 * 6


def test_fit_makes_again_what_memory_demands() -> None:
    training = round_training()
    setup = TrainingSetup(model_parallel=4)
    roomy = estimate_step(training, setup, "fit")
    assert roomy.rematerialized.chosen(0) == ()
    needed = float(roomy.memory.total[0])
    tight = replace(training.group, device=replace(training.group.device, memory_bytes=int(needed - 50_000)))
    squeezed = estimate_step(replace(training, group=tight), setup, "fit")
    assert squeezed.rematerialized.chosen(0) != ()
    assert float(squeezed.memory.total[0]) <= needed - 50_000
    assert squeezed.iteration_s[0] > roomy.iteration_s[0]
