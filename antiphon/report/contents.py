"""All that a report of a plan shows, as plain data: gathered once (`gather.py`), drawn by terminal and page.

Nothing here computes. A figure's numbers are these numbers, so a test can hold the one against the other.
"""

from dataclasses import dataclass, field

from antiphon.cost.parts import Parts
from antiphon.cost.profile import Profile
from antiphon.planner.smallest_cluster import OneMoreNode
from antiphon.sim.gantt import Bar
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import Layout, PhaseName, PhasePlan, Plan
from antiphon.specs.precision import PrecisionSpec
from antiphon.specs.workload import WorkloadSpec


@dataclass(frozen=True, kw_only=True)
class Points:
    """The front of one layout: latency (TPOT in decode, TTFT in prefill), the objective's rate, a line of words."""

    layout: Layout
    latency_s: tuple[float, ...]
    scores: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What lies in one device of a role. `reserve_bytes`: kept free for activations and the runtime."""

    role: str
    device: str
    capacity_bytes: float
    weight_bytes: float
    kv_bytes: float
    reserve_bytes: float

    @property
    def free_bytes(self) -> float:
        return max(0.0, self.capacity_bytes - self.weight_bytes - self.kv_bytes - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One of MegaScale-Infer's conditions (section 4.1) with this plan's numbers put in."""

    equation: str
    says: str
    numbers: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What the best plan gives when one thing changes: for each value, each layout's rate (None: it cannot run).

    `current`: the value the plan was made for, in the axis's own unit; None if it has none, such as no target.
    """

    title: str
    axis: str
    values: tuple[float, ...]
    scores: dict[Layout, tuple[float | None, ...]]
    current: float | None


@dataclass(frozen=True, kw_only=True)
class PhaseContents:
    """One phase. `tokens_per_request`: those that it computes, on average; `parts`: seconds of a layer and micro-batch
    by part; `accounts`: of the plan and the best of each other layout, what a token takes, by what it is spent on, in
    seconds of the objective's resource (none for a latency); `measured_like`: by engine, seconds a token by constants
    fitted to its measured servers, and between what four of five lie (none where no such server was measured); `fronts`
    and `bars`, a stretch of the pipeline, are empty where no page is made."""

    name: PhaseName
    phase: PhasePlan
    tokens_per_request: float
    fronts: tuple[Points, ...]
    bars: tuple[Bar, ...]
    bars_title: str
    memory: tuple[MemoryUse, ...]
    parts: dict[str, Parts]
    conditions: tuple[Condition, ...]
    accounts: dict[Layout, dict[str, float]]
    measured_like: dict[str, tuple[float, float, float]]
    num_candidates: int
    num_feasible: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """The plan, what it was made from, and what is shown of each phase. `profile`: measurements it was priced by."""

    plan: Plan
    model: ModelSpec
    cluster: ClusterSpec
    workload: WorkloadSpec
    precision: PrecisionSpec
    phases: tuple[PhaseContents, ...]
    profile: Profile | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    more_nodes: dict[PhaseName, list[OneMoreNode]] = field(default_factory=dict)
