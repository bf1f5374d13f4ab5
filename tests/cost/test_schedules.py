"""Overlap in colocated layers: by hand, and never slower than serial."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cost.ping_pong import beside_dispatch_s, two_batches_s

SECONDS = st.floats(0, 10)


def test_by_hand() -> None:
    # halves of 3 s arithmetic and 2 s exchange: 6 s of arithmetic count, of 10; all hidden or half of it.
    assert two_batches_s(3, 2, 1.0) == 6
    assert two_batches_s(3, 2, 0.5) == 8
    assert two_batches_s(1, 4, 1.0) == 8, "the wire counts"
    # a shared expert of 1 s beside the first half of an exchange of 1.6 s
    assert beside_dispatch_s(10, 1, 1.6, 1.0) == pytest.approx(9.2)
    assert beside_dispatch_s(10, 1, 1.6, 0.5) == pytest.approx(9.6)


@given(SECONDS, SECONDS, st.floats(0, 1))
def test_never_slower_than_both_halves_one_after_the_other(computed: float, exchange: float, overlap: float) -> None:
    together = two_batches_s(computed, exchange, overlap)
    assert max(2 * computed, 2 * exchange) * (1 - 1e-12) <= together <= 2 * (computed + exchange) * (1 + 1e-12)
