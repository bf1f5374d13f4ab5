"""ACKs behind data or ahead of it: single packets by hand, bytes conserved, and what priority brings."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.sim.links import Message, Traffic, Wire, simulate_traffic


def ping_pong(num_pairs: int, size_bytes: int, **options: object) -> Traffic:
    """Attention and expert workers send to each other at the same time."""
    attention, experts = ([f"{role}[{i}]" for i in range(num_pairs)] for role in ("attention", "experts"))
    there = [Message(source=a, target=e, size_bytes=size_bytes) for a in attention for e in experts]
    back = [Message(source=m.target, target=m.source, size_bytes=size_bytes) for m in there]
    return simulate_traffic([*there, *back], Wire(**({"bytes_per_s": 25e9, "latency_s": 1e-6} | options)))


def test_one_packet_by_hand() -> None:
    """1,000 bytes at 1,000 bytes/s, latency 2: out 0-1, in 3-4, ack of 100 bytes out 4-4.1, in 6.1-6.2."""
    traffic = simulate_traffic(
        [Message(source="a", target="b", size_bytes=1000)], Wire(bytes_per_s=1000, latency_s=2, ack_bytes=100)
    )
    assert traffic.delivered_s == [pytest.approx(4.0)]
    assert traffic.acknowledged_s == [pytest.approx(6.2)]
    assert (traffic.data_bytes, traffic.ack_bytes) == ({"a": 1000, "b": 0}, {"a": 0, "b": 100})


def test_window_stalls_by_hand() -> None:
    """Two packets of 1 s, window 1: the second waits for the first one's ACK at 6.2."""
    wire = Wire(bytes_per_s=1000, latency_s=2, ack_bytes=100, packet_bytes=1000, window_packets=1)
    traffic = simulate_traffic([Message(source="a", target="b", size_bytes=2000, post_s=1.0)], wire)
    assert traffic.delivered_s == [pytest.approx(1 + 6.2 + 4)]


def test_ack_waits_behind_data_or_not() -> None:
    """b sends 6 packets of its own from 0 to 6; a's single packet has arrived at 4. Its ACK leaves b at 6 and passes
    a's incoming wire after b's last packet, at 9; or it leaves at 4 and waits there for one packet only, until 7."""
    messages = [
        Message(source="a", target="b", size_bytes=1000),
        Message(source="b", target="a", size_bytes=6000, post_s=0.0),
    ]
    ends = []
    for ack_first in (False, True):
        wire = Wire(bytes_per_s=1000, latency_s=2, ack_bytes=100, packet_bytes=1000, ack_first=ack_first)
        ends.append(simulate_traffic(messages, wire).acknowledged_s[0])
    assert ends == [pytest.approx(9.1), pytest.approx(7.1)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 40_000), st.floats(0, 1e-5)), max_size=5),
    st.integers(1, 4),
    st.integers(0, 6),
    st.booleans(),
)
def test_bytes_are_conserved_and_times_possible(
    drawn: list[tuple[int, int, int, float]], per_ack: int, more: int, ack_first: bool
) -> None:
    messages = [Message(source=f"n{s}", target=f"n{t}", size_bytes=b, post_s=p) for s, t, b, p in drawn if s != t]
    wire = Wire(
        bytes_per_s=25e9, latency_s=1e-6, packets_per_ack=per_ack, window_packets=per_ack + more, ack_first=ack_first
    )
    traffic = simulate_traffic(messages, wire)
    assert sum(traffic.data_bytes.values()) == sum(message.size_bytes for message in messages)
    num_acks = sum(math.ceil(math.ceil(message.size_bytes / 4096) / per_ack) for message in messages)
    assert sum(traffic.ack_bytes.values()) == num_acks * wire.ack_bytes
    busy_s = traffic.run.busy_s()
    for endpoint in traffic.data_bytes:
        carried = traffic.data_bytes[endpoint] + traffic.ack_bytes[endpoint]
        assert busy_s.get(f"{endpoint} out", 0.0) == pytest.approx(carried / 25e9, rel=1e-9, abs=1e-15)
    for message, delivered_s, known_s in zip(messages, traffic.delivered_s, traffic.acknowledged_s, strict=True):
        assert delivered_s >= message.post_s + message.size_bytes / 25e9 + 1e-6
        assert known_s >= delivered_s + 1e-6


@pytest.mark.parametrize("num_pairs", [1, 3])
def test_priority_for_acks_helps_where_the_window_binds(num_pairs: int) -> None:
    """256 KiB both ways, 16 packets unacknowledged: at least a tenth less latency, the same bytes on the wire."""
    behind, ahead = (ping_pong(num_pairs, 262_144, window_packets=16, ack_first=first) for first in (False, True))
    assert max(ahead.acknowledged_s) < 0.9 * max(behind.acknowledged_s)
    assert (ahead.data_bytes, ahead.ack_bytes) == (behind.data_bytes, behind.ack_bytes)


def test_one_way_traffic_does_not_care() -> None:
    """Nothing but ACKs travels back: their class makes no difference."""
    messages = [Message(source="a", target=f"e{i}", size_bytes=100_000) for i in range(3)]
    ends = [
        simulate_traffic(messages, Wire(bytes_per_s=25e9, latency_s=1e-6, ack_first=first)).acknowledged_s
        for first in (False, True)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match=r"message of 0 bytes from a to b"):
        Message(source="a", target="b", size_bytes=0)
    with pytest.raises(UserError, match=r"two different endpoints"):
        Message(source="a", target="a", size_bytes=1)
    with pytest.raises(UserError, match=r"one ACK for 8 packets, but the window is 4"):
        Wire(bytes_per_s=1, latency_s=0, packets_per_ack=8, window_packets=4)
    with pytest.raises(UserError, match=r"bytes_per_s is 0"):
        Wire(bytes_per_s=0, latency_s=0)
    assert simulate_traffic([], Wire(bytes_per_s=1, latency_s=0)).acknowledged_s == []
