"""Whether a running server had better move to another layout: its load against its plan.

1. The load is what came between two readings of the server's counters: requests, their mean lengths, how many are in
   flight.
2. The cost model says what the plan's own layout does under that load, and what the best layout of the same cluster
   does, by the plan's objective. The plan's has as many instances as run, and none holds more than its batch.
3. A move costs the tokens of the time in which the server stands still. It pays when the better layout has earned them
   back: after move / (gain - 1) seconds of such a load.

Rejected: to plan for the peak of a day. It needs a record of one, and a server that knows its plan has none.
"""

from dataclasses import dataclass, replace

from antiphon.base.errors import UserError
from antiphon.planner.candidates import Pins
from antiphon.planner.search import make_plan
from antiphon.planner.setting import SearchLimits
from antiphon.specs.cluster import ClusterSpec, cluster_from_json
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import LAYOUTS, PhaseName, PhasePlan, Plan
from antiphon.specs.workload import LengthSpec, WorkloadSpec, workload_from_json

WORTH = 1.05  # less is within what the model can tell


@dataclass(frozen=True, kw_only=True)
class SeenLoad:
    """What a server did in `seconds`. `in_flight`: requests that ran or waited, the mean of both readings."""

    seconds: float
    num_requests: int
    input_tokens: float
    output_tokens: float
    in_flight: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated."""
        return self.num_requests * self.output_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """`running` and `best`: the same phase under the load. `gain`: of the best by the plan's objective. `pays_after_s`:
    None: it does not pay."""

    load: SeenLoad
    running: PhasePlan
    best: PhasePlan
    gain: float
    pays_after_s: float | None


def replan(plan: Plan, model: ModelSpec, load: SeenLoad, move_s: float) -> Replanned:
    """Compare. `UserError` for a plan without decoding or its cluster; `NoPlan` if no layout holds the load."""
    name = watched_phase(plan)
    planned = plan.phases[name]
    if not plan.cluster_config:
        raise UserError("the plan does not hold its cluster: make it again with antiphon plan")
    cluster = cluster_from_json(plan.cluster_config, "the plan's cluster")
    workload = loaded(workload_from_json(plan.workload_config, "the plan's workload"), load, planned)
    held = replace(workload, max_batch=min(workload.max_batch or 1, planned.batch * planned.num_instances))
    running = _best(plan, model, cluster, held, name, planned)
    best = _best(plan, model, cluster, workload, name, None)
    gain = _value(plan, best) / _value(plan, running)
    pays = gain >= WORTH and _shape(best) != _shape(planned)
    return Replanned(
        load=load, running=running, best=best, gain=gain, pays_after_s=move_s / (gain - 1) if pays else None
    )


def _shape(phase: PhasePlan) -> tuple[object, ...]:
    """What a server must be started anew to change."""
    return phase.layout, phase.parallel, phase.num_instances, phase.micro_batches


def watched_phase(plan: Plan) -> PhaseName:
    """The phase that generates tokens."""
    for name in ("serve", "decode"):
        if name in plan.phases:
            return name
    raise UserError("the plan is of prompts alone: watch the server with the plan of its decoding")


def loaded(workload: WorkloadSpec, load: SeenLoad, running: PhasePlan) -> WorkloadSpec:
    """The plan's workload with the lengths and requests in flight that were seen: as many as each micro-batch of the
    running layout has the same number of, at least one, because the cost model knows no other."""
    places = running.num_instances * running.parallel.attention_dp * running.micro_batches
    return replace(
        workload,
        name=f"{workload.name}, as seen",
        input_tokens=LengthSpec(median=max(1.0, load.input_tokens)),
        output_tokens=LengthSpec(median=max(1.0, load.output_tokens)),
        arrivals_s=(),
        requests_per_s=None,
        max_batch=places * max(1, round(load.in_flight / places)),
    )


def _best(
    plan: Plan, model: ModelSpec, cluster: ClusterSpec, workload: WorkloadSpec, name: PhaseName, only: PhasePlan | None
) -> PhasePlan:
    limits = SearchLimits(servable=True, overlapped=False) if only is None else _limits_of(only)
    found = make_plan(
        model,
        model_name=plan.model,
        cluster=cluster,
        workload=workload,
        phases=(name,),
        objective=plan.objective,
        precision=plan.precision,
        limits=limits,
        layouts=LAYOUTS if only is None else (only.layout,),
    )
    return found.plan.phases[name]


def _limits_of(phase: PhasePlan) -> SearchLimits:
    """Only this layout's degrees and instances."""
    parallel = phase.parallel
    apart = phase.layout == "disaggregated"
    pins = Pins(
        attention_tp=parallel.attention_tp,
        attention_dp=parallel.attention_dp,
        expert_tp=parallel.expert_tp,
        expert_ep=parallel.expert_workers if apart else parallel.expert_ep,
        pp=parallel.pp,
        micro_batches=phase.micro_batches,
    )
    return SearchLimits(
        max_micro_batches=max(4, phase.micro_batches),
        micro_batches=pins.only("micro_batches"),
        attention_dp=pins.only("attention_dp"),
        attention_tp=pins.only("attention_tp"),
        expert_tp=pins.only("expert_tp"),
        expert_workers=pins.only("expert_ep") if apart else (),
        pp=pins.only("pp"),
        overlapped=False,
        pins=pins,
        num_instances=phase.num_instances,
    )


def _value(plan: Plan, phase: PhasePlan) -> float:
    """More is better."""
    predicted = phase.predicted
    if plan.objective in ("tpot", "ttft"):
        seconds = predicted.tpot_s if plan.objective == "tpot" else predicted.ttft_s
        return 1 / seconds if seconds else 0.0
    rates = {"per-gpu": predicted.per_gpu, "per-cost": predicted.per_cost, "per-power": predicted.per_power}
    return rates.get(plan.objective) or predicted.tokens_per_s
