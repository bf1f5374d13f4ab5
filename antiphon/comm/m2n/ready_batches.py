"""The queue of an expert worker: what has come whole and is not computed, where attention workers step each for itself.

All that is ready of one layer is computed together: the layer's weights are then read once for all of it. The layer
whose rows have waited longest goes first. When nothing else is ready, a worker may also wait a little for rows of the
same layer from another attention worker:

- only for one whose answer to the layer before has left, and who, by the time it took last, is due soon;
- at most as long as the shortest of the last batches took. Reading a layer's weights is part of each batch's time, so
  this bounds what the wait can save.

It never waits for the same attention worker's other micro-batches: those take turns with this one (ping-pong), and
would no longer if they were computed together.

Rejected: to wait a fixed time for as many as step. The slowest would set the pace again.
"""

from collections import deque
from dataclasses import dataclass

_NUM_BATCHES = 32
_NEWEST = 0.25  # part of the newest in the average time from an answer to the next rows
_SLACK = 1.25  # of that time: when rows that have not come are no longer waited for


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """Rows of one layer and micro-batch that are here. `number`: of the step, as the library counts."""

    number: int
    layer: int
    micro_batch: int
    sources: tuple[int, ...]
    since_s: float


class ReadyBatches:
    """Steps by their arrival. Times are seconds of one clock."""

    def __init__(self, *, merges: bool) -> None:
        """`merges`: what is ready of a layer is computed together. Otherwise each step is a batch."""
        self.merges = merges
        self._steps: deque[ReadyStep] = deque()
        self._took_s: deque[float] = deque(maxlen=_NUM_BATCHES)
        self._answered: dict[tuple[int, int], tuple[int, float]] = {}  # (source, micro-batch) -> layer, when
        self._away_s: dict[tuple[int, int], float] = {}  # from an answer to the next rows
        self._next_layer: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def longest_wait_s(self) -> float:
        """For rows of the same layer; 0 before anything was computed."""
        return min(self._took_s, default=0.0)

    def forget(self) -> None:
        """What is here is void, and so is what was expected."""
        self._steps.clear()
        self._answered.clear()

    def add(self, step: ReadyStep) -> None:
        """These rows have come."""
        self._steps.append(step)
        if not self.merges:
            return
        for source in step.sources:
            lane = source, step.micro_batch
            if (answered := self._answered.pop(lane, None)) is not None and answered[0] < step.layer:
                layer, at_s = answered
                self._next_layer[layer] = step.layer
                away_s = step.since_s - at_s
                before_s = self._away_s.get(lane, away_s)
                self._away_s[lane] = before_s + _NEWEST * (away_s - before_s)

    def wait_until_s(self) -> float:
        """Until when further rows may be waited for; in the past: not at all. Only while some are here."""
        first = self._steps[0]
        if not self.merges or any(step.layer != first.layer for step in self._steps):
            return first.since_s
        here = {source for step in self._steps for source in step.sources}
        last_s = first.since_s + self.longest_wait_s
        due_s = [
            at_s + _SLACK * self._away_s[lane]
            for lane, (layer, at_s) in self._answered.items()
            if lane[0] not in here and self._next_layer.get(layer) == first.layer and lane in self._away_s
        ]
        return min(last_s, max(due_s, default=first.since_s))

    def take(self) -> list[ReadyStep]:
        """The next batch: the oldest step, and where they are merged all others of its layer."""
        first = self._steps[0]
        if not self.merges:
            return [self._steps.popleft()]
        taken = [step for step in self._steps if step.layer == first.layer]
        self._steps = deque(step for step in self._steps if step.layer != first.layer)
        return taken

    def answered(self, steps: list[ReadyStep], computed_s: float, now_s: float) -> None:
        """A batch of these was computed, in `computed_s`, and its answer leaves now."""
        if self.merges:
            self._took_s.append(computed_s)
            for step in steps:
                for source in step.sources:
                    self._answered[source, step.micro_batch] = step.layer, now_s
