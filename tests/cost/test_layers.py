"""Attention and experts: counted FLOPs and bytes of whole layers, and what tensor parallelism copies."""

from dataclasses import replace

import numpy as np
import pytest

from antiphon.cost.layers import (
    dense_feed_forward,
    expected_touched,
    expert_feed_forward,
    output_head,
)
from antiphon.cost.memory import attention_matrices, cached_width, gated_matrices, local_heads
from antiphon.cost.roofline import Roof, Roofs
from antiphon.cost.training.counts import forward_flops_per_token
from antiphon.specs.counts import count_flops, count_parameters
from antiphon.specs.model import FeedForwardSpec, ModelSpec, PrecisionSpec
from tests.cost.specimens import (
    attention_decode,
    attention_prefill,
    deepseek_v3,
    mixtral_8x22b,
    tiny_model,
    without_shared,
)

BF16 = PrecisionSpec()
# Memory so fast that only arithmetic counts: seconds are FLOPs. And the other way round: seconds are bytes.
COUNT_FLOPS = Roofs(gemm=Roof(flops_per_s=1.0, bytes_per_s=1e30), attention=Roof(flops_per_s=1.0, bytes_per_s=1e30))
COUNT_BYTES = Roofs(gemm=Roof(flops_per_s=1e30, bytes_per_s=1.0), attention=Roof(flops_per_s=1e30, bytes_per_s=1.0))


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3(), tiny_model()], ids=lambda model: model.family)
def test_decode_flops_are_the_model_s(model: ModelSpec) -> None:
    counts = count_flops(model)
    parts = attention_decode(model, COUNT_FLOPS, 3, 100, 1, BF16)
    scores = 100 * counts.score_flops_absorbed
    expected = 3 * (counts.attention_projections + scores + counts.router + counts.shared_expert)
    assert parts.compute_s == pytest.approx(expected)
    experts = expert_feed_forward(model, COUNT_FLOPS.gemm, 6, 2, 1, BF16)
    assert experts.compute_s == pytest.approx(6 * counts.expert)
    assert output_head(model, COUNT_FLOPS, 3, 1, BF16).compute_s == pytest.approx(3 * counts.head)


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3()], ids=lambda model: model.family)
def test_prefill_flops_are_the_model_s(model: ModelSpec) -> None:
    counts = count_flops(model)
    parts = attention_prefill(without_shared(model), COUNT_FLOPS, 200, 100, 1, BF16)
    pairs = 2 * 100 * 101 / 2  # two prompts of 100, each row sees itself and those before it
    expected = 200 * (counts.attention_projections + counts.router) + pairs * counts.score_flops_expanded
    assert parts.compute_s == pytest.approx(expected)


def test_a_chunk_with_cached_context_is_absorbed_and_sees_its_past() -> None:
    model, counts = deepseek_v3(), count_flops(deepseek_v3())
    parts = attention_prefill(without_shared(model), COUNT_FLOPS, 10, 10, 1, BF16, past=1000)
    pairs = 10 * 1000 + 10 * 11 / 2
    expected = 10 * (counts.attention_projections + counts.router) + pairs * counts.score_flops_absorbed
    assert parts.compute_s == pytest.approx(expected)


def test_decode_bytes_grow_by_the_kv_cache() -> None:
    """Twice the context reads that many more keys and values: 2 * 8 heads * 128 * 2 bytes for each token."""
    near, far = (attention_decode(mixtral_8x22b(), COUNT_BYTES, 7, context, 1, BF16) for context in (1000, 2000))
    assert far.total_s - near.total_s == pytest.approx(7 * 1000 * 2 * 8 * 128 * 2)
    near, far = (attention_decode(deepseek_v3(), COUNT_BYTES, 7, context, 8, BF16) for context in (1000, 2000))
    assert far.total_s - near.total_s == pytest.approx(7 * 1000 * 576 * 2), "latent rows are read whole on every device"


def test_fp8_cache_halves_what_is_read() -> None:
    half = PrecisionSpec(kv="fp8")
    near, far = (attention_decode(mixtral_8x22b(), COUNT_BYTES, 1, context, 1, half) for context in (1000, 2000))
    assert far.total_s - near.total_s == pytest.approx(1000 * 2 * 8 * 128 * 1)


def test_a_sliding_window_bounds_the_context() -> None:
    model = tiny_model()
    attention = model.attention.__class__(**{**model.attention.__dict__, "sliding_window": 50})
    windowed = tiny_model(attention=attention)
    at_window, beyond = (attention_decode(windowed, COUNT_BYTES, 2, context, 1, BF16) for context in (50, 5000))
    assert beyond == at_window


def test_alternating_windows_cost_what_their_layers_cost_on_average() -> None:
    model = tiny_model()
    windows = (True, False, False, True, False)
    found = {}
    for name, changes in {
        "full": {},
        "windowed": {"sliding_window": 50},
        "mixed": {"sliding_window": 50, "windowed_layers": windows},
    }.items():
        variant = tiny_model(attention=replace(model.attention, **changes))
        decode = attention_decode(variant, COUNT_BYTES, 2, 5000, 1, BF16)
        found[name] = float(decode.total_s), forward_flops_per_token(variant, 5000)
    for full, windowed, mixed in zip(found["full"], found["windowed"], found["mixed"], strict=True):
        assert windowed < mixed < full
        assert mixed == pytest.approx((2 * windowed + 3 * full) / 5)


@pytest.mark.parametrize(
    ("tp", "heads", "kv_width"), [(1, 48, 2048), (3, 16, 768), (7, 7, 512), (16, 3, 256), (48, 1, 256)]
)
def test_heads_that_do_not_divide_are_rounded_up_and_kv_heads_copied(tp: int, heads: int, kv_width: int) -> None:
    attention = mixtral_8x22b().attention
    assert local_heads(attention, tp) == heads
    assert cached_width(attention, tp) == kv_width


def test_tensor_parallelism_copies_latent_down_projections() -> None:
    whole, eighth = (attention_matrices(deepseek_v3(), tp) for tp in (1, 8))
    assert eighth[0] == whole[0]
    assert eighth[0].num_elements == 7168 * (1536 + 576)
    assert eighth[1].num_elements * 8 == whole[1].num_elements
    assert eighth[-1].num_elements * 8 == whole[-1].num_elements


@pytest.mark.parametrize("model", [mixtral_8x22b(), deepseek_v3(), tiny_model()], ids=lambda model: model.family)
def test_on_one_device_the_matrices_are_the_model_s(model: ModelSpec) -> None:
    counts = count_parameters(model)
    attention = sum(float(matrix.num_elements) for matrix in attention_matrices(model, 1))
    norms = 0 if model.attention.latent is None else 1536 + 512
    assert attention + norms == counts.attention
    expert = gated_matrices(model.hidden_size, model.feed_forward.intermediate, 1)
    assert sum(float(matrix.num_elements) for matrix in expert) == counts.expert


def test_shared_expert_and_dense_layer_run_with_attention() -> None:
    model = deepseek_v3()
    with_shared, without = (
        attention_decode(one, COUNT_FLOPS, 5, 10, 1, BF16) for one in (model, without_shared(model))
    )
    assert with_shared.total_s - without.total_s == pytest.approx(5 * count_flops(model).shared_expert)
    dense = attention_decode(model, COUNT_FLOPS, 5, 10, 1, BF16, moe_layer=False)
    gate = 5 * count_flops(model).router
    assert dense.total_s - without.total_s == pytest.approx(5 * count_flops(model).dense - gate)
    assert dense_feed_forward(mixtral_8x22b(), COUNT_FLOPS, 5, 0, 1, BF16).total_s == 0


def test_a_layer_costs_its_fixed_time_once() -> None:
    fixed = Roofs(
        gemm=Roof(flops_per_s=1e30, bytes_per_s=1e30, kernel_s=1.0),
        attention=Roof(flops_per_s=1e30, bytes_per_s=1e30, kernel_s=1.0),
        layer_s=100.0,
    )
    # QKV, rotation, attention, output, two norms, gate: 7 kernels.
    assert attention_decode(mixtral_8x22b(), fixed, 4, 10, 1, BF16).fixed_s == 107
    # Sort, gate and up, activation, down, weighted sum.
    assert expert_feed_forward(mixtral_8x22b(), fixed.gemm, 4, 1, 1, BF16).fixed_s == 5
    assert attention_decode(mixtral_8x22b(), fixed, 0, 10, 1, BF16).total_s == 0


def test_expected_touched_by_hand() -> None:
    # 5 experts, top 2, one worker holding 2 of them, rows = tokens * 2 * 2 / 5; 10 tokens: 8 rows.
    # A token misses an expert with probability 3/5: 2 (1 - 0.6^10).
    assert expected_touched(2, 8, num_experts=5, top_k=2) == pytest.approx(2 * (1 - 0.6**10))
    assert expected_touched(1, 100, num_experts=8, top_k=8) == 1
    assert expected_touched(4, 0, num_experts=8, top_k=2) == 0
    assert expected_touched(256, 0.5, num_experts=256, top_k=8) == 0.5, "no more experts than rows"


def test_expected_touched_agrees_with_chance() -> None:
    generator = np.random.default_rng(7)
    chosen = np.argsort(generator.random((4000, 6, 5)), axis=-1)[..., :2]  # 4000 batches of 6 tokens, 2 of 5 experts
    touched = np.mean([len({int(e) for e in batch.ravel()} & {0, 3}) for batch in chosen])
    assert expected_touched(2, 6 * 2 * 2 / 5, num_experts=5, top_k=2) == pytest.approx(touched, rel=0.02)


def test_many_candidates_at_once_equal_one_by_one() -> None:
    batch, context = np.array([1.0, 32.0, 500.0]), np.array([100.0, 2000.0, 7.0])
    tp = np.array([1.0, 3.0, 8.0])
    together = attention_decode(deepseek_v3(), COUNT_BYTES, batch, context, tp, BF16)
    experts = expert_feed_forward(deepseek_v3(), COUNT_BYTES.gemm, batch, np.array([1.0, 7.0, 256.0]), tp, BF16)
    for index in range(3):
        alone = attention_decode(
            deepseek_v3(), COUNT_BYTES, float(batch[index]), float(context[index]), int(tp[index]), BF16
        )
        assert together.at(index).total_s == pytest.approx(float(alone.total_s))
        one = expert_feed_forward(
            deepseek_v3(), COUNT_BYTES.gemm, float(batch[index]), (1, 7, 256)[index], int(tp[index]), BF16
        )
        assert experts.at(index).total_s == pytest.approx(float(one.total_s))


def test_a_model_without_shared_expert_has_none() -> None:
    assert tiny_model(feed_forward=FeedForwardSpec(intermediate=6)).feed_forward.shared_intermediate == 0
    assert without_shared(tiny_model()) == tiny_model()
