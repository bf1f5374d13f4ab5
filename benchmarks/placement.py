"""Balance of expert workers under drifting popularity: placement from a window of steps, used for the next ones.

    python benchmarks/placement.py

Popularity is a Zipf law times a log-normal that wanders (AR(1) of its logarithm, standard deviation 0.7). The
rows of a step are one multinomial draw. Placed every 8 steps from the 40 before. Balancedness is mean over maximum of
the workers' rows. A cell has its mean over steps and its 5th percentile.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.skew import zipf_shares
from antiphon.placement.balance import contiguous
from antiphon.placement.place import place, recent_loads
from antiphon.placement.split import balancedness, split_rows

WINDOW, USED, NUM_PLANS, SEEDS = 40, 8, 14, (0, 1, 2)
ROWS_PER_EXPERT = 64
SPREAD = 0.7
CASES = (  # experts, workers, copies, Zipf exponent, correlation from step to step
    (128, 16, 32, 0.5, 0.95),
    (256, 32, 64, 0.5, 0.95),
    (256, 32, 64, 0.7, 0.95),
    (256, 32, 32, 0.5, 0.95),
    (64, 8, 16, 0.5, 0.95),
    (128, 16, 32, 0.5, 0.8),
    (256, 32, 64, 0.5, 0.8),
)
IntArray = NDArray[np.int64]


def drifting_counts(num_experts: int, num_steps: int, exponent: float, correlation: float, seed: int) -> IntArray:
    """Rows [steps, experts] of a layer."""
    random = np.random.default_rng(seed)
    popular = random.permutation(zipf_shares(num_experts, exponent))
    wander = SPREAD * random.normal(size=num_experts)
    counts = np.empty((num_steps, num_experts), dtype=np.int64)
    for step in range(num_steps):
        shares = popular * np.exp(wander)
        counts[step] = random.multinomial(ROWS_PER_EXPERT * num_experts, shares / shares.sum())
        wander = correlation * wander + np.sqrt(1 - correlation**2) * SPREAD * random.normal(size=num_experts)
    return counts


def drift_row(num_experts: int, num_workers: int, num_copies: int, exponent: float, correlation: float) -> str:
    """One row of the table: contiguous experts, copies with even shares, the split, and a map for the step itself."""
    slots = (num_experts + num_copies) // num_workers
    plain = contiguous(num_experts, num_workers) > 0
    found: dict[str, list[NDArray[np.float64]]] = {"none": [], "even": [], "split": [], "fresh": []}
    for seed in SEEDS:
        counts = drifting_counts(num_experts, WINDOW + NUM_PLANS * USED, exponent, correlation, seed)
        begins = range(WINDOW, len(counts), USED)
        held = place(np.stack([recent_loads(counts[at - WINDOW : at]) for at in begins]), num_workers, slots)
        fresh = place(counts[list(begins)], num_workers, slots)
        for plan, at in enumerate(begins):
            steps = counts[at : at + USED]
            copies = held[plan].sum(axis=1, keepdims=True)
            found["none"].append(balancedness(split_rows(steps, plain)))
            found["even"].append(balancedness(held[plan] / copies * steps[..., None]))
            found["split"].append(balancedness(split_rows(steps, held[plan])))
            found["fresh"].append(balancedness(split_rows(counts[at], fresh[plan]))[None])
    cells = [
        f"{np.concatenate(values).mean():.3f} / {np.quantile(np.concatenate(values), 0.05):.3f}"
        for values in found.values()
    ]
    name = f"{num_experts} / {num_workers} / +{num_copies}, {exponent}, {correlation}"
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    argparse.ArgumentParser(description="Balance of expert workers under drifting popularity.").parse_args()
    print("| experts / workers / copies, Zipf, correlation | no copies | even shares | split | fresh counts |")
    print("|---|---|---|---|---|")
    for case in CASES:
        print(drift_row(*case), flush=True)


if __name__ == "__main__":
    main()
