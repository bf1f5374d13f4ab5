"""How fast each expert worker computes, compared with the others, from what it was sent and for how long it was busy.

    work = max(t, knee x touched),   touched = held (1 - exp(-t / held)),   speed = batches x work / busy time

t are the rows of a mean batch. An expert costs as much as `knee` rows however few it gets, since its weights are read,
and a batch of t rows touches `touched` of the `held` experts. Without this a worker that gets few rows would look slow,
get fewer, and look slower still.

A batch with twice the work can take more than twice as long: a process with a part of a core is halted in the middle of
it. So a worker is compared only with those that have about as much work or more. The one with the hottest expert does
not count as slow for that. When experts move, loads change, and what was measured of equal workers is forgotten. What
is known of a slow one stays: with the little that it gets it would look fast.

Shares are of the fastest worker's speed. Above `_EQUAL` they count as equal: chance and small errors of the formula
must not move rows. A worker that was busy for less than `_LEAST_S` counts as before; its peers may have idled more.
Numbers fade by half whenever `_WINDOW_S` of busy time has come together.
"""

import math

_EQUAL = 0.8
_EQUAL_AGAIN = 0.85  # for one that counted as slow, so that chance does not move rows to and fro
_LOWEST = 0.1
_AS_MUCH = 0.8  # of a worker's work: who has less says nothing about it
_LEAST_S = 1.0  # a few hundred halts of some milliseconds
_LEAST_OF_PEER_S = 0.2
_WINDOW_S = 10.0


class WorkerSpeeds:
    """`num_experts` of each layer, held by `num_workers`."""

    def __init__(self, num_workers: int, num_experts: int, knee: int) -> None:
        self._held = num_experts / num_workers
        self._knee = knee
        self._rows = [0.0] * num_workers
        self._batches = [0.0] * num_workers
        self._busy_s = [0.0] * num_workers
        self._shares = [1.0] * num_workers

    def add(self, worker: int, num_batches: int, num_rows: int, busy_s: float) -> None:
        """What one worker did since its last report."""
        self._rows[worker] += num_rows
        self._batches[worker] += num_batches
        self._busy_s[worker] += busy_s
        if max(self._busy_s) > _WINDOW_S:
            for numbers in (self._rows, self._batches, self._busy_s):
                numbers[:] = [number / 2 for number in numbers]

    def forget_equals(self) -> None:
        """Experts have moved."""
        for worker, share in enumerate(self._shares):
            if share == 1.0:
                self._rows[worker] = self._batches[worker] = self._busy_s[worker] = 0.0

    def shares(self) -> tuple[float, ...]:
        """Of each worker, its speed over that of the fastest of its peers; 1 where nothing is known."""
        works = {worker: self._work(worker) for worker, busy_s in enumerate(self._busy_s) if busy_s >= _LEAST_OF_PEER_S}
        speeds = {worker: self._batches[worker] * work / self._busy_s[worker] for worker, work in works.items()}
        for worker, work in works.items():
            peers = [each for each in works if each != worker and works[each] >= _AS_MUCH * work]
            if not peers or not work or self._busy_s[worker] < _LEAST_S:
                continue
            share = max(_LOWEST, speeds[worker] / max(speeds[each] for each in (worker, *peers)))
            limit = _EQUAL if self._shares[worker] == 1.0 else _EQUAL_AGAIN
            self._shares[worker] = share if share <= limit else 1.0
        return tuple(self._shares)

    def _work(self, worker: int) -> float:
        """Of a mean batch, in rows."""
        rows = self._rows[worker] / max(1.0, self._batches[worker])
        touched = self._held * (1 - math.exp(-rows / self._held))
        return max(rows, self._knee * touched)
