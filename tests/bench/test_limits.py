"""Bounds of the yardstick: formulas against brute force and sizes counted by hand; measurements only for shape."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from antiphon.bench.harness import limits
from antiphon.bench.harness.limits import DecoderSizes, MachineLimits
from antiphon.models.config import model_spec
from antiphon.specs.model import LatentSpec

SMALL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 32768,
}


@pytest.fixture
def sizes() -> DecoderSizes:
    return sizes_of()


def sizes_of(**changes: object) -> DecoderSizes:
    return DecoderSizes(spec=model_spec({**SMALL, **changes}))


def with_router(sizes: DecoderSizes, num_experts: int, top_k: int) -> DecoderSizes:
    router = replace(sizes.spec.router, num_experts=num_experts, top_k=top_k)
    return replace(sizes, spec=replace(sizes.spec, router=router))


@pytest.fixture
def machine() -> MachineLimits:
    return MachineLimits(read_by_threads={1: 11.6e9, 2: 23.4e9}, gemm_by_threads={1: 836e9, 2: 1435e9})


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens"), [(4, 1, 1), (4, 2, 1), (4, 2, 3), (5, 3, 2), (3, 1, 4)]
)
def test_touched_experts_equal_enumeration(sizes: DecoderSizes, num_experts: int, top_k: int, num_tokens: int) -> None:
    picks = list(itertools.combinations(range(num_experts), top_k))
    outcomes = [len(set().union(*outcome)) for outcome in itertools.product(picks, repeat=num_tokens)]
    expected = sum(outcomes) / len(outcomes)
    some = with_router(sizes, num_experts, top_k)
    assert limits.touched_experts(some, num_tokens) == pytest.approx(expected)


def test_touched_experts_at_the_edges(sizes: DecoderSizes) -> None:
    some, every = (with_router(sizes, 32, top_k) for top_k in (4, 32))
    assert [limits.touched_experts(some, tokens) for tokens in (0, 1, 10_000)] == pytest.approx([0, 4, 32])
    assert limits.touched_experts(every, 1) == 32


def test_all_parameters_add_up_to_the_checkpoint(sizes: DecoderSizes) -> None:
    norms = 16 * (2 * 1024 + 2 * 64) + 1024
    total = sizes.decoder_parameters(32) + 2 * sizes.head_parameters + norms
    assert total == 914_918_400


def test_decode_step_bytes_against_a_simulated_router(sizes: DecoderSizes) -> None:
    """Route tokens at random, count each weight a step must read, and compare the mean with the formula."""
    generator = random.Random(0)
    concurrency, context, num_steps = 8, 160, 300
    expert_bytes, attention_bytes = 3 * 1024 * 512 * 2, (1024 * 1024 * 2 + 2 * 1024 * 256) * 2
    total = 0.0
    for _ in range(num_steps):
        for _layer in range(16):
            touched = {expert for _ in range(concurrency) for expert in generator.sample(range(32), 4)}
            total += attention_bytes + 1024 * 32 * 2 + len(touched) * expert_bytes
            total += concurrency * context * 2 * 4 * 64 * 2
        total += 1024 * 32768 * 2 + concurrency * 1024 * 2
    assert limits.decode_step_bytes(sizes, concurrency, context) == pytest.approx(total / num_steps, rel=0.01)


@pytest.mark.parametrize(("concurrency", "megabytes", "tokens_per_s"), [(1, 356, 66), (8, 1224, 153), (64, 1929, 776)])
def test_bounds_match_the_published_yardstick(
    sizes: DecoderSizes, machine: MachineLimits, concurrency: int, megabytes: int, tokens_per_s: int
) -> None:
    assert limits.decode_step_bytes(sizes, concurrency, 160) / 1e6 == pytest.approx(megabytes, rel=0.01)
    bound = limits.memory_bound_tokens_per_s(sizes, machine, concurrency, 160)
    assert bound == pytest.approx(tokens_per_s, rel=0.01)


def test_weights_in_few_bits_are_read_in_fewer_bytes(sizes: DecoderSizes) -> None:
    eight_bits = replace(sizes, expert_bytes=1.0625, dense_bytes=1.0625, head_bytes=1.0625)
    routers = 16 * 1024 * 32  # stay in bfloat16
    for touched in (4.0, 20.5):
        whole = sizes.decoder_parameters(touched) + sizes.head_parameters
        assert sizes.read_bytes(touched) == 2 * whole
        assert eight_bits.read_bytes(touched) == pytest.approx(1.0625 * (whole - routers) + 2 * routers)
    assert limits.decode_step_bytes(eight_bits, 1, 0) < 0.54 * limits.decode_step_bytes(sizes, 1, 0)


def test_prefill_bound_matches_the_published_yardstick(sizes: DecoderSizes, machine: MachineLimits) -> None:
    assert limits.compute_bound_prefill_tokens_per_s(sizes, machine, 512) == pytest.approx(4735, rel=0.01)


def test_prefill_attention_equals_a_sum_over_positions(sizes: DecoderSizes) -> None:
    prompt_tokens = 7
    active = sizes.decoder_parameters(4)
    # Token i sees i + 1 tokens: scores and values take 2 operations each per head dimension and layer.
    attention = sum(2 * 2 * 16 * 16 * 64 * (position + 1) for position in range(prompt_tokens))
    expected = prompt_tokens * 2 * active + attention + 2 * 1024 * 32768
    assert limits.prefill_flops(sizes, prompt_tokens) == pytest.approx(expected)


def test_combined_bound_is_the_slower_of_both(sizes: DecoderSizes) -> None:
    slow_memory = MachineLimits(read_by_threads={1: 1e9}, gemm_by_threads={1: 1e15})
    slow_compute = MachineLimits(read_by_threads={1: 1e15}, gemm_by_threads={1: 1e9})
    for machine, binding in (
        (slow_memory, limits.memory_bound_tokens_per_s),
        (slow_compute, limits.compute_bound_tokens_per_s),
    ):
        assert limits.decode_bound_tokens_per_s(sizes, machine, 8, 160) == binding(sizes, machine, 8, 160)
    # A batch's prefill shares each weight among all its tokens: reading cannot bind once there are enough of them.
    few = limits.prefill_bound_tokens_per_s(sizes, slow_memory, 1, 16)
    many = limits.prefill_bound_tokens_per_s(sizes, slow_memory, 64, 16)
    assert many > 10 * few


def test_dense_layers_have_no_experts() -> None:
    difference = sizes_of().decoder_parameters(4) - sizes_of(mlp_only_layers=[0, 1]).decoder_parameters(4)
    assert difference == 2 * (1024 * 32 + 4 * 3 * 1024 * 512 - 3 * 1024 * 2048)


def test_shared_experts_are_read_by_every_token() -> None:
    shared = sizes_of(model_type="qwen2_moe", shared_expert_intermediate_size=256)
    more = shared.decoder_parameters(4) - sizes_of().decoder_parameters(4)
    assert more == 16 * 3 * 1024 * 256


def test_latent_attention_is_refused() -> None:
    latent = LatentSpec(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8)
    spec = sizes_of().spec
    with pytest.raises(ValueError, match="latent attention is not priced"):
        DecoderSizes(spec=replace(spec, attention=replace(spec.attention, latent=latent)))


def test_measurement_restores_threads_and_covers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "GEMM_SIZE", 32)
    before = torch.get_num_threads()
    measured = limits.measure_machine_limits(num_threads=3, num_passes=1)
    assert list(measured.read_by_threads) == list(measured.gemm_by_threads) == [1, 2, 3]
    assert measured.read_bytes_per_s > 0
    assert measured.gemm_flops_per_s > 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("bf16_flops_per_s", "fp32_flops_per_s", "dtype", "size"),
    [(4e11, 1e11, torch.bfloat16, 4096), (6e8, 7e10, torch.float32, 4096), (1e8, 1e9, torch.float32, 512)],
    ids=["bf16 instructions", "none", "a slow machine"],
)
def test_arithmetic_is_measured_in_the_faster_dtype_at_a_bearable_size(
    monkeypatch: pytest.MonkeyPatch, bf16_flops_per_s: float, fp32_flops_per_s: float, dtype: torch.dtype, size: int
) -> None:
    rates = {torch.bfloat16: bf16_flops_per_s, torch.float32: fp32_flops_per_s}

    monkeypatch.setattr(limits, "_flops_per_s", lambda factors, num_passes: rates[factors.dtype])
    factors = limits._fastest_factors(limits.GEMM_SIZE)
    assert (factors.dtype, factors.shape) == (dtype, (2, size, size))
    assert size == 512 or 2 * size**3 / rates[dtype] <= limits.GEMM_PATIENCE_S


def test_the_product_of_a_dtype_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GEMM_SIZE", 64)
    monkeypatch.setattr(limits, "_PROBE_SIZE", 32)
    for dtype in (torch.float32, torch.bfloat16):
        assert limits.measure_gemm_flops_per_s(dtype, num_passes=1) > 0
