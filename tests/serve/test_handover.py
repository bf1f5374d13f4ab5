"""Hand-overs under random histories: messages lost, repeated and overtaken, processes killed, requests given up.

The world below has real pages (a list of what each token of each layer holds), and workers that obey their books. Every
message waits in one bag, from which a history draws: it may be delivered, delivered and kept, or lost. Pages are
poisoned when they come back, so a write that lands afterwards, and a read of a page that is not whole, are seen.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from antiphon.serve.policy.handover import (
    CachePart,
    ExpectKV,
    Handover,
    HandoverBook,
    KVNews,
    KVOffer,
    KVSource,
    KVTarget,
    WithdrawKV,
)
from antiphon.serve.policy.handover_sides import LandingBook, SendingBook, heads_between

LAYERS, HEADS, BLOCK, NUM_BLOCKS = 2, 2, 3, 8
POISON = "poison"
WHOLE = [CachePart(0, LAYERS, (0, 1))]
SPLIT = [CachePart(0, LAYERS, (0,)), CachePart(0, LAYERS, (1,))]
STAGES = [CachePart(0, 1, (0, 1)), CachePart(1, 2, (0, 1))]


@dataclass(frozen=True)
class Run:
    """What a source has read of its pages, on the wire."""

    number: int
    source: int
    layer: int
    first: int
    rows: tuple[tuple[str, ...], ...]  # by head, then token


@dataclass
class Give:
    """A process of the source: which tokens of which layers it has computed of each request, since it came to life."""

    number: int
    part: CachePart
    book: SendingBook = field(init=False)
    offers: dict[str, KVOffer] = field(default_factory=dict)
    computed: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.book = SendingBook(self.number)


class Take:
    """A process of the target, and its pages: by (layer, head, block, offset)."""

    def __init__(self, part: CachePart) -> None:
        self.part = part
        self.book = LandingBook()
        self.pages: dict[tuple[int, int, int, int], str] = {}


class World:
    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.book = HandoverBook()
        self.source_parts = self.rng.choice([WHOLE, SPLIT, STAGES])
        self.target_parts = self.rng.choice([WHOLE, SPLIT, STAGES])
        self.givers = [self._giver(index) for index in range(len(self.source_parts))]
        self.takers = [Take(part) for part in self.target_parts]
        self.free = set(range(NUM_BLOCKS))
        self.handovers: dict[int, Handover] = {}
        self.bag: list[tuple[str, int, Any]] = []  # to whom, which process of it, what
        self.num_requests = 0
        self.decoding: dict[int, Handover] = {}
        self.ended: Counter[str] = Counter()

    def _giver(self, index: int) -> Give:
        return Give(index, self.source_parts[index])

    def content(self, request_id: str, layer: int, head: int, token: int) -> str:
        return f"{request_id} {layer} {head} {token}"

    # --- the engine ---

    def offer(self) -> None:
        first = self.rng.randint(0, 4)
        end = first + self.rng.randint(1, 6)
        needed = -(-end // BLOCK)
        if len(self.free) < needed:
            return
        blocks = [self.free.pop() for _ in range(needed)]
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        for taker in self.takers:  # its own prefix hit
            for layer in range(*taker.part[:2]):
                for head in taker.part.heads:
                    for token in range(first):
                        place = layer, head, blocks[token // BLOCK], token % BLOCK
                        taker.pages[place] = self.content(request_id, layer, head, token)
        self.send_offer(request_id, first, end, blocks)

    def send_offer(self, request_id: str, first: int, end: int, blocks: list[int]) -> None:
        handover = self.book.offer(
            request_id, source="prefill", target="decode", num_target_ranks=len(self.takers), first=first, end=end,
            pages=blocks, now_s=self.now, timeout_s=self.rng.choice([3.0, 30.0]),
        )  # fmt: skip
        self.handovers[handover.number] = handover
        sides = {
            "sources": [KVSource(index, part) for index, part in enumerate(self.source_parts)],
            "targets": [KVTarget(b"", part) for part in self.target_parts],
        }
        same = {"number": handover.number, "first": first, "end": end, "layout": "x", **sides}
        for rank in range(len(self.takers)):
            self.bag.append(("take", rank, ExpectKV(blocks=blocks, rank=rank, **same)))
        for index in range(len(self.givers)):
            self.bag.append(("give", index, KVOffer(request_id=request_id, **same)))

    def engine_hears(self, rank: int, message: Any) -> None:
        if isinstance(message, KVNews) and message.what == "landed":
            self.book.landed(message.number, rank)
        elif isinstance(message, KVNews) and message.what == "drained":
            self.book.drained(message.number, rank)
        elif isinstance(message, KVNews):
            self.book.withdraw(message.number, message.reason)
        else:
            number, num_tokens = message
            self.book.done(number, num_tokens)
        self.obey()

    def obey(self) -> None:
        for kind, handover in self.book.take_events():
            if kind == "withdraw":
                assert handover.state in ("draining", "free")
                self.bag += [("take", rank, WithdrawKV(handover.number)) for rank in range(len(self.takers))]
                self.bag += [("give", index, WithdrawKV(handover.number)) for index in range(len(self.givers))]
            elif kind == "free":
                self.ended[handover.reason.split()[0]] += 1
                if handover.is_whole and handover.pages and self.rng.random() < 0.5:
                    self.read(handover)
                self.give_back(handover)
            else:
                assert handover.state == "ready"
                self.read(handover)
                self.decoding[handover.number] = handover
                self.ended["ready"] += 1

    def give_back(self, handover: Handover) -> None:
        assert not self.free & set(handover.pages), "given back twice"
        self.free |= set(handover.pages)
        for taker in self.takers:
            for place in [place for place in taker.pages if place[2] in handover.pages]:
                taker.pages[place] = POISON

    def read(self, handover: Handover) -> None:
        """What attention would read: every token, from every process of the target."""
        for taker in self.takers:
            for layer in range(*taker.part[:2]):
                for head in taker.part.heads:
                    for token in range(handover.end):
                        place = layer, head, handover.pages[token // BLOCK], token % BLOCK
                        assert taker.pages.get(place) == self.content(handover.request_id, layer, head, token)

    # --- the workers ---

    def compute(self) -> None:
        """Some process of the source goes on with a layer of one of its requests, by any number of tokens; a step that
        is repeated computes the same again."""
        giver = self.rng.choice(self.givers)
        if not giver.offers:
            return
        offer = self.rng.choice(list(giver.offers.values()))
        layer = self.rng.randrange(*giver.part[:2])
        until = self.rng.randint(1, offer.end)
        giver.computed[offer.request_id, layer] = max(until, giver.computed[offer.request_id, layer])
        if (news := giver.book.advance(offer.request_id, layer, until)) is not None:
            self.write(giver, news[0], layer, news[1], news[2])
        whole = [giver.computed[offer.request_id, each] == offer.end for each in range(*giver.part[:2])]
        if all(whole) and giver.number == 0:
            self.bag.append(("engine", 0, (offer.number, offer.end)))

    def write(self, giver: Give, offer: KVOffer, layer: int, first: int, last: int) -> None:
        sources, targets = [each.part for each in offer.sources], [each.part for each in offer.targets]
        while first < last:
            until = self.rng.randint(first + 1, last)
            for index, part in enumerate(targets):
                heads = heads_between(sources, giver.number, targets, index)
                if heads and part.first_layer <= layer < part.last_layer:
                    rows = tuple(
                        tuple(self.content(offer.request_id, layer, head, token) for token in range(first, until))
                        for head in heads
                    )
                    self.bag.append(("take", index, Run(offer.number, giver.number, layer, first, rows)))
            first = until

    def giver_hears(self, giver: Give, message: Any) -> None:
        if isinstance(message, KVOffer):
            giver.book.open(message)
            giver.offers[message.request_id] = message
        else:
            giver.book.close(message.number)
            for offer in [each for each in giver.offers.values() if each.number == message.number]:
                del giver.offers[offer.request_id]

    def taker_hears(self, rank: int, message: Any) -> None:
        taker = self.takers[rank]
        if isinstance(message, ExpectKV):
            taker.book.expect(message)
        elif isinstance(message, WithdrawKV):
            taker.book.withdraw(message.number)
            self.bag.append(("engine", rank, KVNews(message.number, "drained")))
        elif not taker.book.knows(message.number):
            self.bag.append(("take", rank, message))  # it waits
        else:
            self.land(rank, message)

    def land(self, rank: int, run: Run) -> None:
        taker, count = self.takers[rank], len(run.rows[0])
        place = taker.book.place(run.number, run.source, run.layer, run.first, count)
        if place is None:
            return
        blocks, heads = place
        assert self.handovers[run.number].state != "free"
        assert not self.free & set(blocks), "a write lands in a page that was given back"
        for head, tokens in zip(heads, run.rows, strict=True):
            for offset, text in enumerate(tokens):
                token = run.first + offset
                taker.pages[run.layer, head, blocks[token // BLOCK], token % BLOCK] = text
        if taker.book.landed(run.number, run.source, run.layer, run.first, count):
            self.bag.append(("engine", rank, KVNews(run.number, "landed")))

    # --- what happens ---

    def deliver(self) -> None:
        if not self.bag:
            return
        index = self.rng.randrange(len(self.bag))
        to, process, message = self.bag[index]
        luck = self.rng.random() if self.faults else 1.0
        if luck >= 0.15:  # delivered once, or for the first time
            del self.bag[index]
        if luck < 0.08:
            del self.bag[index]
            return
        if to == "engine":
            self.engine_hears(process, message)
        elif to == "give":
            self.giver_hears(self.givers[process], message)
        else:
            self.taker_hears(process, message)

    def kill_source(self) -> None:
        """All its processes die and come back; what they had sent may still arrive."""
        self.givers = [self._giver(index) for index in range(len(self.source_parts))]
        self.bag = [each for each in self.bag if each[0] != "give"]
        for rank, taker in enumerate(self.takers):
            for number in taker.book.lose(self.rng.randrange(len(self.source_parts))):
                self.bag.append(("engine", rank, KVNews(number, "failed", "lost a source")))
        self.book.source_lost("prefill")
        self.obey()

    def kill_target(self) -> None:
        """Its pages go with it, and so do messages to and from it."""
        self.takers = [Take(part) for part in self.target_parts]
        self.bag = [
            (to, process, message)
            for to, process, message in self.bag
            if to != "take" and not (isinstance(message, KVNews) and message.what in ("landed", "drained"))
        ]
        for handover in self.decoding.values():
            self.free |= set(handover.pages)
        self.decoding.clear()
        self.book.target_lost("decode")
        self.obey()

    def give_up(self) -> None:
        live = [each for each in self.handovers.values() if each.state in ("offered", "filling")]
        if live:
            self.book.withdraw(self.rng.choice(live).number, "aborted")
            self.obey()

    def finish_one(self) -> None:
        if self.decoding:
            _, handover = self.decoding.popitem()
            self.read(handover)  # nothing has written into it since
            self.give_back(handover)

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.1, 1.0, 4.0])
        self.book.tick(self.now)
        self.obey()

    def run(self, num_steps: int) -> None:
        acts = [self.deliver, self.compute, self.offer, self.finish_one, self.pass_time]
        weights = [60, 30, 6, 4, 3]
        if self.faults:
            acts += [self.give_up, self.kill_source, self.kill_target]
            weights += [3, 1, 1]
        for act in self.rng.choices(acts, weights, k=num_steps):
            act()

    def drain(self) -> None:
        """Faults end, time passes: everything must come to an end by itself."""
        self.faults = False
        for _ in range(200):
            while self.bag:
                before = len(self.bag)
                for _ in range(before):
                    self.deliver()
                if len(self.bag) >= before:
                    break
            self.now += 5.0
            self.book.tick(self.now)
            self.obey()
            if not len(self.book) and not self.bag:
                break
        for handover in list(self.decoding.values()):
            self.finish_one()
            assert handover.state != "draining"
        assert len(self.book) == 0
        assert self.free == set(range(NUM_BLOCKS)), "a page has leaked"


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, 20))])
def test_no_history_reads_half_a_page_or_writes_into_a_free_one(batch: int) -> None:
    ended: Counter[str] = Counter()
    for seed in range(batch * 500, batch * 500 + 500):
        world = World(seed)
        world.run(120)
        world.drain()
        ended += world.ended
    assert {"ready", "aborted", "lost", "prefill"} <= set(ended), "every way to end occurs"


def test_without_faults_every_offer_is_ready() -> None:
    world = World(1, faults=False)
    for _ in range(50):
        world.offer()
        while len(world.book):
            world.deliver()
            world.compute()
        world.finish_one()
    assert world.ended == {"ready": 50}


def test_a_thousand_aborts_leak_nothing() -> None:
    world = World(5)
    num_aborted = 0
    while num_aborted < 1000:
        world.offer()
        for _ in range(world.rng.randrange(6)):
            world.compute()
        for _ in range(world.rng.randrange(2 * len(world.bag) + 1)):
            world.deliver()
        world.give_up()
        world.pass_time()
        num_aborted = world.ended["aborted"]
    world.drain()
