"""From the options of `antiphon simulate` to what a simulation takes: the plan's own cluster and workload, or others.

A plan holds its model, cluster and workload; each may be replaced. What would make the comparison with
the plan's prediction meaningless (another precision or cluster) is noticed by computing the prediction anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from antiphon.base.errors import UserError
from antiphon.cli.commands import positive_option
from antiphon.cli.plan_inputs import (
    FirstTokenTarget,
    ProfileFile,
    TokenTarget,
    Values,
    parse_precision,
    split_list,
    with_targets,
)
from antiphon.cost.profile import read_serving_profile
from antiphon.models.planned import load_planned_model, planned_model
from antiphon.placement.routing_trace import with_recorded_popularity
from antiphon.planner.predict import predict
from antiphon.planner.setting import Setting
from antiphon.serve.policy.handover import HandOver
from antiphon.sim.demand import Demand, draw_demand
from antiphon.sim.pools import Pool, Prefill, ServingOptions, parse_kill, pools_of
from antiphon.specs.catalog import shipped_file
from antiphon.specs.cluster import cluster_from_json, load_cluster
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import PhaseName, Plan
from antiphon.specs.workload import WorkloadSpec, load_workload, workload_from_json

Spec = TypeVar("Spec")
_OTHERWISE = 0.01  # relative difference from which the plan's times are of something else
_MOST_REQUESTS = 10_000_000  # some hours, and some gigabytes


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Which requests come and when, what serves them, and what happens meanwhile."""

    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", show_default=False, help="Lengths, rate, targets; the plan's own."),
    ] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Requests of a trace (JSONL, CSV).")] = None
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=_MOST_REQUESTS, show_default=False, help="How many; 1000, all of a trace."
        ),
    ] = None
    rate: Annotated[
        float | None, positive_option("R", "requests per second", "Poisson arrivals a second, not the workload's.")
    ] = None
    all_at_once: Annotated[bool, typer.Option("--all-at-once", help="All requests come at time 0.")] = False
    skew: Annotated[
        float | None, typer.Option(metavar="X", show_default=False, help="Zipf exponent of expert popularity.")
    ] = None
    routing: Annotated[Path | None, typer.Option(metavar="FILE", help="Popularity as recorded by serve.")] = None
    slo_ttft: FirstTokenTarget = None
    slo_tpot: TokenTarget = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Same seed, same run.")] = 0
    # what serves them
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", show_default=False, help="The machines; the plan's own.")
    ] = None
    precision: Annotated[
        Values, typer.Option(metavar="PART=F", show_default=False, help="As in antiphon plan; the plan's own.")
    ] = None
    profile: ProfileFile = None
    prefill: Annotated[
        Prefill | None,
        typer.Option(metavar="NAME", show_default="elsewhere", help="Of a decode plan: mixed or elsewhere."),
    ] = None
    max_batch_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default="2048", help="Rows of a mixed step of a worker.")
    ] = None
    shared_prefix: Annotated[int, typer.Option(metavar="N", min=0, help="Equal first tokens of all prompts.")] = 0
    client_here: Annotated[
        bool, typer.Option("--client-here", help="Clients take cores of the serving machine (--profile).")
    ] = False
    # what happens while they are served
    kill: Annotated[Values, typer.Option(metavar="NAME@S", help="A worker dies: attention[0]@12.5.")] = None
    restart_s: Annotated[float, typer.Option(metavar="S", min=0, help="It is back after this long.")] = 20.0
    rebalance_every: Annotated[float | None, positive_option("S", "s", "Place experts anew by their counts.")] = None
    shift_every: Annotated[float | None, positive_option("S", "s", "Other experts become popular.")] = None
    hand_over: Annotated[
        HandOver | None,
        typer.Option(metavar="WHEN", show_default="layers", help="Of two pools: by layers, or at the end."),
    ] = None

    def read(self, plan: Plan) -> WorkloadSpec:
        """The workload with what is given in place of its own."""
        found = _of_plan(
            "workload", self.workload, plan.workload, plan.workload_config, load_workload, workload_from_json
        )
        if self.trace is not None:
            traced = load_workload(self.trace)
            if not traced.arrivals_s and self.rate is None and not self.all_at_once:
                raise UserError(f"--trace {self.trace} has no arrival_s: give --rate R, or --all-at-once")
            found = replace(
                found,
                input_tokens=traced.input_tokens,
                output_tokens=traced.output_tokens,
                arrivals_s=traced.arrivals_s,
                requests_per_s=traced.requests_per_s,
            )
        if self.rate is not None and self.all_at_once:
            raise UserError(f"--rate {self.rate:g} and --all-at-once contradict each other: leave one of them out")
        if self.skew is not None:
            found = replace(found, expert_skew=self.skew, expert_loads=())
        if self.routing is not None:
            found = with_recorded_popularity(found, self.routing)
        return replace(found, slo=with_targets(found.slo, tpot=self.slo_tpot, ttft=self.slo_ttft))

    def draw(self, workload: WorkloadSpec) -> Demand:
        return draw_demand(
            workload, num_requests=self.requests, rate=self.rate, all_at_once=self.all_at_once, seed=self.seed
        )

    def setting(self, plan: Plan, workload: WorkloadSpec) -> Setting:
        """The setting of the decode phase, or of the only one."""
        parts = split_list(self.precision)
        return Setting(
            model=plan_model(plan),
            cluster=_of_plan(
                "cluster", self.cluster, plan.cluster, plan.cluster_config, load_cluster, cluster_from_json
            ),
            workload=workload,
            phase=next(name for name in ("serve", "decode", "prefill") if name in plan.phases),
            precision=parse_precision(parts) if parts else plan.precision,
            profile=None if self.profile is None else read_serving_profile(self.profile),
        )

    def pools(self, plan: Plan, setting: Setting, demand: Demand) -> list[Pool]:
        """The plan's pools. Prompts of a decode plan come computed, as its prediction assumes, unless `--prefill mixed`
        or `--max-batch-tokens`, which bounds a mixed step, says otherwise."""
        alone = list(plan.phases) == ["decode"]
        serves = "serve" in plan.phases
        if self.max_batch_tokens is not None and not serves and (not alone or self.prefill == "elsewhere"):
            raise UserError("--max-batch-tokens does not apply: no prompt is computed in a decode step; leave it out")
        default: Prefill = "elsewhere" if alone and self.max_batch_tokens is None else "mixed"
        prefill = self.prefill or default
        return pools_of(plan, setting, demand, prefill=prefill, max_batch_tokens=self.max_batch_tokens)

    def serving(self, pools: Sequence[Pool]) -> ServingOptions:
        if not math.isfinite(self.restart_s):
            raise UserError(f"--restart-s is {self.restart_s:g}: it must be a finite number of seconds")
        if self.hand_over is not None and len(pools) == 1:
            raise UserError("--hand-over does not apply: the plan has one pool, nothing is handed over; leave it out")
        return ServingOptions(
            seed=self.seed,
            shared_prefix_tokens=self.shared_prefix,
            kills=tuple(parse_kill(text, pools) for text in self.kill or ()),
            restart_s=self.restart_s,
            rebalance_every_s=self.rebalance_every,
            shift_every_s=self.shift_every,
            hand_over=self.hand_over or "layers",
            client_here=self.client_here,
        )


def plan_model(plan: Plan) -> ModelSpec:
    """The model from the plan itself; a plan without a config may be of a shipped model."""
    if plan.model_config:
        return planned_model(plan.model_config).spec
    try:
        return load_planned_model(shipped_file("model", plan.model)).spec
    except UserError as error:
        raise UserError(
            f"the plan does not hold its model's config.json: make it again with antiphon plan ({error})"
        ) from error


def differences(plan: Plan, setting: Setting) -> list[str]:
    """Notes on phases whose own times are not those of the given cluster, precision and popularity."""
    notes = []
    for name, phase in plan.phases.items():
        anew = predict(replace(setting, phase=name), phase)
        if _differs(phase.predicted.t_e_s, anew.t_e_s) or _differs(phase.predicted.t_c_s, anew.t_c_s):
            notes.append(_difference(name, phase.predicted.t_e_s, anew.t_e_s, phase.predicted.t_c_s, anew.t_c_s))
    return notes


def _differs(planned: float | None, anew: float | None) -> bool:
    return planned is not None and anew is not None and abs(anew - planned) > _OTHERWISE * max(planned, 1e-12)


def _difference(name: PhaseName, *times: float | None) -> str:
    texts = [f"{1e6 * (time or 0.0):.1f}" for time in times]
    return (
        f"{name}: the plan says T_e {texts[0]} and T_c {texts[2]} µs, here they are {texts[1]} and {texts[3]}: "
        "it was made for another cluster, precision or workload (--cluster, --precision, --workload, --profile)"
    )


def _of_plan(
    kind: str,
    given: str | None,
    name: str,
    config: dict[str, object],
    load: Callable[[str], Spec],
    read: Callable[..., Spec],
) -> Spec:
    """What the option --`kind` names, else the plan's own; an older plan only names it."""
    if given is not None:
        return load(given)
    if config:
        return read(config, f"plan: {kind}_config")
    try:
        return load(name)
    except UserError as error:
        raise UserError(f"the plan's {kind} {name!r} is not a shipped one: give its file with --{kind}") from error
