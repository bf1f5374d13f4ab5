"""What the benchmark and a member's process say to each other: one order, one answer, every field checked when read."""

import msgspec

from antiphon.bench.m2n.api import Seat, Traffic
from antiphon.bench.obeying import Done, Failed, Stop


class Open(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Become a member: `kind` names the contestant's implementation. Answered by `Opened`."""

    kind: str
    options: dict[str, str]
    seat: Seat


class Connect(msgspec.Struct, tag=True, frozen=True):
    """What every rank answered to `Open`. Answered by `Done`."""

    introductions: list[bytes]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make buffers. Answered by `Done`."""

    traffic: Traffic


class Check(msgspec.Struct, tag=True, frozen=True):
    """One round whose every byte is compared. Answered by `Done`."""

    step: int


class Run(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`num_warm` rounds that do not count, then `num_rounds` that do. Answered by `Ran`."""

    first_step: int
    num_warm: int
    num_rounds: int


class Opened(msgspec.Struct, tag=True, frozen=True):
    introduction: bytes


class Ran(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`marks`: int64 [rounds, phases + 1] nanoseconds of the monotonic clock: the start, then the end of each phase."""

    phases: list[str]
    marks: bytes


ToMember = Open | Connect | Prepare | Check | Run | Stop
FromMember = Opened | Done | Ran | Failed
