"""Counters of communication: what a rank sends and waits for in training, what one end carries in serving.

The engine's API and messages carry `Traffic`, so neither torch nor the native library is loaded here.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING


@dataclass
class Ledger:
    """`sent_bytes` and `waited_s` by "purpose.collective", such as ``dispatch.all_to_all``.

    Bytes are those that leave this rank in the algorithm that sends least: (n - 1) / n of a tensor for an all-gather or
    reduce-scatter over n ranks, what is not its own for an all-to-all.

    `lost_numbers` by "purpose.clipped" and "purpose.flushed": of rows that travel as E4M3, those that were beyond its
    range and those that became zero."""

    sent_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_numbers: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # a launcher's threads count too

    def sent(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes[name] += num_bytes

    def waited(self, name: str, seconds: float) -> None:
        with self._lock:
            self.waited_s[name] += seconds

    @property
    def all_waited_s(self) -> float:
        """Since the last `take`."""
        with self._lock:
            return sum(self.waited_s.values())

    def lost(self, name: str, count: int) -> None:
        with self._lock:
            self.lost_numbers[name] += count

    def take(self) -> "Ledger":
        """What was counted so far; counting begins anew."""
        with self._lock:
            taken = Ledger(dict(self.sent_bytes), dict(self.waited_s), dict(self.lost_numbers))
            self.sent_bytes.clear()
            self.waited_s.clear()
            self.lost_numbers.clear()
        return taken


if TYPE_CHECKING:
    from antiphon import _m2n


@dataclass(frozen=True, kw_only=True)
class PairTraffic:
    """Traffic with one peer. `credit_waits`: sends that found no free slot; `credits`: slots free now; `stale`:
    messages of a step that had been given up."""

    peer: str
    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    credit_waits: int = 0
    credits: int = 0
    stale: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All pairs of one end, and durations by powers of two: bucket i counts those of [2^i, 2^(i+1)) ns."""

    pairs: list[PairTraffic]
    waits: list[int]
    round_trips: list[int]


def read_traffic(inbox: "_m2n.Inbox", outboxes: "Iterable[_m2n.Outbox]") -> Traffic:
    """The counters of one inbox and of the outboxes to the same peers. Call it on the thread that owns them."""
    pairs: dict[str, PairTraffic] = {}
    for row in inbox.counters():
        if peer := str(row["name"]):
            pairs[peer] = PairTraffic(
                peer=peer,
                messages_received=int(row["messages"]),
                bytes_received=int(row["bytes"]),
                stale=int(row["stale"]),
            )
    round_trips = [0] * len(inbox.wait_histogram())
    for outbox in outboxes:
        counters = outbox.counters()
        pairs[outbox.peer] = replace(
            pairs.get(outbox.peer, PairTraffic(peer=outbox.peer)),
            messages_sent=int(counters["messages"]),
            bytes_sent=int(counters["bytes"]),
            credit_waits=int(counters["credit_waits"]),
            credits=int(counters["credits"]),
        )
        round_trips = [a + b for a, b in zip(round_trips, outbox.credit_histogram(), strict=True)]
    return Traffic(pairs=list(pairs.values()), waits=inbox.wait_histogram(), round_trips=round_trips)
