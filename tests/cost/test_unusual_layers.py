"""Costs of layers that only plans know: states, sparse attention, shared caches, and weights of four bits."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.cost.layers import expert_feed_forward
from antiphon.cost.memory import attention_weight_bytes, expert_weight_bytes, kv_bytes_per_token, tokens_of_state
from antiphon.cost.roofline import roofs
from antiphon.reproduce import shipped_model
from antiphon.specs.cluster import EfficiencySpec, load_device
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec, PrecisionSpec, SparseSpec, StateSpec
from tests.cost.specimens import attention_decode, attention_prefill

ROOFS = roofs(load_device("H100"), EfficiencySpec())
BF16 = PrecisionSpec()


@pytest.fixture
def model() -> ModelSpec:
    return shipped_model("qwen3-30b-a3b")


def with_states(model: ModelSpec, num_layers: int) -> ModelSpec:
    layers = tuple(layer < num_layers for layer in range(model.num_layers))
    return replace(model, state=StateSpec(layers=layers, in_width=12_352, out_width=4096, elements=2**19))


def decode_s(model: ModelSpec, batch: float, context: float) -> float:
    return float(attention_decode(model, ROOFS, batch, context, 1, BF16).total_s)


def test_a_state_takes_the_same_time_at_every_context(model: ModelSpec) -> None:
    whole = with_states(model, model.num_layers)
    assert decode_s(whole, 64, 1e3) == pytest.approx(decode_s(whole, 64, 1e6))
    half = with_states(model, model.num_layers // 2)
    growth = decode_s(model, 64, 1e5) - decode_s(model, 64, 1e4)
    assert decode_s(half, 64, 1e5) - decode_s(half, 64, 1e4) == pytest.approx(growth / 2)


def test_states_take_the_place_of_keys_and_values_in_memory(model: ModelSpec) -> None:
    half = with_states(model, model.num_layers // 2)
    assert 2 * kv_bytes_per_token(half, 1, BF16) == kv_bytes_per_token(model, 1, BF16)
    state_bytes = model.num_layers // 2 * 2**19 * 4
    tokens = float(np.asarray(tokens_of_state(half, 1, BF16)))
    assert tokens * float(np.asarray(kv_bytes_per_token(half, 1, BF16))) == pytest.approx(state_bytes)
    assert tokens_of_state(model, 1, BF16) == 0


def test_sparse_attention_reads_no_more_than_its_tokens_and_pays_for_the_search() -> None:
    model = shipped_model("deepseek-v3")
    attention = replace(model.attention, sparse=SparseSpec(heads=64, dim=128, top_tokens=2048))
    sparse = replace(model, attention=attention)
    assert decode_s(sparse, 64, 128_000) < decode_s(model, 64, 128_000) / 2
    assert decode_s(sparse, 64, 1000) > decode_s(model, 64, 1000)
    assert decode_s(sparse, 64, 128_000) > decode_s(sparse, 64, 64_000)
    long = [float(attention_prefill(one, ROOFS, 65_536, 65_536, 1, BF16).total_s) for one in (model, sparse)]
    assert long[1] < long[0]


@pytest.mark.parametrize("share", [1, 2, 4])
def test_weights_in_memory_are_the_parameters(model: ModelSpec, share: int) -> None:
    attention = replace(model.attention, layers_per_cache=share)
    for one in (replace(model, attention=attention), with_states(model, 30)):
        counts = count_parameters(one)
        held = float(np.asarray(attention_weight_bytes(one, 1, BF16)))
        held += float(np.asarray(expert_weight_bytes(one, one.router.num_experts, 1, BF16)))
        assert held / 2 == pytest.approx(counts.total, rel=1e-4)


def test_only_experts_shrink_with_their_own_format(model: ModelSpec) -> None:
    four = PrecisionSpec(experts="mxfp4")
    assert attention_weight_bytes(model, 1, four) == attention_weight_bytes(model, 1, BF16)
    assert expert_weight_bytes(model, 8, 1, four) == pytest.approx(
        float(np.asarray(expert_weight_bytes(model, 8, 1, BF16))) * 4.25 / 16
    )
    times = [float(expert_feed_forward(model, ROOFS.gemm, 8.0, 128, 1, each).memory_s) for each in (four, BF16)]
    assert times[0] < times[1] / 3
