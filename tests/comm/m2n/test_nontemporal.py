"""Copies past the caches (csrc/m2n/nontemporal_copy.h): of messages over shared memory, once slots have left them.

The copy itself and the rule are tested in native_core/nontemporal_cases.cpp.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from antiphon import _m2n
from antiphon.base.errors import UserError
from tests.comm.m2n.backends import BACKENDS, PATIENCE_S, Backend, by_name, need

SHM = by_name("shm")[0]
OTHERS = [backend for backend in BACKENDS if backend is not SHM]
SLOT_BYTES = 10_001


@contextmanager
def pair(backend: Backend, cache_bytes: int | None) -> Iterator[tuple[_m2n.Inbox, _m2n.Outbox]]:
    """One sender with two slots, of whose machine the caches are said to hold so much."""
    options = backend.options()
    options.cache_bytes = cache_bytes
    receiver, sender = (backend.endpoint(name, options=options) for name in ("receiver", "sender"))
    try:
        inbox = receiver.inbox(1, 2, SLOT_BYTES)
        outbox = sender.connect(receiver.ticket(inbox), 0, PATIENCE_S)
        inbox.wait_connected(1, PATIENCE_S)
        yield inbox, outbox
    finally:
        sender.close()
        receiver.close()


def exchange(inbox: _m2n.Inbox, outbox: _m2n.Outbox, lengths: list[int]) -> None:
    """Messages of random bytes, one after the other; each must arrive as it was."""
    chance = np.random.default_rng(0)
    for step, length in enumerate(lengths):
        sent = chance.integers(0, 256, length, np.uint8)
        outbox.send(step, sent, timeout_s=PATIENCE_S)
        inbox.wait(step, 1, PATIENCE_S)
        (message,) = inbox.messages(step)
        assert np.array_equal(message.payload, sent)
        inbox.release(step)
        outbox.wait_credits(2, PATIENCE_S)


def test_small_caches_are_passed() -> None:
    with pair(SHM, cache_bytes=1) as (inbox, outbox):
        exchange(inbox, outbox, [SLOT_BYTES, 4095, 4096, 0, 1, 4160, 9999, SLOT_BYTES])
        # Not the first, whose slot nobody had written, nor the short ones.
        assert outbox.counters()["nontemporal"] == 4


@pytest.mark.parametrize("cache_bytes", [None, 0, 2**40])
def test_what_the_caches_hold_is_copied_through_them(cache_bytes: int | None) -> None:
    """So little is less than any machine's caches hold."""
    with pair(SHM, cache_bytes) as (inbox, outbox):
        exchange(inbox, outbox, [SLOT_BYTES] * 5)
        assert outbox.counters()["nontemporal"] == 0


@pytest.mark.parametrize("backend", OTHERS, ids=lambda backend: backend.name)
def test_who_copies_nothing_into_shared_slots_passes_no_caches(backend: Backend) -> None:
    with pair(need(backend), cache_bytes=1) as (inbox, outbox):
        exchange(inbox, outbox, [SLOT_BYTES] * 3)
        assert outbox.counters()["nontemporal"] == 0


def test_slots_written_in_place_count_but_are_not_copied() -> None:
    with pair(SHM, cache_bytes=1) as (inbox, outbox):
        for step in range(3):
            outbox.slot(PATIENCE_S)[:5000] = step + 1
            outbox.commit(step, 5000)
            inbox.wait(step, 1, PATIENCE_S)
            assert {*inbox.messages(step)[0].payload.tolist()} == {step + 1}
            inbox.release(step)
            outbox.wait_credits(2, PATIENCE_S)
        assert outbox.counters()["nontemporal"] == 0
        exchange(inbox, outbox, [SLOT_BYTES])
        assert outbox.counters()["nontemporal"] == 1


def test_a_producer_may_pass_the_caches_itself() -> None:
    source = np.random.default_rng(1).integers(0, 256, 5003, np.uint8)
    target = np.zeros(5003, np.uint8)
    _m2n.nontemporal_copy(target, source)
    assert np.array_equal(target, source)
    _m2n.nontemporal_copy(bytearray(0), b"")
    with pytest.raises(UserError, match="a target of 5002 bytes for a source of 5003"):
        _m2n.nontemporal_copy(target[1:], source)
    with pytest.raises(BufferError):
        _m2n.nontemporal_copy(b"cannot be written", b"cannot be written")
    with pytest.raises(TypeError):
        _m2n.TransportOptions().cache_bytes = -1
