"""What one M2N measurement is, the same for every contestant: who sends how much to whom, and when a round ends.

One round: every sender writes one message to every receiver; a receiver acknowledges each sender once the messages of
*all* senders have arrived. A process's operation lasts from its first post to its last acknowledgement. One way, the
operations of the senders count; both ways at once, every process sends and receives, and its operation also covers the
arrival of what it is sent.

Touched rounds are what a program would do: a process writes its payloads anew before its operation begins, and reads
what it was sent before it acknowledges. Untouched ones time the exchange alone; pages handed to the kernel are free
there, so a gain by such means is only a gain if touched rounds show it too.

A contestant is a set of processes. Each runs one `Member`, whose `phases`, called in turn, are its part of a round; the
clock is read between them and nowhere else, so that no contestant can define its time its own way. Rejected: each
contestant timing itself (the definitions drift apart), and a barrier before every round (it hides what a late process
costs the others).

Ranks: senders come first, then receivers.
"""

import gc
import importlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.base.units import format_bytes

Role = Literal["sender", "receiver", "copier"]
Bytes = NDArray[np.uint8]

SEND = "send"
WAIT = "wait"  # after this phase a member's incoming messages are there and may be read
READ = "read"  # in touched rounds
RELEASE = "release"
CREDITS = "wait for credits"
ACK_BYTES = 4


class Flow(NamedTuple):
    """One message of a round."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RoundTraffic:
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
class MemberSeat:
    """One process of a contestant. `traffic` has the largest messages it will see; `num_seats` counts its fellows too.

    `timed`: whether its operations count for the round's time. `timeout_s` bounds each of its waits.
    """

    role: Role
    index: int
    rank: int
    num_seats: int
    timed: bool
    traffic: RoundTraffic
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.role}[{self.index}]"


RoundPhase = tuple[str, Callable[[int], None]]
"""A named part of a round; called with the step, it blocks until the part is over."""


class Member(ABC):
    """One process's part of a contestant, called from one thread. No wait is longer than `MemberSeat.timeout_s`.

    Each message is sent from a buffer and received into one: `make_phases` sets `sent` and `received`, for each of
    `outgoing` and of `incoming`. A member whose bytes are elsewhere says so by methods of its own. The benchmark calls
    `introduction`, `connect`, `prepare`, `check`, `run` and `close` (`harness.children`)."""

    def __init__(self, seat: MemberSeat, options: Mapping[str, str]) -> None:
        self.seat = seat
        self.incoming: list[Flow] = []
        self.outgoing: list[Flow] = []
        self.sent: Sequence[Bytes] = ()
        self.received: Sequence[Bytes] = ()
        self._phases: Sequence[RoundPhase] = ()
        self._touched = False

    def introduction(self) -> bytes:
        """Set up what needs no peer; return what the others need to reach this process."""
        return b""

    def connect(self, introductions: Sequence[bytes]) -> None:  # noqa: B027 -- most have nothing to do
        """Reach the others. `introductions[rank]` is what that rank's `introduction` returned."""

    @abstractmethod
    def make_phases(self, traffic: RoundTraffic) -> Sequence[RoundPhase]:
        """Make buffers for rounds of `traffic`; return the parts of a round, in order."""

    def set_flows(self, traffic: RoundTraffic) -> None:
        self.incoming, self.outgoing = traffic.incoming(self.seat.rank), traffic.outgoing(self.seat.rank)

    def phases_of_pairs(
        self,
        send: Callable[[int], None],
        wait: Callable[[int], None],
        release: Callable[[int], None],
        wait_for_credits: Callable[[int], None],
    ) -> list[RoundPhase]:
        """The parts of a round of messages and their acknowledgements, as far as this process sends and receives."""
        received: list[RoundPhase] = [(WAIT, wait), (RELEASE, release)] if self.incoming else []
        return [(SEND, send), *received, (CREDITS, wait_for_credits)] if self.outgoing else received

    def produce(self, step: int) -> None:
        """Before a checked round: fill what will be sent in it with its patterns."""
        for data, flow in zip(self.payloads(), self.outgoing, strict=True):
            data[:] = pattern(flow.num_bytes, step, flow.source, flow.destination)

    def compare(self, step: int) -> None:
        """After `WAIT` of a checked round: `WrongData` if any byte is not what its sender's pattern says."""
        for data, flow in zip(self.received, self.incoming, strict=True):
            check_pattern(data, flow.num_bytes, step, flow.source, flow.destination)

    def payloads(self) -> Sequence[Bytes]:
        """Between rounds: what this process sends, to be written anew."""
        return self.sent

    def arrived(self, step: int) -> Sequence[Bytes]:
        """After `WAIT`: what this process has to read."""
        return self.received

    def close(self) -> None:  # noqa: B027 -- most have nothing to do
        """Let go of what does not end with the process."""

    def prepare(self, traffic: RoundTraffic) -> None:
        """Make ready for rounds of `traffic`."""
        self._touched = traffic.touched
        self._phases = self.make_phases(traffic)
        if self._touched:
            self._phases = with_reading(self, self._phases)

    def check(self, step: int) -> None:
        """One round whose every byte is compared."""
        checked_round(self, self._phases, step)

    def run(self, first_step: int, num_warm: int, num_rounds: int) -> tuple[list[str], bytes]:
        """`num_warm` rounds that do not count, then `num_rounds` that do: the phases' names, and int64 [rounds,
        phases + 1] nanoseconds of the monotonic clock: the start, then the end of each phase."""
        before = partial(write_anew, self) if self._touched else None
        marks = timed_rounds(self._phases, first_step, num_warm + num_rounds, before)
        del marks[: num_warm * (len(self._phases) + 1)]
        return [name for name, _ in self._phases], marks.tobytes()


# --- what messages hold while they are checked
#
# Bytes depend on step, source, destination and position: word i is `key + i * STRIDE` modulo 2^64, the key a mix of the
# others. A message that is late, swapped, shifted, cut or torn therefore differs in every word concerned. Rejected:
# random bytes from a seeded generator (ten times slower to make, and no better), a checksum (says that, not where).

_STRIDE = 0x9E3779B97F4A7C15  # odd: all words of a message differ
_STEP, _SOURCE, _DESTINATION = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
_WORD = 8


class WrongData(ValueError):
    """A message is not what was sent."""


def pattern(num_bytes: int, step: int, source: int, destination: int) -> Bytes:
    """The bytes of one message, in new memory."""
    key = (step * _STEP + source * _SOURCE + destination * _DESTINATION) % 2**64
    words = np.arange(-(-num_bytes // _WORD), dtype=np.uint64)
    words *= np.uint64(_STRIDE)
    words += np.uint64(key)
    return words.view(np.uint8)[:num_bytes]


def check_pattern(message: Bytes, num_bytes: int, step: int, source: int, destination: int) -> None:
    """`WrongData` names the message and its first wrong byte."""
    what = f"the message of step {step} from rank {source} to rank {destination}"
    if message.nbytes != num_bytes:
        raise WrongData(f"{what} has {message.nbytes} bytes instead of {num_bytes}")
    expected = pattern(num_bytes, step, source, destination)
    if np.array_equal(message, expected):
        return
    wrong = np.flatnonzero(message != expected)
    first = int(wrong[0])
    raise WrongData(
        f"{what} has {wrong.size} wrong bytes of {num_bytes}, the first at {first}: {message[first]} instead of "
        f"{expected[first]}"
    )


# --- a member in its process, and the rounds that are timed there


# Loaded only where needed: a process of ours need not carry torch, and a baseline not our library.
MEMBERS = {
    "antiphon": "ours.AntiphonMember",
    "gloo": "gloo.GlooMember",
    "gloo-all-to-all": "gloo.GlooAllToAllMember",
    "memcpy": "ours.MemcpyMember",
    "mpi": "mpi.MpiMember",
    "ucx": "ucx.UcxMember",
}


def member_of(kind: str, options: Mapping[str, str], seat: MemberSeat) -> Member:
    """The member of a contestant in this process. `kind` names its implementation, which has `options` of its own."""
    module, name = MEMBERS[kind].split(".")
    made: Member = getattr(importlib.import_module(f"{__package__}.{module}"), name)(seat, options)
    return made


def checked_round(member: Member, phases: Sequence[RoundPhase], step: int) -> None:
    """One round with its patterns; `WrongData` if they did not arrive."""
    member.produce(step)
    for name, run in phases:
        run(step)
        if name == WAIT:
            member.compare(step)


def write_anew(member: Member, step: int) -> None:
    """Every byte of what the member sends."""
    for payload in member.payloads():
        payload.fill(step % 256)


def with_reading(member: Member, phases: Sequence[RoundPhase]) -> list[RoundPhase]:
    """The phases of a touched round: what arrived is read, every byte, before anything else."""

    def read(step: int) -> None:
        for payload in member.arrived(step):
            payload.max()

    return [each for phase in phases for each in ((phase, (READ, read)) if phase[0] == WAIT else (phase,))]


def timed_rounds(
    phases: Sequence[RoundPhase], first_step: int, num_rounds: int, before: Callable[[int], None] | None = None
) -> "array[int]":
    """Nanoseconds: per round its start and the end of each phase; `before` runs ahead of a round's start. No garbage
    collection meanwhile."""
    calls = [run for _, run in phases]
    clock = time.monotonic_ns
    marks: list[int] = []  # appending to an array parses its argument, which costs more
    mark = marks.append
    gc.collect()
    gc.disable()
    try:
        for step in range(first_step, first_step + num_rounds):
            if before is not None:
                before(step)
            mark(clock())
            for call in calls:
                call(step)
                mark(clock())
    finally:
        gc.enable()
    return array("q", marks)
