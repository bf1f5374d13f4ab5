"""What one M2N measurement is, the same for every contestant: who sends how much to whom, and when a round ends.

One round: every sender writes one message to every receiver; a receiver acknowledges each sender once the messages of
*all* senders have arrived. A process's operation lasts from its first post to its last acknowledgement. One way, the
operations of the senders count; both ways at once, every process sends and receives, and its operation also covers the
arrival of what it is sent.

Touched rounds are what a program would do: a process writes its payloads anew before its operation begins, and reads
what it was sent before it acknowledges. Untouched ones time the exchange alone; pages handed to the kernel then cost
nobody anything, so a gain by such means is only a gain if touched rounds show it too.

A contestant is a set of processes. Each runs one `Member`, whose `phases`, called in turn, are its part of a round; the
clock is read between them and nowhere else, so that no contestant can define its time its own way. Rejected: each
contestant timing itself (the definitions drift apart), and a barrier before every round (it hides what a late process
costs the others).

Ranks: senders come first, then receivers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from antiphon.base.units import format_bytes
from antiphon.bench.m2n.pattern import Bytes

Role = Literal["sender", "receiver", "copier"]

SEND = "send"
WAIT = "wait"  # after this phase a member's incoming messages are there and may be read
READ = "read"  # in touched rounds
RELEASE = "release"
CREDITS = "wait for credits"


class Flow(NamedTuple):
    """One message of a round."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One round's messages. `receiver_bytes[j]`: bytes from each sender to receiver j, and back if `both_ways`.
    `touched`: written anew and read in every round."""

    num_senders: int
    receiver_bytes: tuple[int, ...]
    both_ways: bool = False
    touched: bool = False

    @property
    def num_receivers(self) -> int:
        return len(self.receiver_bytes)

    @property
    def num_processes(self) -> int:
        return self.num_senders + self.num_receivers

    @property
    def is_balanced(self) -> bool:
        return len(set(self.receiver_bytes)) == 1

    @property
    def message_bytes(self) -> int:
        """The size of a message; of unequal ones the mean."""
        return round(sum(self.receiver_bytes) / self.num_receivers)

    @property
    def round_bytes(self) -> int:
        """All payload bytes of a round, both directions together."""
        return self.num_senders * sum(self.receiver_bytes) * (2 if self.both_ways else 1)

    def index(self, rank: int) -> int:
        """The number of a rank among the senders, or among the receivers."""
        return rank if rank < self.num_senders else rank - self.num_senders

    def flows(self) -> list[Flow]:
        """Every message of a round."""
        pairs = [
            Flow(sender, self.num_senders + receiver, num_bytes)
            for sender in range(self.num_senders)
            for receiver, num_bytes in enumerate(self.receiver_bytes)
        ]
        return pairs + [Flow(f.destination, f.source, f.num_bytes) for f in pairs if self.both_ways]

    def outgoing(self, rank: int) -> list[Flow]:
        """What a rank sends, by destination."""
        return [flow for flow in self.flows() if flow.source == rank]

    def incoming(self, rank: int) -> list[Flow]:
        """What a rank is sent, by source."""
        return [flow for flow in self.flows() if flow.destination == rank]

    def __str__(self) -> str:
        spread = "" if self.is_balanced else " on average"
        ways = ", both ways" if self.both_ways else ""
        touched = ", touched" if self.touched else ""
        return f"{self.num_senders} x {self.num_receivers} of {format_bytes(self.message_bytes)}{spread}{ways}{touched}"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One process of a contestant. `traffic` has the largest messages it will see; `num_seats` counts its fellows too.

    `timed`: whether its operations count for the round's time. `timeout_s` bounds each of its waits.
    """

    role: Role
    index: int
    rank: int
    num_seats: int
    timed: bool
    traffic: Traffic
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.role}[{self.index}]"


class Phase(NamedTuple):
    """A named part of a round. `run(step)` blocks until the part is over."""

    name: str
    run: Callable[[int], None]


def phases_of_pairs(
    send: Callable[[int], None] | None,
    receive: tuple[Callable[[int], None], Callable[[int], None]] | None,
    wait_for_credits: Callable[[int], None],
) -> list[Phase]:
    """The parts of a round of messages and their acknowledgements: `send` None for who sends nothing, `receive` (wait,
    release) None for who receives nothing."""
    phases = [] if send is None else [Phase(SEND, send)]
    if receive is not None:
        phases += [Phase(WAIT, receive[0]), Phase(RELEASE, receive[1])]
    return phases if send is None else [*phases, Phase(CREDITS, wait_for_credits)]


class Member(Protocol):
    """One process's part of a contestant, called from one thread. No wait is longer than `Seat.timeout_s`."""

    def open(self) -> bytes:
        """Set up what needs no peer; return what the others need to reach this process."""

    def connect(self, introductions: Sequence[bytes]) -> None:
        """Reach the others. `introductions[rank]` is what that rank's `open` returned."""

    def prepare(self, traffic: Traffic) -> Sequence[Phase]:
        """Make buffers for rounds of `traffic`; return the parts of a round, in order."""

    def produce(self, step: int) -> None:
        """Before a checked round: fill what will be sent in it with its patterns."""

    def check(self, step: int) -> None:
        """After `WAIT` of a checked round: `WrongData` if any byte is not what its sender's pattern says."""

    def payloads(self) -> Sequence[Bytes]:
        """Between rounds: what this process sends, to be written anew."""

    def arrived(self, step: int) -> Sequence[Bytes]:
        """After `WAIT`: what this process has to read."""

    def close(self) -> None:
        """Let go of everything."""
