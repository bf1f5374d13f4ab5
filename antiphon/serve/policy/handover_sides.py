"""The two ends of a hand-over in the workers: what a source still has to write, what a target still misses.

The engine's part and the protocol are in `handover`. Both books know offers, layers and tokens, not bytes; how many of
these may be under way, `SLOTS` of `SLOT_BYTES` say. Each book belongs to one process of a worker; the caller locks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.serve.policy.handover import CachePart, ExpectKV, KVOffer

SLOT_BYTES = 256 << 10  # of a message with keys and values
SLOTS = 16  # of each pair: a layer of a few hundred tokens may be under way while the next is computed
_MAX_ENDED = 4096  # numbers of ended offers that are remembered one by one; smaller ones are taken for ended


def heads_between(sources: Sequence[CachePart], source: int, targets: Sequence[CachePart], target: int) -> list[int]:
    """KV heads that process `source` writes to process `target`, ascending, in the layers that both have. Where several
    processes of the source cache a head, the targets are spread over them."""
    own, other = sources[source], targets[target]
    if max(own.first_layer, other.first_layer) >= min(own.last_layer, other.last_layer):
        return []
    chosen = []
    for head in sorted(set(other.heads)):
        holders = [index for index, part in enumerate(sources) if part[:2] == own[:2] and head in part.heads]
        if holders and holders[target % len(holders)] == source:
            chosen.append(head)
    return chosen


class _EndedNumbers:
    """Numbers of offers that a worker is through with. They come from one counter, so old ones need not be kept."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._highest = 0

    def add(self, number: int) -> None:
        self._numbers.add(number)
        self._highest = max(self._highest, number)
        if len(self._numbers) > 2 * _MAX_ENDED:
            floor = self._highest - _MAX_ENDED
            self._numbers = {each for each in self._numbers if each > floor}

    def __contains__(self, number: int) -> bool:
        return number in self._numbers or number <= self._highest - _MAX_ENDED


@dataclass(eq=False)
class _Incoming:
    """`missing`: by (layer, source), tokens that have not come, as bits counted from `first`."""

    expect: ExpectKV
    heads: dict[int, list[int]]
    missing: dict[tuple[int, int], int]


class LandingBook:
    """What one process of a target may write into its pages, and what it still misses."""

    def __init__(self) -> None:
        self._open: dict[int, _Incoming] = {}
        self._ended = _EndedNumbers()

    def expect(self, expect: ExpectKV) -> bool:
        """Open an offer. False: it has ended before it came."""
        number = expect.number
        if number in self._open or number in self._ended:
            return False
        part = expect.targets[expect.rank].part
        parts, targets = [each.part for each in expect.sources], [each.part for each in expect.targets]
        heads: dict[int, list[int]] = {}
        missing: dict[tuple[int, int], int] = {}
        everything = (1 << (expect.end - expect.first)) - 1
        for index, source in enumerate(expect.sources):
            if own := heads_between(parts, index, targets, expect.rank):
                heads[source.number] = own
                shared = range(max(part[0], source.part[0]), min(part[1], source.part[1]))
                missing.update(((layer, source.number), everything) for layer in shared)
        self._open[number] = _Incoming(expect, heads, missing)
        return True

    def knows(self, number: int) -> bool:
        """False: its `ExpectKV` is still on its way, so a run of it has to wait."""
        return number in self._open or number in self._ended

    def place(self, number: int, source: int, layer: int, first: int, count: int) -> tuple[list[int], list[int]] | None:
        """(blocks, heads) for a run that came from `source`; None if it is of an offer that has ended. `ValueError` for
        what was not asked for. After it is in the pages, `landed` counts it; nothing may happen between the two."""
        incoming = self._open.get(number)
        if incoming is None:
            return None
        expect = incoming.expect
        if (layer, source) not in incoming.missing or not (expect.first <= first < first + count <= expect.end):
            raise ValueError(
                f"source {source} sent tokens [{first}, {first + count}) of layer {layer}: "
                f"asked for were [{expect.first}, {expect.end}) of layers {sorted(incoming.missing)}"
            )
        return expect.blocks, incoming.heads[source]

    def landed(self, number: int, source: int, layer: int, first: int, count: int) -> bool:
        """The run is in the pages. True: with it the offer is whole, and ends here."""
        incoming = self._open[number]
        run = ((1 << count) - 1) << (first - incoming.expect.first)
        incoming.missing[layer, source] &= ~run
        if any(incoming.missing.values()):
            return False
        self._end(number)
        return True

    def withdraw(self, number: int) -> None:
        """From now on nothing of it is written."""
        self._end(number)

    def lose(self, source: int) -> list[int]:
        """A source is gone: the offers that still miss something of it, which end."""
        lost = [
            number
            for number, incoming in self._open.items()
            if any(left and writer == source for (_, writer), left in incoming.missing.items())
        ]
        for number in lost:
            self._end(number)
        return lost

    def _end(self, number: int) -> None:
        self._open.pop(number, None)
        self._ended.add(number)


class SendingBook:
    """What one process of a source, number `source`, still has to write."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._open: dict[int, tuple[KVOffer, dict[int, int]]] = {}  # and by layer, where the next run begins
        self._of_request: dict[str, int] = {}
        self._ended = _EndedNumbers()

    def open(self, offer: KVOffer) -> None:
        """Begin; an offer that has begun or ended before changes nothing. A request has one offer at a time."""
        number = offer.number
        if number in self._open or number in self._ended:
            return
        part = next(each.part for each in offer.sources if each.number == self._source)
        self._open[number] = offer, dict.fromkeys(range(part.first_layer, part.last_layer), offer.first)
        self._of_request[offer.request_id] = number

    def advance(self, request_id: str, layer: int, until: int) -> tuple[KVOffer, int, int] | None:
        """Tokens [0, until) of the request are in this layer's pages: (offer, first, last) to write now, if any."""
        if (number := self._of_request.get(request_id)) is None:
            return None
        offer, sent = self._open[number]
        first, until = sent[layer], min(until, offer.end)
        if first >= until:
            return None
        sent[layer] = until
        if self.has_all(number):
            del self._of_request[request_id]
        return offer, first, until

    def has_all(self, number: int) -> bool:
        """What `advance` has said of this offer is all of it: to be closed when that is written."""
        offer, sent = self._open[number]
        return all(end == offer.end for end in sent.values())

    def is_wanted(self, number: int) -> bool:
        """It has begun and was not withdrawn."""
        return number in self._open

    def close(self, number: int) -> None:
        """It was withdrawn, has failed, or everything is written."""
        if number in self._open:
            offer, _ = self._open.pop(number)
            if self._of_request.get(offer.request_id) == number:
                del self._of_request[offer.request_id]
        self._ended.add(number)
