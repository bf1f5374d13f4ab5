"""M2N: distinct destinations, message sizes, and the slower side. MegaScale-Infer section 4.2."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.dispatch import expected_distinct, probability_of_none
from antiphon.cost.network import Link, Side, m2n, message_bytes
from antiphon.cost.parts import Number, Parts

LINK = Link(level="scale_out", bytes_per_s=100.0, latency_s=1.0, half_bytes=10.0)


def side(num_workers: int, tp: int = 1, link: Link = LINK) -> Side:
    return Side(num_workers=num_workers, tp=tp, link=link)


def exchanged_rows(
    attention: Side, experts: Side, batch: Number, num_experts: Number, top_k: Number, busiest: Number = 1.0
) -> tuple[Number, Number]:
    """(rows one attention worker sends in all, rows the busiest expert worker receives in all), each row counted once
    per destination; no worker receives a row twice."""
    sent = batch * expected_distinct(num_experts, top_k, experts.num_workers)
    all_rows = attention.num_workers * np.asarray(batch)
    received: Number = np.minimum(attention.num_workers * sent / experts.num_workers * busiest, all_rows)
    return sent, received


def dispatch(
    attention: Side,
    experts: Side,
    *,
    batch: Number,
    num_experts: Number,
    top_k: Number,
    row_bytes: Number,
    busiest: Number = 1.0,
    fixed_s: Number = 0.0,
) -> Parts:
    """Attention to experts, `batch` rows per attention worker. `busiest`: rows of the busiest expert worker over the
    mean (1: balanced)."""
    rows_sent, rows_received = exchanged_rows(attention, experts, batch, num_experts, top_k, busiest)
    return m2n(
        attention, experts, rows_sent=rows_sent, rows_received=rows_received, row_bytes=row_bytes, fixed_s=fixed_s
    )


def combine(
    attention: Side,
    experts: Side,
    *,
    batch: Number,
    num_experts: Number,
    top_k: Number,
    row_bytes: Number,
    busiest: Number = 1.0,
    fixed_s: Number = 0.0,
) -> Parts:
    """Experts to attention: each worker returns one weighted sum per row that it was sent."""
    rows_back, rows_to_busiest = exchanged_rows(attention, experts, batch, num_experts, top_k, busiest)
    return m2n(
        experts, attention, rows_sent=rows_to_busiest, rows_received=rows_back, row_bytes=row_bytes, fixed_s=fixed_s
    )


def test_the_paper_s_message_size() -> None:
    """Mixtral 8x22B, micro-batch 128, attention TP 2: 196,608 bytes from each attention GPU to each expert GPU."""
    rows_sent, _ = exchanged_rows(side(4, tp=2), side(8), batch=128, num_experts=8, top_k=2)
    assert message_bytes(rows_sent / 8, 6144 * 2, 2, 1) == pytest.approx(196_608)
    assert message_bytes(rows_sent / 8, 6144 * 2, 2, 2) == pytest.approx(196_608)


def test_expected_distinct_by_hand() -> None:
    # 4 experts, top 2, 2 workers of 2: the second expert is on the first one's worker with probability 1/3.
    assert expected_distinct(4, 2, 2) == pytest.approx(1 / 3 * 1 + 2 / 3 * 2)
    assert expected_distinct(8, 2, 8) == pytest.approx(2), "one expert per worker: k destinations"
    assert expected_distinct(8, 2, 1) == pytest.approx(1)
    assert expected_distinct(8, 8, 4) == pytest.approx(4)
    # The closed form of DeepSeek-V3 on 32 workers.
    assert expected_distinct(256, 8, 32) == pytest.approx(32 * (1 - math.comb(248, 8) / math.comb(256, 8)))


@pytest.mark.parametrize(("experts", "top_k", "workers"), [(5, 2, 3), (7, 3, 2), (6, 2, 6), (5, 5, 3), (8, 3, 5)])
def test_expected_distinct_equals_enumeration(experts: int, top_k: int, workers: int) -> None:
    base, extra = divmod(experts, workers)
    owner = [w for w in range(workers) for _ in range(base + (w < extra))]
    counts = [len({owner[e] for e in chosen}) for chosen in itertools.combinations(range(experts), top_k)]
    mean = sum(counts) / len(counts)
    assert expected_distinct(experts, top_k, workers) == pytest.approx(mean)


def test_probability_of_none_for_many_at_once() -> None:
    both = probability_of_none(8, np.array([1.0, 2.0]), np.array([2.0, 7.0]))
    np.testing.assert_allclose(both, [6 / 8, 0.0])


def test_one_way_by_hand() -> None:
    # 2 senders, 3 receivers: each sender has 3 messages of 40 bytes, (40 + 10) / 100 s each, and latency 1 s.
    # A receiver gets 2 messages of 60 bytes: 1 + 2 * 0.7.
    slower = m2n(side(2), side(3), rows_sent=12, rows_received=12, row_bytes=10)
    assert slower.scale_out_s == pytest.approx(max(1 + 3 * 0.5, 1 + 2 * 0.7))
    busy = m2n(side(2), side(3), rows_sent=12, rows_received=24, row_bytes=10, fixed_s=0.25)
    assert busy.total_s == pytest.approx(1 + 2 * 1.3 + 0.25)
    assert m2n(side(2), side(3), rows_sent=0, rows_received=0, row_bytes=10).total_s == 0


def test_each_device_sends_its_share() -> None:
    # Attention TP 2 to expert TP 1: a device sends half of each row, an expert device gets 2 pieces from each worker.
    parts = m2n(side(1, tp=2), side(1), rows_sent=8, rows_received=8, row_bytes=10)
    assert parts.total_s == pytest.approx(1 + 2 * (40 + 10) / 100)
    # TP 2 to TP 2: device to device, one piece each.
    parts = m2n(side(1, tp=2), side(1, tp=2), rows_sent=8, rows_received=8, row_bytes=10)
    assert parts.total_s == pytest.approx(1 + (40 + 10) / 100)
    # TP 3 to TP 2, which does not divide: 3 pieces, so 2 messages per expert device.
    parts = m2n(side(1, tp=3), side(1, tp=2), rows_sent=6, rows_received=6, row_bytes=10)
    assert parts.total_s == pytest.approx(1 + 2 * (15 + 10) / 100)


def test_the_slower_link_counts() -> None:
    fast = Link(level="scale_up", bytes_per_s=1000.0, latency_s=0.0, half_bytes=0.0)
    there = dispatch(side(2, link=fast), side(2), batch=5, num_experts=4, top_k=2, row_bytes=10)
    back = combine(side(2, link=fast), side(2), batch=5, num_experts=4, top_k=2, row_bytes=10)
    assert (there.bound_by(), back.bound_by()) == ("scale-out network", "scale-out network")
    assert there.total_s == pytest.approx(back.total_s)


def test_skew_burdens_the_busiest_receiver_but_no_row_comes_twice() -> None:
    arguments = {"batch": 10, "num_experts": 4, "top_k": 2}
    _, even = exchanged_rows(side(3), side(2), **arguments)
    _, skewed = exchanged_rows(side(3), side(2), **arguments, busiest=1.1)
    _, most = exchanged_rows(side(3), side(2), **arguments, busiest=50.0)
    assert even == pytest.approx(3 * 10 * (5 / 3) / 2)
    assert skewed == pytest.approx(1.1 * even)
    assert most == 30


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.data())
def test_more_workers_never_fewer_destinations(experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    workers = np.arange(1, experts + 1, dtype=float)
    distinct = np.asarray(expected_distinct(experts, top_k, workers))
    assert np.all(np.diff(distinct) >= -1e-9)
    assert np.all(distinct <= np.minimum(workers, top_k) + 1e-9)
    assert np.all(distinct >= 1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 512), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4))
def test_more_rows_or_less_bandwidth_never_faster(batch: int, n_a: int, n_e: int, tp_a: int, tp_e: int) -> None:
    def one_way(batch: float, rate: float) -> float:
        link = Link(level="scale_out", bytes_per_s=rate, latency_s=1e-6, half_bytes=64e3)
        return float(
            dispatch(
                side(n_a, tp_a, link), side(n_e, tp_e, link), batch=batch, num_experts=16, top_k=4, row_bytes=8192
            ).total_s
        )

    assert one_way(batch + 1, 1e10) >= one_way(batch, 1e10) >= one_way(batch, 2e10)
