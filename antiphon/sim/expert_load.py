"""Which experts are popular, where they are placed, how many rows the fullest expert worker gets, and when they move.

1. Popularity is the workload's shares; at every shift other experts become the popular ones (a seeded permutation).
2. Rows of a step fall on experts at random. What a step waits for is the fullest worker: the expected maximum over
   workers of their own shares (`cost.skew`), as a table over rows, since a step adds up many layers.
3. Counts are drawn when somebody looks at them: sums of multinomial draws are one multinomial draw.
4. Re-placement: `balance` on the counts since the last one, if that makes the busiest worker's share smaller
   by `WORTHWHILE`. It takes as long as the worker that gets most new experts needs to receive their weights.

Rejected: drawing the rows of every layer of every step. It takes longer than everything else, for the same mean.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.memory import expert_weight_bytes
from antiphon.cost.roofline import FloatArray
from antiphon.cost.skew import expected_max_rows_of
from antiphon.placement.place import balance, busiest_share
from antiphon.planner.candidates import Candidates
from antiphon.planner.setting import Setting
from antiphon.sim.step_tables import Line, sizes_up_to
from antiphon.specs.plan import PhasePlan

WORTHWHILE = 0.02
_LARGEST_ROWS = 2.0**24


class Popularity:
    """Shares by expert as they are now. Shared by all instances of a pool; `version` counts the shifts."""

    def __init__(self, shares: tuple[float, ...], seed: int) -> None:
        self._ranked = np.asarray(shares, dtype=np.float64)
        self._random = np.random.default_rng([seed, 10])
        self.shares: FloatArray = self._ranked
        self.version = 0

    def shift(self) -> None:
        """Other experts become the popular ones."""
        self.shares = self._ranked[self._random.permutation(self._ranked.size)]
        self.version += 1


@dataclass(frozen=True, kw_only=True)
class Move:
    """A re-placement: how long the instance stands still for it, experts that got a new place, the busiest worker's
    share of all rows by the measured counts before and after."""

    pause_s: float
    num_moved: int
    busiest_before: float
    busiest_after: float


def fractions_of(phase: PhasePlan, num_workers: int) -> FloatArray:
    """[experts, workers] from a plan's placement."""
    fractions = np.zeros((len(phase.placement), num_workers))
    for expert, owners in enumerate(phase.placement):
        for worker, fraction in owners:
            fractions[expert, worker] = fraction
    return fractions


class ExpertLoad:
    """Rows and placement of one instance's experts. `pairs` are (token, expert) pairs; `counts`: those drawn since the
    last re-placement, by expert."""

    def __init__(
        self, setting: Setting, one: Candidates, fractions: FloatArray, popularity: Popularity, seed: int
    ) -> None:
        self._setting, self._one = setting, one
        self._popularity = popularity
        self._random = np.random.default_rng([seed, 11])
        self.fractions = fractions
        self._slots = int(one.slots[0])
        self._fullest: Line | None = None
        self._version = popularity.version
        self._shares_then = popularity.shares
        self._pending_pairs = 0
        self.counts = np.zeros(fractions.shape[0])
        self.mean_pairs = 0.0
        self.fullest_pairs = 0.0

    @property
    def num_workers(self) -> int:
        return int(self.fractions.shape[1])

    def fullest(self, pairs: int) -> float:
        """Expected rows of the fullest worker when `pairs` fall on all of them."""
        if self._fullest is None or self._version != self._popularity.version:
            self._draw_counts()
            self._version = self._popularity.version
            sizes = sizes_up_to(_LARGEST_ROWS, 1.5)
            loads = self._popularity.shares @ self.fractions
            self._fullest = Line(sizes, np.asarray(expected_max_rows_of(sizes, loads / loads.sum())))
        return self._fullest(pairs)

    def record(self, pairs: int, fullest: float) -> None:
        """Rows of one micro-batch of all layers together."""
        self._pending_pairs += pairs
        self.mean_pairs += pairs / self.num_workers
        self.fullest_pairs += fullest

    def replace(self) -> Move | None:
        """Place anew by what was counted since the last time; None if it would not be worth it."""
        self._draw_counts()
        counts, self.counts = self.counts, np.zeros_like(self.counts)
        if not counts.sum() > 0:
            return None
        fresh = balance(counts, self.num_workers, self._slots)
        before, after = busiest_share(self.fractions, counts), busiest_share(fresh, counts)
        if after > before * (1 - WORTHWHILE):
            return None
        arrived = (fresh > 0) & (self.fractions <= 0)
        self.fractions, self._fullest = fresh, None
        return Move(
            pause_s=self._receive_s(int(arrived.sum(axis=0).max())),
            num_moved=int(arrived.sum()),
            busiest_before=before,
            busiest_after=after,
        )

    def _receive_s(self, num_experts: int) -> float:
        """Weights of this many experts, of all layers of the stage, over the NICs of one worker's devices."""
        setting, one = self._setting, self._one
        tp, pp = float(one.expert_tp[0]), float(one.pp[0])
        size = np.asarray(expert_weight_bytes(setting.model, num_experts, tp, setting.precision, pp=pp))
        return float(np.max(setting.networks[int(one.expert_kind[0])].scale_out.send_s(size)))

    def _draw_counts(self) -> None:
        """Belongs to the popularity under which the rows were recorded, so it runs before a shift is looked at."""
        if self._pending_pairs:
            shares = self._shares_then
            self.counts += self._random.multinomial(self._pending_pairs, shares / shares.sum())
            self._pending_pairs = 0
        self._shares_then = self._popularity.shares
