"""What to copy for a forecast: of the rows that each expert of a layer will get (Lina section 5.2).

Lina places all experts anew for every layer. Here owners stay, and each worker has room for one copy more. So only what
relieves the fullest worker is loaded:

1. Split the expected rows over the present copies (`placement/split`). A part costs at least `knee` rows.
2. The fullest worker hands rows of its largest part to the one that would be done first: as many as make both equal,
   at least a knee, and no part is left smaller than that.
3. Repeat with the loads that this leaves, until the fullest worker finds no other. A worker takes one copy at most.

The choice itself is native code (`csrc/m2n/expert_split.cpp`): it is made twice in each layer of a step.
Rejected: first-fit-decreasing for all experts (the paper's packing). It moves experts that no step waits for, and a
worker would need room for as many new experts as it has.

Letters: E experts, W workers.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.placement.split import FloatArray, IntArray


@dataclass(frozen=True)
class Prefetch:
    """A copy of `expert` for `worker`. `gain`: rows that the fullest worker would be spared, this copy's part of it."""

    expert: int
    worker: int
    gain: float


def most_popular(counts_E: FloatArray | IntArray, number: int) -> list[int]:
    """The experts with the largest counts in falling order; of equal ones the lower number first."""
    order: list[int] = np.argsort(-np.asarray(counts_E, dtype=np.float64), kind="stable")[:number].tolist()
    return order


def needs_phase_two(expected_E: FloatArray | IntArray, actual_E: FloatArray | IntArray, top_k: int) -> bool:
    """Whether the most popular 2 k experts are others than those that were expected (Lina's second phase)."""
    return set(most_popular(expected_E, 2 * top_k)) != set(most_popular(actual_E, 2 * top_k))
