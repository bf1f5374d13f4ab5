"""How fast each expert worker computes, compared with the others, from what it was sent and for how long it was busy.

    work = batches x max(t, knee x touched),   touched = held (1 - exp(-t / held)),   speed = work / busy time

t are the rows of a mean batch. An expert costs as much as `knee` rows however few it gets, since its weights are read,
and a batch of t rows touches `touched` of the `held` experts. Without this a worker that gets few rows would look slow,
get fewer, and look slower still.

Speeds are shares of the fastest. Above `_EQUAL` they count as equal: chance and small errors of the formula must not
move rows. Numbers fade by half whenever `_WINDOW_S` of busy time has come together.
"""

import math

_EQUAL = 0.8
_EQUAL_AGAIN = 0.85  # for one that counted as slow, so that chance does not move rows to and fro
_LOWEST = 0.1
_WINDOW_S = 10.0


class WorkerSpeeds:
    """`num_experts` of each layer, held by `num_workers`."""

    def __init__(self, num_workers: int, num_experts: int, knee: int) -> None:
        self._held = num_experts / num_workers
        self._knee = knee
        self._rows = [0.0] * num_workers
        self._batches = [0.0] * num_workers
        self._busy_s = [0.0] * num_workers
        self._is_slow = [False] * num_workers

    def add(self, worker: int, num_batches: int, num_rows: int, busy_s: float) -> None:
        """What one worker did since its last report."""
        self._rows[worker] += num_rows
        self._batches[worker] += num_batches
        self._busy_s[worker] += busy_s
        if max(self._busy_s) > _WINDOW_S:
            for numbers in (self._rows, self._batches, self._busy_s):
                numbers[:] = [number / 2 for number in numbers]

    def shares(self) -> tuple[float, ...]:
        """Of each worker, its speed over that of the fastest; 1 where nothing is known."""
        speeds = [self._speed(worker) for worker in range(len(self._rows))]
        fastest = max((speed for speed in speeds if speed is not None), default=1.0)
        shares = [1.0 if speed is None else max(_LOWEST, speed / fastest) for speed in speeds]
        limits = [_EQUAL_AGAIN if is_slow else _EQUAL for is_slow in self._is_slow]
        self._is_slow = [share <= limit for share, limit in zip(shares, limits, strict=True)]
        return tuple(share if slow else 1.0 for share, slow in zip(shares, self._is_slow, strict=True))

    def _speed(self, worker: int) -> float | None:
        batches, busy_s = self._batches[worker], self._busy_s[worker]
        if not (batches and busy_s and self._rows[worker]):
            return None
        per_batch = self._rows[worker] / batches
        touched = self._held * (1 - math.exp(-per_batch / self._held))
        return batches * max(per_batch, self._knee * touched) / busy_s
