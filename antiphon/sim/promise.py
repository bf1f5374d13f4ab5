"""Whether a plan keeps its own promise: its requests, run through the engine's scheduler before the plan is printed.

1. Requests come at the plan's rate, or at the rate it says it takes, for about three times as long as one lasts.
2. Of many equal instances one is run, with its share of the requests; of two pools as many as keep their ratio. The
   engine sends a request to the emptiest worker, which chance does not, so a share is a little harder than the whole.
3. A promise that breaks is planned for anew with a target that is tighter by as much as it was missed.

Rejected: the formulas' word for it. They know means and a percentile of each cause, not what causes do together.
"""

from collections.abc import Callable
from dataclasses import replace

from antiphon.base.errors import ResourceError
from antiphon.planner.search import PlanResult
from antiphon.planner.setting import Setting
from antiphon.sim.demand import draw_demand
from antiphon.sim.pools import ServingOptions, pools_of
from antiphon.sim.serve_results import ServingResult, serving_result
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.plan import PhaseName, Plan
from antiphon.specs.workload import SloSpec, WorkloadSpec

TOLERANCE = 0.05
"""By how much fewer requests than promised a plan may serve in time."""
FEWEST, MOST = 200, 500
MOST_INSTANCES = 4
ROUNDS = 3


def kept_promise(plan: Plan, setting: Setting, slo: SloSpec) -> ServingResult:
    """What a simulation says of it. `setting`: any of the plan's; `slo`: what is promised."""
    counts = {name: phase.num_instances for name, phase in plan.phases.items()}
    fewer = _in_ratio(counts)
    share = sum(fewer.values()) / sum(counts.values())
    tokens_of: dict[PhaseName, float] = {"prefill": setting.lengths.prompt}
    rate = setting.workload.requests_per_s or min(
        phase.predicted.tokens_per_s / tokens_of.get(name, setting.lengths.output)
        for name, phase in plan.phases.items()
    )
    lasts_s = max(
        (phase.predicted.tpot_s or 0.0) * setting.lengths.output + (phase.predicted.ttft_s or 0.0)
        for phase in plan.phases.values()
    )
    count = int(min(max(3 * rate * share * lasts_s, FEWEST), MOST))
    demand = draw_demand(setting.workload, num_requests=count, rate=rate * share)
    phases = {name: replace(phase, num_instances=fewer[name]) for name, phase in plan.phases.items()}
    pools = pools_of(replace(plan, phases=phases), setting, demand)
    return serving_result(simulate_serving(pools, demand, ServingOptions()), slo)


def _in_ratio(counts: dict[PhaseName, int]) -> dict[PhaseName, int]:
    """Numbers of instances in about the same ratio, few enough to be simulated quickly."""
    factor = max(min(counts.values()), sum(counts.values()) / MOST_INSTANCES)
    return {name: max(round(count / factor), 1) for name, count in counts.items()}


def checked(search: Callable[[WorkloadSpec], PlanResult], workload: WorkloadSpec) -> PlanResult:
    """The plan that `search` finds for `workload`, or for tighter targets, that keeps the workload's own promise in
    simulation; a note says so. `ResourceError` where the last one tried does not."""
    asked = workload
    for _ in range(ROUNDS):
        result = search(asked)
        setting = next(result.settings[name] for name in result.plan.phases)
        kept = kept_promise(result.plan, setting, workload.slo)
        if kept.slo_kept_ratio >= workload.slo.percentile - TOLERANCE:
            said = f"simulated with {kept.num_requests} requests: {kept.slo_kept_ratio:.1%} keep the targets"
            phases = {name: replace(phase, notes=(*phase.notes, said)) for name, phase in result.plan.phases.items()}
            return replace(result, plan=replace(result.plan, phases=phases))
        asked = replace(asked, slo=_tighter(asked.slo, workload.slo, kept))
    if kept.num_refused:
        raise ResourceError(
            f"the plan found refuses {kept.num_refused} of {kept.num_requests} requests in simulation, as the engine "
            f"would, the first because: {kept.first_refusal}; or take it with --no-check"
        )
    raise ResourceError(
        f"the plan found keeps its promise for {kept.slo_kept_ratio:.0%} of requests in simulation, not for "
        f"{workload.slo.percentile:.0%} (time to the first token {_shown(kept.ttft_at_percentile_s)}, per token "
        f"{_shown(kept.tpot_at_percentile_s)}): loosen a target, lower the rate, or take it with --no-check"
    )


def _tighter(asked: SloSpec, promised: SloSpec, kept: ServingResult) -> SloSpec:
    def target(now_s: float | None, promised_s: float | None, simulated_s: float | None) -> float | None:
        if now_s is None or promised_s is None or simulated_s is None or simulated_s <= promised_s:
            return now_s
        return now_s * max(promised_s / simulated_s, 0.5) * 0.98

    return replace(
        asked,
        ttft_s=target(asked.ttft_s, promised.ttft_s, kept.ttft_at_percentile_s),
        tpot_s=target(asked.tpot_s, promised.tpot_s, kept.tpot_at_percentile_s),
    )


def _shown(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.0f} ms"
