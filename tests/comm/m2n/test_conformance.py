"""What every back-end of the M2N library does alike, seen through its Python interface.

One suite, run over each back-end; `loopback-shuffled` delivers late and in random order, so nothing here may rely on
an order of arrival. Sender and receiver are often driven by one thread in turn: then payloads are small, because large
ones need both ends at work. Kills of real processes are in test_kills.py.
"""

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from antiphon import _m2n
from antiphon.base.errors import Interrupted, NoCredit, PeerLost, PeerTimeout, Refused, UserError
from tests.comm.m2n.backends import BACKENDS, PATIENCE_S, SECRET, Backend, crew, need
from tests.waiting import wait_until

SHM = BACKENDS[0]
SEQUENCES = 4096  # of a slot, before they begin again
Bytes = NDArray[np.uint8]


class Net:
    """Endpoints of one test, which end with it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.endpoints: list[_m2n.Endpoint] = []
        self.held: list[_m2n.Outbox] = []  # an outbox that goes away is a lost source

    def endpoint(self, name: str, **arguments: Any) -> _m2n.Endpoint:
        self.endpoints.append(self.backend.endpoint(name, **arguments))
        return self.endpoints[-1]

    def receiver(self, sources: int = 1, slots: int = 2, slot_bytes: int = 64) -> "Receiver":
        return Receiver(self, self.endpoint("receiver"), sources, slots, slot_bytes)

    def pair(self, slots: int = 2, slot_bytes: int = 64) -> "tuple[_m2n.Inbox, _m2n.Outbox]":
        receiver = self.receiver(1, slots, slot_bytes)
        return receiver.inbox, receiver.connect(0)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


class Receiver:
    """An endpoint with one inbox, and how to reach it."""

    def __init__(self, net: Net, endpoint: _m2n.Endpoint, sources: int, slots: int, slot_bytes: int) -> None:
        self.net = net
        self.endpoint = endpoint
        self.inbox = endpoint.inbox(sources, slots, slot_bytes)
        self.ticket = endpoint.ticket(self.inbox)

    def connect(self, source: int) -> _m2n.Outbox:
        """From an endpoint of its own, named `sender[source]`."""
        return self.net.endpoint(f"sender[{source}]").connect(self.ticket, source, PATIENCE_S)

    def connect_all(self) -> list[_m2n.Outbox]:
        outboxes = [self.connect(source) for source in range(self.inbox.sources)]
        self.inbox.wait_connected(len(outboxes), PATIENCE_S)
        return outboxes


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every back-end that this build and this machine have."""
    return need(request.param)


@pytest.fixture
def net(backend: Backend) -> Iterator[Net]:
    made = Net(backend)
    yield made
    made.close()


@pytest.fixture
def shm() -> Iterator[Net]:
    """For what does not depend on the back-end."""
    made = Net(SHM)
    yield made
    made.close()


def pattern(source: int, step: int, length: int) -> Bytes:
    """Bytes that tell whose they are, and where in the message."""
    return (np.arange(length, dtype=np.uint32) * 31 + source * 101 + step * 17 + 1).astype(np.uint8)


def take(inbox: _m2n.Inbox, step: int, expect: int | Sequence[int] = 1) -> dict[int, bytes]:
    """Wait for a step, release it; its payloads by source."""
    inbox.wait(step, expect, PATIENCE_S)
    payloads = {message.source: bytes(message.payload) for message in inbox.messages(step)}
    inbox.release(step)
    return payloads


# --- one message


def test_a_message_carries_its_label(net: Net) -> None:
    inbox, outbox = net.pair()
    words = (0, 1, 2**32 - 1, 3, 4, 5, 6, 7)
    outbox.send(2**64 - 1, b"payload", user=words, participants=12)
    inbox.wait(2**64 - 1, 1, PATIENCE_S)
    (message,) = inbox.messages(2**64 - 1)
    assert (message.source, message.step, message.participants) == (0, 2**64 - 1, 12)
    assert message.user == words
    assert bytes(message.payload) == b"payload"
    assert message.payload.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        message.payload[0] = 1
    inbox.release(message.step)
    outbox.send(0, b"", user=[9])
    inbox.wait(0, 1, PATIENCE_S)
    (message,) = inbox.messages(0)
    assert (message.step, message.participants, message.user) == (0, 0, (9, *[0] * 7))
    assert len(message.payload) == 0
    with pytest.raises(UserError, match="9 user words: a header holds 8"):
        outbox.send(1, b"", user=range(9))


@pytest.mark.parametrize("slot_bytes", [1, 2, 63, 64, 65, 4096, 40_000])
def test_every_size_up_to_a_full_slot(net: Net, slot_bytes: int) -> None:
    inbox, outbox = net.pair(slots=2, slot_bytes=slot_bytes)
    for step, length in enumerate(sorted({0, 1, slot_bytes // 2, slot_bytes - 1, slot_bytes})):
        outbox.send(step, pattern(0, step, length), timeout_s=PATIENCE_S)
        assert take(inbox, step) == {0: pattern(0, step, length).tobytes()}


def test_a_slot_is_not_overrun(net: Net) -> None:
    inbox, outbox = net.pair(slots=2, slot_bytes=100)
    what = (
        r"a message of 101 bytes to receiver, whose slots hold 100: make the inbox with larger slots or split the mess"
    )
    with pytest.raises(UserError, match=what):
        outbox.send(0, bytes(101))
    assert len(outbox.slot()) == 100
    with pytest.raises(UserError, match=what):
        outbox.commit(0, 101)
    outbox.slot()[:] = 7
    outbox.commit(1, 100)
    assert take(inbox, 1) == {0: bytes([7]) * 100}
    assert inbox.partial(0) == ([], [0])
    outbox.wait_credits(2, PATIENCE_S)


def test_a_payload_is_written_in_place(net: Net) -> None:
    inbox, outbox = net.pair(slots=2, slot_bytes=32)
    with pytest.raises(UserError, match=r"commit without slot\(\)"):
        outbox.commit(0, 0)
    first = outbox.slot()
    assert outbox.slot().ctypes.data == first.ctypes.data, "the same slot until commit"
    assert outbox.credits == 2, "it is still free"
    first[:5] = pattern(0, 0, 5)
    outbox.commit(0, 5, user=[3], participants=1)
    second = outbox.slot()
    assert second.ctypes.data != first.ctypes.data
    second[:] = 9
    outbox.send(1, b"sent after all")  # takes the slot that was handed out
    with pytest.raises(UserError, match=r"commit without slot\(\)"):
        outbox.commit(1, 0)
    assert outbox.credits == 0
    assert inbox.wait_complete(PATIENCE_S) == 0
    assert take(inbox, 0) == {0: pattern(0, 0, 5).tobytes()}
    assert take(inbox, 1) == {0: b"sent after all"}
    outbox.wait_credits(2, PATIENCE_S)


def test_a_payload_is_anything_with_contiguous_bytes(net: Net) -> None:
    inbox, outbox = net.pair(slots=1, slot_bytes=64)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    for step, payload in enumerate([b"bytes", bytearray(b"array"), memoryview(b"view"), matrix, matrix[1:]]):
        outbox.send(step, payload, timeout_s=PATIENCE_S)
        assert take(inbox, step) == {0: bytes(memoryview(payload).cast("B"))}
    with pytest.raises((BufferError, ValueError)):
        outbox.send(9, matrix[:, ::2])
    with pytest.raises(TypeError):
        outbox.send(9, "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an array of Python objects holds addresses"):
        outbox.send(9, np.array([object()]))
    outbox.wait_credits(1, PATIENCE_S)


def test_a_payload_that_nobody_else_holds_lives_until_it_is_sent(net: Net) -> None:
    """Larger than what a kernel buffers: most of it is read long after `send` has returned."""
    num_bytes, steps = 12 << 20, 3
    receiver = net.receiver(1, 2, num_bytes)

    def send() -> None:
        outbox = receiver.connect(0)
        for step in range(steps):
            outbox.send(step, bytes([step + 1]) * num_bytes, timeout_s=PATIENCE_S)
            gc.collect()
            rubbish = [bytearray(b"\xee") * num_bytes for _ in range(2)]
            del rubbish
        outbox.wait_reusable(PATIENCE_S)
        outbox.wait_credits(2, PATIENCE_S)

    with crew() as threads:
        threads.start(send)
        for step in range(steps):
            time.sleep(0.05)
            receiver.inbox.wait(step, 1, PATIENCE_S)
            (message,) = receiver.inbox.messages(step)
            assert int(message.payload.min()) == int(message.payload.max()) == step + 1
            receiver.inbox.release(step)


def test_a_reusable_buffer_can_change(net: Net) -> None:
    num_bytes, steps = 3 << 20, 4
    receiver = net.receiver(1, 2, num_bytes)

    def send() -> None:
        outbox = receiver.connect(0)
        buffer = np.empty(num_bytes, np.uint8)
        for step in range(steps):
            buffer[:] = step + 1
            outbox.send(step, buffer, timeout_s=PATIENCE_S)
            outbox.wait_reusable(PATIENCE_S)
            buffer[:] = 0xEE
        outbox.wait_credits(2, PATIENCE_S)

    with crew() as threads:
        threads.start(send)
        for step in range(steps):
            receiver.inbox.wait(step, 1, PATIENCE_S)
            (message,) = receiver.inbox.messages(step)
            assert int(message.payload.min()) == int(message.payload.max()) == step + 1
            receiver.inbox.release(step)


# --- credits


def test_without_credit_nothing_is_sent_and_nothing_lost(net: Net) -> None:
    inbox, outbox = net.pair(slots=3)
    for step in range(3):
        outbox.send(step, bytes([step]))
    assert outbox.credits == 0
    with pytest.raises(NoCredit, match=r"sender\[0\] has no free slot of 3 \(peer receiver\) after 0 s") as caught:
        outbox.send(3, b"too much")
    assert caught.value.peers == ["receiver"]
    started = time.monotonic()
    with pytest.raises(NoCredit, match=r"after 0\.1 s"):
        outbox.slot(0.1)
    assert time.monotonic() - started >= 0.1
    with pytest.raises(PeerTimeout, match=r"wait for credits \(peer receiver\) after 0.05 s"):
        outbox.wait_credits(1, 0.05)
    with pytest.raises(PeerTimeout, match="wait for all credits"):
        _m2n.wait_all_credits([outbox], 0.05)
    assert take(inbox, 1) == {0: b"\x01"}
    outbox.wait_credits(1, PATIENCE_S)
    outbox.send(3, b"now")
    assert [take(inbox, step)[0] for step in (3, 2, 0)] == [b"now", b"\x02", b"\x00"]
    outbox.wait_credits(3, PATIENCE_S)
    _m2n.wait_all_credits([outbox], 0.0)
    assert outbox.counters()["credit_waits"] == 2
    with pytest.raises(UserError, match="waiting for 4 credits, receiver gives 3"):
        outbox.wait_credits(4, 0.0)


def test_credits_come_back_in_any_order(net: Net) -> None:
    chance = random.Random(1)
    slots = 7
    inbox, outbox = net.pair(slots=slots)
    held: list[int] = []
    for step in range(int(1500 * net.backend.scale)):
        outbox.send(step, pattern(0, step, step % 65), timeout_s=PATIENCE_S)
        held.append(step)
        while len(held) == slots or (held and chance.random() < 0.4):
            some = held.pop(chance.randrange(len(held)))
            assert take(inbox, some) == {0: pattern(0, some, some % 65).tobytes()}
    for step in held:
        take(inbox, step)
    outbox.wait_credits(slots, PATIENCE_S)


@pytest.mark.parametrize("slots", [1, 2])
def test_sequence_numbers_begin_again(net: Net, slots: int) -> None:
    """A slot is used more often than its sequence number can count, twice where that is quick."""
    inbox, outbox = net.pair(slots=slots, slot_bytes=8)
    rounds = SEQUENCES + 5 if net.backend.scale < 1 else 2 * SEQUENCES + 5
    for step in range(rounds):
        for slot in range(slots):
            outbox.send(step * slots + slot, step.to_bytes(8), timeout_s=PATIENCE_S)
        for slot in range(slots):
            assert take(inbox, step * slots + slot) == {0: step.to_bytes(8)}
    assert inbox.counters()[0]["messages"] == rounds * slots
    assert inbox.counters()[0]["rejected"] == 0


def test_the_most_slots(net: Net) -> None:
    slots = 256
    inbox, outbox = net.pair(slots=slots, slot_bytes=8)
    for turn in range(3):
        for step in range(slots):
            outbox.send(step, bytes([turn, step]), timeout_s=PATIENCE_S)
        with pytest.raises(NoCredit):
            outbox.send(slots, b"")
        for step in reversed(range(slots)):
            assert take(inbox, step) == {0: bytes([turn, step])}
        outbox.wait_credits(slots, PATIENCE_S)


def to_many(net: Net, num_receivers: int) -> tuple[list[Receiver], list[_m2n.Outbox]]:
    """Receivers of one source, two slots of 100 bytes, and one sender's outboxes to all of them."""
    receivers = [net.receiver(1, 2, 100) for _ in range(num_receivers)]
    sender = net.endpoint("sender")
    return receivers, [sender.connect(receiver.ticket, 0, PATIENCE_S) for receiver in receivers]


def test_one_sender_reaches_many_with_pieces_of_one_payload(net: Net) -> None:
    receivers, outboxes = to_many(net, 3)
    payload = pattern(0, 0, 150)
    pieces = [payload[:30], payload[30:130], payload[150:]]
    for step in range(5):
        for outbox, piece in zip(outboxes, pieces, strict=True):
            outbox.send(step, piece, participants=1, timeout_s=PATIENCE_S)
        for receiver, piece in zip(receivers, pieces, strict=True):
            assert receiver.inbox.wait_complete(PATIENCE_S) == step
            assert take(receiver.inbox, step) == {0: piece.tobytes()}
        _m2n.wait_all_credits(outboxes, PATIENCE_S)


def test_each_slot_comes_round_with_its_own_memory(net: Net) -> None:
    receivers, outboxes = to_many(net, 2)
    for step in range(2):
        for outbox in outboxes:
            outbox.slot(PATIENCE_S)[:1] = step + 1
            outbox.commit(step, 1)
    for receiver in receivers:
        assert [take(receiver.inbox, step) for step in (1, 0)] == [{0: b"\x02"}, {0: b"\x01"}]
    _m2n.wait_all_credits(outboxes, PATIENCE_S)


def test_a_view_of_a_slot_keeps_its_outbox(net: Net) -> None:
    (receiver,), outboxes = to_many(net, 1)
    slot = outboxes[0].slot(PATIENCE_S)
    slot[:] = 7
    outboxes[0].commit(0, 100)
    assert take(receiver.inbox, 0) == {0: bytes([7]) * 100}
    outboxes.clear()
    gc.collect()
    assert receiver.inbox.connected() == [0]
    del slot
    gc.collect()
    with pytest.raises(PeerLost):
        receiver.inbox.wait(1, 1, PATIENCE_S)


def test_one_wait_serves_the_outboxes_of_one_endpoint(net: Net) -> None:
    receiver = net.receiver(2, 2, 100)
    sender, other = net.endpoint("sender"), net.endpoint("other")
    mine, foreign = (each.connect(receiver.ticket, source, PATIENCE_S) for source, each in enumerate([sender, other]))
    _m2n.wait_all_credits([], 0.0)
    _m2n.wait_all_credits([mine, mine], 0.0)
    with pytest.raises(TypeError, match="None"):
        _m2n.wait_all_credits([mine, None], 0.0)  # type: ignore[list-item]
    with pytest.raises(UserError, match="outboxes of sender and of other: one wait serves those of one endpoint"):
        _m2n.wait_all_credits([mine, foreign], 0.0)


# --- waiting


def test_wait_by_number_and_by_set(net: Net) -> None:
    receiver = net.receiver(sources=3)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    inbox.wait(5, 0, 0.0)
    inbox.wait(5, [], 0.0)
    outboxes[2].send(5, b"two")
    inbox.wait(5, 1, PATIENCE_S)
    inbox.wait(5, [2], 0.0)
    inbox.wait(5, (2, 2), 0.0)
    inbox.wait(5, np.int64(1), 0.0)  # type: ignore[arg-type]
    inbox.wait(5, np.array([2]), 0.0)  # type: ignore[arg-type]
    for missing, names in [([0], "sender[0]"), ([2, 1, 0], "sender[0], sender[1]"), (3, "sender[0], sender[1]")]:
        with pytest.raises(PeerTimeout) as caught:
            inbox.wait(5, missing, 0.02)
        assert str(caught.value) == f"receiver wait for step 5: still waiting for {names} after 0.02 s"
        assert caught.value.peers == names.split(", ")
    outboxes[0].send(5, b"zero")
    inbox.wait(5, 2, PATIENCE_S)
    outboxes[1].send(5, b"one")
    inbox.wait(5, {0, 1, 2}, PATIENCE_S)  # type: ignore[arg-type]
    assert take(inbox, 5, 3) == {0: b"zero", 1: b"one", 2: b"two"}
    for bad, words in [(4, "4 sources are expected"), (-1, "-1 sources"), ([3], "source 3"), ([-1], "source -1")]:
        with pytest.raises(UserError, match=f"{words}.*: the inbox has 3"):
            inbox.wait(6, bad, 0.0)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"a timeout of .* s: it must be 0 to 1e9"):
            inbox.wait(6, 1, seconds)


def test_steps_are_told_apart_whatever_comes_first(net: Net) -> None:
    receiver = net.receiver(sources=2, slots=4)
    outboxes = receiver.connect_all()
    steps = [7, 2**63, 3, 0]
    for step in steps:
        outboxes[0].send(step, pattern(0, step % 97, 9))
    for step in reversed(steps):
        outboxes[1].send(step, pattern(1, step % 97, 5))
    for step in (3, 2**63, 0, 7):
        expected = {0: pattern(0, step % 97, 9).tobytes(), 1: pattern(1, step % 97, 5).tobytes()}
        assert take(receiver.inbox, step, 2) == expected
    assert receiver.inbox.messages(3) == []
    receiver.inbox.release(12345)  # nothing is here of it


def test_a_complete_step_is_returned_once(net: Net) -> None:
    receiver = net.receiver(sources=3, slots=4)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    assert inbox.wait_complete(0.0) is None
    outboxes[0].send(10, b"", participants=2)
    outboxes[0].send(11, b"", participants=1)
    outboxes[1].send(12, b"", participants=0)  # does not say
    assert inbox.wait_complete(PATIENCE_S) == 11
    assert inbox.wait_complete(0.02) is None
    outboxes[1].send(10, b"", participants=2)
    assert inbox.wait_complete(PATIENCE_S) == 10
    outboxes[2].send(12, b"", participants=2)
    assert inbox.wait_complete(PATIENCE_S) == 12
    assert inbox.wait_complete(0.02) is None
    for step, sources in [(10, [0, 1]), (11, [0]), (12, [1, 2])]:
        assert [message.source for message in inbox.messages(step)] == sources
        inbox.release(step)
    outboxes[2].send(12, b"again", participants=1)
    assert inbox.wait_complete(PATIENCE_S) == 12
    inbox.release(12)
    outboxes[2].send(13, b"", participants=1)
    inbox.wait(13, 1, PATIENCE_S)
    inbox.release(13)
    assert inbox.wait_complete(0.02) is None, "it was released before it could be returned"


def test_random_participants_are_all_served(net: Net) -> None:
    """Every step has senders of its own; they send in random orders; each step is returned once, with all of them."""
    chance = random.Random(2)
    sources, slots = 4, 3
    num_steps = int(400 * net.backend.scale)
    receiver = net.receiver(sources=sources, slots=slots)
    senders_of = {step: chance.sample(range(sources), chance.randint(1, sources)) for step in range(num_steps)}

    def send(source: int) -> None:
        outbox = receiver.connect(source)
        net.held.append(outbox)
        for step in range(num_steps):
            if source in senders_of[step]:
                label = {"participants": len(senders_of[step]), "timeout_s": PATIENCE_S}
                outbox.send(step, pattern(source, step, (step * 7 + source) % 65), **label)
        outbox.wait_credits(slots, PATIENCE_S)

    with crew() as threads:
        for source in range(sources):
            threads.start(send, source)
        seen = []
        while len(seen) < num_steps:
            step = receiver.inbox.wait_complete(PATIENCE_S)
            assert step is not None
            seen.append(step)
            expected = {s: pattern(s, step, (step * 7 + s) % 65).tobytes() for s in senders_of[step]}
            assert take(receiver.inbox, step, senders_of[step]) == expected
    assert sorted(seen) == list(range(num_steps))


def test_steps_that_nobody_asks_for_leave_no_trace(net: Net) -> None:
    """Announced, waited for by number and released, far more often than anything has room for."""
    inbox, outbox = net.pair(slots=2)
    for step in range(200):
        outbox.send(step, b"", participants=1, timeout_s=PATIENCE_S)
        take(inbox, step)
    outbox.send(500, b"", participants=1, timeout_s=PATIENCE_S)
    outbox.send(501, b"", participants=1, timeout_s=PATIENCE_S)
    inbox.wait(500, 1, PATIENCE_S)
    inbox.wait(501, 1, PATIENCE_S)
    assert {inbox.wait_complete(PATIENCE_S), inbox.wait_complete(PATIENCE_S)} == {500, 501}
    assert inbox.wait_complete(0.02) is None


def test_what_has_begun_is_listed(net: Net) -> None:
    receiver = net.receiver(sources=3, slots=4)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    assert inbox.partial(1) == ([], [0, 1, 2])
    assert inbox.incomplete() == []
    outboxes[1].send(1, b"", participants=3)
    outboxes[1].send(2, b"", participants=1)
    outboxes[1].send(3, b"")
    for step in (1, 2, 3):
        inbox.wait(step, 1, PATIENCE_S)
    time.sleep(0.03)
    ((step, age_s),) = inbox.incomplete()
    assert step == 1
    assert 0.03 <= age_s < PATIENCE_S
    assert inbox.partial(1) == ([1], [0, 2])
    outboxes[0].send(1, b"", participants=3)
    outboxes[2].send(1, b"", participants=3)
    inbox.wait(1, 3, PATIENCE_S)
    assert inbox.incomplete() == []
    assert inbox.partial(1) == ([0, 1, 2], [])


def test_one_source_is_released(net: Net) -> None:
    receiver = net.receiver(sources=3, slots=1)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    for source, outbox in enumerate(outboxes):
        outbox.send(1, bytes([source]), participants=3)
    inbox.wait(1, 3, PATIENCE_S)
    inbox.release(1, 1)
    outboxes[1].wait_credits(1, PATIENCE_S)
    assert [outbox.credits for outbox in outboxes] == [0, 1, 0]
    assert [message.source for message in inbox.messages(1)] == [0, 2]
    assert inbox.incomplete() == [], "it was complete"
    inbox.release(1, 1)
    inbox.release(1)
    for outbox in outboxes:
        outbox.wait_credits(1, PATIENCE_S)
    for source in (3, 65536):
        with pytest.raises(UserError, match=f"source {source}: the inbox has 3"):
            inbox.release(1, source)


def test_discarded_steps_are_counted_and_return_their_credits(net: Net) -> None:
    inbox, outbox = net.pair(slots=4)
    for step in (1, 2, 9):
        outbox.send(step, b"", participants=1)
        inbox.wait(step, 1, PATIENCE_S)
    inbox.discard_below(5)
    assert inbox.counters()[0]["stale"] == 2
    outbox.wait_credits(3, PATIENCE_S)
    outbox.send(4, b"late", participants=1)  # from now on, too
    outbox.wait_reusable(PATIENCE_S)
    wait_until(lambda: inbox.partial(4) == ([], [0]) and outbox.credits == 3, "the credit of a late message")
    assert inbox.counters()[0]["stale"] == 3
    inbox.discard_below(2)  # never backwards
    outbox.send(4, b"late", participants=1)
    wait_until(lambda: inbox.incomplete() == [] and outbox.credits == 3, "the credit of a late message")
    assert inbox.wait_complete(PATIENCE_S) == 9
    assert inbox.wait_complete(0.02) is None
    assert take(inbox, 9) == {0: b""}
    assert inbox.counters()[0]["stale"] == 4


# --- many at once


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(3, 2), (2, 5), (1, 7), (7, 1), (4, 4)])
def test_odd_numbers_of_senders_and_receivers(net: Net, num_senders: int, num_receivers: int) -> None:
    """Uneven sizes, sent in three ways, held for random times, checked byte by byte."""
    slots, slot_bytes = 3, 3000
    num_steps = max(6, int(60 * net.backend.scale))
    receivers = [net.receiver(num_senders, slots, slot_bytes) for _ in range(num_receivers)]

    def length(source: int, receiver: int, step: int) -> int:
        return random.Random(f"{source} {receiver} {step}").choice([0, 1, 64, 777, slot_bytes])

    def send(source: int) -> None:
        endpoint = net.endpoint(f"sender[{source}]")
        outboxes = [endpoint.connect(receiver.ticket, source, PATIENCE_S) for receiver in receivers]
        for step in range(num_steps):
            parts = [pattern(source, step + i, length(source, i, step)) for i in range(num_receivers)]
            for outbox, part in zip(outboxes, parts, strict=True):
                if step % 2 == 0:
                    outbox.send(step, part, timeout_s=PATIENCE_S)
                else:
                    outbox.slot(PATIENCE_S)[: len(part)] = part
                    outbox.commit(step, len(part))
        _m2n.wait_all_credits(outboxes, PATIENCE_S)
        # An outbox that goes away is a lost source: not before everybody is done.
        done.wait(PATIENCE_S)

    def receive(index: int) -> None:
        inbox = receivers[index].inbox
        chance = random.Random(index)
        held: list[int] = []
        for step in range(num_steps):
            inbox.wait(step, num_senders, PATIENCE_S)
            messages = inbox.messages(step)
            assert [message.source for message in messages] == list(range(num_senders))
            for message in messages:
                expected = pattern(message.source, step + index, length(message.source, index, step))
                assert np.array_equal(message.payload, expected)
            held.append(step)
            while len(held) == slots or (held and chance.random() < 0.6):
                inbox.release(held.pop(chance.randrange(len(held))))
        for step in held:
            inbox.release(step)
        finished.release()

    done, finished = threading.Event(), threading.Semaphore(0)
    with crew() as threads:
        for source in range(num_senders):
            threads.start(send, source)
        for index in range(num_receivers):
            threads.start(receive, index)
        for _ in range(num_receivers):
            if not finished.acquire(timeout=3 * PATIENCE_S):
                break
        done.set()


def test_inboxes_of_one_endpoint_do_not_mix(net: Net) -> None:
    """Equal source numbers, equal steps, one thread that waits for either."""
    endpoint = net.endpoint("receiver")
    inboxes = [endpoint.inbox(2, slots, 64) for slots in (1, 3)]
    sender = net.endpoint("sender")
    outboxes = [sender.connect(endpoint.ticket(inbox), 1, PATIENCE_S) for inbox in inboxes]
    for step in range(20):
        for which, outbox in enumerate(outboxes):
            outbox.send(step, pattern(which, step, 20), timeout_s=PATIENCE_S)
            with pytest.raises(PeerTimeout):
                inboxes[1 - which].wait(step + 100 * which, [1], 0.0)
        for which in (1, 0) if step % 2 else (0, 1):
            assert take(inboxes[which], step, [1]) == {1: pattern(which, step, 20).tobytes()}
    assert [inbox.connected() for inbox in inboxes] == [[1], [1]]
    assert [inbox.counters()[1]["messages"] for inbox in inboxes] == [20, 20]
    assert [outbox.slots for outbox in outboxes] == [1, 3]


def test_both_ways_at_once(net: Net) -> None:
    """Endpoints that are sender and receiver, in a circle; credits of one direction travel beside data of the other."""
    num_ends, num_steps = 3, int(200 * net.backend.scale)
    ends = [net.receiver(num_ends, 2, 5000) for _ in range(num_ends)]
    barrier = threading.Barrier(num_ends)

    def run(index: int) -> None:
        # An end also sends to itself.
        outboxes = [ends[index].endpoint.connect(other.ticket, index, PATIENCE_S) for other in ends]
        barrier.wait(PATIENCE_S)
        for step in range(num_steps):
            for outbox in outboxes:
                outbox.send(step, pattern(index, step, 10 * (step % 500)), timeout_s=PATIENCE_S)
            received = take(ends[index].inbox, step, num_ends)
            assert received == {s: pattern(s, step, 10 * (step % 500)).tobytes() for s in range(num_ends)}
        _m2n.wait_all_credits(outboxes, PATIENCE_S)
        barrier.wait(PATIENCE_S)

    with crew() as threads:
        for index in range(num_ends):
            threads.start(run, index)


def test_an_endpoint_talks_to_itself(net: Net) -> None:
    receiver = net.receiver(1, 2, 64)
    outbox = receiver.endpoint.connect(receiver.ticket, 0, PATIENCE_S)
    for step in range(50):
        outbox.send(step, pattern(0, step, step), timeout_s=PATIENCE_S)
        assert take(receiver.inbox, step) == {0: pattern(0, step, step).tobytes()}


@pytest.mark.parametrize("waiting", ["poll", "spin", "block"])
def test_every_way_to_wait(net: Net, waiting: str) -> None:
    num_steps = 60 if waiting != "poll" else 10
    ends = [net.endpoint(name, waiting=waiting, spin_s=20e-6) for name in ("a", "b")]
    assert ends[0].waiting == waiting
    inboxes = [end.inbox(1, 1, 64) for end in ends]
    tickets = [end.ticket(inbox) for end, inbox in zip(ends, inboxes, strict=True)]

    def run(me: int) -> None:
        outbox = ends[me].connect(tickets[1 - me], 0, PATIENCE_S)
        for step in range(num_steps):
            if me == step % 2:
                outbox.send(step, b"ball", timeout_s=PATIENCE_S)
            else:
                assert take(inboxes[me], step) == {0: b"ball"}
        inboxes[me].wait_connected(1, PATIENCE_S)
        outbox.wait_credits(1, PATIENCE_S)
        barrier.wait(PATIENCE_S)

    barrier = threading.Barrier(2)
    with crew() as threads:
        threads.start(run, 0)
        threads.start(run, 1)


# --- who is there


def test_connections_are_waited_for(net: Net) -> None:
    receiver = net.receiver(sources=3)
    inbox = receiver.inbox
    assert inbox.connected() == []
    with pytest.raises(
        PeerTimeout, match=r"receiver wait for connections: .* source 2 \(never connected\) after 0.02 s"
    ):
        inbox.wait_connected([2], 0.02)
    with crew() as threads:
        outboxes: list[_m2n.Outbox] = []
        threads.start(lambda: (time.sleep(0.05), outboxes.append(receiver.connect(2))))
        inbox.wait_connected([2], PATIENCE_S)
    assert inbox.connected() == [2]
    inbox.wait_connected(1, 0.0)
    with pytest.raises(PeerTimeout) as caught:
        inbox.wait_connected(2, 0.02)
    assert caught.value.peers == ["source 0 (never connected)", "source 1 (never connected)"]
    with pytest.raises(UserError, match="4 sources are expected: the inbox has 3"):
        inbox.wait_connected(4, 0.0)


def test_expected_names_are_used_before_anybody_connects(shm: Net) -> None:
    endpoint = shm.endpoint("experts[0]")
    inbox = endpoint.inbox(2, 1, 64, ["attention[0]", "attention[1]"])
    with pytest.raises(PeerTimeout, match=r"still waiting for attention\[1\] after") as caught:
        inbox.wait(0, [1], 0.0)
    assert caught.value.peers == ["attention[1]"]
    outbox = shm.endpoint("somebody else").connect(endpoint.ticket(inbox), 1, PATIENCE_S)
    with pytest.raises(PeerTimeout, match="somebody else"):
        inbox.wait(0, [1], 0.0)
    del outbox
    with pytest.raises(UserError, match="1 names for 2 sources: give one for each, or none"):
        endpoint.inbox(2, 1, 64, ["one"])


def test_a_late_joiner_is_waited_for(net: Net) -> None:
    receiver = net.receiver(sources=2)
    first = receiver.connect(0)

    def come_later() -> None:
        time.sleep(0.1)
        outbox = receiver.connect(1)
        outbox.send(4, b"late")
        outbox.wait_credits(2, PATIENCE_S)

    with crew() as threads:
        threads.start(come_later)
        first.send(4, b"early")
        assert take(receiver.inbox, 4, 2) == {0: b"early", 1: b"late"}


def test_a_closed_endpoint_is_lost_to_its_receivers(net: Net) -> None:
    receiver = net.receiver(sources=2)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    with crew() as threads:
        threads.start(lambda: (time.sleep(0.05), net.endpoints[1].close()))
        with pytest.raises(PeerLost) as caught:
            inbox.wait(1, [0, 1], PATIENCE_S)
    assert str(caught.value) == "lost sender[0]: closed its endpoint"
    assert (caught.value.peer, caught.value.reason) == ("sender[0]", "closed its endpoint")
    with pytest.raises(PeerLost):
        inbox.wait(1, 2, PATIENCE_S)
    with pytest.raises(PeerTimeout):
        inbox.wait(1, 1, 0.02)  # the other one may still come
    with pytest.raises(PeerTimeout):
        inbox.wait(1, [1], 0.02)
    assert inbox.connected() == [1]
    row = inbox.counters()[0]
    assert (row["state"], row["name"], row["reason"]) == ("lost", "sender[0]", "closed its endpoint")
    with pytest.raises(PeerLost, match=r"sender\[0\]"):
        inbox.wait_complete(PATIENCE_S)
    assert inbox.wait_complete(0.02) is None, "said once"
    assert [outbox.lost for outbox in outboxes] == [True, False]


@pytest.mark.parametrize("lost", range(3))
def test_whoever_of_many_is_lost_ends_the_wait_for_all(net: Net, lost: int) -> None:
    # A back-end may sleep on one of those it waits for; it must hear of the others' losses all the same.
    receiver = Receiver(net, net.endpoint("receiver", waiting="block"), 3, 2, 64)
    outboxes = receiver.connect_all()
    outboxes[(lost + 1) % 3].send(0, b"here", timeout_s=PATIENCE_S)
    with crew() as threads:
        threads.start(lambda: (time.sleep(0.05), net.endpoints[1 + lost].close()))
        with pytest.raises(PeerLost, match=rf"lost sender\[{lost}\]: closed its endpoint"):
            receiver.inbox.wait(0, 3, PATIENCE_S)
    assert len(receiver.inbox.messages(0)) == 1


@pytest.mark.parametrize("lost", range(3))
def test_whoever_of_many_is_lost_ends_the_wait_for_all_credits(net: Net, lost: int) -> None:
    receivers = [Receiver(net, net.endpoint(f"receiver[{number}]"), 1, 1, 64) for number in range(3)]
    sender = net.endpoint("sender", waiting="block")
    outboxes = [sender.connect(receiver.ticket, 0, PATIENCE_S) for receiver in receivers]
    for outbox in outboxes:
        outbox.send(0, b"never taken", timeout_s=PATIENCE_S)
    with crew() as threads:
        threads.start(lambda: (time.sleep(0.05), receivers[lost].endpoint.close()))
        with pytest.raises(PeerLost, match=rf"lost receiver\[{lost}\]: closed its endpoint"):
            _m2n.wait_all_credits(outboxes, PATIENCE_S)


def test_a_closed_endpoint_is_lost_to_its_senders(net: Net) -> None:
    receiver = net.receiver(sources=1, slots=1)
    outbox = receiver.connect(0)
    outbox.send(0, b"never taken")
    assert not outbox.lost
    with crew() as threads:
        threads.start(lambda: (time.sleep(0.05), receiver.endpoint.close()))
        with pytest.raises(PeerLost, match="lost receiver: closed its endpoint"):
            outbox.send(1, b"", timeout_s=PATIENCE_S)
    assert outbox.lost
    calls: list[Callable[[], Any]] = [
        outbox.slot,
        lambda: outbox.send(1, b""),
        lambda: outbox.wait_credits(1, PATIENCE_S),
        lambda: _m2n.wait_all_credits([outbox], PATIENCE_S),
    ]
    for call in calls:
        with pytest.raises(PeerLost, match="lost receiver: closed its endpoint"):
            call()


def test_after_its_own_close_an_endpoint_sends_and_receives_nothing(net: Net) -> None:
    receiver, other = net.receiver(), net.receiver()
    outbox = other.connect(0)
    outbox_here = net.endpoints[0].connect(other.ticket, 0, PATIENCE_S)
    del outbox
    outbox_to_it = receiver.connect(0)
    receiver.inbox.wait_connected(1, PATIENCE_S)
    net.endpoints[0].close()
    net.endpoints[0].close()
    assert outbox_here.lost
    wait_until(lambda: outbox_to_it.lost, "the other side hears of it")
    with pytest.raises(PeerLost, match="lost receiver: this endpoint was closed"):
        outbox_here.send(0, b"")
    with pytest.raises(PeerLost, match=r"lost sender\[0\]: "):
        receiver.inbox.wait(0, 1, PATIENCE_S)
    for wait in (
        lambda: receiver.inbox.wait_complete(PATIENCE_S),
        lambda: receiver.inbox.wait_connected(1, PATIENCE_S),
    ):
        with pytest.raises((PeerLost, UserError), match=r"receiver is closed: nothing can arrive|lost sender\[0\]"):
            wait()
    with pytest.raises(UserError, match="receiver is closed: it cannot receive"):
        receiver.endpoint.inbox(1, 1, 1)
    with pytest.raises(UserError, match="receiver is closed: it cannot connect"):
        receiver.endpoint.connect(other.ticket, 0, PATIENCE_S)
    with pytest.raises(UserError, match="receiver is closed: it has no tickets to give"):
        receiver.endpoint.ticket(receiver.inbox)
    assert receiver.endpoint.control_counters()["accepted"] == 1


def test_a_dropped_outbox_is_a_lost_source(net: Net) -> None:
    receiver = net.receiver(sources=1)
    outbox = receiver.connect(0)
    receiver.inbox.wait_connected(1, PATIENCE_S)
    del outbox
    with pytest.raises(PeerLost, match=r"lost sender\[0\]: "):
        receiver.inbox.wait(0, 1, PATIENCE_S)
    again = net.endpoints[1].connect(receiver.ticket, 0, PATIENCE_S)
    again.send(0, b"back")
    assert take(receiver.inbox, 0) == {0: b"back"}


def test_what_a_lost_source_had_sent_still_counts(net: Net) -> None:
    receiver = net.receiver(sources=2, slots=3)
    inbox = receiver.inbox
    outboxes = receiver.connect_all()
    outboxes[0].send(1, b"one", participants=1)
    outboxes[0].send(2, b"two", participants=2)
    outboxes[0].wait_reusable(PATIENCE_S)
    if net.backend.holds_back:
        inbox.wait(1, 1, PATIENCE_S)
        inbox.wait(2, 1, PATIENCE_S)
    net.endpoints[1].close()
    wait_until(lambda: inbox.connected() == [1], "the loss")
    inbox.wait(1, [0], 0.0)
    inbox.wait(2, [0], 0.0)
    outboxes[1].send(2, b"rest", participants=2)
    inbox.wait(2, [0, 1], PATIENCE_S)
    assert inbox.wait_complete(0.0) == 1, "what was complete comes before the bad news"
    with pytest.raises(PeerLost):
        inbox.wait_complete(PATIENCE_S)
    assert inbox.wait_complete(0.0) == 2
    assert take(inbox, 1) == {0: b"one"}
    assert take(inbox, 2, 2) == {0: b"two", 1: b"rest"}
    with pytest.raises(PeerLost):
        inbox.wait(3, [0], PATIENCE_S)


def test_busy_sources_do_not_hide_a_loss(net: Net) -> None:
    """There is always a complete step of somebody else, and still the loss is told."""
    receiver = net.receiver(sources=2, slots=8)
    inbox = receiver.inbox
    lost, busy = receiver.connect_all()
    lost.send(1000, b"", participants=1)
    inbox.wait(1000, 1, PATIENCE_S)
    for step in range(3):
        busy.send(step, b"", participants=1, timeout_s=PATIENCE_S)
        inbox.wait(step, 1, PATIENCE_S)
    net.endpoints[1].close()
    wait_until(lambda: inbox.connected() == [1], "the loss")
    seen: list[int | str | None] = []
    for step in range(3, 20):
        busy.send(step, b"", participants=1, timeout_s=PATIENCE_S)
        inbox.wait(step, 1, PATIENCE_S)
        try:
            seen.append(inbox.wait_complete(PATIENCE_S))
            inbox.release(seen[-1])  # type: ignore[arg-type]
        except PeerLost:
            seen.append("lost")
            break
    assert seen == [1000, 0, 1, 2, "lost"], "after what was complete before it, before what was completed later"


def test_losses_that_are_known_are_not_told(net: Net) -> None:
    receiver = net.receiver(sources=2)
    outboxes = receiver.connect_all()
    net.endpoints[1].close()
    wait_until(lambda: receiver.inbox.connected() == [1], "the loss")
    receiver.inbox.forget_losses()
    assert receiver.inbox.wait_complete(0.02) is None
    receiver.inbox.drop(1)
    assert receiver.inbox.connected() == []
    assert receiver.inbox.wait_complete(0.02) is None
    with pytest.raises(PeerLost, match=r"lost sender\[1\]: dropped"):
        receiver.inbox.wait(0, [1], PATIENCE_S)
    with pytest.raises(UserError, match="source 2: the inbox has 2"):
        receiver.inbox.drop(2)
    outboxes.append(receiver.connect(1))
    outboxes[-1].send(0, b"")
    receiver.inbox.wait(0, [1], PATIENCE_S)


def test_a_new_incarnation_replaces_the_old_one(net: Net) -> None:
    receiver = net.receiver(sources=2, slots=2)
    inbox = receiver.inbox
    old, bystander = receiver.connect_all()
    old.send(1, b"old one", participants=2)
    old.send(2, b"old two", participants=1)
    bystander.send(1, b"bystander", participants=2)
    inbox.wait(1, 2, PATIENCE_S)
    inbox.wait(2, 1, PATIENCE_S)
    views = [message.payload for step in (1, 2) for message in inbox.messages(step) if message.source == 0]
    before = inbox.counters()[0]["incarnation"]
    new = receiver.connect(0)
    assert {message.source for message in inbox.messages(1)} == {0, 1}, "what a wait promised stays until the next one"
    wait_until(lambda: inbox.partial(1)[0] == [1], "the old messages go")
    assert inbox.messages(2) == []
    assert inbox.counters()[0]["incarnation"] != before
    assert inbox.counters()[0]["lost"] == 1
    new.send(1, b"new one", participants=2)
    assert inbox.wait_complete(PATIENCE_S) == 1, "complete again, and not returned before"
    assert take(inbox, 1, 2) == {0: b"new one", 1: b"bystander"}
    assert inbox.wait_complete(0.02) is None
    with pytest.raises(PeerLost):
        wait_until(lambda: bool(old.send(3, b"late", timeout_s=0.05)), "the old one hears of it")
    for step in (7, 8, 9):
        new.send(step, pattern(0, step, 60), timeout_s=PATIENCE_S)
        assert take(inbox, step) == {0: pattern(0, step, 60).tobytes()}
    assert inbox.messages(3) == []
    assert [bytes(view) for view in views] == [b"old one", b"old two"], "memory lives as long as its views"
    bystander.wait_credits(2, PATIENCE_S)


def test_many_incarnations_use_up_nothing(net: Net) -> None:
    receiver = net.receiver(sources=1, slots=2, slot_bytes=100_000)
    endpoint = net.endpoint("sender[0]")

    def live_and_die(step: int) -> None:
        outbox = endpoint.connect(receiver.ticket, 0, PATIENCE_S)
        outbox.send(step, pattern(0, step, 1000), participants=1)
        assert take(receiver.inbox, step) == {0: pattern(0, step, 1000).tobytes()}
        outbox.send(step + 1, b"left behind")

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for step in range(0, 40, 2):
        live_and_die(step)
    before, resident = descriptors(), psutil.Process().memory_info().rss
    for step in range(40, 240, 2):
        live_and_die(step)
    wait_until(lambda: descriptors() <= before, "all descriptors of the old incarnations are closed")
    assert psutil.Process().memory_info().rss - resident < 4 << 20
    assert int(receiver.inbox.counters()[0]["lost"]) >= 118


# --- strangers


def test_a_wrong_secret_is_refused_on_both_sides(net: Net) -> None:
    receiver = net.receiver()
    for secret in (b"", b"guess", SECRET + b"!"):
        stranger = net.endpoint("stranger", secret=secret)
        with pytest.raises(Refused, match="secret"):
            stranger.connect(receiver.ticket, 0, PATIENCE_S)
    assert receiver.inbox.connected() == []
    counters = receiver.endpoint.control_counters()
    assert counters["accepted"] == 0
    outbox = receiver.connect(0)
    outbox.send(0, b"friend")
    assert take(receiver.inbox, 0) == {0: b"friend"}


def test_a_ticket_is_checked(net: Net) -> None:
    receiver = net.receiver(sources=3)
    sender = net.endpoint("sender")
    for source in (-1, 3, 4096, 2**40):
        with pytest.raises(UserError, match=f"source {source}: the inbox of receiver has 3"):
            sender.connect(receiver.ticket, source, PATIENCE_S)
    for broken in (b"", b"no ticket", receiver.ticket[:-1], receiver.ticket + b"x", bytes(200)):
        with pytest.raises(UserError):
            sender.connect(broken, 0, PATIENCE_S)
    other = _m2n.Endpoint("other", "shm" if net.backend.transport != "shm" else "tcp", secret=SECRET)
    net.endpoints.append(other)
    with pytest.raises(UserError, match="give both the same transport"):
        other.connect(receiver.ticket, 0, PATIENCE_S)


def test_a_ticket_of_an_earlier_run_is_refused(net: Net) -> None:
    receiver = net.receiver()
    sender = net.endpoint("sender")
    receiver.endpoint.close()
    with pytest.raises((Refused, PeerTimeout), match="receiver"):
        sender.connect(receiver.ticket, 0, 0.3)


def test_a_refused_hello_costs_nobody_his_place(shm: Net) -> None:
    """The receiver has no memory for a second incarnation: the first one stays."""
    script = """
import resource
from antiphon import _m2n
from antiphon.base.errors import Refused

SHM_BYTES = 1 << 30
receiver = _m2n.Endpoint("receiver")
inbox = receiver.inbox(1, 1, SHM_BYTES)
ticket = receiver.ticket(inbox)
sender = _m2n.Endpoint("sender")
first = sender.connect(ticket, 0, 10.0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + SHM_BYTES // 2, resource.RLIM_INFINITY))
try:
    sender.connect(ticket, 0, 10.0)
except Refused as error:
    print(error)
first.send(1, b"still here")
inbox.wait(1, 1, 10.0)
print(bytes(inbox.messages(1)[0].payload).decode())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    refusal, message = done.stdout.splitlines()
    assert "receiver" in refusal
    assert "Cannot allocate memory" in refusal
    assert message == "still here"


def test_impossible_endpoints_and_inboxes_are_refused(shm: Net) -> None:
    with pytest.raises(UserError, match="transport is carrier pigeon: it must be shm, tcp, libfabric or loopback"):
        _m2n.Endpoint("x", "carrier pigeon")
    with pytest.raises(UserError, match="waiting is often: it must be auto, poll, spin or block"):
        _m2n.Endpoint("x", waiting="often")
    for option in ("spin_s", "heartbeat_s", "dead_after_s"):
        for seconds in (float("nan"), float("inf"), -1.0):
            with pytest.raises(UserError, match=f"{option} of .* s: it must be 0 to 1e9"):
                _m2n.Endpoint("x", **{option: seconds})  # type: ignore[arg-type]
    endpoint = shm.endpoint("x")
    with pytest.raises(UserError, match="an inbox of another endpoint than x"):
        endpoint.ticket(shm.endpoint("y").inbox(1, 1, 64))
    for arguments, words in [
        ((0, 1, 1), "sources is 0: it must be 1 to 4096"),
        ((4097, 1, 1), "sources is 4097"),
        ((1, 0, 1), "slots is 0: it must be 1 to 256"),
        ((1, 257, 1), "slots is 257"),
        ((1, 1, 0), "slot bytes is 0: it must be 1 to 4294967296"),
        ((1, 1, 2**32 + 1), "slot bytes is 4294967297"),
    ]:
        with pytest.raises(UserError, match=words):
            endpoint.inbox(*arguments)


# --- interrupts


def waits_of(net: Net) -> list[tuple[str, _m2n.Endpoint, Callable[[], Any]]]:
    """Everything that can wait, and whose endpoint ends the wait."""
    receiver = net.receiver(sources=2, slots=1)
    outbox = receiver.connect(0)
    outbox.send(0, b"")
    sender, inbox = net.endpoints[1], receiver.inbox
    net.held.append(outbox)
    return [
        ("wait", receiver.endpoint, lambda: inbox.wait(1, 1, PATIENCE_S)),
        ("wait set", receiver.endpoint, lambda: inbox.wait(1, [0], PATIENCE_S)),
        ("wait_complete", receiver.endpoint, lambda: inbox.wait_complete(PATIENCE_S)),
        ("wait_connected", receiver.endpoint, lambda: inbox.wait_connected(2, PATIENCE_S)),
        ("send", sender, lambda: outbox.send(1, b"", timeout_s=PATIENCE_S)),
        ("slot", sender, lambda: outbox.slot(PATIENCE_S)),
        ("wait_credits", sender, lambda: outbox.wait_credits(1, PATIENCE_S)),
        ("wait_all_credits", sender, lambda: _m2n.wait_all_credits([outbox], PATIENCE_S)),
    ]


def test_any_wait_can_be_interrupted(net: Net) -> None:
    for name, endpoint, wait in waits_of(net):
        for before_s in (0.0, 0.02):
            with crew() as threads:
                threads.start(lambda e=endpoint, s=before_s: (time.sleep(s), e.interrupt()))
                started = time.monotonic()
                with pytest.raises(Interrupted, match="the wait was interrupted"):
                    wait()
                assert time.monotonic() - started < PATIENCE_S / 2, name


def test_an_interrupt_waits_for_the_next_wait_and_disturbs_nothing_else(net: Net) -> None:
    inbox, outbox = net.pair(slots=2)
    sender = net.endpoints[1]
    sender.interrupt()
    outbox.send(1, b"not a wait")
    outbox.slot()[:3] = 1
    outbox.commit(2, 3)
    assert take(inbox, 1) == {0: b"not a wait"}
    assert take(inbox, 2) == {0: b"\x01\x01\x01"}
    wait_until(lambda: outbox.credits == 2, "both credits")
    for step in (3, 4):
        outbox.send(step, b"", timeout_s=PATIENCE_S)
    with pytest.raises(Interrupted):
        outbox.send(5, b"", timeout_s=PATIENCE_S)
    with pytest.raises(NoCredit):
        outbox.send(5, b"", timeout_s=0.02)


@pytest.mark.parametrize("which", ["wait", "wait_complete", "send"])
def test_a_signal_ends_a_wait(net: Net, which: str) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm

    (wait,) = [wait for name, _, wait in waits_of(net) if name == which]
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        started = time.monotonic()
        with pytest.raises(Alarm):
            wait()
        assert time.monotonic() - started < PATIENCE_S / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# --- numbers


def test_counters_and_histograms_add_up(net: Net) -> None:
    receiver = net.receiver(sources=2, slots=2, slot_bytes=1000)
    outboxes = receiver.connect_all()
    num_steps = 50
    for step in range(num_steps):
        for source, outbox in enumerate(outboxes):
            outbox.send(step, pattern(source, step, 10 * source + step), timeout_s=PATIENCE_S)
        take(receiver.inbox, step, 2)
    for outbox in outboxes:
        outbox.wait_credits(2, PATIENCE_S)
    for source, (outbox, row) in enumerate(zip(outboxes, receiver.inbox.counters(), strict=True)):
        num_bytes = sum(10 * source + step for step in range(num_steps))
        assert (row["name"], row["state"], row["messages"]) == (f"sender[{source}]", "live", num_steps)
        assert (row["bytes"], row["stale"], row["rejected"], row["lost"]) == (num_bytes, 0, 0, 0)
        counters = outbox.counters()
        assert (counters["peer"], counters["messages"], counters["bytes"]) == ("receiver", num_steps, num_bytes)
        assert counters["credits"] == 2
        assert sum(outbox.credit_histogram()) == num_steps
    assert sum(receiver.inbox.wait_histogram()) == num_steps
    counters = receiver.endpoint.control_counters()
    assert (counters["accepted"], counters["rejected"], counters["gone"]) == (2, 0, 0)
    net.endpoints[1].close()
    wait_until(lambda: receiver.endpoint.control_counters()["gone"] == 1, "the loss is counted")


def test_long_waits_are_in_the_right_bucket(shm: Net) -> None:
    inbox, outbox = shm.pair()
    with crew() as threads:
        threads.start(lambda: (time.sleep(0.05), outbox.send(0, b"")))
        inbox.wait(0, 1, PATIENCE_S)
    histogram = inbox.wait_histogram()
    (bucket,) = [index for index, count in enumerate(histogram) if count]
    assert 2**bucket <= PATIENCE_S * 1e9
    assert 2 ** (bucket + 1) > 0.04 * 1e9
    time.sleep(0.03)
    inbox.release(0)
    outbox.wait_credits(2, PATIENCE_S)
    (bucket,) = [index for index, count in enumerate(outbox.credit_histogram()) if count]
    assert 2 ** (bucket + 1) > 0.03 * 1e9


@pytest.mark.slow
def test_a_million_messages_need_no_more_memory(net: Net) -> None:
    """Small ones, over many slots; the resident memory after a tenth of them is that of the end.

    Pools that are touched for the first time late may add a megabyte or two, once. A leak adds at least malloc's
    smallest piece, 32 bytes, for every message: the bound lies between.
    """
    slots, total = 32, 1_000_000
    inbox, outbox = net.pair(slots=slots, slot_bytes=64)
    payload = pattern(0, 0, 24)
    resident = 0
    for first in range(0, total, slots):
        for step in range(first, first + slots):
            outbox.send(step, payload, (), 1, PATIENCE_S)
        for step in range(first, first + slots):
            inbox.wait(step, 1, PATIENCE_S)
            inbox.release(step)
        if resident == 0 and first > total // 10:
            gc.collect()
            resident = psutil.Process().memory_info().rss
    gc.collect()
    growth = psutil.Process().memory_info().rss - resident
    assert inbox.counters()[0]["messages"] >= total
    assert growth < 8 * total, f"{growth} bytes more"


def test_every_back_end_of_the_build_is_tested() -> None:
    assert set(_m2n.transports()) <= {backend.transport for backend in BACKENDS}
