"""Lina: all-to-all beside all-reduce, chunks, pipelining, packing, eq. 1."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.training.contention import (
    devices_per_expert,
    fair_sharing_end,
    longest_wait,
    pack_experts,
    pipelined_layer,
    pipelining_efficiency,
    slowdown,
)


def test_fair_sharing_by_hand() -> None:
    """All-reduce 8 from 0, all-to-all 4 from 2: both until 10 at half speed, then 2 of all-reduce alone."""
    first, second = fair_sharing_end(8.0, 4.0, 2.0)
    assert (float(first), float(second)) == (12, 10)
    first, second = fair_sharing_end(2.0, 4.0, 3.0)
    assert (float(first), float(second)) == (2, 7)


def test_fair_sharing_of_figure_7() -> None:
    """All-reduce 7.9 from 4.1, all-to-all 7.6 from 5.7: 1.83 times slower, the median that Figure 3 measures.

    The run drawn in Figure 7a has 17.7 instead of 19.6: both transfers together took less than their sum."""
    first, second = fair_sharing_end(7.9, 7.6, 1.6)
    assert 4.1 + float(first) == pytest.approx(18.3)
    assert 4.1 + float(second) == pytest.approx(19.6)
    assert float(slowdown(7.6, 7.9, 1.6)) == pytest.approx(1.83, abs=0.005)


TIMES = st.floats(1e-3, 100)


@settings(max_examples=50, deadline=None)
@given(TIMES, TIMES, st.floats(0, 100))
def test_the_link_is_never_idle_and_never_overbooked(first: float, second: float, start: float) -> None:
    ends = [float(end) for end in fair_sharing_end(first, second, start)]
    work_done_by = max(first, start) + second if first <= start else first + second
    assert max(ends) == pytest.approx(work_done_by)
    assert 1 - 1e-6 <= float(slowdown(second, first, start)) <= 2 + 1e-6


def test_chunks_shorten_the_wait() -> None:
    assert float(longest_wait(7.9, 150e6, 30e6)) == pytest.approx(1.58)
    assert float(longest_wait(7.9, 20e6, 30e6)) == pytest.approx(7.9)


def test_pipelining_hides_the_feed_forward() -> None:
    """7.6 and 1.6 in one piece, then in four: all but a quarter of the feed-forward disappears."""
    assert float(pipelined_layer(7.6, 1.6, 1)) == pytest.approx(9.2)
    assert float(pipelined_layer(7.6, 1.6, 4)) == pytest.approx(8.0)


@settings(max_examples=50, deadline=None)
@given(TIMES, TIMES, st.integers(1, 64))
def test_a_pipeline_by_running_it(sent: float, computed: float, chunks: int) -> None:
    arrived = ended = 0.0
    for _ in range(chunks):
        arrived += sent / chunks
        ended = max(ended, arrived) + computed / chunks
    assert float(pipelined_layer(sent, computed, chunks)) == pytest.approx(ended)


def test_table_3_of_lina() -> None:
    """33% (then 86%, four experts a device), 34% (79%, two) and 36% (85%, two): ours are full, 73% and 77%."""
    alone = float(pipelining_efficiency(3.0, 1.0))
    assert alone == pytest.approx(1 / 3)
    packed = pack_experts(16, 16, 3.0, 1.0)
    assert packed.experts_per_device == 4
    assert packed.efficiency == 1
    for before, measured in ((0.34, 0.79), (0.36, 0.85)):
        two = pack_experts(16, 16, 1.0, before, limit=2)
        assert two.efficiency == pytest.approx(2 * before * 15 / 14)
        assert two.efficiency == pytest.approx(measured, abs=0.09)


def test_packing_odd_numbers() -> None:
    assert pack_experts(2, 2, 5.0, 1.0).all_to_all_s == 0  # all experts on every device: data parallelism
    assert pack_experts(1, 1, 5.0, 1.0).experts_per_device == 1
    assert pack_experts(5, 5, 100.0, 1.0).experts_per_device == 4
    with pytest.raises(UserError, match="0 experts on 3 devices"):
        pack_experts(0, 3, 1.0, 1.0)


def test_equation_1_by_hand() -> None:
    popularity = [[0.5, 0.5, 0.0], [0.7, 0.1, 0.2]]
    assert devices_per_expert(popularity, 4).tolist() == pytest.approx([2.4, 1.2, 0.4])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 64), st.integers(0, 2**31))
def test_equation_1_hands_out_all_devices(tokens: int, experts: int, devices: int, seed: int) -> None:
    draws = np.random.default_rng(seed).random((tokens, experts)) + 1e-9
    shares = devices_per_expert(draws / draws.sum(axis=1, keepdims=True), devices)
    assert shares.sum() == pytest.approx(devices)
    assert (shares >= 0).all()


def test_equation_1_refuses_nonsense() -> None:
    with pytest.raises(UserError, match="one row per token"):
        devices_per_expert([], 4)
    with pytest.raises(UserError, match="below 0"):
        devices_per_expert([[1.5, -0.5]], 4)
