"""Whether a running server had better move to another layout, its load against its plan (`antiphon plan PLAN --watch`):

1. The load is what came between two readings of the server's counters: requests, their mean lengths, how many are in
   flight.
2. The cost model says what the plan's own layout does under that load, and what the best layout of the same cluster
   does, by the plan's objective. The plan's has as many instances as run, and none holds more than its batch.
3. The running layout is priced without the plan's targets, because it serves whatever comes. Where it misses one of
   them, by the model or by the server's own mean times, its promise is broken, and a gain in rate says nothing.
4. A move costs the tokens of the time in which the server stands still. It pays when the better layout has earned them
   back: after move / (gain - 1) seconds of such a load.

Rejected: to plan for the peak of a day. It needs a record of one, and a server that knows its plan has none.
"""

from dataclasses import dataclass, replace

from antiphon.base.errors import UserError
from antiphon.base.units import milliseconds
from antiphon.planner.candidates import Pins
from antiphon.planner.explain import NoPlan
from antiphon.planner.search import make_plan, settings_of
from antiphon.planner.setting import SearchLimits
from antiphon.specs.checked import CountFromZero, NotNegative, Positive, checked
from antiphon.specs.cluster import ClusterSpec, cluster_from_json
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import LATENCIES, LAYOUTS, PhaseName, PhasePlan, Plan
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec, workload_from_json

WORTH_OF_MOVE = 1.05  # times the value of now; less is within what the model can tell


@checked("load")
@dataclass(frozen=True, kw_only=True)
class SeenLoad:
    """What a server did in `seconds`. `in_flight`: requests that ran or waited, the mean of both readings. `ttft_s`,
    `tpot_s`: its mean times to the first token and between tokens; None where it counted none."""

    seconds: Positive
    num_requests: CountFromZero
    input_tokens: NotNegative
    output_tokens: NotNegative
    in_flight: NotNegative
    ttft_s: NotNegative | None = None
    tpot_s: NotNegative | None = None


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """`running` and `best`: the same phase under the load; None where the layout does not hold it, or none keeps the
    plan's targets. `broken`: each target that the running layout misses, in words; `missing`: why there is no best.
    `gain`: of the best by the plan's objective; None where a promise is broken. `pays_after_s`: None: it does not pay.
    """

    running: PhasePlan | None
    best: PhasePlan | None
    broken: tuple[str, ...]
    missing: str
    gain: float | None
    pays_after_s: float | None


def replan(plan: Plan, model: ModelSpec, load: SeenLoad, move_s: float) -> Replanned:
    """Compare. `UserError` for a plan without decoding or its cluster."""
    name = watched_phase(plan)
    planned = plan.phases[name]
    if not plan.cluster_config:
        raise UserError("the plan does not hold its cluster: make it again with antiphon plan")
    cluster = cluster_from_json(plan.cluster_config, "the plan's cluster")
    workload = loaded(workload_from_json(plan.workload_config, "the plan's workload"), load, planned)
    slo, most = workload.slo, planned.batch * planned.num_instances
    held = replace(workload, slo=SloSpec(percentile=slo.percentile), max_batch=min(workload.max_batch or 1, most))
    running, no_room = _best_plan(plan, model, cluster, held, name, planned)
    best, missing = _best_plan(plan, model, cluster, workload, name, None)
    broken = (no_room,) if running is None else broken_promises(slo, running, load)
    gain, pays = None, False
    if running is not None and best is not None and not broken:
        gain = _value(plan, best) / _value(plan, running)
        pays = gain >= WORTH_OF_MOVE and is_other(best, planned)
    return Replanned(
        running=running,
        best=best,
        broken=broken,
        missing=missing,
        gain=gain,
        pays_after_s=move_s / (gain - 1) if gain is not None and pays else None,
    )


def broken_promises(slo: SloSpec, running: PhasePlan, load: SeenLoad) -> tuple[str, ...]:
    """Each target that the server's mean times miss; without such a time, the model's of the running layout."""
    said = []
    for what, promised_s, seen_s, predicted_s in (
        ("to the first token", slo.ttft_s, load.ttft_s, None),  # the model's queue is that of a full server
        ("a token", slo.tpot_s, load.tpot_s, running.predicted.tpot_s),
    ):
        time_s, how = (predicted_s, "predicted") if seen_s is None else (seen_s, "measured")
        if promised_s is not None and time_s is not None and time_s > promised_s:
            said.append(f"{milliseconds(time_s)} {what} ({how}), promised are {milliseconds(promised_s)}")
    return tuple(said)


def is_other(best: PhasePlan, planned: PhasePlan) -> bool:
    """Whether a server must be started anew to become `best`."""
    fixed = ("layout", "parallel", "num_instances", "micro_batches")
    return any(getattr(best, name) != getattr(planned, name) for name in fixed)


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


def _best_plan(
    plan: Plan, model: ModelSpec, cluster: ClusterSpec, workload: WorkloadSpec, name: PhaseName, only: PhasePlan | None
) -> tuple[PhasePlan | None, str]:
    """The best of all layouts, or of `only`; or why there is none."""
    limits = SearchLimits(servable=True, overlapped=False) if only is None else _limits_of(only)
    try:
        settings = settings_of(
            model,
            cluster,
            workload,
            phases=(name,),
            objective=plan.objective,
            precision=plan.precision,
            limits=limits,
        )
        found = make_plan(settings, model_name=plan.model, layouts=LAYOUTS if only is None else (only.layout,))
    except NoPlan as error:
        return None, str(error)
    return found.plan.phases[name], ""


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
    return SearchLimits(overlapped=False, pins=pins, num_instances=phase.num_instances)


def _value(plan: Plan, phase: PhasePlan) -> float:
    """More is better."""
    otherwise = 0.0 if plan.objective in LATENCIES else phase.predicted.tokens_per_s
    return phase.predicted.score(plan.objective) or otherwise
