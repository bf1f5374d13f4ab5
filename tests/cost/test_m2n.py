"""M2N: message sizes, and the slower side. MegaScale-Infer section 4.2."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cost.exchange import expected_distinct
from antiphon.cost.network import Link, Side, m2n, message_bytes

LINK = Link(level="scale_out", bytes_per_s=100.0, latency_s=1.0, half_bytes=10.0)


def side(num_workers: int, tp: int = 1, link: Link = LINK) -> Side:
    return Side(num_workers=num_workers, tp=tp, link=link)


def test_the_paper_s_message_size() -> None:
    """Mixtral 8x22B, micro-batch 128, attention TP 2: 196,608 bytes from each attention GPU to each expert GPU."""
    rows_sent = 128 * expected_distinct(8, 2, 8)
    assert message_bytes(rows_sent / 8, 6144 * 2, 2, 1) == pytest.approx(196_608)
    assert message_bytes(rows_sent / 8, 6144 * 2, 2, 2) == pytest.approx(196_608)


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
    near, far = side(2, link=fast), side(2)
    there = m2n(near, far, rows_sent=8, rows_received=8, row_bytes=10)
    back = m2n(far, near, rows_sent=8, rows_received=8, row_bytes=10)
    assert (there.bound_by(), back.bound_by()) == ("scale-out network", "scale-out network")
    assert there.total_s == pytest.approx(back.total_s)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 512), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4), st.integers(1, 4))
def test_more_rows_or_less_bandwidth_never_faster(rows: int, n_a: int, n_e: int, tp_a: int, tp_e: int) -> None:
    def one_way(rows: float, rate: float) -> float:
        link = Link(level="scale_out", bytes_per_s=rate, latency_s=1e-6, half_bytes=64e3)
        senders, receivers = side(n_a, tp_a, link), side(n_e, tp_e, link)
        return float(m2n(senders, receivers, rows_sent=rows, rows_received=n_a * rows / n_e, row_bytes=8192).total_s)

    assert one_way(rows + 1, 1e10) >= one_way(rows, 1e10) >= one_way(rows, 2e10)
