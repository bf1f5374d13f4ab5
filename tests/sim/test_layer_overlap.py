"""Two streams of one training layer against the closed form of `cost.training`, and against bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.parts import Parts
from antiphon.cost.training.layer_time import Recomputed, layer_time
from antiphon.cost.training.operators import Communication, Kernel, LayerOperators, Product
from antiphon.sim.events import Run
from antiphon.sim.layer_overlap import simulate_layer

PRODUCTS = ("qkv", "out", "router", "experts_in", "experts_out")
SHARED = ("shared_in", "shared_out")
KERNELS = ("layer", "norms", "rope", "scores", "permute", "activation")
PARTNERS = {"before_attention": "qkv", "after_attention": "out", "dispatch": "experts_in", "combine": "experts_out"}
seconds = st.floats(0.01, 5)


@st.composite
def layers(draw: st.DrawFn, shared: bool = False) -> LayerOperators:
    def product() -> Product:
        return Product(
            forward=Parts(compute_s=draw(seconds)),
            input_gradient=Parts(compute_s=draw(seconds)),
            weight_gradient=Parts(memory_s=draw(seconds)),
        )

    def kernel() -> Kernel:
        return Kernel(forward=Parts(memory_s=draw(seconds)), backward=Parts(memory_s=draw(seconds)))

    return LayerOperators(
        products={name: product() for name in (*PRODUCTS, *(SHARED if shared else ()))},
        kernels={name: kernel() for name in (*KERNELS, *(("shared_activation",) if shared else ()))},
        communications={
            name: Communication(time=Parts(scale_up_s=draw(seconds)), fuses_with=partner)
            for name, partner in PARTNERS.items()
        },
        beside=SHARED if shared else (),
    )


def computed_s(run: Run) -> float:
    return run.busy_s()["compute"]


@settings(max_examples=50, deadline=None)
@given(st.booleans().flatmap(layers), st.booleans())
def test_without_overlap_it_is_the_sum(operators: LayerOperators, backward: bool) -> None:
    closed = layer_time(operators, "none", 1.0)
    wanted = (closed.backward if backward else closed.forward).total.total_s
    run = simulate_layer(operators, "none", backward=backward)
    assert run.end_s == pytest.approx(float(wanted), rel=1e-9)
    assert sum(run.busy_s().values()) == pytest.approx(run.end_s, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(layers())
def test_inter_is_never_faster_than_the_closed_form(operators: LayerOperators) -> None:
    closed = layer_time(operators, "inter", 1.0)
    backward = simulate_layer(operators, "inter", backward=True)
    assert backward.end_s >= float(closed.backward.total.total_s) * (1 - 1e-9)
    assert simulate_layer(operators, "inter", backward=False).end_s == pytest.approx(
        float(closed.forward.total.total_s), rel=1e-9
    ), "without a shared expert nothing hides in forward"


@settings(max_examples=50, deadline=None)
@given(st.booleans().flatmap(layers), st.booleans(), st.integers(1, 9))
def test_more_overlap_is_never_slower_and_all_work_is_done(
    operators: LayerOperators, backward: bool, num_tiles: int
) -> None:
    runs = [
        simulate_layer(operators, level, backward=backward, num_tiles=num_tiles) for level in ("none", "inter", "intra")
    ]
    none, inter, intra = runs
    assert inter.end_s <= none.end_s * (1 + 1e-9)
    assert intra.end_s <= none.end_s * (1 + 1e-9)
    for run in runs:
        assert computed_s(run) == pytest.approx(computed_s(none), rel=1e-9)
        assert run.busy_s()["network"] == pytest.approx(none.busy_s()["network"], rel=1e-9)
        assert run.end_s >= computed_s(run) * (1 - 1e-9)


def test_backward_hides_communication_behind_gradients_of_weights_by_hand() -> None:
    """Operators of 1 s, communications of 2 s: 5 input gradients, 6 kernels and 8 s of network on the critical path;
    weights of experts_out, experts_in, router and out fit beside them, and qkv's, last of all, runs after."""
    one = Parts(compute_s=1.0)
    operators = LayerOperators(
        products={name: Product(forward=one, input_gradient=one, weight_gradient=one) for name in PRODUCTS},
        kernels={name: Kernel(forward=one, backward=one) for name in KERNELS},
        communications={
            name: Communication(time=Parts(scale_up_s=2.0), fuses_with=partner) for name, partner in PARTNERS.items()
        },
    )
    assert simulate_layer(operators, "none", backward=True).end_s == 5 + 5 + 6 + 8
    inter = simulate_layer(operators, "inter", backward=True)
    critical_s = 5 + 6 + 8
    assert inter.end_s == critical_s + 1, "of five gradients of weights one finds no gap"


def test_fused_pair_by_hand() -> None:
    """Dispatch 4 s and experts_in 4 s in 4 tiles: 5 s instead of 8, forward."""
    none, one = Parts(), Parts(compute_s=4.0)
    operators = LayerOperators(
        products={"experts_in": Product(forward=one, input_gradient=none, weight_gradient=none)},
        kernels={},
        communications={"dispatch": Communication(time=Parts(scale_up_s=4.0), fuses_with="experts_in")},
    )
    assert simulate_layer(operators, "intra", backward=False, num_tiles=4).end_s == 5
    assert simulate_layer(operators, "intra", backward=False, num_tiles=1).end_s == 8


def test_what_is_made_again() -> None:
    """3 s of computation and 2 s of network made again: all added without overlap, hidden where there is room."""
    one = Parts(compute_s=1.0)
    operators = LayerOperators(
        products={"experts_out": Product(forward=one, input_gradient=one, weight_gradient=one)},
        kernels={},
        communications={"combine": Communication(time=Parts(scale_up_s=6.0), fuses_with="experts_out")},
    )
    again = Recomputed(computation=Parts(compute_s=3.0), communication=Parts(scale_up_s=2.0))
    assert simulate_layer(operators, "none", backward=True, recomputed=again).end_s == 3 + 2 + 6 + 1 + 1
    assert simulate_layer(operators, "inter", backward=True, recomputed=again).end_s == 6 + 2
    with pytest.raises(UserError, match=r"only the backward pass makes anything again"):
        simulate_layer(operators, "inter", backward=False, recomputed=again)
    with pytest.raises(UserError, match=r"0 tiles: give at least 1"):
        simulate_layer(operators, "intra", backward=True, num_tiles=0)
