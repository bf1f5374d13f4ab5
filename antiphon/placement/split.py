"""How many rows each copy of an expert gets in this step: the sender's choice, made from the gate's own counts.

    minimise  max_j  load_j / speed_j,   load_j = sum_i x_ij,   sum_j x_ij = n_i,   x_ij = 0 where j has no copy of i

1. Experts with one copy have no choice. n_i rows cost max(n_i, knee): weights are read for few rows too.
2. An expert with fewer than two knees of rows stays whole, because each part would read the weights again. It goes to
   the owner that is done first.
3. The others, largest first, pour their rows over their owners until those would be done at one time, the level. Each
   changes the levels of others, so this is repeated. Every pouring lowers the sum of squares, and where that is
   smallest the maximum is too.
4. A part below half a knee goes to the other copies, one below a knee is raised to it. Then parts become whole rows.

Numbers come about by +, -, * and / in one order, so `csrc/m2n/expert_split.cpp` gives the same rows.
Rejected: rounds of x <- x (mean / load)^0.7. After 30 of them the fullest worker was up to 7% above the optimum, after
10 pourings 1%, and a pouring costs less. Rejected: a linear program in every step, which takes milliseconds.

Letters: B steps or layers that are split independently, E experts, W workers, K copies of the expert that has most.

`Prefetch`: what to copy for a forecast of the rows that each expert of a layer will get (Lina section 5.2).

Lina places all experts anew for every layer. Here owners stay, and each worker has room for one copy more. So only what
relieves the fullest worker is loaded:

1. Split the expected rows over the present copies, as above. A part costs at least `knee` rows.
2. The fullest worker hands rows of its largest part to the one that would be done first: as many as make both equal,
   at least a knee, and no part is left smaller than that.
3. Repeat with the loads that this leaves, until the fullest worker finds no other. A worker takes one copy at most.

The choice itself is native code (`csrc/m2n/expert_split.cpp`): it is made twice in each layer of a step.
Rejected: first-fit-decreasing for all experts (the paper's packing). It moves experts that no step waits for, and a
worker would need room for as many new experts as it has.

"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.specs.checked import LARGEST, SMALLEST

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
MAX_ROUNDS = 12
SETTLED = 1e-3  # of the mean load; rounds end when no part changes by more


def split_rows(counts: IntArray, held: BoolArray, speeds: FloatArray | None = None, knee: int = 1) -> IntArray:
    """Rows [..., E, W] of each copy: whole numbers, none below `knee` unless the expert itself has fewer.

    `counts` [..., E] rows of each expert; `held` [..., E, W] who has a copy, or [E, W] for all steps; `speeds` [W] in
    rows/s, only their ratios count (None: equal); `knee` rows up to which an expert takes no longer than for one."""
    if not knee >= 1 or knee != int(knee):
        raise UserError(f"a knee of {knee} rows: it must be a whole number of at least 1")
    if not np.array_equal(counts, np.floor(counts)):
        raise UserError("counts of rows must be whole numbers")
    pouring = _Pouring(np.asarray(counts, dtype=np.float64), held, speeds, knee)
    pouring.pour_all()
    pouring.make_whole()
    rows: IntArray = pouring.dense().reshape(*np.shape(counts), pouring.num_workers).astype(np.int64)
    return rows


def split_loads(loads: FloatArray, held: BoolArray, speeds: FloatArray | None = None) -> FloatArray:
    """As `split_rows`, for loads that need not be whole and can be split at any size."""
    pouring = _Pouring(np.asarray(loads, dtype=np.float64), held, speeds, 0)
    pouring.pour_all()
    return pouring.dense().reshape(*np.shape(loads), pouring.num_workers)


def balancedness(rows: FloatArray | IntArray, speeds: FloatArray | None = None) -> FloatArray:
    """Mean over maximum of the workers' loads, [...] from rows [..., E, W]. With `speeds` it is of the times that the
    loads take, and the mean is what an ideal split would take. 1 where there are no rows."""
    loads = np.asarray(rows, dtype=np.float64).sum(axis=-2)
    if speeds is None:
        speeds = np.ones(loads.shape[-1])
    most = (loads / speeds).max(axis=-1)
    ideal = loads.sum(axis=-1) / np.sum(speeds)
    result: FloatArray = np.where(most > 0, ideal / np.where(most > 0, most, 1.0), 1.0)
    return result


def check_speeds(speeds: FloatArray | None, num_workers: int) -> None:
    """`UserError` unless each worker has a speed above 0; None: all are equal."""
    if speeds is None:
        return
    values = np.asarray(speeds, dtype=np.float64)
    if values.shape != (num_workers,) or not ((values > SMALLEST) & (values <= LARGEST)).all():
        raise UserError(
            f"speeds {values.tolist()} of {num_workers} workers: give each a finite number above 0, between "
            f"{SMALLEST:g} and {LARGEST:g}"
        )


class _Pouring:
    """B splits at once. `owners` [B, E, K] ascending, W (no worker) where an expert has fewer; `parts` as `owners`;
    `loads` [B, W + 1]; `order` [B, R] the experts with copies, largest first, `pours` which of them are split."""

    def __init__(self, counts: FloatArray, held: BoolArray, speeds: FloatArray | None, knee: int) -> None:
        held = np.asarray(held, dtype=bool)
        num_experts, num_workers = held.shape[-2:] if held.ndim > 1 else (0, 0)
        if counts.ndim < 1 or counts.shape[-1] != num_experts or not num_experts or not num_workers:
            raise UserError(
                f"loads {counts.shape} and copies {held.shape}: give [..., E] and [..., E, W], none of them 0"
            )
        if not (np.isfinite(counts) & (counts >= 0)).all():
            raise UserError("loads must be finite numbers of at least 0")
        check_speeds(speeds, num_workers)
        self.counts = counts.reshape(-1, num_experts)
        self.knee = knee
        self.num_workers = num_workers
        self.speeds = np.append(np.ones(num_workers) if speeds is None else speeds, 1.0)
        num_copies = held.sum(axis=-1)
        if not (num_copies > 0).all():
            raise UserError(f"expert {int(np.argwhere(num_copies == 0)[0][-1])} is held by no worker: give it one")
        width = int(num_copies.max(initial=1))
        owners = np.argsort(~held, axis=-1, kind="stable")[..., :width]
        owners = np.where(np.arange(width) < num_copies[..., None], owners, num_workers)
        shape = (len(self.counts), num_experts, width)
        self.owners = np.broadcast_to(owners.reshape(-1, num_experts, width), shape)
        self.parts = np.zeros(shape)
        self.loads = np.zeros((shape[0], num_workers + 1))
        copied = np.broadcast_to(num_copies.reshape(-1, num_experts) > 1, shape[:2])
        order = np.argsort(np.where(copied, -self.counts, 1.0), axis=-1, kind="stable")
        self.order = order[:, : int(copied.sum(axis=-1).max(initial=0))]
        pours = copied & (self.counts >= max(2 * knee, np.finfo(float).tiny))
        self.pours = np.take_along_axis(pours, self.order, axis=-1)
        self.whole = np.take_along_axis(copied & ~pours, self.order, axis=-1)
        self._place_single(~copied)

    def _place_single(self, single: BoolArray) -> None:
        """Step 1."""
        self.parts[..., 0] = np.where(single, self.counts, 0.0)
        costs = np.where(self.parts[..., 0] > 0, np.maximum(self.parts[..., 0], self.knee), 0.0)
        steps = np.broadcast_to(np.arange(len(costs))[:, None], costs.shape)
        np.add.at(self.loads, (steps, self.owners[..., 0]), costs)

    def pour_all(self) -> None:
        """Steps 2 and 3: those that stay whole come after the first pouring of the others."""
        steps = np.arange(len(self.counts))
        positions = range(self.order.shape[1])
        for position in positions:
            self._pour(steps, position)
        for position in positions:
            self._place_whole(steps, position)
        settled = SETTLED * self.loads[:, :-1].mean(axis=-1)
        for _ in range(MAX_ROUNDS - 1):
            moved = np.zeros(len(steps))
            for position in positions:
                np.maximum(moved, self._pour(steps, position), out=moved)
            steps = steps[moved > settled[steps]]
            if steps.size == 0:
                return

    def _pour(self, steps: IntArray, position: int) -> FloatArray:
        """Largest change of a part of the expert at `position`, by step."""
        experts = self.order[steps, position]
        owners, parts = self.owners[steps, experts], self.parts[steps, experts]
        base = self.loads[steps[:, None], owners] - parts
        takes = (owners < self.num_workers) & self.pours[steps, position][:, None]
        new = np.where(takes, _to_level(self.counts[steps, experts], base, self.speeds[owners], takes), parts)
        self.parts[steps, experts] = new
        self.loads[steps[:, None], owners] = base + new
        change: FloatArray = np.abs(new - parts).max(axis=-1)
        return change

    def _place_whole(self, steps: IntArray, position: int) -> None:
        experts = self.order[steps, position]
        counts, owners = self.counts[steps, experts], self.owners[steps, experts]
        costs = np.where(self.whole[steps, position] & (counts > 0), np.maximum(counts, self.knee), 0.0)
        times = (self.loads[steps[:, None], owners] + costs[:, None]) / self.speeds[owners]
        first = np.argmin(np.where(owners < self.num_workers, times, np.inf), axis=-1)
        placed = costs > 0
        self.parts[steps[placed], experts[placed], first[placed]] = counts[placed]
        self.loads[steps, owners[steps, first]] += costs

    def make_whole(self) -> None:
        """Step 4."""
        steps = np.arange(len(self.counts))
        for position in range(self.order.shape[1]):
            chosen = steps[self.pours[:, position]]
            if chosen.size:
                self._make_whole(chosen, self.order[chosen, position])

    def _make_whole(self, steps: IntArray, experts: IntArray) -> None:
        owners, parts = self.owners[steps, experts], self.parts[steps, experts]
        counts, speeds = self.counts[steps, experts], self.speeds[owners]
        base = self.loads[steps[:, None], owners] - parts
        rank = np.argsort(np.argsort(-parts, axis=-1, kind="stable"), axis=-1, kind="stable")
        kept = (rank < (counts // self.knee)[:, None]) & (parts >= self.knee / 2) | (rank == 0)
        least = np.where(kept, float(self.knee), 0.0)
        rest = counts - least.sum(axis=-1)
        whole = least + np.floor(np.where(kept, _to_level(rest, base + least, speeds, kept), 0.0))
        missing = counts - whole.sum(axis=-1)
        while (missing > 0).any():
            times = np.where(kept, (base + whole + 1) / speeds, np.inf)
            more = (np.arange(times.shape[1]) == np.argmin(times, axis=-1)[:, None]) & (missing > 0)[:, None]
            whole += more
            missing -= more.sum(axis=-1)
        self.parts[steps, experts] = whole
        self.loads[steps[:, None], owners] = base + whole

    def dense(self) -> FloatArray:
        """`parts` as [B, E, W]."""
        rows = np.zeros((*self.counts.shape, self.num_workers + 1))
        np.put_along_axis(rows, self.owners, self.parts, axis=-1)
        return rows[..., :-1]


def _to_level(rows: FloatArray, base: FloatArray, speeds: FloatArray, takes: BoolArray) -> FloatArray:
    """Parts [B, K] of `rows` [B] on workers with loads `base`: those below the common level are filled up to it."""
    times = np.where(takes, base / speeds, np.inf)
    order = np.argsort(times, axis=-1, kind="stable")
    by_time = np.take_along_axis(times, order, axis=-1)
    sum_base = np.cumsum(np.take_along_axis(np.where(takes, base, 0.0), order, axis=-1), axis=-1)
    sum_speeds = np.cumsum(np.take_along_axis(np.where(takes, speeds, 0.0), order, axis=-1), axis=-1)
    levels = (rows[:, None] + sum_base) / np.where(sum_speeds > 0, sum_speeds, 1.0)
    num_filled = np.logical_and.accumulate(by_time < levels, axis=-1).sum(axis=-1)
    level = np.take_along_axis(levels, np.maximum(num_filled - 1, 0)[:, None], axis=-1)
    parts: FloatArray = np.where(num_filled[:, None] > 0, np.maximum(level * speeds - base, 0.0), 0.0)
    return parts


@dataclass(frozen=True)
class Prefetch:
    """A copy of `expert` for `worker`. `gain`: rows that the fullest worker would be spared, this copy's part of it."""

    expert: int
    worker: int
    gain: float


Phases = Literal["both", "first", "second"]  # of Lina's scheduling, section 5.2


def most_popular(counts_E: FloatArray | IntArray, number: int) -> list[int]:
    """The experts with the largest counts in falling order; of equal ones the lower number first."""
    order: list[int] = np.argsort(-np.asarray(counts_E, dtype=np.float64), kind="stable")[:number].tolist()
    return order


def needs_phase_two(expected_E: FloatArray | IntArray, actual_E: FloatArray | IntArray, top_k: int) -> bool:
    """Whether the most popular 2 k experts are others than those that were expected (Lina's second phase)."""
    return set(most_popular(expected_E, 2 * top_k)) != set(most_popular(actual_E, 2 * top_k))
