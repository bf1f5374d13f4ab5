"""What a simulation remembers of each request, and of the gaps between tokens: enough for every percentile, no more.

Gaps are kept as (seconds, how many), because all sequences of a step share theirs; a few numbers a step stand for
thousands of tokens exactly. Rejected: a histogram. It would round what tests compare.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are None until they happen. `refused`: why the engine's admission turned it down."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_output: int = 0
    num_losses: int = 0  # how often a worker died under it
    refused: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single one."""
        if self.num_output < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


class Gaps:
    """Times between consecutive tokens of a request, over all requests."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.counts: list[int] = []

    def add(self, counts: dict[float, int]) -> None:
        """Gaps of one step: seconds -> how many."""
        self.seconds.extend(counts)
        self.counts.extend(counts.values())

    def summary(self) -> dict[str, float]:
        return summary(np.asarray(self.seconds), np.asarray(self.counts))


def summary(values: NDArray[np.float64], counts: NDArray[np.int64] | None = None) -> dict[str, float]:
    """Mean, percentiles and maximum; empty if there is nothing. A percentile is a value that occurs: the smallest that
    so large a share does not exceed."""
    if not len(values):
        return {}
    weights = np.ones(len(values)) if counts is None else counts.astype(np.float64)
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    reached = np.cumsum(weights)
    found = {"mean": float((values * weights).sum() / reached[-1])}
    for percentile in PERCENTILES:
        found[f"p{percentile * 100:g}"] = percentile_of(values, reached, percentile)
    found["max"] = float(values[-1])
    return found


def percentile_of(ordered: NDArray[np.float64], reached: NDArray[np.float64], percentile: float) -> float:
    """`reached`: cumulative weights of the ordered values."""
    index = int(np.searchsorted(reached, percentile * reached[-1] * (1 - 1e-12)))
    return float(ordered[min(index, len(ordered) - 1)])
