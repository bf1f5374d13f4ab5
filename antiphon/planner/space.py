"""All candidates worth a look: degrees by layout and device kinds, cut by devices, then by memory; latency comes later.

Disaggregated (MegaScale-Infer Algorithm 1): TP of both sides within a scale-up domain, one expert worker up to one per
expert, m micro-batches, attention workers where T_a = T_e and around it. Colocated (MixServe section III-B): stages of
every number of devices, attention TP x DP and experts TP x EP in every factorization, PP.
Which layout a colocated candidate is follows from its degrees: one TP group over all of a stage is `tp_pp`, experts
without TP are `dp_ep`, everything else is `hybrid`.

Rejected: powers of two only, as the grammar says. Nodes of 7 devices and 3 nodes exist.
"""

import math
from dataclasses import dataclass

import numpy as np

from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidates import (
    DISAGGREGATED,
    DP_EP,
    HYBRID,
    TP_PP,
    BoolArray,
    Candidates,
    IntArray,
    can_be_served,
    candidates_of,
    degrees_up_to,
    fewest_for_each_share,
    joined,
    largest_that,
    piece_of,
    stage_sizes,
)
from antiphon.planner.room import (
    batch_limits,
    domains_of,
    missing_bytes,
    num_workers_that_fit,
    usable_instances,
    widest_domain,
)
from antiphon.planner.setting import Setting, most_ranks
from antiphon.planner.worker_times import attention_times, expert_times
from antiphon.specs.cluster import NodeGroup
from antiphon.specs.plan import LAYOUTS, Layout

NUM_WORKER_COUNTS = 12
"""Numbers of attention workers tried for each choice of the other degrees; all of them where there are no more."""
ALL_WORKER_COUNTS_UP_TO = 32
"""Models with more experts are tried with the smallest number of workers for each number of experts held."""
MOST_ATTENTION_WORKERS = 4096
"""The limit of one instance. A larger cluster has more instances."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Candidates that fit, their batch limits, instances that fit; by layout how many were looked at and dropped.
    `least_missing_bytes`: the least any candidate of a layout lacks on a device, where memory dropped all."""

    candidates: Candidates
    limits: IntArray
    instances: IntArray
    num_considered: IntArray
    num_without_memory: IntArray
    least_missing_bytes: tuple[float, ...]


def make_space(setting: Setting, layouts: tuple[Layout, ...]) -> Space:
    """All candidates of `layouts` for the setting's phase."""
    parts: list[Candidates] = []
    if "disaggregated" in layouts:
        parts += _disaggregated(setting)
    if set(layouts) - {"disaggregated"}:
        parts += _colocated(setting)
    every = joined(parts)
    wanted = np.isin(every.layout, [LAYOUTS.index(layout) for layout in layouts])
    if setting.limits.servable:
        on_cpu = np.array([group.device.kind == "cpu" for group in setting.groups])[every.attention_kind]
        wanted &= can_be_served(setting.model, every, on_cpu)
    every = every.take(wanted & setting.limits.pins.allow(every))
    instances = usable_instances(setting, every)
    limits = setting.limits.pins.batches(every, batch_limits(setting, every))
    kept = (instances > 0) & (limits > 0)
    no_memory = (instances > 0) & (limits == 0)
    missing = missing_bytes(setting, every)
    least = [missing[(every.layout == code) & no_memory].min(initial=math.inf) for code in range(len(LAYOUTS))]
    return Space(
        candidates=every.take(kept),
        limits=limits[kept],
        instances=instances[kept],
        num_considered=_by_layout(every.layout),
        num_without_memory=_by_layout(every.layout[no_memory]),
        least_missing_bytes=tuple(float(value) for value in least),
    )


def _by_layout(codes: IntArray) -> IntArray:
    return np.bincount(codes, minlength=len(LAYOUTS)).astype(np.int64)


def _only(values: IntArray, wanted: int | None) -> IntArray:
    return values if wanted is None else values[values == wanted]


def _wanted_or(values: IntArray, wanted: int | None, most: int) -> IntArray:
    """What was asked for, even if it is not among those tried by default."""
    return values if wanted is None else np.array([wanted] if wanted <= most else [], dtype=np.int64)


def _extra_slots(setting: Setting) -> IntArray:
    return np.array(setting.limits.extra_slots if setting.is_skewed else (0,), dtype=np.int64)


def _disaggregated(setting: Setting) -> list[Candidates]:
    found = []
    for kind, group in enumerate(setting.groups):
        for expert_kind, expert_group in enumerate(setting.groups):
            base = _degrees_apart(setting, kind, group, expert_kind, expert_group)
            cap = _most_attention_workers(setting, base, kind, expert_kind)
            if len(base):
                found.append(_with_attention_workers(setting, base, cap))
    return found


def _degrees_apart(
    setting: Setting, kind: int, group: NodeGroup, expert_kind: int, expert_group: NodeGroup
) -> Candidates:
    """Every choice of tp_a, tp_e, expert workers, slots, m, for one pairing of devices."""
    pins, experts = setting.limits.pins, setting.model.router.num_experts
    width, expert_width = widest_domain(group), widest_domain(expert_group)
    most_workers = min(experts, expert_group.num_devices)
    counts = np.arange(1, experts + 1) if experts <= ALL_WORKER_COUNTS_UP_TO else fewest_for_each_share(experts)
    counts = _wanted_or(counts[counts <= most_workers], pins.expert_ep, most_workers)
    turns = np.arange(1, setting.limits.max_micro_batches + 1) if pins.micro_batches is None else [pins.micro_batches]
    grids = np.meshgrid(
        _wanted_or(degrees_up_to(width), pins.attention_tp, width),
        _wanted_or(degrees_up_to(expert_width), pins.expert_tp, expert_width),
        counts,
        _extra_slots(setting),
        np.array(turns, dtype=np.int64),
        indexing="ij",
    )
    tp_a, tp_e, num_workers, extra, m = grids
    slots = np.minimum(-(-experts // num_workers) + extra, experts)
    slots = setting.slots_used_each(num_workers.reshape(-1), slots.reshape(-1)).reshape(slots.shape)
    return candidates_of(
        layout=DISAGGREGATED,
        attention_kind=kind,
        expert_kind=expert_kind,
        attention_tp=tp_a,
        attention_dp=1,
        expert_tp=tp_e,
        expert_ep=num_workers,
        slots=slots,
        pp=1,
        micro_batches=m,
        piece_devices=0,
        batch=1,
    )


def _most_attention_workers(setting: Setting, base: Candidates, kind: int, expert_kind: int) -> IntArray:
    """Attention workers that fit beside one set of expert workers, counted in devices; at least 1."""
    workers = num_workers_that_fit(domains_of(setting.groups[kind]), base.attention_tp)
    if kind == expert_kind:
        left = setting.groups[kind].num_devices - base.expert_devices
        workers = np.minimum(workers, left // base.attention_tp)
    return np.clip(workers, 1, MOST_ATTENTION_WORKERS)


def _with_attention_workers(setting: Setting, base: Candidates, cap: IntArray) -> Candidates:
    """`base` with several numbers of attention workers each: T_a = T_e and its neighbours, powers of two, few and most.
    What cannot hold its weights gets one number, so that it is counted once and dropped."""
    limits = batch_limits(setting, base)
    balanced = np.ones(len(base), dtype=np.int64)
    fit = limits > 0
    if fit.any():
        balanced[fit] = _balanced(setting, base.take(fit), limits[fit], cap[fit])
    wanted = setting.limits.pins.attention_dp
    choices = _neighbours(balanced, cap) if wanted is None else np.full((len(base), 1), wanted)
    choices = np.sort(np.where(choices <= cap[:, None], choices, 1 if wanted is None else 0), axis=1)
    fresh = np.concatenate([np.ones((len(base), 1), dtype=bool), np.diff(choices, axis=1) > 0], axis=1) & (choices > 0)
    row, column = np.nonzero(fresh)
    return base.take(row).having(attention_dp=choices[row, column])


def _neighbours(balanced: IntArray, cap: IntArray) -> IntArray:
    """[candidates, NUM_WORKER_COUNTS] numbers from 1 to `cap`, with repetitions."""
    every = np.broadcast_to(np.arange(1, NUM_WORKER_COUNTS + 1), (balanced.size, NUM_WORKER_COUNTS))
    near = [balanced + step for step in (-2, -1, 0, 1, 2)]
    far = [balanced // 2, balanced * 2, cap, cap // 2, cap // 4, np.full_like(cap, 4), np.full_like(cap, 8)]
    some = np.clip(np.stack(near + far, axis=1), 1, cap[:, None])
    return np.where(cap[:, None] <= NUM_WORKER_COUNTS, np.minimum(every, cap[:, None]), some)


def _balanced(setting: Setting, base: Candidates, limits: IntArray, cap: IntArray) -> IntArray:
    """The most attention workers for which T_e <= T_a, at the batch that memory and, by T_a alone, the promise
    allow."""
    batch = _reference_batch(setting, base, limits)
    at_batch = base.having(batch=batch)
    t_a = _by_kind(setting, at_batch, attention=True)

    def below(num_workers: IntArray) -> BoolArray:
        return np.asarray(_by_kind(setting, at_batch.having(attention_dp=num_workers), attention=False) <= t_a)

    return largest_that(below, np.ones(len(base), dtype=np.int64), cap + 1)


def _reference_batch(setting: Setting, base: Candidates, limits: IntArray) -> IntArray:
    target_s = setting.workload.slo.tpot_s
    if setting.phase == "prefill":
        return np.minimum(limits, math.ceil(4 * setting.lengths.prompt))
    if target_s is None:
        return limits
    budget_s = target_s / (base.micro_batches * setting.model.num_moe_layers)
    most = _by_kind(setting, base.having(batch=limits), attention=True)
    least = _by_kind(setting, base.having(batch=np.ones_like(limits)), attention=True)
    slope = np.maximum(most - least, 1e-12) / np.maximum(limits - 1, 1)
    allowed = 1 + (budget_s - least) / slope
    return np.clip(np.clip(allowed, 1, 1e12).astype(np.int64), 1, limits)


def _by_kind(setting: Setting, candidates: Candidates, *, attention: bool) -> FloatArray:
    """T_a or T_e of candidates that all have the same pairing of devices."""
    kind = int(candidates.attention_kind[0] if attention else candidates.expert_kind[0])
    if attention:
        return np.asarray(attention_times(setting, candidates, kind, whole=False).moe_layer.total_s)
    return np.asarray(expert_times(setting, candidates, kind).total_s)


def _colocated(setting: Setting) -> list[Candidates]:
    found = []
    for kind, group in enumerate(setting.groups):
        width = widest_domain(group)
        for stage in stage_sizes(group.num_devices, width, setting.model.router.num_experts):
            piece = piece_of(stage, width)
            num_domains = sum(count for size, count in domains_of(group) if size >= piece)
            if stage // piece <= num_domains:
                found.append(_stage_degrees(setting, kind, group, piece, stage // piece))
    return found


def _stage_degrees(setting: Setting, kind: int, group: NodeGroup, piece: int, num_pieces: int) -> Candidates:
    """Every factorization of a stage of `num_pieces` times `piece` devices, and every useful number of stages. A TP
    group lies inside a piece or covers whole pieces; its degree divides what it splits, unless it
    is a whole domain."""
    pins, model = setting.limits.pins, setting.model
    stage = piece * num_pieces
    tp = np.array(
        [
            degree
            for degree in range(1, stage + 1)
            if stage % degree == 0 and (piece % degree == 0 or degree % piece == 0)
        ]
    )
    is_domain = (tp == piece) & (piece == widest_domain(group))
    tp_heads = tp[(model.attention.num_heads % tp == 0) | is_domain]
    tp_width = tp[(model.feed_forward.intermediate % tp == 0) | is_domain]
    stages = fewest_for_each_share(model.num_layers)
    stages = _wanted_or(stages, pins.pp, model.num_layers)
    grids = np.meshgrid(
        _only(tp_heads, pins.attention_tp),
        _only(tp_width[stage // tp_width <= most_ranks(model.router.num_experts)], pins.expert_tp),
        stages[stages * stage <= group.num_devices],
        _extra_slots(setting),
        indexing="ij",
    )
    tp_a, tp_e, pp, extra = (grid.reshape(-1) for grid in grids)
    dp, ep = stage // tp_a, stage // tp_e
    layout = np.where((dp == 1) & (ep == 1), TP_PP, np.where(tp_e == 1, DP_EP, HYBRID))
    slots = np.minimum(-(-model.router.num_experts // ep) + extra, model.router.num_experts)
    every = candidates_of(
        layout=layout,
        attention_kind=kind,
        expert_kind=kind,
        attention_tp=tp_a,
        attention_dp=dp,
        expert_tp=tp_e,
        expert_ep=ep,
        slots=setting.slots_used_each(ep, slots),
        pp=pp,
        micro_batches=pp,
        piece_devices=piece,
        batch=1,
    )
    return every if pins.attention_dp is None else every.take(dp == pins.attention_dp)
