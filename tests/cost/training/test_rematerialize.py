"""What is made again: the cheapest first, never more than the target asks, and what its absence saves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.roofline import Parts
from antiphon.cost.training.operators import layer_operators
from antiphon.cost.training.rematerialize import (
    CHEAP,
    Option,
    activations_of,
    choose,
    dense_bytes,
    needed_bytes,
    options,
    seconds,
    total_width,
)
from antiphon.cost.training.setup import LayerCase, TrainingSetup, layer_case
from tests.cost.training.specimens import round_training

DEAR = ("qkv_a2a", "fc1_out+fc3_out", "attn")


def case(**changes: object) -> LayerCase:
    return layer_case(round_training(), TrainingSetup(model_parallel=4, dispatch="all_gather", **changes))


def option(name: str, saved: float, spent: float, after: tuple[str, ...] = ()) -> Option:
    return Option(name=name, saved_bytes=saved, computation=Parts(memory_s=spent), after=after)


def test_cheap_options_are_the_papers_choice() -> None:
    one = case()
    found = {item.name: item for item in options(one, layer_operators(one))}
    assert set(found) == {*CHEAP, *DEAR}
    unit = 16 * 128 * 2  # a rank's rows, hidden size, bytes
    tensors = activations_of(one)
    saved = sum(float(found[name].saved_bytes) for name in CHEAP)
    assert saved == pytest.approx((total_width(tensors, "needed") - total_width(tensors, "kept")) * unit)
    assert float(found["ffn_in"].communication.total_s) > 0  # dispatched again
    assert found["fc1_out+fc3_out"].computation == layer_operators(one).products["experts_in"].forward


def test_tensor_parallel_experts_hold_whole_rows() -> None:
    """k rows a token on every rank instead of k / n: 2 * (4 - 1) widths more."""
    plain, tensor = needed_bytes(case()), needed_bytes(case(experts="tensor"))
    assert float(tensor - plain) == pytest.approx(2 * 3 * 16 * 128 * 2)


def test_tensor_parallel_attention_has_nothing_to_exchange_again() -> None:
    one = case(attention="tensor")
    assert "attn_a2a" not in {item.name for item in options(one, layer_operators(one))}


def test_dense_layers_hold_their_own() -> None:
    model = round_training().model
    widened = replace(
        model,
        moe_layers=(False, True, True, True),
        feed_forward=replace(model.feed_forward, dense_intermediate=512),
    )
    one = layer_case(round_training(widened), TrainingSetup(model_parallel=4))
    attention = 1 + 1 + 1.5 + 1 + 1 + 1 + 1  # hidden, ln1, queries keys values, attention twice, ln2 in and out
    assert float(dense_bytes(one)) == pytest.approx((attention + 3 * 512 / 128) * 16 * 128 * 2)


def test_overlap_makes_communication_and_memory_traffic_cheap() -> None:
    one = Option(name="x", saved_bytes=1.0, computation=Parts(memory_s=1.0), communication=Parts(scale_up_s=4.0))
    assert float(seconds(one, overlaps=False, overlap=0.75)) == pytest.approx(5)
    assert float(seconds(one, overlaps=True, overlap=0.75)) == pytest.approx(5 / 4)
    product = replace(one, computation=Parts(compute_s=1.0, fixed_s=1.0), communication=Parts())
    assert float(seconds(product, overlaps=True, overlap=0.75)) == pytest.approx(2), "products hide behind nothing"


def test_the_cheapest_first_until_the_target() -> None:
    available = (option("dear", 10.0, 10.0), option("cheap", 10.0, 1.0), option("after", 10.0, 0.1, after=("dear",)))
    choice = choose(available, np.asarray([0.0, 5.0, 15.0, 25.0, 99.0]), overlaps=False, overlap=0.0)
    assert [choice.chosen(index) for index in range(5)] == [
        (),
        ("cheap",),
        ("dear", "cheap"),
        ("dear", "cheap", "after"),
        ("dear", "cheap", "after"),
    ]
    assert choice.saved_bytes.tolist() == [0, 10, 20, 30, 30]
    spent = choice.computation.memory_s
    assert np.allclose(spent, [0, 1, 11, 11.1, 11.1])


def test_what_saves_nothing_is_left_alone() -> None:
    available = (option("nothing", 0.0, 0.0), option("a", 1.0, 1.0))
    assert choose(available, 5.0, overlaps=False, overlap=0.0).chosen(0) == ("a",)


def test_at_least_is_taken_without_a_target() -> None:
    available = (option("a", 1.0, 1.0), option("b", 1.0, 1.0))
    assert choose(available, 0.0, overlaps=False, overlap=0.0, at_least=("b",)).chosen(0) == ("b",)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10)), min_size=1, max_size=6),
    st.floats(0, 40),
)
def test_enough_is_saved_and_nothing_needless(pairs: list[tuple[float, float]], target: float) -> None:
    available = tuple(option(str(index), saved, spent) for index, (saved, spent) in enumerate(pairs))
    choice = choose(available, target, overlaps=False, overlap=0.0)
    saved = float(choice.saved_bytes[0])
    most = sum(saved for saved, _ in pairs)
    assert saved >= min(target, most) - 1e-9
    price = {str(index): spent / size for index, (size, spent) in enumerate(pairs)}
    left = set(price) - set(choice.chosen(0))
    assert all(price[taken] <= price[other] + 1e-9 for taken in choice.chosen(0) for other in left)
    if choice.chosen(0):
        highest = max(price[taken] for taken in choice.chosen(0))  # several may have it
        dearest = [float(available[int(taken)].saved_bytes) for taken in choice.chosen(0) if price[taken] == highest]
        assert saved - max(dearest) < target
