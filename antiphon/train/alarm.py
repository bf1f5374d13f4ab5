"""Tells when a router collapses or an expert dies, from the rows of each expert, step by step. Plain Python.

A router has collapsed when its fullest expert has had far more rows than the mean for `PATIENCE_STEPS` steps in a row;
an expert is dead when it has had none for as long, and even use would have given it `MISSED_ROWS` by then (with a row a
step expected, none is chance). One warning when it begins, one when it ends.
Rejected: entropy of the use. It is one number too, but 3.1 of 4.2 says little to a reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_STEPS = 25
MISSED_ROWS = 50.0
MOST_OVER_MEAN = 8.0


def collapse_limit(num_experts: int, top_k: int) -> float:
    """Rows of the fullest expert over the mean from which on a router counts as collapsed: three quarters of the way
    to the worst that can be (all rows choose the same `top_k`), at most 8."""
    worst = num_experts / top_k
    return min(MOST_OVER_MEAN, 1 + 0.75 * (worst - 1))


@dataclass(frozen=True)
class Alarm:
    """`text`: where, what, since when, and what to do. `ended`: it is over."""

    layer: int
    expert: int
    since_step: int
    ended: bool
    text: str


@dataclass
class _Trouble:
    """A run of bad steps. `missed`: rows that even use would have given in it to one expert."""

    since_step: int
    num_steps: int = 0
    missed: float = 0.0
    expert: int = -1
    told: bool = False


class _Watched:
    """Runs of bad steps by some key."""

    def __init__(self) -> None:
        self._troubles: dict[tuple[int, ...], _Trouble] = {}

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._troubles

    def bad(self, key: tuple[int, ...], step: int, mean: float, expert: int) -> _Trouble | None:
        """The trouble, if it is to be told now."""
        trouble = self._troubles.setdefault(key, _Trouble(step))
        trouble.num_steps += 1
        trouble.missed += mean
        if trouble.told or trouble.num_steps < PATIENCE_STEPS or trouble.missed < MISSED_ROWS:
            return None
        trouble.told, trouble.expert = True, expert
        return trouble

    def good(self, key: tuple[int, ...]) -> _Trouble | None:
        """The trouble that ends here, if it was told."""
        trouble = self._troubles.pop(key, None)
        return trouble if trouble is not None and trouble.told else None


class RouterAlarm:
    """`layers`: the model's numbers of the MoE layers, in the order of the counts."""

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._layers = layers
        self._limit = collapse_limit(num_experts, top_k)
        self._full, self._dead = _Watched(), _Watched()

    def observe(self, step: int, counts_LE: Sequence[Sequence[int]]) -> list[Alarm]:
        """What began or ended with this step. `counts_LE`: rows by layer and expert, of all ranks."""
        told: list[Alarm] = []
        for layer, counts_E in zip(self._layers, counts_LE, strict=True):
            mean = sum(counts_E) / len(counts_E)
            if not mean:
                continue
            told += self._collapse(step, layer, counts_E, mean)
            for expert, count in enumerate(counts_E):
                if not count or (layer, expert) in self._dead:
                    told += self._death(step, layer, expert, count, mean)
        return told

    def _collapse(self, step: int, layer: int, counts_E: Sequence[int], mean: float) -> list[Alarm]:
        fullest = max(range(len(counts_E)), key=counts_E.__getitem__)
        ratio = counts_E[fullest] / mean
        if ratio < self._limit:
            over = self._full.good((layer,))
            if over is None:
                return []
            text = f"layer {layer}: the router, collapsed since step {over.since_step}, has recovered at step {step}"
            return [Alarm(layer, over.expert, over.since_step, True, text)]
        trouble = self._full.bad((layer,), step, mean, fullest)
        if trouble is None:
            return []
        text = (
            f"layer {layer}: the router has collapsed: expert {fullest} has {ratio:.1f} times the mean, the fullest "
            f"above {self._limit:.1f} since step {trouble.since_step}: raise loss.balance, set loss.z, lower "
            "optimizer.learning_rate, or go back to a checkpoint before it"
        )
        return [Alarm(layer, fullest, trouble.since_step, False, text)]

    def _death(self, step: int, layer: int, expert: int, count: int, mean: float) -> list[Alarm]:
        if count:
            over = self._dead.good((layer, expert))
            if over is None:
                return []
            text = f"layer {layer}, expert {expert}, without rows since step {over.since_step}, lives at step {step}"
            return [Alarm(layer, expert, over.since_step, True, text)]
        trouble = self._dead.bad((layer, expert), step, mean, expert)
        if trouble is None:
            return []
        text = (
            f"layer {layer}, expert {expert} is dead: no row since step {trouble.since_step} ({trouble.missed:,.0f} "
            "expected by even use): raise loss.balance or loss.bias_rate, lower optimizer.learning_rate, or go back to "
            "a checkpoint before it"
        )
        return [Alarm(layer, expert, trouble.since_step, False, text)]
