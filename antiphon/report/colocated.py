"""The colocated deployment nearest to a plan, for engines that know no other, and what running it gives up.

1. a plan that is colocated already is its own nearest
2. else the best of the losing colocated layouts, by the plan's objective; one that keeps the promises comes first
3. the losses are stated in words and, as far as they are predicted, in numbers

Rejected: turning a disaggregated plan's own sizes into colocated ones. They may not fit, and the search never looked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from antiphon.base.errors import ResourceError
from antiphon.base.units import milliseconds, number
from antiphon.report.words import (
    LAYOUT_TITLES,
    OBJECTIVE_UNITS,
    commented,
    degrees_text,
    devices_text,
    latency_text,
    plural,
)
from antiphon.specs.cluster import ClusterSpec
from antiphon.specs.model import WEIGHTS_ONLY, PrecisionSpec
from antiphon.specs.plan import PhaseName, PhasePlan, Plan, Predicted
from antiphon.specs.workload import SloSpec, WorkloadSpec

DECODES_ONLY = (
    "a decode plan: this server is given prompts that prefill servers have computed (antiphon plan --phase serve plans",
    "the whole service)",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What another engine's command needs beside the plan. `model`: folder or name as that engine takes it.
    `hidden_size`, `draft_layers`: of the model, the latter its own layers that propose tokens; 0: none known."""

    model: str
    precision: PrecisionSpec
    workload: WorkloadSpec
    cluster: ClusterSpec
    hidden_size: int = 0
    draft_layers: int = 0

    @property
    def is_skewed(self) -> bool:
        """Whether some experts are more popular than others."""
        return self.workload.expert_skew > 0 or len(set(self.workload.expert_loads)) > 1

    @property
    def memory_used(self) -> float:
        """Fraction of device memory for weights and KV."""
        return 1 - self.cluster.efficiency.memory_reserve


@dataclass(frozen=True, kw_only=True)
class Colocated:
    """A colocated deployment of phase `name`: `plan` as it would be in that layout, its `placement` empty where it is
    the engine's own. `num_experts`: of the model, 0 if the plan does not say. `why_not`: the promise it breaks, empty
    if it keeps all."""

    name: PhaseName
    plan: PhasePlan
    num_experts: int
    why_not: str = ""

    @property
    def per_rank(self) -> int:
        """The share of a batch of one data-parallel rank; the odd ones on top."""
        return math.ceil(self.plan.batch / self.plan.parallel.attention_dp)

    @property
    def redundant_experts(self) -> int:
        """Copies of experts beyond the first: the plan's, and as many as make all ranks hold equally many."""
        copies, ranks = max(sum(map(len, self.plan.placement)), self.num_experts), self.plan.parallel.expert_ep
        return math.ceil(copies / ranks) * ranks - self.num_experts

    @property
    def is_exchanged(self) -> bool:
        """Whether rows go between data-parallel ranks to whole experts, by an all-to-all."""
        return self.plan.parallel.expert_ep > 1 and self.plan.parallel.attention_dp > 1

    @property
    def overlaps_two_batches(self) -> bool:
        """Whether two halves of a batch take turns at devices and network; several stages take turns by themselves."""
        return self.plan.micro_batches > 1 and self.plan.parallel.pp == 1 and self.is_exchanged

    def rows_of_rank(self, workload: WorkloadSpec) -> int:
        """The most rows of a data-parallel rank in a step that only decodes, or that computes prompts, too."""
        rows = self.per_rank if self.name == "prefill" else self.per_rank * workload.rows_per_step
        return max(rows, self.plan.step_tokens or 0)

    @property
    def devices_per_stage(self) -> int:
        return self.plan.parallel.attention_dp * self.plan.parallel.attention_tp

    @property
    def num_instances(self) -> int:
        """Copies of the model; a command starts one of them."""
        devices = sum(use.num_devices for use in self.plan.devices)
        return devices // (self.devices_per_stage * self.plan.parallel.pp)


def nearest_colocated(plan: Plan, name: PhaseName, slo: SloSpec) -> Colocated:
    """The deployment to configure; `ResourceError` if no colocated layout of this model runs on the cluster at all."""
    phase = plan.phases[name]
    num_experts = len(phase.placement)
    if phase.layout != "disaggregated":
        return Colocated(name=name, plan=phase, num_experts=num_experts)
    candidates = [
        replace(
            phase,
            layout=loser.layout,
            parallel=loser.parallel,
            batch=loser.batch,
            micro_batches=loser.micro_batches or 1,
            devices=loser.devices,
            predicted=loser.predicted,
            placement=(),
        )
        for loser in phase.rejected
        if loser.layout != "disaggregated" and loser.parallel and loser.predicted and loser.batch
    ]
    if not candidates:
        reasons = "; ".join(f"{LAYOUT_TITLES[loser.layout]}: {loser.reason}" for loser in phase.rejected)
        raise ResourceError(
            f"no colocated layout of {plan.model} runs on {plan.cluster} ({reasons or 'none was searched'}): "
            f"plan with --layout auto, or on a cluster with more memory"
        )

    def order(one: PhasePlan) -> tuple[bool, float]:
        keeps = not broken_promise(one.predicted, slo)
        return keeps, one.predicted.score(plan.objective) or one.predicted.per_gpu

    best = max(candidates, key=order)
    return Colocated(name=name, plan=best, num_experts=num_experts, why_not=broken_promise(best.predicted, slo))


def broken_promise(predicted: Predicted, slo: SloSpec) -> str:
    """The first target that is missed, in words; empty if none is."""
    for what, value, target in (
        ("a token takes", predicted.tpot_s, slo.tpot_s),
        ("the first token takes", predicted.ttft_s, slo.ttft_s),
    ):
        if value is not None and target is not None and value > target:
            return f"{what} {milliseconds(value)}, the target is {milliseconds(target)}"
    return ""


def losses(plan: Plan, nearest: Colocated) -> Iterator[str]:
    """What running `nearest` gives up, one line each."""
    phase = plan.phases[nearest.name]
    if phase.layout == "disaggregated":
        kinds = {use.device for use in phase.devices}
        yield f"attention and experts apart: {degrees_text(phase.layout, phase.parallel)}"
        if len(kinds) > 1:
            yield f"a kind of device for each: {devices_text(phase.devices)}"
        if phase.micro_batches > 1:
            yield f"{phase.micro_batches} micro-batches in turn, which keep both sides busy"
    replicated = sum(len(owners) > 1 for owners in phase.placement)
    if replicated and not nearest.plan.placement:
        yield f"the plan's placement: {plural(replicated, 'expert')} with replicas"
    elif replicated:
        yield f"which experts have replicas: the engine chooses by the load it sees, the plan by {plan.workload}"
    if nearest.overlaps_two_batches and nearest.plan.micro_batches > 2:
        yield f"{nearest.plan.micro_batches} micro-batches at once: the engine overlaps two"
    if nearest.why_not:
        yield f"a promise: {nearest.why_not}"


def comparison(plan: Plan, nearest: Colocated) -> Iterator[str]:
    """The plan and the nearest deployment beside each other, with predicted numbers."""
    phase, unit = plan.phases[nearest.name], OBJECTIVE_UNITS[plan.objective]
    yield f"{plan.model} on {plan.cluster}, {nearest.name}, workload {plan.workload}"
    yield f"plan:    {_line(phase)}"
    yield f"         {_rates(phase.predicted, plan)}"
    if phase.layout == "disaggregated":
        yield f"nearest: {_line(nearest.plan)}"
        mine, theirs = (one.predicted.score(plan.objective) for one in (phase, nearest.plan))
        share = f"; {theirs / mine - 1:+.0%} {unit}" if mine and theirs else ""
        yield f"         {_rates(nearest.plan.predicted, plan)}{share}"


def _line(phase: PhasePlan) -> str:
    sizes = degrees_text(phase.layout, phase.parallel)
    return f"{LAYOUT_TITLES[phase.layout]}: {sizes}; {devices_text(phase.devices)}"


def _rates(predicted: Predicted, plan: Plan) -> str:
    rate = f"{number(predicted.score(plan.objective))} {OBJECTIVE_UNITS[plan.objective]}"
    return f"predicted {latency_text(predicted)}, {rate}"


def preamble(
    plan: Plan, nearest: Colocated, target: Target, engine: str, version: str, more: Sequence[str] = ()
) -> str:
    """Comments above a command: plan and nearest deployment side by side, then what is lost, `more` of it as the
    engine has it."""
    lost = [*losses(plan, nearest), *more, *_format_losses(target.precision, engine)]
    lines = [f"{engine} {version}: the nearest settings to this plan", *comparison(plan, nearest)]
    if set(plan.phases) == {"decode"}:
        lines += DECODES_ONLY
    if nearest.num_instances > 1:
        lines.append(
            f"this starts one of {nearest.num_instances} instances: run it for each, and balance requests between them"
        )
    return commented(*lines, *(["lost:", *(f"  - {line}" for line in lost)] if lost else []))


def _format_losses(precision: PrecisionSpec, engine: str) -> Iterator[str]:
    if precision.dispatch != precision.combine or precision.dispatch not in ("bfloat16", "float16"):
        yield f"rows sent as {precision.dispatch} and back as {precision.combine}: {engine}'s exchange decides"
    for name in sorted({precision.weights, precision.experts or precision.weights} & set(WEIGHTS_ONLY)):
        yield f"{name} weights: give {engine} a checkpoint that is quantised already"
