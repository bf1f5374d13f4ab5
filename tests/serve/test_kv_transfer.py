"""Keys and values between caches of different cuts, block sizes, back-ends and processes, over each transport."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest
import torch

from antiphon.kernels.reference_attention import ReferenceCache
from antiphon.serve.policy.handover import CachePart, ExpectKV, KVNews, KVOffer, KVSource, KVTarget, WithdrawKV
from antiphon.serve.worker import kv_transfer
from antiphon.serve.worker.kv_transfer import KVReceiver, KVSender
from antiphon.serve.worker.messages import KVTransferConfig
from tests.comm.m2n.backends import Backend, by_name, need
from tests.serve.kv_source import LAYOUT, CacheShape, Job, make_cached

PLENTY_S = 30.0
NUM_SOURCES = 4


class Side:
    """What receivers or senders of a test say."""

    def __init__(self) -> None:
        self.said: SimpleQueue[Any] = SimpleQueue()

    def next(self, timeout_s: float = PLENTY_S) -> Any:
        return self.said.get(timeout=timeout_s)

    def is_silent(self) -> bool:
        try:
            return self.said.get(timeout=0.3) is None
        except Empty:
            return True


def configuration(transport: str, source: int, *, receives: bool = False) -> KVTransferConfig:
    return KVTransferConfig(
        transport=transport, host="127.0.0.1", secret=b"secret", source=source, num_sources=NUM_SOURCES,
        receives=receives,
    )  # fmt: skip


class Handing:
    """Both sides of one offer in this process: sources with `source_parts`, targets with `target_parts`."""

    def __init__(
        self,
        shape: CacheShape,
        source_parts: list[CachePart],
        target_parts: list[CachePart],
        *,
        block_sizes: tuple[int, int] = (16, 32),
        tokens: tuple[int, int] = (5, 77),
        transport: str = "shm",
    ) -> None:
        self.shape, self.transport = shape, transport
        self.first, self.end = tokens
        self.source_parts, self.target_parts = source_parts, target_parts
        self.source_block_size = block_sizes[0]
        self.givers = [make_cached(shape, part, block_sizes[0], self.end, seed=1) for part in source_parts]
        self.takers = [make_cached(shape, part, block_sizes[1], self.end, seed=2) for part in target_parts]
        self.heard, self.sent = Side(), Side()
        self.receivers = [
            KVReceiver(configuration(transport, 0, receives=True), f"target[{rank}]", taker.cache, taker.part, LAYOUT,
                       self.heard.said.put)
            for rank, taker in enumerate(self.takers)
        ]  # fmt: skip
        self.senders: list[KVSender] = []

    def sides(self) -> dict[str, Any]:
        return {
            "sources": [KVSource(index, part) for index, part in enumerate(self.source_parts)],
            "targets": [
                KVTarget(receiver.ticket, part)
                for receiver, part in zip(self.receivers, self.target_parts, strict=True)
            ],
        }

    def start_senders(self) -> None:
        self.senders = [
            KVSender(configuration(self.transport, index), f"source[{index}]", giver.cache, giver.part, LAYOUT,
                     self.sent.said.put)
            for index, giver in enumerate(self.givers)
        ]  # fmt: skip

    def offer(self, number: int = 1, layout: str = LAYOUT) -> KVOffer:
        return KVOffer(
            number=number, request_id="r", first=self.first, end=self.end, layout=layout, **self.sides()
        )  # fmt: skip

    def expect(self, number: int = 1) -> None:
        for rank, (receiver, taker) in enumerate(zip(self.receivers, self.takers, strict=True)):
            receiver.heard(
                ExpectKV(
                    number=number, first=self.first, end=self.end, layout=LAYOUT, blocks=taker.blocks.tolist(),
                    rank=rank, **self.sides(),
                )
            )  # fmt: skip

    def compute(self, chunks: list[int]) -> None:
        """Chunk by chunk, layer by layer, as steps do; `chunks` are where chunks end."""
        done = 0
        for last in chunks:
            for layer in range(max(part.last_layer for part in self.source_parts)):
                for giver, sender in zip(self.givers, self.senders, strict=True):
                    if giver.part.first_layer <= layer < giver.part.last_layer:
                        giver.fill(layer, done, last)
                        sender.layer_done("r", layer, last, lambda giver=giver: giver.blocks)  # type: ignore[misc]
            for sender in self.senders:
                sender.flush()
            done = last

    def wrong(self) -> list[tuple[int, int]]:
        return [each for taker in self.takers for each in taker.wrong(self.first, self.end)]

    def close(self) -> None:
        for each in (*self.senders, *self.receivers):
            each.close()


@contextmanager
def handing(*arguments: Any, **options: Any) -> Iterator[Handing]:
    pair = Handing(*arguments, **options)
    try:
        yield pair
    finally:
        pair.close()


GQA = CacheShape()
LATENT = CacheShape(key_dim=20, value_dim=16, latent=True)
LATENT_INT8 = CacheShape(key_dim=20, value_dim=16, latent=True, storage="int8")
FLOAT = CacheShape(dtype="float32", key_dim=7, value_dim=5)
INT8 = CacheShape(storage="int8", key_dim=23, value_dim=37)
FP8 = CacheShape(storage="fp8")


def heads(*groups: tuple[int, ...], layers: int = 3) -> list[CachePart]:
    return [CachePart(0, layers, group) for group in groups]


CASES = {
    "one to one": (GQA, heads((0, 1, 2)), heads((0, 1, 2)), (16, 16)),
    "tp 2 to tp 1, other blocks": (GQA, heads((0, 1), (2,)), heads((0, 1, 2)), (48, 5)),
    "tp 1 to tp 3, odd blocks": (FLOAT, heads((0, 1, 2)), heads((0,), (1,), (2,)), (7, 16)),
    "tp 3 to tp 2": (GQA, heads((0,), (1,), (2,)), heads((0, 1), (2,)), (3, 32)),
    "more ranks than heads": (GQA, heads((0,), (0,), (1,), (1,)), heads((0, 0, 1), (0, 1, 1)), (16, 1)),
    "latent, tp 2 to tp 1": (LATENT, heads((0,), (0,)), heads((0,)), (16, 11)),
    "latent, tp 1 to tp 2": (LATENT, heads((0,)), heads((0,), (0,)), (9, 16)),
    "stages to one": (GQA, [CachePart(0, 1, (0, 1)), CachePart(1, 3, (0, 1))], heads((0, 1)), (16, 80)),
    "int8, one to one": (INT8, heads((0, 1)), heads((0, 1)), (16, 48)),
    "int8, tp 3 to tp 2, other back-ends": (INT8, heads((0,), (1,), (2,)), heads((0, 1), (2,)), (32, 5)),
    "fp8, tp 1 to tp 2": (FP8, heads((0, 1, 2)), heads((0, 1), (2,)), (7, 80)),
    "fp8, more ranks than heads": (FP8, heads((0,), (0,), (1,)), heads((0, 0, 1), (0, 1, 1)), (16, 16)),
    "int8 latent": (LATENT_INT8, heads((0,), (0,)), heads((0,)), (9, 16)),
    "one to stages": (FLOAT, heads((0, 1)), [CachePart(0, 2, (0, 1)), CachePart(2, 3, (0, 1))], (16, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_cut_and_block_size(case: str) -> None:
    shape, sources, targets, block_sizes = CASES[case]
    with handing(shape, sources, targets, block_sizes=block_sizes) as pair:
        pair.start_senders()
        pair.expect()
        for sender in pair.senders:
            sender.open([pair.offer()])
        pair.compute([3, 30, 77])
        assert [pair.heard.next() for _ in targets] == [KVNews(1, "landed")] * len(targets)
        assert pair.wrong() == []
        assert pair.sent.is_silent()


@pytest.mark.parametrize("backend", by_name("tcp", "loopback", "libfabric"), ids=lambda backend: backend.name)
def test_every_transport(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = need(backend).transport
    monkeypatch.setattr(kv_transfer, "SLOT_BYTES", 2000)  # runs are cut, and slots used again and again
    with handing(GQA, heads((0, 1), (2,)), heads((0, 1, 2)), tokens=(0, 500), transport=transport) as pair:
        pair.start_senders()
        pair.expect()
        for sender in pair.senders:
            sender.open([pair.offer()])
        pair.compute([499, 500])
        assert pair.heard.next() == KVNews(1, "landed")
        assert pair.wrong() == []


def test_a_step_that_is_repeated_sends_nothing_twice_and_order_does_not_matter() -> None:
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        (sender,) = pair.senders
        offer = pair.offer()
        sender.open([offer])
        pair.compute([40])  # the target does not know of it yet
        sender.open([offer])
        pair.compute([40, 77])
        sent = sender.bytes_sent
        pair.expect()
        assert pair.heard.next() == KVNews(1, "landed")
        assert pair.wrong() == []
        sender.open([offer])
        pair.compute([77])
        assert sender.bytes_sent == sent == 3 * 2 * 72 * pair.takers[0].cache.spec.row_bytes(2)


def test_a_source_keeps_nothing_of_an_offer_that_is_written() -> None:
    """It keeps one for each request, else, as long as it lives."""
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        pair.expect()
        pair.senders[0].open([pair.offer()])
        pair.compute([40])
        assert pair.senders[0]._book.is_wanted(1)
        pair.compute([77])
        assert pair.heard.next() == KVNews(1, "landed")
        assert not pair.senders[0]._book.is_wanted(1)
        assert pair.sent.is_silent()


def test_nothing_lands_after_a_withdrawal() -> None:
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        (sender,), (receiver,), (taker,) = pair.senders, pair.receivers, pair.takers
        pair.expect()
        sender.open([pair.offer()])
        pair.compute([40])
        receiver.heard(WithdrawKV(1))
        assert pair.heard.next() == KVNews(1, "drained")
        poison = torch.full((2 * 77 * taker.cache.spec.row_bytes(2),), 0x55, dtype=torch.uint8)
        for layer in range(3):
            taker.cache.write_tokens(layer, taker.blocks, 0, 77, taker.heads(), poison)
        pair.compute([77])  # the source has not heard of it
        assert pair.heard.is_silent()
        assert receiver.num_dropped > 0
        for layer in range(3):
            rows = torch.empty_like(poison)
            taker.cache.read_tokens(layer, taker.blocks, 0, 77, taker.heads(), rows)
            assert torch.equal(rows, poison)
        pair.expect()  # an order that was overtaken
        pair.expect(2)
        sender.open([pair.offer(2)])
        pair.compute([77])
        assert pair.heard.next() == KVNews(2, "landed")
        assert pair.wrong() == []


def test_what_the_source_had_cached_goes_with_what_it_computes() -> None:
    with handing(GQA, heads((0,), (1,)), heads((0, 1)), tokens=(16, 61), transport="tcp") as pair:
        pair.start_senders()
        pair.expect()
        for giver, sender in zip(pair.givers, pair.senders, strict=True):
            sender.open([pair.offer()])
            for layer in range(3):
                giver.fill(layer, 0, 48)
        pair.compute([61])
        assert pair.heard.next() == KVNews(1, "landed")
        assert pair.wrong() == []


def test_sides_that_differ_say_so() -> None:
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        pair.senders[0].open([pair.offer(layout="another model's")])
        failed = pair.sent.next()
        assert isinstance(failed, KVNews)
        assert failed.what == "failed"
        assert "another model's" in failed.reason
        pair.compute([77])
        assert pair.senders[0].bytes_sent == 0


def test_a_run_that_was_not_asked_for_ends_its_offer_only() -> None:
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        pair.expect()
        pair.end = 76
        pair.expect(2)
        pair.end = 77
        pair.senders[0].open([pair.offer(2)])
        pair.compute([77])
        failed = pair.heard.next()
        assert isinstance(failed, KVNews)
        assert failed.what == "failed"
        assert (failed.number, "[5, 77)" in failed.reason) == (2, True)
        pair.senders[0].open([pair.offer(1)])
        pair.compute([77])
        assert pair.heard.next() == KVNews(1, "landed")


def test_a_target_that_is_gone_fails_the_offer() -> None:
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        offer = pair.offer()
        pair.receivers[0].close()
        pair.senders[0].open([offer])
        pair.compute([77])
        failed = pair.sent.next()
        assert isinstance(failed, KVNews)
        assert failed.what == "failed"
        assert failed.number == 1


def test_a_target_that_takes_nothing_holds_a_step_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVReceiver, "_work", lambda self: None)
    monkeypatch.setattr(kv_transfer, "SLOTS", 1)
    monkeypatch.setattr(kv_transfer, "_CREDIT_S", 0.2)
    with handing(GQA, heads((0, 1)), heads((0, 1))) as pair:
        pair.start_senders()
        (sender,), (giver,) = pair.senders, pair.givers
        for number in range(1, 21):
            sender.open([msgspec.structs.replace(pair.offer(number), request_id=f"r{number}")])
        for layer in range(3):
            giver.fill(layer, 0, 77)
            for number in range(1, 21):
                sender.layer_done(f"r{number}", layer, 77, lambda: giver.blocks)
        sender.flush()
        failed = [pair.sent.next() for _ in range(20)]
        assert {each.number for each in failed} == set(range(1, 21))
        assert len({each.reason for each in failed}) == 1
        assert "source[0]" in failed[0].reason or "target[0]" in failed[0].reason


@contextmanager
def source_process(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-m", "tests.serve.kv_source"]
    process = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2]
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_source_that_is_killed_ends_its_offer_and_another_fills_the_same_pages(transport: str) -> None:
    with handing(GQA, heads((0, 1), layers=2), heads((0,), (1,), layers=2), transport=transport) as pair:
        pair.expect(1)
        job = Job(
            config=configuration(transport, 0), shape=GQA, part=pair.source_parts[0], block_size=48, offer=pair.offer(1)
        )
        with source_process(job) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"sent layer 0\n"
            assert pair.heard.is_silent()
        failures = [pair.heard.next() for _ in pair.receivers]
        assert all(isinstance(each, KVNews) and (each.number, each.what) == (1, "failed") for each in failures)
        for receiver in pair.receivers:
            receiver.heard(WithdrawKV(1))
        assert [pair.heard.next() for _ in pair.receivers] == [KVNews(1, "drained")] * 2
        pair.start_senders()
        pair.expect(2)
        pair.senders[0].open([pair.offer(2)])
        pair.compute([77])
        assert [pair.heard.next() for _ in pair.receivers] == [KVNews(2, "landed")] * 2
        assert pair.wrong() == []


@pytest.mark.parametrize(
    "shape", [CacheShape(key_dim=70, value_dim=52), CacheShape(dtype="float32", key_dim=21, value_dim=36)]
)
def test_tokens_that_fill_a_panel_lie_as_single_ones_do(shape: CacheShape) -> None:
    """16 tokens of a panel move in vectors, others one by one: a cache written in one run is read in pieces of 5."""
    whole = make_cached(shape, CachePart(0, 1, (0, 1, 2)), 32, 90, seed=3)
    size = whole.cache.dtype.itemsize
    key_bytes, value_bytes = shape.key_dim * size, shape.value_dim * size
    rows = torch.randint(0, 255, (3, 85 * (key_bytes + value_bytes)), dtype=torch.uint8)
    whole.cache.write_tokens(0, whole.blocks, 3, 85, whole.heads(), rows.view(-1))
    keys, values = (part.view(3, 85, -1) for part in rows.split([85 * key_bytes, 85 * value_bytes], 1))
    for first in range(0, 85, 5):
        piece = torch.empty(3, 5 * (key_bytes + value_bytes), dtype=torch.uint8)
        whole.cache.read_tokens(0, whole.blocks, 3 + first, 5, whole.heads(), piece.view(-1))
        assert torch.equal(piece[:, : 5 * key_bytes].reshape(3, 5, -1), keys[:, first : first + 5])
        assert torch.equal(piece[:, 5 * key_bytes :].reshape(3, 5, -1), values[:, first : first + 5])
    back = torch.empty_like(rows)
    whole.cache.read_tokens(0, whole.blocks, 3, 85, whole.heads(), back.view(-1))
    assert torch.equal(back, rows)


def test_codes_travel_in_about_half_the_bytes() -> None:
    sent = []
    for shape in (CacheShape(key_dim=64, value_dim=64), CacheShape(key_dim=64, value_dim=64, storage="int8")):
        with handing(shape, heads((0, 1)), heads((0, 1))) as pair:
            pair.start_senders()
            pair.expect()
            pair.senders[0].open([pair.offer()])
            pair.compute([77])
            assert pair.heard.next() == KVNews(1, "landed")
            sent.append(pair.senders[0].bytes_sent)
    assert sent == [3 * 2 * 72 * 256, 3 * 2 * 72 * (128 + 8)]


def test_codes_and_scales_are_what_attention_reads() -> None:
    """Rows that one back-end stored are the other's after they were handed over: the same codes and scales."""
    shape, part = CacheShape(storage="int8", dtype="float32", key_dim=8, value_dim=8), CachePart(0, 1, (0, 1))
    native, plain = (make_cached(shape, part, block_size, 33, seed=3) for block_size in (16, 5))
    rows = torch.empty(2 * 33 * plain.cache.spec.row_bytes(4), dtype=torch.uint8)
    keys, values = (torch.randn(33, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert isinstance(plain.cache, ReferenceCache)
    slots = plain.blocks.long()[torch.arange(33) // 5] * 5 + torch.arange(33) % 5
    plain.cache.store(0, slots, keys, values)
    plain.cache.read_tokens(0, plain.blocks, 0, 33, plain.heads(), rows)
    native.cache.write_tokens(0, native.blocks, 0, 33, native.heads(), rows)
    back = torch.empty_like(rows)
    native.cache.read_tokens(0, native.blocks, 0, 33, native.heads(), back)
    assert torch.equal(back, rows)
    key_rows = rows.view(2, -1)[:, : 33 * 12].view(2, 33, 12)
    scales = key_rows[..., 8:].contiguous().view(torch.float32)
    assert torch.equal(scales.squeeze(-1).T, keys.abs().amax(-1) / 127)
    read = key_rows[..., :8].contiguous().view(torch.int8) * scales
    assert (read.transpose(0, 1) - keys).abs().max() <= scales.max() / 2 + 1e-6
