"""Communication volumes: by hand, and by moving every element of a small layer."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import expected_distinct
from antiphon.cost.training.counts import (
    expert_parallel_volume,
    layer_ratio,
    sequence_to_tensor_ratio,
)


def tensor_parallel_volume(degree: float) -> float:
    """MegaScale-MoE eq. 1 (attention) and eq. 4 (feed-forward): 2 (n - 1) / n."""
    return 2 * (degree - 1) / degree


def sequence_parallel_volume(degree: float, heads_per_kv_head: float) -> float:
    """MegaScale-MoE eq. 2: 2 (n - 1) / n * (2 + 2/m) / n with m query heads per key/value head.

    Twice what a rank sends when it is counted as eq. 1, 3 and 4 count: see `sequence_parallel_sent`."""
    return 2 * (degree - 1) / degree * (2 + 2 / heads_per_kv_head) / degree


def sequence_parallel_sent(degree: float, heads_per_kv_head: float) -> float:
    """Eq. 2 counted element by element: (n - 1) / n of a rank's 1/n of queries, keys, values (1 + 2/m) and output (1).
    Half of eq. 2; time is computed from this one."""
    return (degree - 1) / degree * (2 + 2 / heads_per_kv_head) / degree


def test_tensor_parallel_by_hand() -> None:
    assert tensor_parallel_volume(8) == pytest.approx(2 * 7 / 8)
    assert tensor_parallel_volume(1) == 0


def test_equations_by_hand() -> None:
    assert sequence_parallel_volume(8, 4) == pytest.approx(2 * 7 / 8 * 2.5 / 8)
    assert expert_parallel_volume(8, 2) == pytest.approx(2 * 2 / 8 * 7 / 8)


def test_ulysses_sends_half_of_equation_2() -> None:
    """Eq. 1 and 3 count what a rank sends; eq. 2, counted the same way, is twice too much."""
    tokens, heads, kv_heads, head_dim, degree = 16, 8, 2, 4, 2
    sent = 0
    for token, head in itertools.product(range(tokens), range(heads)):
        sent += (token * degree // tokens != head * degree // heads) * head_dim * 2  # the query's way, the output's
    for token, head in itertools.product(range(tokens), range(kv_heads)):
        sent += (token * degree // tokens != head * degree // kv_heads) * head_dim * 2  # key and value
    per_rank = sent / degree / (tokens * heads * head_dim)
    assert per_rank == pytest.approx(float(sequence_parallel_sent(degree, heads / kv_heads)))
    assert sequence_parallel_volume(degree, 4) == pytest.approx(2 * per_rank)


def test_distinct_ranks() -> None:
    assert expected_distinct(64, 6, 8) == pytest.approx(4.54, abs=5e-3)
    assert expected_distinct(128, 8, 8) == pytest.approx(5.34, abs=5e-3)
    assert expected_distinct(8, 2, 8) == pytest.approx(2)  # one expert a rank: nothing to save


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 128), st.integers(1, 16), st.integers(1, 16))
def test_ratios_are_positive_and_arrays_agree(degree: int, heads_per_kv: int, top_k: int) -> None:
    assert float(sequence_to_tensor_ratio(degree, heads_per_kv)) > 0
    both = sequence_parallel_volume(degree, heads_per_kv) + expert_parallel_volume(degree, top_k)
    assert both / (2 * tensor_parallel_volume(degree)) == pytest.approx(float(layer_ratio(degree, heads_per_kv, top_k)))
    column = layer_ratio(np.asarray([degree, degree]), heads_per_kv, top_k)
    assert column[0] == column[1] == pytest.approx(float(layer_ratio(degree, heads_per_kv, top_k)))
