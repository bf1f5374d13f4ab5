"""Handing a request's keys and values from one worker's pages to another's: the protocol, without I/O or a clock.

The target's pages exist before anything is sent. Then three books meet (the ends' are in `handover_sides`):

1. The engine's `HandoverBook` makes an offer: tokens [first, end) of a request, `first` behind what the target found in
   its own prefix cache.
2. Each process of the source writes what it has computed, layer by layer (`SendingBook` says what is new).
3. Each process of the target counts tokens, by layer and by source, never messages or their order (`LandingBook`). So
   a run that comes twice, late, or cut in another way because a step was repeated, changes nothing.
4. The request goes on at the target once all its processes have everything *and* the source has said that the prompt
   is done. Random choices depend on the seed and the number of the token alone: beyond a first token there is no state.

    OFFERED -> FILLING -> READY -> FREE          READY: the pages are whole, and become the request's
        |         |                  ^
        +---------+---> DRAINING ----+           DRAINING: the pages are in quarantine

A failure, a deadline and an abort all withdraw the offer. Its pages stay in quarantine until every process of the
target has answered that nothing of it is written any more, or is gone with its cache. A time-out is no answer. A number
is never used twice, so a late message of an offer that has ended cannot be taken for one of the next.

Any message may be lost, repeated or overtaken: withdrawals are repeated until they are answered, the rest ends at the
deadline. Times are seconds on one clock of the caller's.

The simulator runs the same three books (`sim/handovers`).

Rejected: leases of pages. They end too early for a slow wire, and too late after a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

HandOver = Literal["layers", "end"]  # keys and values leave after each layer, or all at the end of a step
MAX_PROMPTS = 256  # that a prefill worker has under way
MAX_LOST = 2  # hand-overs of a request's tokens; then the decode worker computes them
_REPEAT_S = 1.0  # a withdrawal without an answer is repeated so often


class CachePart(NamedTuple):
    """What one process of a worker caches: layers [first_layer, last_layer), and KV heads by their number in the model,
    in its own order (one may occur twice)."""

    first_layer: int
    last_layer: int
    heads: tuple[int, ...]


class KVSource(msgspec.Struct, frozen=True, array_like=True):
    """A process that writes: its number among the sources of every inbox, and its part of the cache."""

    number: int
    part: CachePart


class KVTarget(msgspec.Struct, frozen=True, array_like=True):
    """A process that is written to: how to reach its inbox, and its part of the cache."""

    ticket: bytes
    part: CachePart


class KVOffer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To each process of the source: write tokens [first, end) of the request to these targets. `layout`: digest of
    what a cached token is; a source whose own differs refuses at once."""

    number: int
    request_id: str
    first: int
    end: int
    layout: str
    sources: list[KVSource]
    targets: list[KVTarget]


class ExpectKV(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To process `rank` of the target: tokens [first, end) will come for these blocks, the whole table of the request
    from its first token on."""

    number: int
    first: int
    end: int
    layout: str
    blocks: list[int]
    rank: int
    sources: list[KVSource]
    targets: list[KVTarget]


class WithdrawKV(msgspec.Struct, tag=True, frozen=True):
    """To all processes of both sides: the offer has ended. A target answers that it is drained, always."""

    number: int


class KVNews(msgspec.Struct, tag=True, frozen=True):
    """What a process says of an offer. From one of the target, `landed`: all its pages are whole; `drained`: it writes
    nothing there any more. From any, `failed`: the offer cannot be completed, and why."""

    number: int
    what: Literal["landed", "drained", "failed"]
    reason: str = ""


HandoverState = Literal["offered", "filling", "ready", "draining", "free"]  # see the module's docstring


@dataclass(eq=False, kw_only=True)
class Handover:
    """One offer as the engine sees it. `source`, `target`: workers by name; `pages`: the target's, which may not be
    given back before the state is READY or FREE. `landing`: ranks of the target that still miss something; `draining`:
    those that still may write. `reason`: why it was withdrawn."""

    number: int
    request_id: str
    source: str
    target: str
    first: int
    end: int
    pages: tuple[int, ...]
    offered_s: float
    deadline_s: float
    landing: set[int]
    draining: set[int]
    state: HandoverState = "offered"
    is_done: bool = False
    reason: str = ""
    repeat_s: float = field(default=0.0, repr=False)

    @property
    def is_whole(self) -> bool:
        """The pages hold all tokens [first, end), whatever became of the source since."""
        return not self.landing


# What the engine has to do. `ready`: decode; `withdraw`: send `WithdrawKV` to all processes of both
# workers; `free`: it has failed (`reason`), and its pages may be used for anything again.
HandoverEvent = tuple[Literal["ready", "withdraw", "free"], Handover]


class HandoverBook:
    """All offers of an engine that have not ended. News of others are ignored."""

    def __init__(self) -> None:
        self._live: dict[int, Handover] = {}
        self._events: list[HandoverEvent] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._live)

    def offer(
        self,
        request_id: str,
        *,
        source: str,
        target: str,
        num_target_ranks: int,
        first: int,
        end: int,
        pages: Sequence[int],
        now_s: float,
        timeout_s: float,
    ) -> Handover:
        """Begin; the caller then sends `ExpectKV` to the target, and after it `KVOffer` to the source."""
        assert 0 <= first < end, f"no tokens in [{first}, {end})"
        self._last_number += 1
        handover = Handover(
            number=self._last_number,
            request_id=request_id,
            source=source,
            target=target,
            first=first,
            end=end,
            pages=tuple(pages),
            offered_s=now_s,
            deadline_s=now_s + timeout_s,
            landing=set(range(num_target_ranks)),
            draining=set(range(num_target_ranks)),
        )
        self._live[handover.number] = handover
        return handover

    def landed(self, number: int, rank: int) -> None:
        """A rank of the target has all of it."""
        if handover := self._filling(number):
            handover.landing.discard(rank)
            self._finish_if_whole(handover)

    def done(self, number: int, num_tokens: int) -> None:
        """The source has computed all `num_tokens` of the prompt."""
        if handover := self._filling(number):
            if num_tokens != handover.end:
                self._withdraw(handover, f"{handover.source} computed {num_tokens} tokens, not {handover.end}")
                return
            handover.is_done = True
            self._finish_if_whole(handover)

    def withdraw(self, number: int, reason: str) -> None:
        """End it: a process failed at it, or the request is wanted no more. Its pages come back with an event."""
        if handover := self._live.get(number):
            self._withdraw(handover, reason)

    def drained(self, number: int, rank: int) -> None:
        """A rank of the target writes nothing of it any more."""
        handover = self._live.get(number)
        if handover is not None and handover.state == "draining":
            handover.draining.discard(rank)
            if not handover.draining:
                self._free(handover)

    def source_lost(self, worker: str) -> None:
        """A source is gone: its offers are withdrawn."""
        for handover in [each for each in self._live.values() if each.source == worker]:
            self._withdraw(handover, f"lost {worker}")

    def target_lost(self, worker: str) -> None:
        """A target is gone, and with it all of its pages: nothing can be written there any more."""
        for handover in [each for each in self._live.values() if each.target == worker]:
            self._withdraw(handover, f"lost {worker}")
            handover.landing.update(handover.draining)
            self._free(handover)

    def tick(self, now_s: float) -> None:
        """Deadlines pass, withdrawals without an answer are repeated."""
        for handover in list(self._live.values()):
            if handover.state != "draining" and now_s >= handover.deadline_s:
                waited = handover.deadline_s - handover.offered_s
                self._withdraw(handover, f"{handover.source} has not handed it over within {waited:.1f} s")
            if handover.state == "draining" and now_s >= handover.repeat_s:
                if handover.repeat_s:
                    self._events.append(("withdraw", handover))
                handover.repeat_s = now_s + _REPEAT_S

    def take_events(self) -> list[HandoverEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _filling(self, number: int) -> Handover | None:
        handover = self._live.get(number)
        if handover is None or handover.state == "draining":
            return None
        handover.state = "filling"
        return handover

    def _finish_if_whole(self, handover: Handover) -> None:
        if handover.is_whole and handover.is_done:
            handover.state = "ready"
            del self._live[handover.number]
            self._events.append(("ready", handover))

    def _withdraw(self, handover: Handover, reason: str) -> None:
        if handover.state != "draining":
            handover.state, handover.reason = "draining", reason
            self._events.append(("withdraw", handover))

    def _free(self, handover: Handover) -> None:
        handover.state = "free"
        del self._live[handover.number]
        self._events.append(("free", handover))
