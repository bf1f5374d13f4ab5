"""How fast each expert worker computes, compared with the others, from what it was sent and for how long it was busy.

    work = max(t, knee x touched),   touched = held (1 - exp(-t / held)),   speed = batches x work / busy time

t are the rows of all its experts in a mean batch. An expert costs as much as `knee` rows however few it gets, since its
weights are read, and a batch of t rows touches `touched` of the `held` experts. Without this one that gets few rows
would look slow, get fewer, and look slower still.

The formula is not the truth. With twice the work a batch takes more than twice as long on a part of a core, which is
halted in the middle, and less than twice as long where each batch has fixed costs. So shares follow rules that hold
whatever a batch costs:

- A worker counts as slow if its batches take longer than those of a peer that has at least about as much work. The
  worker of a hot expert is not slow for its load, and one with few rows is not slow for its fixed costs. A slower one
  is no peer.
- A slow worker gets less work, and may look fast with that. It stays slow until it has looked faster all through
  `_PATIENCE_S` of busy time, and twice as long each further time. A worker with too little work costs the others a
  little, one with too much holds up everybody.
- When loads change, what was measured before is forgotten.

Shares are of the fastest peer's speed. A worker that was busy for less than `_LEAST_S` counts as before; its peers may
have idled more. Numbers fade by half whenever `_WINDOW_S` of busy time has come together. Rejected: a line of time over
rows, fitted to each worker's reports. Its load is the same for minutes, and a prompt differs in more than its rows.
"""

import math
from collections.abc import Collection

_NEWS = 0.8  # a share of another number above this is chance
_FASTER = 0.9  # above this, if it is so all the time
_LOWEST = 0.1
_LEAST_S = 1.0  # a few hundred halts of some milliseconds
_LEAST_OF_PEER_S = 0.2
_WINDOW_S = 10.0
_PATIENCE_S = 20.0


class WorkerSpeeds:
    """The speeds of `num_workers`; `knee`: rows up to which an expert takes no longer than for one."""

    def __init__(self, num_workers: int, knee: int) -> None:
        self._knee = knee
        self._work = [0.0] * num_workers
        self._batches = [0.0] * num_workers
        self._busy_s = [0.0] * num_workers
        self._shares = [1.0] * num_workers
        self._fast_s = [0.0] * num_workers  # busy time since it began to look faster than its share
        self._patience_s = [_PATIENCE_S] * num_workers

    def add(self, worker: int, num_batches: int, rows: Collection[Collection[int]], busy_s: float) -> None:
        """What one worker did since its last report; `rows` of each expert that it holds, by layer."""
        if not num_batches or not any(rows):
            return
        of_batch, held = sum(map(sum, rows)) / num_batches, sum(map(len, rows)) / len(rows)
        touched = held * (1 - math.exp(-of_batch / held))
        self._work[worker] += num_batches * max(of_batch, self._knee * touched)
        self._batches[worker] += num_batches
        self._busy_s[worker] += busy_s
        self._fast_s[worker] += busy_s
        if max(self._busy_s) > _WINDOW_S:
            for numbers in (self._work, self._batches, self._busy_s):
                numbers[:] = [number / 2 for number in numbers]

    def forget(self) -> None:
        """Loads have changed: experts have moved, or rows are split anew."""
        for numbers in (self._work, self._batches, self._busy_s):
            numbers[:] = [0.0] * len(numbers)

    def shares(self) -> tuple[float, ...]:
        """Each worker's speed over that of the fastest of its peers; 1 where nothing is known."""
        known = [
            worker for worker, busy_s in enumerate(self._busy_s) if busy_s >= _LEAST_OF_PEER_S and self._work[worker]
        ]
        for worker in known:
            if self._busy_s[worker] >= _LEAST_S:
                share = self._shares[worker]
                self._judge(worker, [each for each in known if each != worker and self._shares[each] >= share])
        return tuple(self._shares)

    def _judge(self, worker: int, others: list[int]) -> None:
        """Against those that have about as much work in a batch, or more."""
        work, time_s = self._of_batch(worker)
        peers = [each for each in map(self._of_batch, others) if each[0] >= _NEWS * work]
        seen = min((work / time_s * peer_s / peer_work for peer_work, peer_s in peers), default=0.0)
        slower = [work / time_s * peer_s / peer_work for peer_work, peer_s in peers if peer_s <= _NEWS * time_s]
        share = self._shares[worker]
        if seen < share / _FASTER:
            self._fast_s[worker] = 0.0
        if slower and min(slower) <= _NEWS * share:
            self._shares[worker] = max(_LOWEST, min(slower))
        elif share < 1.0 and self._fast_s[worker] >= self._patience_s[worker]:
            self._shares[worker] = seen if seen < _NEWS else 1.0
            self._patience_s[worker] *= 2
            self._fast_s[worker] = 0.0

    def _of_batch(self, worker: int) -> tuple[float, float]:
        """Work, and seconds."""
        return self._work[worker] / self._batches[worker], self._busy_s[worker] / self._batches[worker]
