"""Order of communication in training: all-to-all first, all-reduce in small pieces (Lina, sections 4.2 and 6.1).

1. A gradient that is ready is cut into equal all-reduce micro-ops; all-to-all is submitted as one or several.
2. Of each class one micro-op is in flight at a time, never interrupted: collective libraries cannot preempt a call.
3. All-to-all goes first. An all-reduce micro-op is launched only while no all-to-all waits, runs, or has parts to come.
   An all-to-all does not wait for an all-reduce in flight: its peers may hold that all-reduce back until this very
   all-to-all is over, and then each rank would wait for the other. They share the wire for at most one chunk.
4. When the combine of the backward pass begins, all-to-all is imminent: nothing more is launched until it is submitted.
5. Inside a class the order is that of submission, the same on every rank, and each class must use a process group of
   its own. How the two classes interleave may differ between ranks; the order inside a group may not.

With `between_pairs` it is the fixed schedule that Lina compares with (section 7.2.2): sums are launched only between
the two all-to-alls of one MoE layer's backward and those of the next, and share the wire with what else travels.

Numbers and names only: the trainer launches what `next` returns, the simulator prices it. Rejected: deferring
all-reduce to the end of an all-to-all pair (Lina Figure 7c), which leaves the gap between the two idle.

A tensor is cut into ceil(size / chunk) pieces whose sizes differ by at most one byte: equal pieces make waiting
predictable, and no piece mixes two gradients. Rejected: full chunks and a short rest, which pays the fixed cost of a
micro-op for a few bytes. What the trainer submits as one tensor are gradients that are ready at once and needed at
once: those of one layer for the same ranks, or of the head, or of the embedding (`train.shards`).

Experts per device (section 4.2): start with one and double, as long as the FFN micro-op is shorter than the all-to-all
micro-op. More experts on a device means fewer devices per all-to-all, so less is sent and more is computed between two
sends. Stop when computation is no longer shorter, or when a device would hold all experts (no all-to-all is left).
Rejected: searching all divisors; each step costs a re-distribution of expert weights and a few measured steps.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError

DEFAULT_CHUNK_BYTES = 30_000_000  # Lina section 7.1: blocks all-to-all least in most of their cases
Kind = Literal["all_to_all", "all_reduce"]
BACKWARD = ", backward"  # ends the names of exchanges of gradients


def partition(size_bytes: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> list[tuple[int, int]]:
    """(offset, size) of each piece in bytes, in order, none larger than `chunk_bytes`; no piece for an empty tensor."""
    if chunk_bytes < 1:
        raise UserError(f"chunks of {chunk_bytes} bytes: a chunk holds at least one")
    num_pieces = -(-size_bytes // chunk_bytes)
    bounds = [size_bytes * piece // max(1, num_pieces) for piece in range(num_pieces + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class MicroOp:
    """Piece `number` of `num_pieces` of `tensor`."""

    traffic: Kind
    tensor: str
    number: int
    num_pieces: int
    size_bytes: int

    @property
    def is_last(self) -> bool:
        return self.number == self.num_pieces - 1


class MicroOpScheduler:
    """The policy of one rank. `chunk_bytes` None: tensors stay whole (strict priority without partitioning)."""

    def __init__(
        self,
        chunk_bytes: int | None = DEFAULT_CHUNK_BYTES,
        *,
        between_pairs: bool = False,
    ) -> None:
        if chunk_bytes is not None:
            partition(0, chunk_bytes)  # refuses impossible sizes now rather than at the first gradient
        self._chunk_bytes = chunk_bytes
        self._between_pairs = between_pairs
        self._in_pair = False
        self._all_to_all: deque[MicroOp] = deque()
        self._all_reduce: deque[MicroOp] = deque()
        self._to_come: dict[str, int] = {}  # all-to-all tensors begun -> number of the next part
        self._combining = False
        self._in_flight: dict[Kind, MicroOp] = {}

    @property
    def in_flight(self) -> tuple[MicroOp, ...]:
        """At most one of each class, in order of launch."""
        return tuple(self._in_flight.values())

    @property
    def num_waiting(self) -> int:
        """Micro-ops submitted but not launched."""
        return len(self._all_to_all) + len(self._all_reduce)

    def submit_all_reduce(self, tensor: str, size_bytes: int) -> int:
        """A gradient is ready; returns into how many micro-ops it was cut (none if it is empty)."""
        whole = [(0, size_bytes)] if size_bytes else []
        pieces = whole if self._chunk_bytes is None else partition(size_bytes, self._chunk_bytes)
        for number, (_, size) in enumerate(pieces):
            self._all_reduce.append(MicroOp("all_reduce", tensor, number, len(pieces), size))
        return len(pieces)

    def submit_all_to_all(self, tensor: str, size_bytes: int, *, number: int = 0, num_pieces: int = 1) -> None:
        """Part `number` of an all-to-all is ready. Parts come in order; until the last has come, all-reduce waits."""
        expected = self._to_come.get(tensor, 0)
        if not 0 <= number < num_pieces or number != expected:
            raise UserError(
                f"all-to-all {tensor!r}: part {number} of {num_pieces}, but part {expected} is next: submit in order"
            )
        self._combining = False
        self._in_pair |= tensor.startswith("combine") and tensor.endswith(BACKWARD)
        if number + 1 < num_pieces:
            self._to_come[tensor] = number + 1
        else:
            self._to_come.pop(tensor, None)
        self._all_to_all.append(MicroOp("all_to_all", tensor, number, num_pieces, size_bytes))

    def combine_begins(self) -> None:
        """The combine of the backward pass runs: hold all-reduce back until the all-to-all it leads to is submitted."""
        self._combining = not self._between_pairs

    def next(self) -> MicroOp | None:
        """The micro-op to launch now, or None to wait for the next call of any other method. Call it until it says
        None."""
        if self._all_to_all:
            return None if "all_to_all" in self._in_flight else self._launch(self._all_to_all)
        if self._between_pairs:
            is_free = not self._in_pair and "all_reduce" not in self._in_flight
        else:
            is_free = not self._in_flight and not self._combining and not self._to_come
        return self._launch(self._all_reduce) if self._all_reduce and is_free else None

    def finished(self, done: MicroOp) -> None:
        """A micro-op in flight has completed."""
        if done != self._in_flight.get(done.traffic):
            raise UserError(f"{done} is not in flight ({self.in_flight} are): report each micro-op once, when it ends")
        del self._in_flight[done.traffic]
        if done.is_last and done.tensor.startswith("dispatch") and done.tensor.endswith(BACKWARD):
            self._in_pair = False

    def _launch(self, queue: "deque[MicroOp]") -> MicroOp:
        chosen = queue.popleft()
        self._in_flight[chosen.traffic] = chosen
        return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingStep:
    """One packing that was tried, with the times of one micro-op of each kind."""

    experts_per_device: int
    ffn_s: float
    all_to_all_s: float


class ExpertPacking:
    """The search, one measurement at a time: run with `experts_per_device`, then say what was measured.

    Only numbers that divide `num_experts` are tried: a device group must hold each expert equally often.
    """

    def __init__(self, num_experts: int) -> None:
        if num_experts < 1:
            raise UserError(f"{num_experts} experts: at least one is needed")
        self._num_experts = num_experts
        self.experts_per_device = 1
        self.steps: list[PackingStep] = []
        self.has_ended = False

    def observe(self, ffn_s: float, all_to_all_s: float) -> None:
        """Seconds of an FFN micro-op and of an all-to-all micro-op under this packing."""
        packed = self.experts_per_device
        self.steps.append(PackingStep(experts_per_device=packed, ffn_s=ffn_s, all_to_all_s=all_to_all_s))
        if ffn_s >= all_to_all_s or self._num_experts % (2 * packed):
            self.has_ended = True
        else:
            self.experts_per_device = 2 * packed


def choose_experts_per_device(measure: Callable[[int], tuple[float, float]], num_experts: int) -> list[PackingStep]:
    """Try 1, 2, 4, ... experts per device; the last step is the choice.

    `measure(experts_per_device)` -> (seconds of an FFN micro-op, seconds of an all-to-all micro-op).
    """
    packing = ExpertPacking(num_experts)
    while not packing.has_ended:
        packing.observe(*measure(packing.experts_per_device))
    return packing.steps
