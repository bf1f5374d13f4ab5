"""Which worker holds which experts: copies of the hot ones, packed so that a split of the rows can level the loads.

    minimise  max_j C_j / speed_j,   C_j = sum_i x_ij max(a_i, K),   sum_j x_ij = 1,   x_ij = 0 where j has no copy of i

(MegaScale-Infer section 6, "Load balance"; a_i what expert i's rows cost, K what it costs however few they are.)

1. Spare slots become copies, one by one, of the expert with the largest cost per copy.
2. Copies are placed in falling order of cost on the worker that is done first with it and has a slot for it. Two
   surcharges: on workers that share experts with the expert's other owners already, because a chain of neighbours that
   share passes a surprise on and a pair that shares twice does not; and on a worker that does not hold the expert now,
   because its weights have to move.
3. `placement.split` says what the rows' split makes of it. Where that is more than 1% above an even load, copies of the
   busiest worker change places or replace others' second copies, as long as that helps.
4. What is there now is changed in the same way, one change after another. Each map's time counts with the cost of the
   moves to it, and the best one wins: what is there now, what it became, or the new map. So counts that are only noisy
   move little, and the caller can say how much chance alone makes, which no change is worth. Layers whose load is even
   but for that and the cost of one move stay as they are, and cost no search.

Copies ahead of a layer, by a forecast of its rows, are an attention worker's (`serve/worker/expert_prefetch`).

All layers are placed at once, one copy of each layer a time: numpy's calls cost what they cost, for 61 rows or one.
Rejected: an integer program. It is the yardstick in the tests, and takes seconds to minutes.

The planner and the simulator place one layer with `balance`, all speeds equal:

1. Copies as above, in falling order of cost on the least loaded worker that has a slot and not yet that expert.
2. Where slots allow it, experts are also laid end to end and cut into equal parts, one for each worker: an even load.
3. The best of these, of step 1 without copies, and of the contiguous split is taken, so it never loses to the latter.

Without copies and with enough slots step 1 is longest-processing-time-first: at most 4/3 - 1/(3 N) of the optimum.
`place` comes up to 7% nearer to an even load. A planner places an expert layer for thousands of candidates and needs
three things that it does not give: an answer in a third to a twentieth of the time, no copy that gains nothing (copies
take memory), and fractions that are exactly even where slots allow it. A server needs speeds and few moves, and splits
rows anew in every step.

Letters: L layers, E experts, W workers.
"""

import heapq
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from antiphon.base.errors import UserError
from antiphon.placement.split import BoolArray, FloatArray, IntArray, check_speeds, split_loads
from antiphon.specs.checked import is_number
from antiphon.specs.placement import Owners

SPREAD = 0.15  # surcharge, in mean loads of a worker, for each expert that two workers share already
CLOSE = 1.01
HALF_LIFE_STEPS = 4.0
NUM_TRIED = 24  # changes of a map whose split is computed
BEAM = 6  # maps that are changed further
MOST_COPIES = 1 << 22  # on all workers of a layer
BEAM_NUMBERS = 1024  # experts times workers, up to which all of them are


def place(
    loads: FloatArray,
    num_workers: int,
    slots: int,
    *,
    speeds: FloatArray | None = None,
    floor: float = 0.0,
    present: BoolArray | None = None,
    move_cost: float = 0.0,
    noise: float = 0.0,
) -> BoolArray:
    """Who holds a copy: [L, E, W] from `loads` [L, E] (or [E, W] from [E]), at most `slots` experts on a worker.

    `speeds` [W]: loads a worker gets done in a second (None: all 1); `floor`: K. `present`: who holds what now.
    `move_cost`: what moving one expert costs, as time of the busiest worker in one step; `noise`: what any change must
    gain besides, because chance alone makes as much. `UserError` if the experts do not fit."""
    costs = np.maximum(np.atleast_2d(np.asarray(loads, dtype=np.float64)), floor)
    num_experts = costs.shape[1]
    if costs.ndim != 2 or not np.isfinite(costs).all() or not np.all(np.asarray(loads) >= 0) or not floor >= 0:
        raise UserError(
            f"loads {np.shape(loads)} must be [L, E] or [E], of finite numbers of at least 0, the floor too"
        )
    check_fit(num_experts, num_workers, slots)
    check_speeds(speeds, num_workers)
    speeds = np.ones(num_workers) if speeds is None else np.asarray(speeds, dtype=np.float64)
    slots = min(slots, num_experts)
    if present is not None and np.shape(present)[-2:] != (num_experts, num_workers):
        raise UserError(
            f"present {np.shape(present)}: give [L, E, W] or [E, W] of {num_experts} experts on {num_workers}"
        )
    if not len(costs):
        held = np.zeros((0, num_experts, num_workers), dtype=bool)
    elif present is None:
        held = _new(costs, slots, speeds, None, move_cost)
    else:
        held = np.broadcast_to(np.asarray(present, dtype=bool), (len(costs), num_experts, num_workers)).copy()
        even = costs.sum(axis=1) / speeds.sum()
        (open_,) = np.nonzero(_worst(costs, held, speeds) > even + move_cost + noise)  # elsewhere not one move pays
        if open_.size:
            held[open_] = _changed_or_new(costs[open_], slots, speeds, held[open_], move_cost, noise)
    return held.reshape(*np.shape(loads), num_workers)


def _changed_or_new(
    costs: FloatArray, slots: int, speeds: FloatArray, now: BoolArray, move_cost: float, noise: float
) -> BoolArray:
    """Step 4."""
    changed = np.stack([_improve(costs[layer], now[layer], slots, speeds, move_cost) for layer in range(len(costs))])
    maps = np.stack([now, changed, _new(costs, slots, speeds, now, move_cost)])
    prices = np.stack([_worst(costs, each, speeds) + move_cost * moves_by_layer(now, each) for each in maps])
    prices[1:] += noise
    best: BoolArray = maps[np.argmin(prices, axis=0), np.arange(len(costs))]  # of equals the first
    return best


def _new(costs: FloatArray, slots: int, speeds: FloatArray, now: BoolArray | None, move_cost: float) -> BoolArray:
    """Steps 1 to 3."""
    held = _greedy(costs, slots, speeds, now, move_cost)
    for layer, worst in enumerate(_worst(costs, held, speeds)):
        if worst > CLOSE * costs[layer].sum() / speeds.sum():
            held[layer] = _improve(costs[layer], held[layer], slots, speeds)
    return held


def matrix_of(owners: Owners, num_workers: int) -> BoolArray:
    """[E, W] from the owners of one layer."""
    held = np.zeros((len(owners), num_workers), dtype=bool)
    for expert, workers in enumerate(owners):
        held[expert, list(workers)] = True
    return held


def owners_of(held: BoolArray) -> Owners:
    """The owners of one layer from [E, W], ascending."""
    return tuple(tuple(np.flatnonzero(workers).tolist()) for workers in held)


def moves_by_layer(before: BoolArray, after: BoolArray) -> IntArray:
    """Experts [L] whose weights a worker has to fetch, from [L, E, W] to [L, E, W]."""
    moves: IntArray = (after & ~before).sum(axis=(-2, -1))
    return moves


def recent_loads(window: FloatArray, half_life_steps: float = HALF_LIFE_STEPS) -> FloatArray:
    """Loads [L, E] to place for: the mean of counts [T, L, E] of the last T steps, where a step counts half of one
    `half_life_steps` later. Popularity drifts, so an even mean over the window is stale."""
    steps = np.asarray(window, dtype=np.float64)
    loads: FloatArray = np.tensordot(_weights(len(steps), half_life_steps), steps, axes=1)
    return loads


def chance_of(load: float, num_steps: int, half_life_steps: float = HALF_LIFE_STEPS) -> float:
    """Standard deviation of one of `recent_loads`, if its rows came independently of each other."""
    return float(np.sqrt(load * (_weights(num_steps, half_life_steps) ** 2).sum()))


def _weights(num_steps: int, half_life_steps: float) -> FloatArray:
    weights = 0.5 ** (np.arange(num_steps)[::-1] / half_life_steps)
    shares: FloatArray = weights / weights.sum()
    return shares


def _worst(costs: FloatArray, held: BoolArray, speeds: FloatArray) -> FloatArray:
    """Time [L] of the busiest worker."""
    worst: FloatArray = (split_loads(costs, held, speeds).sum(axis=-2) / speeds).max(axis=-1)
    return worst


def num_copies(costs: FloatArray, num_workers: int, slots: int) -> IntArray:
    """Copies [L, E] of each expert, together as many as there are slots: step 1."""
    copies = np.ones(costs.shape, dtype=np.int64)
    layers = np.arange(len(costs))
    shares = np.where(copies < num_workers, costs, -1.0)
    for _ in range(num_workers * slots - costs.shape[1]):
        most = np.argmax(shares, axis=1)
        copies[layers, most] += 1
        more = copies[layers, most]
        shares[layers, most] = np.where(more < num_workers, costs[layers, most] / more, -1.0)
    return copies


def _greedy(costs: FloatArray, slots: int, speeds: FloatArray, now: BoolArray | None, move_cost: float) -> BoolArray:
    """Step 2. An expert's copies follow each other, so its first one always finds a slot; a later one that no worker
    may take is left out."""
    num_layers, num_experts = costs.shape
    num_workers = speeds.size
    copies = num_copies(costs, num_workers, slots)
    pieces = costs / copies
    queue = np.argsort(-pieces, axis=1, kind="stable")
    queue = np.stack([np.repeat(queue[layer], copies[layer, queue[layer]]) for layer in range(num_layers)])
    layers = np.arange(num_layers)
    held = np.zeros((num_layers, num_experts, num_workers), dtype=bool)
    loads, used = np.zeros((num_layers, num_workers)), np.zeros((num_layers, num_workers), dtype=np.int64)
    shared = np.zeros((num_layers, num_workers, num_workers))
    spread = SPREAD * costs.sum(axis=1) / speeds.sum()
    for experts in queue.T:
        holders, piece = held[layers, experts], pieces[layers, experts]
        score = (loads + piece[:, None]) / speeds
        if holders.any():
            score += spread[:, None] * np.matmul(holders[:, None].astype(np.float64), shared)[:, 0]
        if now is not None:
            score += move_cost * ~now[layers, experts]
        score[holders | (used >= slots)] = np.inf
        chosen = np.argmin(score, axis=1)
        fits = np.isfinite(score[layers, chosen])
        here, experts, chosen = layers[fits], experts[fits], chosen[fits]
        shared[here, :, chosen] += holders[fits]
        shared[here, chosen, :] += holders[fits]
        held[here, experts, chosen] = True
        loads[here, chosen] += piece[fits]
        used[here, chosen] += 1
    return held


def _improve(costs: FloatArray, held: BoolArray, slots: int, speeds: FloatArray, move_cost: float = 0.0) -> BoolArray:
    """Step 3, for one layer [E, W]: the best BEAM maps of each round are changed again, also those that are no better
    than before, because a copy often pays only after a second change. Large layers follow one map. With a `move_cost`
    an expert that a worker gets has to pay for itself."""
    first = held
    width = int(np.clip(BEAM_NUMBERS // held.size, 1, BEAM))
    enough = CLOSE * costs.sum() / speeds.sum()
    parts = split_loads(costs, held, speeds)
    best, worst, patience = held, float((parts.sum(axis=0) / speeds).max()), width
    beam = [(held, parts)]
    while patience and worst > enough:
        patience -= 1
        changed = np.concatenate([_changes(parts, held, slots, speeds) for held, parts in beam])
        if width > 1:
            changed = np.unique(changed, axis=0)
        if not len(changed):
            break
        split = split_loads(np.broadcast_to(costs, (len(changed), costs.size)), changed, speeds)
        times = (split.sum(axis=1) / speeds).max(axis=1) + move_cost * moves_by_layer(first, changed)
        order = np.argsort(times, kind="stable")[:width]
        beam = [(changed[index], split[index]) for index in order]
        if times[order[0]] < worst * (1 - 1e-6):
            best, worst, patience = changed[order[0]], float(times[order[0]]), width
    return best


def _changes(parts: FloatArray, held: BoolArray, slots: int, speeds: FloatArray) -> BoolArray:
    """Up to NUM_TRIED maps [N, E, W], one change away, that seem to relieve the busiest worker most.

    A change takes an expert i of the busiest worker b and a worker w that lacks it. Either i moves to w, in exchange
    for an expert j that b lacks; or w gets a copy of i in place of an expert j that others hold too. j may be an empty
    slot."""
    num_experts, num_workers = held.shape
    loads = parts.sum(axis=0)
    busiest = int(np.argmax(loads / speeds))
    given = np.flatnonzero(held[:, busiest])
    taken, workers = np.nonzero(np.vstack([held, held.sum(axis=0) < slots]))
    away = workers != busiest
    taken, workers = taken[away], workers[away]
    ours = parts[given, busiest][:, None]
    theirs = np.vstack([parts, np.zeros(num_workers)])[taken, workers]
    lacks = ~held[given][:, workers]
    is_empty, is_copied = taken == num_experts, np.append(held.sum(axis=1) > 1, True)[taken]
    swaps = lacks & (is_empty | ~np.append(held[:, busiest], False)[taken])
    here, there = loads[busiest], loads[workers]
    swapped = np.maximum((here - ours + theirs) / speeds[busiest], (there - theirs + ours) / speeds[workers])
    level = (here + there - theirs) / (speeds[busiest] + speeds[workers])
    copied = np.maximum((here - ours) / speeds[busiest], level)
    values = np.concatenate(
        [np.where(swaps, swapped, np.inf).ravel(), np.where(lacks & is_copied, copied, np.inf).ravel()]
    )
    best = np.argsort(values, kind="stable")[:NUM_TRIED]
    best = best[np.isfinite(values[best])]
    maps = np.repeat(np.pad(held, ((0, 1), (0, 0)))[None], len(best), axis=0)
    for number, index in enumerate(best):
        is_copy, pair = divmod(int(index), swaps.size)
        i, at = divmod(pair, len(taken))
        maps[number, given[i], workers[at]] = True
        maps[number, taken[at], workers[at]] = False
        if not is_copy:
            maps[number, given[i], busiest] = False
            maps[number, taken[at], busiest] = True
    return maps[:, :num_experts]


# --- `balance`, the planner's


def check_fit(num_experts: int, num_workers: int, slots: int) -> None:
    """`UserError` unless `num_workers` with `slots` each can hold all experts, of which there is at least one."""
    for count, what in ((num_experts, "experts"), (num_workers, "workers"), (slots, "slots of a worker")):
        if not isinstance(count, Integral) or count < 1:
            raise UserError(f"{count} {what}: give a whole number of at least 1")
    if (copies := num_workers * min(slots, num_experts)) > MOST_COPIES:
        raise UserError(
            f"{num_workers} workers with {slots} slots have room for {copies:,} copies of {num_experts} experts: give "
            f"fewer, at most {MOST_COPIES:,} are placed"
        )
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
    if not (np.all(np.isfinite(costs)) and np.all(costs >= 0) and is_number(floor) and floor >= 0):
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
    choices = [_least_loaded(costs, copies, num_workers, slots) for copies in _copy_counts(costs, num_workers, slots)]
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


def _least_loaded(costs: FloatArray, copies: Sequence[int], num_workers: int, slots: int) -> FloatArray:
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
