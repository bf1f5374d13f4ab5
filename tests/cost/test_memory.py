"""Memory: weights by role against exact counts, and admission against the serving engine's own scheduler."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.memory import (
    attention_activation_bytes,
    attention_weight_bytes,
    expert_activation_bytes,
    expert_weight_bytes,
    kv_blocks,
    kv_bytes_per_token,
    max_sequences,
    msi_memory_bytes,
)
from antiphon.kernels.api import KVCacheSpec
from antiphon.serve.policy.request import SchedulerConfig, new_request
from antiphon.serve.policy.scheduler import Scheduler
from antiphon.specs.counts import (
    admitted_sequences,
    blocks_in_budget,
    blocks_of,
    count_parameters,
    kv_cache_block_bytes,
    reserved_blocks,
)
from antiphon.specs.model import ModelSpec, PrecisionSpec
from antiphon.specs.sampling import SamplingParams
from tests.cost.specimens import deepseek_v3, mixtral_8x22b, tiny_model

BF16 = PrecisionSpec()


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3(), tiny_model()], ids=lambda model: model.family)
def test_weights_of_one_device_are_the_whole_model(model: ModelSpec) -> None:
    held = attention_weight_bytes(model, 1, BF16) + expert_weight_bytes(model, model.router.num_experts, 1, BF16)
    counts = count_parameters(model)
    assert held == 2 * counts.total


def test_weights_under_tensor_parallelism_by_hand() -> None:
    # Hidden 8, 4 heads of 2, 2 KV heads, tp 3: 2 heads and 1 KV head, so QKV 8 x (4 + 4) and output 4 x 8: 96.
    # Norms 16, gate 8 * 5 = 40: 152 a layer, 3 layers. Vocabulary 10 in 3: 4 rows of 8, twice; the last norm 8.
    model = tiny_model()
    assert attention_weight_bytes(model, 3, BF16) == 2 * (3 * 152 + 2 * 32 + 8)
    # Experts of width 6 in tp 4: 2 each, 3 * 8 * 2 = 48; 2 held, 3 layers.
    assert expert_weight_bytes(model, 2, 4, BF16) == 2 * 3 * 2 * 48
    assert expert_weight_bytes(model, 2, 4, PrecisionSpec(weights="int4")) == (0.5 + 2 / 32) * 3 * 2 * 48
    assert expert_weight_bytes(model, 2, 4, PrecisionSpec(experts="int4", group=128)) == (0.5 + 2 / 128) * 3 * 2 * 48
    # In few bits are the projections, 96 a layer; norms, gates, tables and the last norm are not.
    few_bits = 3 * 96 * (1 + 2 / 32) + 2 * (3 * 56 + 2 * 32 + 8)
    assert attention_weight_bytes(model, 3, PrecisionSpec(weights="int8")) == few_bits


def test_stages_that_do_not_divide_are_as_full_as_the_fullest() -> None:
    model = tiny_model()  # 3 layers in 2 stages: 2 in one
    table, last_norm = 2 * 10 * 8, 2 * 8
    whole = attention_weight_bytes(model, 1, BF16) - 2 * table - last_norm
    fullest = attention_weight_bytes(model, 1, BF16, pp=2) - table - last_norm
    assert fullest == pytest.approx(whole * 2 / 3)
    assert expert_weight_bytes(model, 1, 1, BF16, pp=2) == 2 * 2 * 3 * 8 * 6
    assert kv_bytes_per_token(model, 1, BF16, pp=2) == 2 * 8 * 2


def test_latent_rows_are_not_cut_by_tensor_parallelism() -> None:
    assert kv_bytes_per_token(deepseek_v3(), 1, BF16) == kv_bytes_per_token(deepseek_v3(), 8, BF16) == 61 * 576 * 2
    assert kv_bytes_per_token(mixtral_8x22b(), 8, BF16) == 56 * 2 * 128 * 2
    assert kv_bytes_per_token(mixtral_8x22b(), 16, BF16) == 56 * 2 * 128 * 2, "a KV head is copied, not cut"


def test_what_is_left_for_the_cache() -> None:
    model = tiny_model()  # 3 layers * 8 elements * 2 bytes = 48 a token, 768 a block
    np.testing.assert_array_equal(kv_blocks(np.array([5e8, -3e8]), model, 1, BF16), [5e8 // 768, 0])


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3()], ids=lambda model: model.family)
def test_a_block_is_what_the_back_ends_allocate(model: ModelSpec) -> None:
    attention, latent = model.attention, model.attention.latent
    cache = KVCacheSpec(
        num_layers=model.num_layers,
        num_blocks=1,
        block_size=16,
        num_kv_heads=1 if latent else attention.num_kv_heads,
        key_dim=latent.key_dim if latent else attention.head_dim,
        value_dim=latent.kv_lora_rank if latent else attention.head_dim,
        values_in_keys=latent is not None,
    )
    assert kv_cache_block_bytes(model, 16, 2) == cache.block_bytes(2)
    assert kv_cache_block_bytes(model, 16, 2, "int8") == replace(cache, storage="int8").block_bytes(2)
    assert 16 * kv_bytes_per_token(model, 1, BF16) == cache.block_bytes(2)


def test_block_arithmetic_on_numbers_and_arrays() -> None:
    assert [blocks_of(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    np.testing.assert_array_equal(blocks_of(np.array([0.0, 1.0, 16.0, 17.0]), 16), [0, 1, 1, 2])
    assert blocks_in_budget(1000, 300) == 3
    assert [reserved_blocks(blocks) for blocks in (1, 99, 100, 199, 1000)] == [1, 1, 1, 1, 10]
    np.testing.assert_array_equal(reserved_blocks(np.array([1, 99, 100, 1000])), [1, 1, 1, 10])
    assert [admitted_sequences(blocks, 3, 1) for blocks in (2, 3, 6, 7)] == [0, 1, 1, 2]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 200),
    st.sampled_from([16, 32]),
    st.integers(1, 40),
)
def test_as_many_are_admitted_as_the_engine_admits(
    num_blocks: int, tokens: int, block_size: int, max_running: int
) -> None:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=10_000,
        max_batch_tokens=1_000_000,
        max_running=max_running,
    )
    expected = np.minimum(max_sequences(num_blocks, tokens, block_size=block_size), max_running)
    if -(-tokens // block_size) > num_blocks:
        assert expected == 0
        return
    scheduler = Scheduler(config)
    for number in range(max_running + 1):  # different tokens, so that no block is shared
        prompt = [number * 1000 + position for position in range(tokens)]
        params = SamplingParams(max_tokens=1)
        request = new_request(str(number), prompt, params, arrival=number, seed=0, eos_token_ids=())
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.num_running == expected


def test_sequences_of_many_candidates_at_once() -> None:
    np.testing.assert_array_equal(
        max_sequences(np.array([0.0, 10.0, 1000.0]), np.array([16.0, 16.5, 100.0])), [0, 4, 141]
    )


def test_equation_8_of_megascale_infer() -> None:
    # m = 3, b_a = 2, s = 10, h = 8, L = 3, g = 2, P_a = 100: 4 * 3 * 2 * 10 * 8 * 3 / 2 + 200.
    assert msi_memory_bytes(3, 2, 10, 8, 3, 2, 100) == 2880 + 200


def test_equation_8_counts_our_cache() -> None:
    model = mixtral_8x22b()
    ours = 3 * 2 * 10 * kv_bytes_per_token(model, 1, BF16)
    assert msi_memory_bytes(3, 2, 10, model.hidden_size, model.num_layers, 6, 0) == ours


def test_activations_grow_with_rows() -> None:
    # Hidden 8; QKV 8 + 8 wide: 3 * 8 + 16 elements a row; experts 3 * 8 + 3 * 6.
    assert attention_activation_bytes(tiny_model(), 10, 1, BF16) == 10 * 40 * 2
    assert expert_activation_bytes(tiny_model(), 10, 1, BF16) == 10 * 42 * 2
