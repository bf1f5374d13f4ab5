"""Figure 9 term by term against the closed forms of section 4.1."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.training.rematerialize import LayerShape, layer_activations, total_width
from tests.cost.specimens import deepseek_v3
from tests.cost.training.specimens import small_model

SHAPES = st.builds(
    LayerShape,
    degree=st.integers(1, 72),
    top_k=st.integers(1, 16),
    width_ratio=st.floats(0.1, 8),
    heads_per_kv_head=st.integers(1, 16),
    sent=st.floats(1, 16),
)


def all_width(degree: float, top_k: float, width_ratio: float, heads_per_kv_head: float) -> float:
    """MegaScale-MoE, section 4.1, what one layer makes: 2n + 2k + 3kf + 12 + 5/m."""
    n, k, f, m = degree, top_k, width_ratio, heads_per_kv_head
    width: float = 2 * n + 2 * k + 3 * k * f + 12 + 5 / m
    return width


def kept_width(top_k: float, width_ratio: float, heads_per_kv_head: float) -> float:
    """MegaScale-MoE, section 4.1, what is kept for the backward pass: 2kf + 4 + 2/m."""
    k, f, m = top_k, width_ratio, heads_per_kv_head
    width: float = 2 * k * f + 4 + 2 / m
    return width


@settings(max_examples=50, deadline=None)
@given(SHAPES)
def test_the_sum_is_the_closed_form(shape: LayerShape) -> None:
    tensors = layer_activations(shape)
    arguments = (shape.top_k, shape.width_ratio, shape.heads_per_kv_head)
    assert total_width(tensors) == pytest.approx(float(all_width(shape.degree, *arguments)))
    assert total_width(tensors, "kept") == pytest.approx(float(kept_width(*arguments)))


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.sampled_from(["all_to_all", "all_gather"]), st.booleans())
def test_kept_is_needed_and_needed_is_made(shape: LayerShape, dispatch: str, gate_after_down: bool) -> None:
    tensors = layer_activations(shape, dispatch, gate_after_down=gate_after_down)
    assert all(tensor.needed for tensor in tensors if tensor.kept)
    assert 0 < total_width(tensors, "kept") <= total_width(tensors, "needed") <= total_width(tensors)


def test_all_to_all_holds_copies_instead_of_everything() -> None:
    shape = LayerShape(degree=8, top_k=2, width_ratio=3.5, heads_per_kv_head=4, sent=2)
    assert total_width(layer_activations(shape, "all_to_all")) == pytest.approx(54.25 - 2 * 8 + 2 * 2)


def test_gate_after_down_needs_the_down_projection() -> None:
    shape = LayerShape(degree=8, top_k=3, width_ratio=3.5, heads_per_kv_head=4, sent=3)
    before = total_width(layer_activations(shape), "kept")
    assert total_width(layer_activations(shape, gate_after_down=True), "kept") == pytest.approx(before + 3)


def test_wide_heads_weigh_more() -> None:
    """Qwen3's queries are twice as wide as its hidden rows; DeepSeek-V3's values narrower than its queries."""
    model = small_model()
    wide = replace(model, attention=replace(model.attention, head_dim=32))
    narrow, broad = (total_width(layer_activations(LayerShape.of(one, 4)), "kept") for one in (model, wide))
    assert broad - narrow == pytest.approx(1.5 + 1)
    shape = LayerShape.of(deepseek_v3(), 8)
    assert shape.heads_per_kv_head == 1
    assert (shape.query, shape.value) == pytest.approx((128 * 192 / 7168, 128 * 128 / 7168))


def test_shape_of_a_model() -> None:
    shape = LayerShape.of(small_model(), 4)
    assert (shape.degree, shape.top_k, shape.width_ratio, shape.heads_per_kv_head, shape.sent) == (4, 2, 2, 4, 2)
