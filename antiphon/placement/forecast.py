"""What to copy for a forecast: of the rows that each expert of a layer will get (Lina section 5.2).

Lina places all experts anew for every layer. Here owners stay, and each worker has room for one copy more. So only what
relieves the fullest worker is loaded:

1. Split the expected rows over the present copies (`placement/split`). A part costs at least `knee` rows.
2. The fullest worker hands rows of its largest part to the one that would be done first: as many as make both equal,
   at least a knee, and no part is left smaller than that.
3. Repeat with the loads that this leaves, until the fullest worker finds nobody. A worker takes one copy at most.

Attention workers use the native form (`csrc/m2n/expert_split.cpp`), which makes the same choices.
Rejected: first-fit-decreasing for all experts (the paper's packing). It moves experts that nobody waits for, and a
worker would need room for as many new experts as it has.

Letters: E experts, W workers.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.placement.split import BoolArray, FloatArray, IntArray, split_rows


@dataclass(frozen=True)
class Prefetch:
    """A copy of `expert` for `worker`. `gain`: rows that the fullest worker would be spared, this copy's part of it."""

    expert: int
    worker: int
    gain: float


def choose_prefetches(
    counts_E: IntArray, held_EW: BoolArray, open_W: BoolArray, speeds_W: FloatArray, knee: int
) -> list[Prefetch]:
    """Copies worth having for these rows, beyond those in `held_EW`. `open_W`: workers that may take one. `speeds_W`:
    rows/s, only their ratios count. Empty if the fullest worker cannot be relieved by a knee."""
    parts_EW = split_rows(counts_E, held_EW, speeds_W, knee)
    times_W = np.where(parts_EW > 0, np.maximum(parts_EW, knee), 0).sum(axis=0) / speeds_W
    before = float(times_W.max())
    open_W = open_W.copy()
    chosen: list[tuple[int, int]] = []
    while open_W.any():
        fullest = int(times_W.argmax())
        taker = int(np.where(open_W, times_W, np.inf).argmin())
        if taker == fullest:
            break
        expert = int(np.where(held_EW[:, taker], 0, parts_EW[:, fullest]).argmax())
        rows = _handed(parts_EW[expert, fullest], times_W, speeds_W, fullest, taker, knee)
        if rows < knee or held_EW[expert, taker]:
            break
        parts_EW[expert, fullest] -= rows
        parts_EW[expert, taker] += rows
        times_W[fullest] -= rows / speeds_W[fullest]
        times_W[taker] += rows / speeds_W[taker]
        open_W[taker] = False
        chosen.append((expert, taker))
    gain = (before - float(times_W.max())) * float(speeds_W.mean())
    if gain < knee:
        return []
    return [Prefetch(expert, worker, gain / len(chosen)) for expert, worker in chosen]


def _handed(part: int, times_W: FloatArray, speeds_W: FloatArray, giver: int, taker: int, knee: int) -> int:
    """Rows of a part that make both workers equal, so that what stays is a knee at least, or nothing."""
    difference = float(times_W[giver] - times_W[taker])
    equal = int(difference / (1 / float(speeds_W[giver]) + 1 / float(speeds_W[taker])))
    return int(part) if part <= equal else min(equal, int(part) - knee)


def most_popular(counts_E: FloatArray | IntArray, number: int) -> list[int]:
    """The experts with the largest counts in falling order; of equal ones the lower number first."""
    order: list[int] = np.argsort(-np.asarray(counts_E, dtype=np.float64), kind="stable")[:number].tolist()
    return order


def needs_phase_two(expected_E: FloatArray | IntArray, actual_E: FloatArray | IntArray, top_k: int) -> bool:
    """Whether the most popular 2 k experts are others than those that were expected (Lina's second phase)."""
    return set(most_popular(expected_E, 2 * top_k)) != set(most_popular(actual_E, 2 * top_k))
