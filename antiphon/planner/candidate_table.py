"""All evaluated candidates of one phase as columns: what was tried, what it would do, and why it will not do.

`why_not` is `TPOT`, `TTFT` or `RATE`; 0 means feasible. Candidates that memory or the number of devices rules
out are not in here; how many those were is in `space`, by layout.

Rejected: only the winners. The report's clouds, the sentences about losers and the sensitivity charts all need the
losers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidates import BoolArray, Candidates, IntArray
from antiphon.planner.space import Space
from antiphon.specs.cluster import DeviceSpec
from antiphon.specs.plan import LAYOUTS, DeviceUse, Layout, Objective

TPOT, TTFT, RATE = 1, 2, 3
"""Why not: a promise that is broken, or the rate."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Columns of one phase. `step_s`: a decode iteration or prefill pass. Rates are of all instances; `capacity` is one
    instance's most tokens/s. `step_tokens`: see `Candidates`. nan: not known (TTFT in decode, TPOT in prefill,
    prices)."""

    batch: IntArray
    num_instances: IntArray
    step_s: FloatArray
    t_a_s: FloatArray
    t_e_s: FloatArray
    t_c_s: FloatArray
    tpot_s: FloatArray
    ttft_s: FloatArray
    queueing_s: FloatArray
    capacity: FloatArray
    tokens_per_s: FloatArray
    why_not: IntArray
    step_tokens: IntArray

    def take(self, index: IntArray | BoolArray) -> Self:
        return type(self)(**{column.name: getattr(self, column.name)[index] for column in fields(self)})

    def put(self, where: IntArray | BoolArray, other: "Outcome") -> None:
        """Overwrite the entries at `where`."""
        for column in fields(self):
            getattr(self, column.name)[where] = getattr(other, column.name)


@dataclass(frozen=True, kw_only=True)
class CandidateTable:
    """`candidates` and `outcome` have equal lengths. `kinds`: the cluster's devices; `space`: of the search that
    they came from, for its counts; its columns are not those of `candidates`."""

    candidates: Candidates
    outcome: Outcome
    kinds: tuple[DeviceSpec, ...]
    space: Space

    def __len__(self) -> int:
        return len(self.candidates)

    def one(self, index: int) -> Candidates:
        """A candidate at its batch."""
        where, outcome = np.array([index]), self.outcome
        return self.candidates.take(where).having(batch=outcome.batch[where], step_tokens=outcome.step_tokens[where])

    @property
    def batch(self) -> IntArray:
        """Requests in flight per instance (decode) or tokens of a pass (prefill)."""
        return self.candidates.having(batch=self.outcome.batch).instance_batch

    @property
    def num_devices(self) -> IntArray:
        """Devices of all instances together."""
        each = self.candidates.attention_devices + self.candidates.expert_devices
        return self.outcome.num_instances * each

    @property
    def latency_s(self) -> FloatArray:
        """Time per output token in decode, time to first token in prefill."""
        return np.where(np.isnan(self.outcome.tpot_s), self.outcome.ttft_s, self.outcome.tpot_s)

    @property
    def feasible(self) -> BoolArray:
        return np.asarray(self.outcome.why_not == 0)

    @property
    def per_gpu(self) -> FloatArray:
        return self.outcome.tokens_per_s / np.maximum(self.num_devices, 1)

    @property
    def per_cost(self) -> FloatArray:
        """nan where a device in use has no price."""
        return self.outcome.tokens_per_s / self.weighted(
            [np.nan if kind.price is None else kind.price for kind in self.kinds]
        )

    @property
    def per_power(self) -> FloatArray:
        """Tokens per second and watt: tokens per joule."""
        return self.outcome.tokens_per_s / self.weighted([kind.power_w for kind in self.kinds])

    def weighted(self, each: Sequence[float]) -> FloatArray:
        """What all devices of a candidate count for together; `each`: one of each kind."""
        values, chosen = np.asarray(each, dtype=np.float64), self.candidates
        attention = values[chosen.attention_kind] * chosen.attention_devices
        experts = np.where(chosen.expert_devices > 0, values[chosen.expert_kind] * chosen.expert_devices, 0.0)
        return np.asarray(np.maximum(self.outcome.num_instances, 1) * (attention + experts))

    def score(self, objective: Objective) -> FloatArray:
        """What `objective` compares: more is better. Of a latency it is one over it; where a phase does not know the
        latency, the rate per device."""
        scores: dict[Objective, Callable[[], FloatArray]] = {
            "per-gpu": lambda: self.per_gpu,
            "per-cost": lambda: self.per_cost,
            "per-power": lambda: self.per_power,
            "ttft": lambda: _per_second(self.outcome.ttft_s, self.per_gpu),
            "tpot": lambda: _per_second(self.outcome.tpot_s, self.per_gpu),
        }
        return scores[objective]()

    def best(self, objective: Objective, among: BoolArray | None = None) -> int | None:
        """Index of the feasible candidate with the best score; of equal ones the one with the shorter step, then with
        fewer devices. None if there is none."""
        allowed = self.feasible if among is None else self.feasible & among
        index = np.flatnonzero(allowed)
        if index.size == 0:
            return None
        scores = self.score(objective)[index]
        top = index[scores >= scores.max() * (1 - 1e-9)]
        order = np.lexsort((self.num_devices[top], self.outcome.step_s[top]))
        return int(top[order[0]])

    def pareto(self, objective: Objective, layout: Layout | None = None) -> IntArray:
        """Indices of candidates that no other beats in both latency (TPOT, or TTFT in prefill) and score, by latency.
        Promises are left out of it: the front shows what a looser one would buy."""
        scores = np.nan_to_num(self.score(objective), nan=-np.inf)
        allowed = np.isfinite(self.latency_s) & (scores > 0)
        if layout is not None:
            allowed &= self.candidates.layout == LAYOUTS.index(layout)
        index = np.flatnonzero(allowed)
        return index[front(self.latency_s[index], scores[index])]

    def devices(self, index: int) -> tuple[DeviceUse, ...]:
        """Devices of all instances together, by role."""
        names = [kind.name for kind in self.kinds]
        return self.candidates.devices_of(index, names, max(int(self.outcome.num_instances[index]), 1))

    @property
    def total_considered(self) -> int:
        """Candidates looked at, those without room included."""
        return int(self.space.num_considered.sum())


def _per_second(latency_s: FloatArray, otherwise: FloatArray) -> FloatArray:
    return np.asarray(np.where(np.isnan(latency_s), otherwise, 1 / np.maximum(latency_s, 1e-12)))


def front(latency_s: FloatArray | IntArray, scores: FloatArray) -> IntArray:
    """Positions that no other beats in both, by latency: each has a higher score than all that are faster."""
    order = np.lexsort((-scores, latency_s))
    before = np.maximum.accumulate(np.concatenate([[-np.inf], scores[order]]))[:-1]
    return np.asarray(order[scores[order] > before])
