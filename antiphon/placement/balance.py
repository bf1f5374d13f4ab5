"""Spread experts over workers so that the busiest one has least to do (MegaScale-Infer section 6, "Load balance").

    minimise  max_j C_j,   C_j = sum_i x_ij * max(a_i, K),   sum_j x_ij = 1

a_i is what expert i's rows cost, K what an expert costs however few rows it gets (its weights are read), x_ij the
fraction of expert i's rows that worker j serves.

1. Spare slots become copies, one by one, of the expert with the largest cost per copy.
2. Copies are placed in falling order of cost on the least loaded worker that has a slot and not yet that expert.
3. Where slots allow it, experts are also laid end to end and cut into equal parts, one for each worker: an even load.
4. The best of these, of step 2 without copies, and of the contiguous split is taken, so it never loses to the latter.

Without copies and with enough slots step 2 is longest-processing-time-first: at most 4/3 - 1/(3 N) of the optimum.

Planner and simulator place with this, the server with `placement.place`, which comes up to 7% nearer to an even load.
A planner places an expert layer for thousands of candidates and needs three things that `place` does not give: an
answer in a third to a twentieth of the time, no copy that gains nothing (copies take memory), and fractions that are
exactly even where slots allow it. A server needs speeds and few moves, and splits rows anew in every step.
Rejected: an integer program. It is exact, and takes seconds to minutes.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError

FloatArray = NDArray[np.float64]


def check_fit(num_experts: int, num_workers: int, slots: int) -> None:
    """`UserError` unless `num_workers` with `slots` each can hold all experts."""
    if num_workers < 1:
        raise UserError(f"{num_workers} workers: there must be at least 1")
    needed = -(-num_experts // num_workers)
    if slots < needed:
        raise UserError(
            f"{num_experts} experts do not fit in {num_workers} x {slots} slots: give each worker at least {needed}"
        )


def expert_costs(loads: Sequence[float] | FloatArray, floor: float = 0.0) -> FloatArray:
    """max(a_i, K) of each expert. `loads`: a_i, in any unit; `floor`: K in the same unit."""
    costs = np.asarray(loads, dtype=np.float64)
    if costs.ndim != 1 or costs.size == 0:
        raise UserError(f"loads have shape {costs.shape}: give one number per expert")
    if not (np.all(np.isfinite(costs)) and np.all(costs >= 0) and floor >= 0):
        raise UserError("loads and their floor must be numbers of at least 0")
    return np.maximum(costs, floor)


def worker_costs(fractions: FloatArray, costs: FloatArray) -> FloatArray:
    """C_j of each worker. `fractions` [experts, workers], `costs` [experts]."""
    totals: FloatArray = costs @ fractions
    return totals


def contiguous(num_experts: int, num_workers: int) -> FloatArray:
    """Fractions [experts, workers] of contiguous runs whose lengths differ by at most one."""
    if not 1 <= num_workers <= num_experts:
        raise UserError(f"{num_workers} workers for {num_experts} experts: use 1 to {num_experts}")
    base, extra = divmod(num_experts, num_workers)
    lengths = [base + (worker < extra) for worker in range(num_workers)]
    fractions = np.zeros((num_experts, num_workers))
    fractions[np.arange(num_experts), np.repeat(np.arange(num_workers), lengths)] = 1.0
    return fractions


def cut_evenly(costs: FloatArray, num_workers: int) -> FloatArray:
    """Fractions [experts, workers] of experts laid end to end by cost and cut into equal parts. Costs are not all 0."""
    ends = np.cumsum(costs) / costs.sum() * num_workers
    starts = np.concatenate([[0.0], ends[:-1]])
    workers = np.arange(num_workers)
    overlaps = np.minimum(ends[:, None], workers + 1) - np.maximum(starts[:, None], workers)
    overlaps = np.where(overlaps > 1e-9, overlaps, 0.0)
    nothing = overlaps.sum(axis=1) == 0  # an expert without cost lies where it is
    overlaps[nothing, np.minimum(starts[nothing].astype(np.int64), num_workers - 1)] = 1.0
    fractions: FloatArray = overlaps / overlaps.sum(axis=1, keepdims=True)
    return fractions


def balance(
    loads: Sequence[float] | FloatArray, num_workers: int, slots_per_worker: int | None = None, *, floor: float = 0.0
) -> FloatArray:
    """Fractions x_ij [experts, workers], rows adding up to 1, with at most `slots_per_worker` experts on a worker.

    `slots_per_worker` None: as many as an even split needs, hence no copies if that comes out even. `UserError` if the
    experts do not fit."""
    costs = expert_costs(loads, floor)
    slots = -(-costs.size // max(num_workers, 1)) if slots_per_worker is None else slots_per_worker
    check_fit(costs.size, num_workers, slots)
    choices = [_greedy(costs, copies, num_workers, slots) for copies in _copy_counts(costs, num_workers, slots)]
    if num_workers <= costs.size:
        choices.append(contiguous(costs.size, num_workers))
    if costs.sum() > 0:
        even = cut_evenly(costs, num_workers)
        choices += [even] if int((even > 0).sum(axis=0).max()) <= slots else []
    return min(choices, key=lambda fractions: (float(worker_costs(fractions, costs).max()), int((fractions > 0).sum())))


def busiest_share(fractions: FloatArray, loads: Sequence[float] | FloatArray) -> float:
    """Share of all rows that the busiest worker gets; at least 1 / workers, never above 1, rounding included."""
    shares = np.asarray(loads, dtype=np.float64)
    total = float(shares.sum())
    if not total > 0:
        shares, total = np.ones_like(shares), float(shares.size)
    return min(float(worker_costs(fractions, shares).max()) / total, 1.0)


def placement_of(fractions: FloatArray) -> tuple[tuple[tuple[int, float], ...], ...]:
    """As `PhasePlan.placement`: of each expert its (worker, fraction) pairs."""
    return tuple(tuple((int(worker), float(row[worker])) for worker in np.flatnonzero(row > 0)) for row in fractions)


def _copy_counts(costs: FloatArray, num_workers: int, slots: int) -> list[list[int]]:
    """Copies of each expert: as many as there are slots for, and, if that is not the same, one each."""
    copies = [1] * costs.size
    spare = num_workers * slots - costs.size
    heap = [(-float(cost), expert) for expert, cost in enumerate(costs)] if num_workers > 1 else []
    heapq.heapify(heap)
    while spare > 0 and heap:
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        spare -= 1
        if copies[expert] < num_workers:
            heapq.heappush(heap, (-float(costs[expert]) / copies[expert], expert))
    single = [1] * costs.size
    return [single] if copies == single else [single, copies]


def _greedy(costs: FloatArray, copies: Sequence[int], num_workers: int, slots: int) -> FloatArray:
    """Copies in falling order of cost, each on the least loaded worker that may take it; a copy that no worker may take
    is left out, and the others of that expert share its rows."""
    held = np.zeros((costs.size, num_workers), dtype=bool)
    workers = [(0.0, 0, worker) for worker in range(num_workers)]  # load, experts held, worker; those with a free slot
    order = sorted(range(costs.size), key=lambda expert: (-float(costs[expert]) / copies[expert], expert))
    for expert in order:  # no more copies than slots, so an expert's first copy always finds one
        cost, taken = float(costs[expert]) / copies[expert], []
        for _ in range(min(copies[expert], len(workers))):
            load, count, worker = heapq.heappop(workers)  # of equal ones the first
            held[expert, worker] = True
            taken.append((load + cost, count + 1, worker))
        for after in taken:
            if after[1] < slots:
                heapq.heappush(workers, after)
    fractions: FloatArray = held / held.sum(axis=1, keepdims=True)
    return fractions
