"""Ways to share one rank's network between all-to-all and all-reduce in the backward pass (Lina section 4, Figure 7).

- `baseline`: both run whenever they are ready and slow each other down (`Contention`)
- `priority`: one at a time, all-to-all first; an all-reduce that has begun is not interrupted
- `deferral`: an all-reduce waits until the pair of all-to-alls of its MoE layer is over
- `known`: with all times known beforehand, an all-reduce starts only if it ends before the next all-to-all
- `micro_ops`: Lina; the very policy object of `antiphon.comm.micro_ops` decides, this file only prices its answers

Rejected: a copy of the policy inside the simulator, which would judge something other than what trains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.comm.micro_ops import MicroOp, MicroOpScheduler
from antiphon.sim.resources import RELATIVE_TIE, Activity, Discipline, Priority, Slice

Schedule = Literal["baseline", "priority", "deferral", "known", "micro_ops"]
SCHEDULES: tuple[Schedule, ...] = ("baseline", "priority", "deferral", "known", "micro_ops")
ALL_TO_ALL, ALL_REDUCE = "all_to_all", "all_reduce"


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Rates of an all-to-all and an all-reduce that run together, as fractions of their rates alone.

    A half each is fair sharing of a link that either can fill. Rates may add up to more than one where neither can.
    """

    all_to_all_rate: float = 0.5
    all_reduce_rate: float = 0.5

    def __post_init__(self) -> None:
        for name in ("all_to_all_rate", "all_reduce_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"contention: {name} is {getattr(self, name)}: give a fraction above 0, at most 1")

    def rates(self, kinds: Sequence[str]) -> list[float]:
        """One rate for each running transfer."""
        if len(set(kinds)) < 2:
            return [1.0] * len(kinds)
        return [self.all_to_all_rate if kind == ALL_TO_ALL else self.all_reduce_rate for kind in kinds]


class Deferral(Priority):
    """All-reduce waits for the next even number of all-to-alls to have ended, or for the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self._num_all_to_all = 0
        self._num_ended = 0
        self._kinds: dict[int, str] = {}
        self._deferred: list[tuple[int, float, int, Activity]] = []  # (ended all-to-alls needed, arrival, index, ...)

    def register(self, index: int, activity: Activity) -> None:
        self._kinds[index] = activity.kind
        self._num_all_to_all += activity.kind == ALL_TO_ALL

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        if activity.kind == ALL_TO_ALL:
            super().arrive(now_s, index, activity)
        else:
            needed = min(self._num_all_to_all, self._num_ended // 2 * 2 + 2)
            self._deferred.append((needed, now_s, index, activity))

    def next_slice(self, now_s: float) -> Slice | None:
        for entry in [entry for entry in self._deferred if entry[0] <= self._num_ended]:
            self._deferred.remove(entry)
            super().arrive(entry[1], entry[2], entry[3])
        return super().next_slice(now_s)

    def served(self, now_s: float, done: Slice) -> None:
        self._num_ended += self._kinds[done.activity] == ALL_TO_ALL


class KnownTimes(Priority):
    """All-to-all first; an all-reduce starts only if it ends before the next all-to-all of `starts_s` (ascending)."""

    def __init__(self, starts_s: Sequence[float]) -> None:
        super().__init__()
        self._starts_s = list(starts_s)
        self._num_begun = 0
        self._kinds: dict[int, str] = {}

    def register(self, index: int, activity: Activity) -> None:
        self._kinds[index] = activity.kind

    def next_slice(self, now_s: float) -> Slice | None:
        if not self._waiting:
            return None
        _, _, index, duration_s = self._waiting[0]
        if self._kinds[index] == ALL_TO_ALL:
            self._num_begun += 1
        elif now_s + duration_s > self._next_all_to_all_s() * (1 + RELATIVE_TIE):
            return None
        return super().next_slice(now_s)

    def _next_all_to_all_s(self) -> float:
        return self._starts_s[self._num_begun] if self._num_begun < len(self._starts_s) else float("inf")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What an activity of the network carries: the tensor's name and size, and which part of it this activity is."""

    tensor: str
    size_bytes: int
    number: int = 0
    num_pieces: int = 1


class PolicyDiscipline(Discipline):
    """Lets a `MicroOpScheduler` decide. `payloads[a]`: what activity a carries.

    An all-reduce is one activity, served slice by slice as the scheduler cuts it; each part of an all-to-all is an
    activity of its own, since computation waits for it.
    """

    def __init__(self, policy: MicroOpScheduler, payloads: Mapping[int, Payload]) -> None:
        super().__init__()
        self._policy = policy
        self._payloads = payloads
        self._activity_of: dict[tuple[str, str, int], tuple[int, float]] = {}

    def arrive(self, now_s: float, index: int, activity: Activity) -> None:
        payload = self._payloads[index]
        self._activity_of[activity.kind, payload.tensor, payload.number] = (index, activity.duration_s)
        if activity.kind == ALL_TO_ALL:
            self._policy.submit_all_to_all(
                payload.tensor, payload.size_bytes, number=payload.number, num_pieces=payload.num_pieces
            )
        else:
            self._policy.submit_all_reduce(payload.tensor, payload.size_bytes)

    def next_slice(self, now_s: float) -> Slice | None:
        chosen = self._policy.next()
        return None if chosen is None else self._price(chosen)

    def _price(self, chosen: MicroOp) -> Slice:
        if chosen.traffic == ALL_TO_ALL:
            return Slice(*self._activity_of[chosen.traffic, chosen.tensor, chosen.number])
        index, duration_s = self._activity_of[chosen.traffic, chosen.tensor, 0]
        share = chosen.size_bytes / self._payloads[index].size_bytes
        return Slice(index, duration_s * share, is_last=chosen.is_last)

    def served(self, now_s: float, done: Slice) -> None:
        (running,) = self._policy.in_flight  # this network does one thing at a time
        self._policy.finished(running)
