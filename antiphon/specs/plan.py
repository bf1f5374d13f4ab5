"""A deployment plan: what an engine needs to obey it and a person to judge it. Written by the planner, read by all.

One layout per phase. A `disaggregated` phase has attention workers and expert workers; the three colocated layouts
(`hybrid` TP-EP, `tp_pp`, `dp_ep`) have equal workers that do both.
"""

from dataclasses import dataclass, field
from typing import Literal

from antiphon.specs.precision import PrecisionSpec
from antiphon.specs.strict_table import CountFromZero, NotNegative

Layout = Literal["disaggregated", "hybrid", "tp_pp", "dp_ep"]
LAYOUTS: tuple[Layout, ...] = ("disaggregated", "hybrid", "tp_pp", "dp_ep")
PhaseName = Literal["prefill", "decode"]
Objective = Literal["per-gpu", "per-cost", "per-power"]
OBJECTIVES: tuple[Objective, ...] = ("per-gpu", "per-cost", "per-power")
MAX_MICRO_BATCHES = 64  # of a phase: the most that the engine runs


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of one instance (one copy of the model).

    Disaggregated: `attention_dp` attention workers of `attention_tp` devices, `expert_workers` expert workers of
    `expert_tp` devices. Colocated: attention in `attention_dp` x `attention_tp`, experts in `expert_ep` x `expert_tp`
    over the same devices, and `pp` stages of such groups.
    """

    attention_tp: int = 1
    attention_dp: int = 1
    expert_tp: int = 1
    expert_ep: int = 1
    expert_workers: CountFromZero = 0
    pp: int = 1


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Devices of one kind in one role: `attention`, `experts`, or `both` where they are colocated."""

    role: Literal["attention", "experts", "both"]
    device: str
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the model of costs says of a phase. Rates are of all instances together.

    `per_gpu`, `per_cost`, `per_power`: tokens/s by device, by unit of relative price, by watt. `t_a_s`, `t_e_s`,
    `t_c_s`: one layer and micro-batch of attention, experts, one way of exchange (MegaScale-Infer section 4.1).
    `memory_bytes`: of the fullest device by role. `bound_by`: what each part waits for, such as
    ``{"attention": "memory bandwidth"}``.
    """

    tpot_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float = 0.0
    per_gpu: float = 0.0
    per_cost: float | None = None
    per_power: float = 0.0
    t_a_s: float | None = None
    t_e_s: float | None = None
    t_c_s: float | None = None
    queueing_s: float | None = None
    memory_bytes: dict[str, float] = field(default_factory=dict)
    bound_by: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """The best candidate of a layout that lost, and what beat it. `predicted` None: the layout cannot run at all."""

    layout: Layout
    reason: str
    parallel: Parallel | None = None
    micro_batches: int | None = None
    batch: int | None = None
    devices: tuple[DeviceUse, ...] = ()
    predicted: Predicted | None = None


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """How one phase is run. `batch`: requests in flight per instance (decode) or tokens of a pass (prefill);
    `placement[e]` lists (expert worker or EP rank, fraction of expert e's tokens), fractions adding up to 1."""

    layout: Layout
    parallel: Parallel
    num_instances: int = 1
    micro_batches: int
    batch: int
    devices: tuple[DeviceUse, ...] = ()
    placement: tuple[tuple[tuple[int, float], ...], ...]
    predicted: Predicted
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of `antiphon plan`. `model`, `cluster`, `workload`: their names; the files may say more.

    `model_config`: the `config.json` keys the plan was made for, so that an engine can refuse another model."""

    version: int = 1
    model: str
    cluster: str
    workload: str
    objective: Objective
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    phases: dict[PhaseName, PhasePlan]
    model_config: dict[str, object] = field(default_factory=dict)
    num_candidates: CountFromZero = 0
    search_s: NotNegative = 0.0
