"""Unequal loads: shares, the expected maximum, and the barrier."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.skew import (
    barrier_factor,
    expected_max_normal,
    expected_max_rows,
    expected_max_rows_of,
    fullest_part,
    zipf_shares,
)


def test_zipf_shares_by_hand() -> None:
    # 1, 1/2, 1/3 over 11/6.
    np.testing.assert_allclose(zipf_shares(3, 1.0), [6 / 11, 3 / 11, 2 / 11])
    np.testing.assert_allclose(zipf_shares(5, 0.0), 0.2)
    with pytest.raises(UserError, match="exponent is -1"):
        zipf_shares(3, -1)
    with pytest.raises(UserError, match="0 experts"):
        zipf_shares(0, 1)


def test_expected_maximum_of_normals_is_the_known_one() -> None:
    np.testing.assert_allclose(
        expected_max_normal(np.array([1, 2, 3, 10, 100])), [0, 0.56419, 0.84628, 1.53875, 2.50759], atol=2e-5
    )
    assert expected_max_normal(2) == pytest.approx(np.pi**-0.5, abs=1e-5)


def test_barrier_by_hand() -> None:
    assert barrier_factor(1, 0.3) == 1
    assert barrier_factor(2, 0.3) == pytest.approx(1 + 0.3 * 0.56419, abs=1e-5)
    assert barrier_factor(64, 0.0) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.floats(0, 2))
def test_more_workers_wait_no_less(num_workers: int, cv: float) -> None:
    assert barrier_factor(num_workers + 1, cv) >= barrier_factor(num_workers, cv) >= 1


def test_fullest_worker_against_chance() -> None:
    generator = np.random.default_rng(3)
    for rows, workers in ((512, 4), (512, 16), (100, 3)):
        drawn = generator.multinomial(rows, np.full(workers, 1 / workers), size=4000).max(axis=1).mean()
        assert expected_max_rows(rows, workers) == pytest.approx(drawn, rel=0.03)
    skewed = np.array([0.4, 0.3, 0.2, 0.1])
    drawn = generator.multinomial(200, skewed, size=4000).max(axis=1).mean()
    assert expected_max_rows_of(200.0, skewed) == pytest.approx(drawn, rel=0.03)
    tied = np.array([0.3, 0.3, 0.3, 0.1])
    drawn = generator.multinomial(200, tied, size=4000).max(axis=1).mean()
    assert expected_max_rows_of(200.0, tied) == pytest.approx(drawn, rel=0.03)


@pytest.mark.parametrize(("rows", "workers", "expected"), [(0, 4, 0), (1, 16, 1), (7, 1, 7), (0.5, 4, 0.5)])
def test_fullest_worker_of_few_rows(rows: float, workers: int, expected: float) -> None:
    assert expected_max_rows(rows, workers) == expected


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1e5), st.integers(1, 300))
def test_fullest_worker_lies_between_mean_and_all(rows: float, workers: int) -> None:
    fullest = expected_max_rows(rows, workers)
    assert rows / workers <= fullest * (1 + 1e-9)
    assert fullest <= rows


@pytest.mark.parametrize(("tokens", "parts", "experts", "top_k"), [(16, 2, 32, 4), (4, 4, 32, 4), (64, 8, 64, 6)])
def test_fullest_part_against_chance(tokens: int, parts: int, experts: int, top_k: int) -> None:
    drawn = np.argsort(np.random.default_rng(5).random((2000, tokens, experts)))[..., :top_k]
    by_part = np.stack([(drawn // (experts // parts) == part).sum((1, 2)) for part in range(parts)], axis=1)
    hit = np.zeros((2000, experts), dtype=bool)
    hit[np.arange(2000)[:, None], drawn.reshape(2000, -1)] = True
    touched = hit.reshape(2000, parts, -1).sum(2)
    busiest, widest = fullest_part(tokens, parts, num_experts=experts, top_k=top_k)
    assert busiest == pytest.approx(by_part.max(1).mean() / by_part.mean(), rel=0.02)
    assert widest == pytest.approx(touched.max(1).mean() / touched.mean(), rel=0.02)


@pytest.mark.parametrize(("parts", "experts", "top_k"), [(1, 32, 4), (4, 8, 8), (1, 1, 1)])
def test_parts_that_cannot_differ_are_even(parts: int, experts: int, top_k: int) -> None:
    assert fullest_part(10, parts, num_experts=experts, top_k=top_k) == (1, 1)


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 1e5), st.integers(1, 16), st.integers(1, 8))
def test_fullest_part_lies_between_mean_and_all(tokens: float, parts: int, top_k: int) -> None:
    busiest, widest = fullest_part(tokens, parts, num_experts=16, top_k=top_k)
    assert 1 <= busiest <= parts
    assert 1 <= widest <= parts * (1 + 1e-9)
