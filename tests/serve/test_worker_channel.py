"""Frames between engine and worker: cut anywhere, too long, unreadable, or never finished."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from antiphon.base.errors import PeerLost, PeerTimeout
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker.channel import MAX_MESSAGE_BYTES, Channel
from antiphon.serve.worker.messages import (
    FromWorker,
    LoadProgress,
    Reset,
    ResetDone,
    RunStep,
    Sampled,
    Shutdown,
    StepResult,
    ToWorker,
)
from antiphon.specs.sampling import PackedLogprobs, SamplingParams

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The engine's channel to a worker, and the worker's end as a bare socket."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "experts[0]", FromWorker)
    yield channel, theirs
    channel.close()
    theirs.close()


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(payload)) + payload


def test_a_frame_may_come_byte_by_byte(pair: Pair) -> None:
    channel, peer = pair
    whole = frame(LoadProgress(3, 7)) + frame(ResetDone(5))
    received = []
    for index in range(len(whole)):
        peer.sendall(whole[index : index + 1])
        while (message := channel.poll()) is not None:
            received.append(message)
    assert received == [LoadProgress(3, 7), ResetDone(5)]


def test_many_frames_may_come_at_once(pair: Pair) -> None:
    channel, peer = pair
    peer.sendall(b"".join(frame(ResetDone(epoch)) for epoch in range(100)) + frame(LoadProgress(1, 2))[:5])
    assert [channel.receive(1.0).epoch for _ in range(100)] == list(range(100))
    assert channel.poll() is None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), "sent a frame of 1073741825 bytes"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "sent a message that cannot be read"),
        (frame(Shutdown()), "sent a message that cannot be read"),  # a worker has no business to say that
        (struct.pack("<I", 0), "sent a message that cannot be read"),
    ],
)
def test_nonsense_means_that_the_peer_is_lost(pair: Pair, sent: bytes, reason: str) -> None:
    channel, peer = pair
    peer.sendall(sent)
    with pytest.raises(PeerLost, match=rf"lost experts\[0\]: {reason}"):
        channel.receive(1.0)


@pytest.mark.parametrize("before", [b"", frame(ResetDone(5))[:2], frame(ResetDone(5))[:-1]])
def test_a_closed_connection_means_that_the_peer_is_lost(pair: Pair, before: bytes) -> None:
    channel, peer = pair
    peer.sendall(before)
    assert channel.poll() is None
    peer.close()
    with pytest.raises(PeerLost, match=r"lost experts\[0\]: connection closed"):
        channel.receive(1.0)
    with pytest.raises(PeerLost, match=r"lost experts\[0\]: connection closed"):
        channel.send(Reset(1))


def test_last_words_are_heard(pair: Pair) -> None:
    channel, peer = pair
    peer.sendall(frame(ResetDone(5)))
    peer.close()
    assert channel.poll() == ResetDone(5)
    with pytest.raises(PeerLost):
        channel.poll()


def test_silence_is_a_timeout_that_names_the_peer(pair: Pair) -> None:
    channel, peer = pair
    peer.sendall(frame(ResetDone(5))[:3])
    with pytest.raises(PeerTimeout, match=r"receive: nothing from experts\[0\] within 0.1 s") as caught:
        channel.receive(0.05)
    assert caught.value.peers == ["experts[0]"]


def test_a_peer_that_does_not_read_is_a_timeout(pair: Pair) -> None:
    channel, _ = pair
    big = RunStep(step=0, released=["x" * (1 << 22)], starts=[], micro_batches=[], participants=[])
    with pytest.raises(PeerTimeout, match=r"send: nothing from experts\[0\]"):
        channel.send(big, timeout_s=0.05)


def test_what_the_peer_does_not_read_waits_here_in_order(pair: Pair) -> None:
    channel, peer = pair
    theirs = Channel(peer, "engine", ToWorker)
    big = RunStep(step=1, released=["x" * (1 << 22)], starts=[], micro_batches=[], participants=[])
    started = time.monotonic()
    for message in (big, Reset(2), big, Reset(3)):
        channel.enqueue(message)
    assert time.monotonic() - started < 10.0
    assert channel.has_unsent
    received: list[object] = []
    while len(received) < 4:
        channel.flush()
        while (message := theirs.poll()) is not None:
            received.append(message)
    assert received == [big, Reset(2), big, Reset(3)]
    assert not channel.has_unsent
    assert channel.stalled_s == 0.0


def test_a_peer_that_reads_now_and_then_does_not_stall(pair: Pair) -> None:
    channel, peer = pair
    channel.enqueue(RunStep(step=1, released=["x" * (1 << 22)], starts=[], micro_batches=[], participants=[]))
    time.sleep(0.05)
    stalled_s = channel.stalled_s
    assert stalled_s >= 0.05
    assert not channel.flush(), "the peer has read nothing"
    assert channel.stalled_s > stalled_s
    while channel.stalled_s >= stalled_s:
        peer.recv(1 << 20)
        channel.flush()
    assert channel.has_unsent


def test_a_message_cut_by_a_timeout_is_finished_before_the_next(pair: Pair) -> None:
    channel, peer = pair
    theirs = Channel(peer, "engine", ToWorker)
    big = RunStep(step=1, released=["x" * (1 << 22)], starts=[], micro_batches=[], participants=[])
    with pytest.raises(PeerTimeout):
        channel.send(big, timeout_s=0.01)
    sender = threading.Thread(target=channel.send, args=[Reset(5)])
    sender.start()
    assert [theirs.receive(10.0), theirs.receive(10.0)] == [big, Reset(5)]
    sender.join()


def test_too_much_unread_is_a_lost_peer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = pair
    monkeypatch.setattr("antiphon.serve.worker.channel.MAX_UNSENT_BYTES", 1 << 20)
    channel.enqueue(RunStep(step=1, released=["x" * (1 << 22)], starts=[], micro_batches=[], participants=[]))
    with pytest.raises(PeerLost, match=r"experts\[0\]: does not read: \d+ bytes wait, at most 1048576 may"):
        channel.enqueue(Reset(1))


def test_large_messages_and_all_fields_survive() -> None:
    """Named tuples, nested dataclasses and bytes come out as what went in."""
    ours, theirs = socket.socketpair()
    engine, worker = Channel(ours, "worker", FromWorker), Channel(theirs, "engine", ToWorker)
    params = SamplingParams(max_tokens=5, logit_bias={3: -1.5, 90: 2.0}, stop_token_ids=(4, 5), seed=2**62, logprobs=3)
    step = RunStep(
        step=2**40,
        released=["a", "b"],
        starts=[SequenceStart("c", 3, tuple(range(500_000)), 400_000, params, 2**63 - 1, (1, 2))],
        micro_batches=[[], [SequenceStep("c", 3, (5, 6), 7, 0, (8, 9), True, 0, 1)]],
        participants=[[0], [0, 1]],
        bitmasks={"c": bytes(range(256)) * 100},
    )
    sender = threading.Thread(target=engine.send, args=[step])
    sender.start()
    assert worker.receive(30.0) == step
    sender.join()
    result = StepResult(
        step=1,
        requests=[Sampled("c", 7, PackedLogprobs(num_top=1, ids=bytes(8), values=bytes(8), ranks=bytes(4)), [])],
        step_s=0.1,
        wait_s=0.2,
        exposed_s=0.3,
        dispatch_bytes=2**50,
    )
    worker.send(result)
    assert engine.receive(1.0) == result
    engine.close()
    worker.close()
