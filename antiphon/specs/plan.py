"""A plan to serve: what an engine needs to obey it and a person to judge it; `plan.json`, written and read strictly.

One layout per phase. A `disaggregated` phase has attention workers and expert workers; the three colocated layouts
(`hybrid` TP-EP, `tp_pp`, `dp_ep`) have equal workers that do both.

What reads a plan obeys it, so nothing in the file is guessed or skipped. A phase holds its parallel sizes beside
`layout`, as plain keys (`attention_tp`, ..., `pp`), and

    "placement": {"0": {"3": 0.5, "4": 0.5}, "1": {"0": 1.0}, ...}     expert -> worker -> fraction of its tokens

with every expert from 0 on, workers from 0 on, fractions above 0 that add up to 1. `rejected` lists the best
candidate of every other layout. A plan without `precision` is in bfloat16. Unknown keys and other versions are refused
by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import (
    Count,
    CountFromZero,
    Flag,
    NotNegative,
    Positive,
    Reckoned,
    Text,
    Whole,
    check_version,
    describe,
    is_number,
    placed,
    plain,
    read,
    read_mapping,
)
from antiphon.specs.model import PrecisionSpec

Layout = Literal["disaggregated", "hybrid", "tp_pp", "dp_ep"]
LAYOUTS: tuple[Layout, ...] = ("disaggregated", "hybrid", "tp_pp", "dp_ep")
# `serve`: prompts and tokens in the same steps, on the same devices.
PhaseName = Literal["prefill", "decode", "serve"]
# Of a hybrid phase: rows between nodes and inside them at the same time, one after the other, or as measured.
Collectives = Literal["fused", "synchronous", "auto"]
# The last two: the least time, on all of the cluster, whatever that takes of it.
Objective = Literal["per-gpu", "per-cost", "per-power", "ttft", "tpot"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LATENCIES: tuple[Objective, ...] = ("ttft", "tpot")
_COMPARED: dict[Objective, str] = {  # the field of `Predicted`
    "per-gpu": "per_gpu",
    "per-cost": "per_cost",
    "per-power": "per_power",
    "ttft": "ttft_s",
    "tpot": "tpot_s",
}
# How a note says whether a whole service runs on one kind of server; the words begin it.
ONE_POOL, TWO_POOLS = "one pool for prompts and tokens", "a pool for prefill and one for decode"
# The most that the engine runs.
MAX_MICRO_BATCHES = 64  # of a phase
MAX_ATTENTION_WORKERS = 64  # a batch names its participants in the bits of one word
MAX_INSTANCES = 64
MAX_DEGREE = 1 << 20  # of a plan, for clusters of a million devices
MAX_BATCH = 10**9  # more is a slip of the finger
Degree = Annotated[Whole, Field(ge=1, le=MAX_DEGREE)]


def groups_nest(num_ranks: Any, attention_tp: Any, expert_tp: Any) -> Any:
    """Whether this many ranks can be both attention groups and expert groups: one kind is made of whole groups of the
    other, and the ranks are whole groups of both. Of numbers, or of arrays of candidates."""
    nested = (attention_tp % expert_tp == 0) | (expert_tp % attention_tp == 0)
    return nested & (num_ranks % attention_tp == 0) & (num_ranks % expert_tp == 0)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of one instance (one copy of the model).

    Disaggregated: `attention_dp` attention workers of `attention_tp` devices, `expert_workers` expert workers of
    `expert_tp` devices. Colocated: attention in `attention_dp` x `attention_tp`, experts in `expert_ep` x `expert_tp`
    over the same devices, and `pp` stages of such groups.
    """

    attention_tp: Degree = 1
    attention_dp: Degree = 1
    expert_tp: Degree = 1
    expert_ep: Degree = 1
    expert_workers: Annotated[Whole, Field(ge=0, le=MAX_DEGREE)] = 0
    pp: Degree = 1


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Devices of one kind in one role: `attention`, `experts`, or `both` where they are colocated."""

    role: Literal["attention", "experts", "both"]
    device: Text
    num_devices: Count


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the model of costs says of a phase. Rates are of all instances together.

    `per_gpu`, `per_cost`, `per_power`: tokens/s by device, by unit of relative price, by watt. `t_a_s`, `t_e_s`,
    `t_c_s`: one layer and micro-batch of attention, experts, one way of exchange (MegaScale-Infer section 4.1).
    `memory_bytes`: of the fullest device by role. `bound_by`: what each part waits for, such as
    ``{"attention": "memory bandwidth"}``. `band`: what is measured is expected within this fraction of the rates, four
    times out of five.
    """

    tpot_s: Reckoned | None = None
    ttft_s: Reckoned | None = None
    tokens_per_s: Reckoned = 0.0
    per_gpu: Reckoned = 0.0
    per_cost: Reckoned | None = None
    per_power: Reckoned = 0.0
    band: Reckoned | None = None
    t_a_s: Reckoned | None = None
    t_e_s: Reckoned | None = None
    t_c_s: Reckoned | None = None
    queueing_s: Reckoned | None = None
    memory_bytes: dict[str, Reckoned] = field(default_factory=dict)
    bound_by: dict[str, str] = field(default_factory=dict)

    def score(self, objective: Objective) -> float | None:
        """The rate that `objective` compares; None where it is unknown, such as a price that is not stated."""
        value: float | None = getattr(self, _COMPARED[objective])
        return 1 / value if value and objective in LATENCIES else value


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """The best candidate of a layout that lost, and what beat it. `predicted` None: the layout cannot run at all."""

    layout: Layout
    reason: Text
    micro_batches: Count | None = None
    batch: Count | None = None
    devices: tuple[DeviceUse, ...] = ()
    predicted: Predicted | None = None
    parallel: Parallel | None = None


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """How one phase is run. `batch`: requests in flight per instance (decode, serve) or tokens of a pass (prefill).
    `step_tokens`: the most rows of an attention worker's step where prompts are computed beside decoding (serve).
    `two_batches`: each micro-batch is cut in halves, of which one computes while the other's rows are exchanged
    (colocated layouts). `collectives`: the form of the exchange that the prediction is of; `auto` where it makes no
    difference. `placement[e]` lists (expert worker or EP rank, fraction of expert e's tokens), fractions
    adding up to 1."""

    layout: Layout
    parallel: Parallel
    num_instances: Degree = 1
    micro_batches: Degree
    batch: Annotated[Whole, Field(ge=1, le=MAX_BATCH)]
    step_tokens: Count | None = None
    two_batches: Flag = False
    collectives: Collectives = "auto"
    devices: tuple[DeviceUse, ...] = ()
    placement: tuple[tuple[tuple[int, float], ...], ...]
    predicted: Predicted
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer of `antiphon plan`, whole: `model`, `cluster` and `workload` are names; `model_config` (the keys of
    `config.json`), `cluster_config` and `workload_config` are what they stood for when it was made.
    `request_tokens_per_s`: of one request, prompt and output over all its time (MixServe eq. 11), where the plan is of
    the whole service."""

    version: Count = 1
    model: Text
    cluster: Text
    workload: Text
    objective: Objective
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    phases: dict[PhaseName, PhasePlan]
    model_config: dict[str, object] = field(default_factory=dict)
    cluster_config: dict[str, object] = field(default_factory=dict)
    workload_config: dict[str, object] = field(default_factory=dict)
    request_tokens_per_s: Positive | None = None
    num_candidates: CountFromZero = 0
    search_s: NotNegative = 0.0


VERSION = 1
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
FRACTION_TOLERANCE = 1e-6
Placement = tuple[tuple[tuple[int, float], ...], ...]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plain JSON values in the shape above; what has no value is left out."""
    written: dict[str, Any] = plain(plan)
    return written | {"phases": {name: _phase_to_json(phase) for name, phase in written["phases"].items()}}


def plan_from_json(mapping: Mapping[str, Any], where: str = "plan") -> Plan:
    """The plan a mapping holds; `UserError` names the key, its value and the fix."""
    check_version(mapping, VERSION, where, "make the plan again with `antiphon plan`")
    if "phase" in mapping:
        raise UserError(
            f"{where}: phase is {describe(mapping['phase'])}: this is a plan to train, not to serve: make one with "
            "--phase decode, prefill or both"
        )
    phases = mapping.get("phases")
    if phases == {}:
        raise UserError(f"{where}: phases is {{}}: give at least one of {', '.join(PHASES)}")
    if not isinstance(phases, Mapping):
        return read(Plan, mapping, where)
    by_name = {
        name: _phase(phase, f"{where}: phases.{name}") if name in PHASES and isinstance(phase, Mapping) else phase
        for name, phase in phases.items()
    }
    return read(Plan, {**mapping, "phases": by_name}, where)


def read_plan(path: str | Path) -> Plan:
    with a_file_of("plan", Path(path)):
        return plan_from_json(read_mapping(Path(path)), str(path))


def _phase_to_json(phase: dict[str, Any]) -> dict[str, Any]:
    placement = {
        str(expert): {str(worker): fraction for worker, fraction in shares}
        for expert, shares in enumerate(phase["placement"])
    }
    rejected = [_without_parallel(each) for each in phase["rejected"]]
    return _without_parallel(phase | {"placement": placement, "rejected": rejected})


def _without_parallel(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the sizes of their `parallel` in its place."""
    return {
        name: value
        for key, each in values.items()
        for name, value in (each if key == "parallel" else {key: each}).items()
    }


def _phase(mapping: Mapping[str, Any], where: str) -> PhasePlan:
    values = _with_parallel(mapping, where)
    if isinstance(rejected := values.get("rejected"), list):
        values["rejected"] = [
            _with_parallel(each, f"{where}.rejected[{number}]") if isinstance(each, Mapping) else each
            for number, each in enumerate(rejected)
        ]
    layout, parallel = values.get("layout"), values.setdefault("parallel", Parallel())
    if layout == "disaggregated" and not parallel.expert_workers:
        raise UserError(f"{where}: expert_workers is 0: a disaggregated layout needs at least 1")
    if layout in LAYOUTS and "placement" in values:
        num_workers = parallel.expert_workers if layout == "disaggregated" else parallel.expert_ep
        with placed(f"{where}.placement"):
            values["placement"] = _placement(values["placement"], num_workers)
    return read(PhasePlan, values, where)


def _with_parallel(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`mapping` with the sizes that stand beside `layout` in one `parallel`, if there are any."""
    names = [field.name for field in fields(Parallel)]
    sizes = {key: value for key, value in mapping.items() if key in names}
    rest = {key: value for key, value in mapping.items() if key not in names}
    return rest | {"parallel": read(Parallel, sizes, where)} if sizes else rest


def _placement(experts: Any, num_workers: int) -> Placement:
    if not isinstance(experts, Mapping):
        raise UserError(f"it is {describe(experts)}: it must be an object with a key for each expert")
    if missing := [expert for expert in range(len(experts)) if str(expert) not in experts]:
        raise UserError(f"expert {missing[0]} is missing: place every expert from 0 to the last")
    return tuple(_shares(experts[str(expert)], f"expert {expert}", num_workers) for expert in range(len(experts)))


def _shares(workers: Any, expert: str, num_workers: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(workers, Mapping):
        raise UserError(f"{expert} is {describe(workers)}: it must be an object with a key for each of its workers")
    for worker, share in workers.items():
        if not worker.isdecimal() or len(worker) > 9 or str(int(worker)) != worker or int(worker) >= num_workers:
            raise UserError(f"{expert}: worker {worker[:20]!r} does not exist: use 0 to {num_workers - 1}")
        if not is_number(share) or share <= 0:
            raise UserError(f"{expert}: the share of worker {worker} is {describe(share)}: it must be a number above 0")
    if abs(sum(workers.values()) - 1) > FRACTION_TOLERANCE:
        raise UserError(f"{expert}: the fractions add up to {sum(workers.values()):.6g}: make them add up to 1")
    return tuple((int(worker), float(share)) for worker, share in workers.items())
