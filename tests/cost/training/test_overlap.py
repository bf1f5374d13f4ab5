"""R of eq. 5-9, and what hides behind what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.roofline import Parts
from antiphon.cost.training.operators import Kernel, LayerOperators, Product
from antiphon.cost.training.step import (
    computation_to_communication,
    fused_speedup,
    hidden_behind,
    layer_time,
)


@pytest.mark.parametrize(
    ("width", "bytes_per_s", "expected"), [(14336, 400e9, 8.7), (1408, 400e9, 0.85), (14336, 50e9, 1.09)]
)
def test_r(width: int, bytes_per_s: float, expected: float) -> None:
    assert computation_to_communication(width, bytes_per_s, 989e12) == pytest.approx(expected, abs=0.01)


def test_r_is_the_ratio_of_its_two_times() -> None:
    top_k, tokens, hidden, width, degree, rate, peak = 2, 100, 64, 96, 8, 3e9, 5e12
    communication = 2 * top_k * tokens * hidden * (degree - 1) / degree / degree / rate
    computation = 3 * top_k * tokens * hidden * width / degree / peak
    many_ranks = computation / communication * (degree - 1) / degree
    assert computation_to_communication(width, rate, peak) == pytest.approx(many_ranks)


def test_hidden_behind_by_hand() -> None:
    communication = Parts(scale_up_s=2.0, fixed_s=2.0)
    assert float(hidden_behind(communication, 3.0, 1.0).total_s) == pytest.approx(1.0)
    left = hidden_behind(communication, 10.0, 0.5)
    assert (float(left.scale_up_s), float(left.fixed_s)) == pytest.approx((1.0, 1.0))
    assert float(hidden_behind(Parts(), 1.0, 1.0).total_s) == 0


def layer(products: float, weights: float, communication: float, beside: float = 0.0) -> LayerOperators:
    one = Product(
        forward=Parts(compute_s=products),
        input_gradient=Parts(compute_s=products),
        weight_gradient=Parts(memory_s=weights),
    )
    nothing = Product(forward=Parts(compute_s=beside), input_gradient=Parts(), weight_gradient=Parts())
    return LayerOperators(
        products={"experts_in": one, "shared_in": nothing},
        kernels={"norms": Kernel(forward=Parts(memory_s=1.0), backward=Parts(memory_s=2.0))},
        communications={"dispatch": Parts(scale_up_s=communication)},
        beside=("shared_in",),
    )


def test_levels_by_hand() -> None:
    """Products 5, gradients of weights 3, communication 4, a shared expert of 1 beside it."""
    operators = layer(5.0, 3.0, 4.0, beside=1.0)
    none, inter, intra = (layer_time(operators, level, 1.0) for level in ("none", "inter", "intra"))
    assert float(none[0].total.total_s) == pytest.approx(5 + 1 + 1 + 4)
    assert float(inter[0].total.total_s) == pytest.approx(5 + 1 + 1 + 3)
    assert float(intra[0].total.total_s) == pytest.approx(5 + 1 + 1 + 0)
    assert float(none[1].total.total_s) == pytest.approx(5 + 3 + 2 + 4)
    assert float(inter[1].total.total_s) == pytest.approx(5 + 3 + 2 + 1)
    assert float(intra[1].total.total_s) == pytest.approx(5 + 3 + 2)


def test_products_made_again_hide_communication_too() -> None:
    again, resent = Parts(compute_s=1.0), Parts(scale_up_s=1.0)
    _, backward = layer_time(layer(5.0, 3.0, 4.0), "inter", 1.0, again, resent)
    assert float(backward.total.total_s) == pytest.approx(5 + 3 + 2 + 1 + (4 + 1 - 4))


def test_memory_bound_kernels_made_again_run_beside_products() -> None:
    """Of 7 s of memory traffic 5 hide behind the products' arithmetic, half of them at overlap 0.5."""
    again = Parts(memory_s=7.0, fixed_s=0.5)
    operators = layer(5.0, 3.0, 0.0)
    for level, overlap, left in (("none", 1.0, 7.5), ("inter", 1.0, 2.5), ("inter", 0.5, 5.0)):
        _, backward = layer_time(operators, level, overlap, again)
        assert float(backward.total.total_s) - (5 + 3 + 2) == pytest.approx(left)


TIMES = st.floats(0, 10)


@settings(max_examples=50, deadline=None)
@given(TIMES, TIMES, TIMES, TIMES, st.floats(0, 1))
def test_each_level_is_at_least_as_fast(
    products: float, weights: float, sent: float, beside: float, overlap: float
) -> None:
    operators = layer(products, weights, sent, beside)
    levels = [layer_time(operators, level, overlap) for level in ("none", "inter", "intra")]
    totals = [float(sum(one.total.total_s for one in both)) for both in levels]
    assert totals[0] >= totals[1] - 1e-9 >= totals[2] - 2e-9
    at_least = sum(one.computation.total_s for one in levels[0])
    assert totals[2] >= float(at_least) - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0, 1))
def test_fusing_a_pair_at_most_doubles(communication: float, product: float, overlap: float) -> None:
    assert 1 <= float(fused_speedup(communication, product, overlap)) <= 2 + 1e-9
