"""A plan's numbers from its fields, and the other way round: what makes a plan one can check.

`phase_plan` writes a table's candidate as a plan; `predict` computes its numbers anew from the plan alone, with the
very functions of the search. Both agree, or the plan says something that the search did not mean (a test holds them
together).

Rejected: keeping the search's columns beside the plan. A reader of plan.json could not check it.

How far a prediction may be off, and which layouts the model cannot tell apart:

1. Attention, experts and exchange are each off by the spread of their published tables (docs/calibration.md),
   independently, by their share of a layer.
2. What no part explains (load of experts, schedulers, congestion) is off by the spread that whole deployments had
   before half of them chose two defaults (docs/reproduction.md). It is common to all layouts of one model on one
   cluster.
3. A band holds 80% of normal errors: 1.28 times both together. Two layouts differ by their parts alone; closer than
   1.28 times those of both they are a tie, and the simpler one is recommended.

Rejected: a band by differentiating every constant. It needs a spread for each, which has not been measured.
"""

import math
from dataclasses import replace

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.memory import kv_bytes_per_token, tokens_of_state
from antiphon.cost.ping_pong import bottleneck
from antiphon.cost.roofline import Parts
from antiphon.placement.place import balance, placement_of
from antiphon.planner.candidate_table import CandidateTable
from antiphon.planner.candidates import Candidates, candidates_of, piece_of, real
from antiphon.planner.mixed_steps import with_prompts
from antiphon.planner.outcome import outcome_at
from antiphon.planner.room import BLOCK_SIZE, weight_bytes, widest_domain
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepParts, group_of, step_parts
from antiphon.specs.counts import blocks_of
from antiphon.specs.plan import LAYOUTS, Collectives, DeviceUse, Layout, PhaseName, PhasePlan, Predicted


def phase_plan(setting: Setting, table: CandidateTable, index: int, num_instances: int | None = None) -> PhasePlan:
    """The table's candidate as a plan without losers; `num_instances` if it is to be other than the table's."""
    one = table.one(index)
    instances = int(table.outcome.num_instances[index]) if num_instances is None else num_instances
    fractions = balance(setting.shares, int(one.expert_ep[0]), int(one.slots[0]))
    return PhasePlan(
        layout=one.layout_of(0),
        parallel=one.parallel_of(0),
        num_instances=instances,
        micro_batches=int(one.micro_batches[0]),
        batch=int(one.instance_batch[0]),
        step_tokens=int(one.step_tokens[0]) or None,
        two_batches=bool(np.any(step_parts_of(setting, one).in_halves)),
        collectives=collectives_of(setting, one),
        devices=devices_of(setting, one, instances),
        placement=placement_of(fractions),
        predicted=predicted_of(setting, one, instances),
    )


def collectives_of(setting: Setting, one: Candidates) -> Collectives:
    """The form of the exchange that a single candidate's numbers are of; `auto` where both forms take the same time."""
    if one.layout_of(0) == "disaggregated":
        return "auto"
    forms: tuple[Collectives, Collectives] = ("fused", "synchronous")
    of_form = [replace(setting, limits=replace(setting.limits, collectives=form)) for form in forms]
    fused_s, synchronous_s = (float(step_parts_of(each, one).dispatch.at(0).total_s) for each in of_form)
    if fused_s == synchronous_s:
        return "auto"
    if setting.limits.collectives != "auto":
        return setting.limits.collectives
    return "fused" if fused_s < synchronous_s else "synchronous"


def devices_of(setting: Setting, one: Candidates, num_instances: int) -> tuple[DeviceUse, ...]:
    """Devices of all instances of a single candidate together, by role."""
    return one.devices_of(0, [group.device.name for group in setting.groups], num_instances)


def resource_weights(setting: Setting) -> list[float]:
    """What one device of each kind counts for in the objective."""
    devices = [group.device for group in setting.groups]
    if setting.objective == "per-cost":
        return [float(device.price or 0.0) for device in devices]
    return [device.power_w if setting.objective == "per-power" else 1.0 for device in devices]


def candidate_of(setting: Setting, plan: PhasePlan) -> Candidates:
    """The one candidate that a phase of a plan describes. `UserError` if its sizes contradict each other, or its
    devices are not in the cluster."""
    _check_sizes(plan)
    names = [group.device.name for group in setting.groups]
    unknown = [use.device for use in plan.devices if use.device not in names]
    if unknown:
        raise UserError(f"the plan uses {unknown[0]}, the cluster has {', '.join(names)}: give the plan's own cluster")
    parallel, apart = plan.parallel, plan.layout == "disaggregated"
    kind, expert_kind = names.index(plan.devices[0].device), names.index(plan.devices[-1].device)
    workers = parallel.expert_workers if apart else parallel.expert_ep
    held = [sum(1 for owners in plan.placement for owner, _ in owners if owner == worker) for worker in range(workers)]
    stage = parallel.attention_tp * parallel.attention_dp
    return candidates_of(
        layout=LAYOUTS.index(plan.layout),
        attention_kind=kind,
        expert_kind=expert_kind,
        attention_tp=parallel.attention_tp,
        attention_dp=parallel.attention_dp,
        expert_tp=parallel.expert_tp,
        expert_ep=workers,
        slots=max(held),
        pp=parallel.pp,
        micro_batches=plan.micro_batches,
        piece_devices=0 if apart else piece_of(stage, widest_domain(setting.groups[kind])),
        batch=plan.batch // (plan.micro_batches * parallel.attention_dp),
        step_tokens=plan.step_tokens or 0,
    )


def _check_sizes(plan: PhasePlan) -> None:
    """`UserError` where a phase's sizes contradict each other, as after an edit by hand."""
    parallel, apart, again = plan.parallel, plan.layout == "disaggregated", "make the plan again with antiphon plan"
    roles, wanted = [use.role for use in plan.devices], ["attention", "experts"] if apart else ["both"]
    if roles != wanted:
        found = " and ".join(roles) or "no role"
        raise UserError(f"the plan lists devices of {found}, {plan.layout} has {' and '.join(wanted)}: {again}")
    attention, experts = parallel.attention_tp * parallel.attention_dp, parallel.expert_tp * parallel.expert_ep
    if not apart and attention != experts:
        raise UserError(
            f"a stage of the plan has {attention} devices by its attention and {experts} by its experts: {plan.layout} "
            f"has both on the same: {again}"
        )
    least = plan.micro_batches * parallel.attention_dp
    if plan.batch < least:
        raise UserError(
            f"the plan's batch is {plan.batch}: {plan.micro_batches} micro-batches on {parallel.attention_dp} "
            f"attention workers are at least {least}: {again}"
        )


def predict(setting: Setting, plan: PhasePlan) -> Predicted:
    """The plan's numbers, computed from its fields."""
    return predicted_of(setting, candidate_of(setting, plan), plan.num_instances)


def step_parts_of(setting: Setting, one: Candidates) -> StepParts:
    """The parts of a single candidate's step; of one with prompts, where they share it with what decodes."""
    if setting.phase == "serve":
        one = with_prompts(setting, one)[1]
    return step_parts(setting, one, group_of(setting, one))


def named_parts(parts: StepParts) -> dict[str, Parts]:
    slower = parts.dispatch.at(0)
    if float(parts.combine.at(0).total_s) > float(slower.total_s):
        slower = parts.combine.at(0)
    return {"attention": parts.attention.moe_layer.at(0), "experts": parts.experts.at(0), "exchange": slower}


def predicted_of(setting: Setting, one: Candidates, num_instances: int) -> Predicted:
    """Numbers of a single candidate, `num_instances` of it."""
    outcome = outcome_at(setting, one, np.array([num_instances]))
    tokens_per_s = float(outcome.tokens_per_s[0])
    uses = devices_of(setting, one, num_instances)
    devices = {group.device.name: group.device for group in setting.groups}
    prices = [devices[use.device].price for use in uses]
    cost = sum(use.num_devices * (price or math.nan) for use, price in zip(uses, prices, strict=True))
    return Predicted(
        tpot_s=_known(outcome.tpot_s[0]),
        ttft_s=_known(outcome.ttft_s[0]),
        tokens_per_s=tokens_per_s,
        per_gpu=tokens_per_s / sum(use.num_devices for use in uses),
        per_cost=_known(tokens_per_s / cost),
        band=band(setting, one),
        per_power=tokens_per_s / sum(use.num_devices * devices[use.device].power_w for use in uses),
        t_a_s=float(outcome.t_a_s[0]),
        t_e_s=float(outcome.t_e_s[0]),
        t_c_s=float(outcome.t_c_s[0]),
        queueing_s=_known(outcome.queueing_s[0]),
        memory_bytes=memory_of(setting, one),
        bound_by=bound_by(setting, one),
    )


def request_tokens_per_s(settings: dict[PhaseName, Setting], phases: dict[PhaseName, PhasePlan]) -> float | None:
    """MixServe eq. 11: tokens of a mean request, prompt and output, over all its time, queues included; None where a
    plan is not of the whole of it."""
    first, last = (phases.get("prefill" if "prefill" in phases else "serve"), phases.get("decode", phases.get("serve")))
    if first is None or last is None or first.predicted.ttft_s is None or last.predicted.tpot_s is None:
        return None
    lengths = next(iter(settings.values())).lengths
    waits_s = (last.predicted.queueing_s or 0.0) if last is not first else 0.0  # that of `serve` is in its first token
    took_s = first.predicted.ttft_s + waits_s + lengths.output * last.predicted.tpot_s
    return (lengths.prompt + lengths.output) / took_s


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def memory_of(setting: Setting, one: Candidates) -> dict[str, float]:
    """Weights and KV in use on the fullest device of each role."""
    weights = weight_bytes(setting, one)
    tokens = float(one.micro_batches[0] * one.batch[0])
    if setting.decodes:
        state = float(np.max(tokens_of_state(setting.model, real(one.attention_tp), setting.precision)))
        tokens *= blocks_of(math.ceil(setting.lengths.held_tokens + state), BLOCK_SIZE) * BLOCK_SIZE
    cache = tokens * float(
        np.max(kv_bytes_per_token(setting.model, real(one.attention_tp), setting.precision, pp=real(one.pp)))
    )
    attention, experts = float(weights[0][0]) + cache, float(weights[1][0])
    if one.layout_of(0) == "disaggregated":
        return {"attention": attention, "experts": experts}
    return {"both": attention + experts}


def bound_by(setting: Setting, one: Candidates) -> dict[str, str]:
    """What attention, experts and exchange wait for, and which of them a step waits for."""
    parts = step_parts_of(setting, one)
    named = named_parts(parts)
    bounds = {name: part.bound_by() for name, part in named.items() if float(part.total_s) > 0}
    times = {name: float(part.total_s) for name, part in named.items()}
    if one.layout_of(0) != "disaggregated":
        return {**bounds, "step": max(times, key=lambda name: times[name])}
    back = float(parts.combine.at(0).total_s)
    there = float(parts.dispatch.at(0).total_s)
    waits = bottleneck(int(one.micro_batches[0]), times["attention"], times["experts"], there, back)
    words = {"network": "exchange", "bubbles": "the round trip: too few micro-batches to fill it"}
    return {**bounds, "step": words.get(waits, waits)}


PRODUCTS_SPREAD, ATTENTION_SPREAD, EXCHANGE_SPREAD, WHOLE_SPREAD = 0.12, 0.09, 0.13, 0.18
NORMAL_80_PERCENT = 1.28
EQUAL = 0.005  # relative; what is no further apart is the same, and the simpler one is taken
BY_SIMPLICITY: tuple[Layout, ...] = ("tp_pp", "dp_ep", "hybrid", "disaggregated")


def parts_spread(setting: Setting, one: Candidates) -> float:
    """Relative spread of a single candidate's step by those of its parts."""
    parts = step_parts_of(setting, one)
    apart = bool(one.is_disaggregated[0])
    exchange = parts.dispatch.total_s + parts.combine.total_s if apart else parts.exposed_s
    products = max(PRODUCTS_SPREAD, ATTENTION_SPREAD)  # an attention layer is mostly products
    pairs = [
        (parts.attention.moe_layer.total_s, products),
        (parts.experts.total_s, PRODUCTS_SPREAD),
        (exchange, EXCHANGE_SPREAD),
    ]
    times = [float(np.asarray(time).reshape(-1)[0]) for time, _ in pairs]
    total = sum(times) or 1.0
    return math.sqrt(sum((time / total * spread) ** 2 for time, (_, spread) in zip(times, pairs, strict=True)))


def band(setting: Setting, one: Candidates) -> float:
    """A single candidate's rate is expected within this fraction of the prediction, either way."""
    return NORMAL_80_PERCENT * math.hypot(parts_spread(setting, one), WHOLE_SPREAD)


def simplest_of_ties(setting: Setting, table: CandidateTable, best: int) -> tuple[int, str]:
    """The best candidate of the simplest layout that ties with `best`, and what there is to say about it."""
    scores = table.score(setting.objective)
    mine = parts_spread(setting, table.one(best))
    for layout in BY_SIMPLICITY[: BY_SIMPLICITY.index(table.candidates.layout_of(best))]:
        index = table.best(setting.objective, np.asarray(table.candidates.layout == LAYOUTS.index(layout)))
        if index is None:
            continue
        gain = float(scores[best] / scores[index]) - 1
        apart = NORMAL_80_PERCENT * math.hypot(mine, parts_spread(setting, table.one(index)))
        if gain <= apart:
            better = table.candidates.layout_of(best)
            said = f"a tie: {better} is predicted {gain:.1%} better, less than the model can tell apart"
            if gain <= EQUAL:
                return index, f"equal: {better} is predicted no better than {layout}, which is simpler"
            if setting.limits.prefer_simple:
                return index, f"{said}; {layout} is simpler, and taken (--prefer simple)"
            return index, f"{said}; {layout} is simpler (--prefer simple takes it)"
    return best, ""
