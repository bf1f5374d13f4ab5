"""What one end of the exchange has carried: counters for each peer and durations, for metrics and reports.

The engine's API and messages carry it, so the native library is not loaded here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
