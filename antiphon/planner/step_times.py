"""Time of one step (a decode iteration, a prefill pass) of every candidate, in the papers' terms T_a, T_e, T_c.

Disaggregated (MegaScale-Infer section 4.1): a layer of all m micro-batches takes max(m T_f, T_a + T_e + 2 T_c); dense
layers and the head keep the attention workers busy m times. Colocated (MixServe eq. 6): a micro-batch passes its
stage's layers, each attention + exchange + experts; as many micro-batches as stages are on the way, so that all stages
are busy.

Candidates are taken by layout and pairing of devices, within which links and rooflines are single numbers.
Rejected: eq. 5 as the time between two tokens. It starts the pipeline anew each step, and does not hold outside eq.
1-3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.cost.exchange import Degrees, Spread, layer_exchange, summed_exchange
from antiphon.cost.layers import AttentionTimes, ServerStep, server_step
from antiphon.cost.memory import share_of
from antiphon.cost.network import Network, Side, m2n
from antiphon.cost.ping_pong import beside_dispatch_s, layer_time, two_batches_s
from antiphon.cost.profile import profiled_messages
from antiphon.cost.roofline import FloatArray, Number, Parts, row_bytes_of, select
from antiphon.planner.candidates import TP_PP, BoolArray, Candidates, real
from antiphon.planner.local_prediction import measured_steps
from antiphon.planner.room import widest_domain
from antiphon.planner.setting import Setting
from antiphon.planner.worker_times import (
    as_profiled,
    attention_times,
    expert_times,
    experts_as_profiled,
    rows_each,
    rows_of_fullest,
    rows_received,
    shared_expert_s,
    slowest_rows,
    step_rows,
)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step is made of, per layer and micro-batch, and the step itself. `combine`: the way back; colocated
    layouts exchange both ways in `dispatch`, of which `exposed_s` adds to attention and experts under the schedule
    taken; `in_halves`: that schedule cuts the micro-batch in two."""

    attention: AttentionTimes
    experts: Parts
    dispatch: Parts
    combine: Parts
    hop: Parts
    step_s: FloatArray
    exposed_s: Number = 0.0
    in_halves: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Columns in seconds: one layer and micro-batch, and one step of all micro-batches. `t_c_s`: one way, the
    slower."""

    t_a_s: FloatArray
    t_e_s: FloatArray
    t_c_s: FloatArray
    step_s: FloatArray


@dataclass(frozen=True)
class CandidateGroup:
    """What candidates that are evaluated together have in common. `near`: an instance fits in one scale-up domain."""

    apart: bool
    whole_rows: bool
    attention_kind: int
    expert_kind: int
    near: bool


def step_times(setting: Setting, candidates: Candidates) -> StepTimes:
    """Times of all candidates at their batch."""
    columns = np.zeros((4, len(candidates)))
    # each proposed token takes one more layer
    drafts = setting.workload.draft_tokens if setting.decodes else 0
    drafting = 1 + drafts / setting.model.num_layers
    engine = setting.engine_times
    for group, where in groups_of(setting, candidates):
        some = candidates.take(where)
        parts = step_parts(setting, some, group)
        back = np.maximum(parts.dispatch.total_s, parts.combine.total_s) if group.apart else parts.dispatch.total_s / 2
        step_s = parts.step_s * drafting + _engine_turn_s(setting, some)
        values = (parts.attention.moe_layer.total_s, parts.experts.total_s, back, step_s)
        for column, value in zip(columns, values, strict=True):
            column[where] = value
        if engine is None:
            continue
        way_s, places = back if group.apart else parts.dispatch.total_s, np.flatnonzero(where)
        for place, found in measured_steps(
            setting, some, engine, kind=group.attention_kind, near=group.near, layer_s=way_s, hop_s=parts.hop.total_s
        ):
            measured = (found.t_a_s, found.t_e_s, found.t_c_s, found.tpot_s)
            for column, seconds in zip(columns, measured, strict=True):
                column[places[place]] = column[places[place]] if seconds is None else seconds
    return StepTimes(t_a_s=columns[0], t_e_s=columns[1], t_c_s=columns[2], step_s=columns[3])


def _engine_turn_s(setting: Setting, candidates: Candidates) -> Number:
    """Between two steps, where it was measured: by the sequences of one attention worker."""
    if setting.profile is None:
        return 0.0
    rows = real(candidates.batch)
    if setting.phase == "prefill":
        rows = np.maximum(rows / setting.new_tokens(setting.lengths.prompt), 1.0)
    return setting.profile.turn_s(rows * candidates.micro_batches)


def groups_of(setting: Setting, candidates: Candidates) -> Iterator[tuple[CandidateGroup, BoolArray]]:
    """Each group that occurs, and which candidates it holds."""
    apart = candidates.is_disaggregated
    domains = np.array([widest_domain(group) for group in setting.groups])
    near = (candidates.attention_kind == candidates.expert_kind) & (
        candidates.attention_devices + candidates.expert_devices <= domains[candidates.attention_kind]
    )
    whole_rows = (candidates.layout == TP_PP) | (not setting.limits.sliced)
    keys = np.stack([apart, whole_rows, candidates.attention_kind, candidates.expert_kind, near]).astype(np.int64)
    sizes = (2, 2, len(setting.groups), len(setting.groups), 2)
    codes = np.ravel_multi_index(tuple(keys), sizes)
    for code in np.unique(codes):
        is_apart, is_whole, kind, expert_kind, is_near = (int(value) for value in np.unravel_index(code, sizes))
        yield CandidateGroup(bool(is_apart), bool(is_whole), kind, expert_kind, bool(is_near)), codes == code


def group_of(setting: Setting, candidates: Candidates) -> CandidateGroup:
    """The group of a single candidate."""
    ((group, _),) = groups_of(setting, candidates)
    return group


def step_parts(setting: Setting, candidates: Candidates, group: CandidateGroup) -> StepParts:
    """All candidates are of `group`."""
    return _disaggregated(setting, candidates, group) if group.apart else _colocated(setting, candidates, group)


def _disaggregated(setting: Setting, candidates: Candidates, group: CandidateGroup) -> StepParts:
    attention = attention_times(setting, candidates, group.attention_kind)
    experts = expert_times(setting, candidates, group.expert_kind)
    dispatch, combine = _exchanges(setting, candidates, group)
    model, m = setting.model, real(candidates.micro_batches)
    moe_layer_s = layer_time(m, attention.moe_layer.total_s, experts.total_s, dispatch.total_s, combine.total_s)
    num_dense = model.num_layers - model.num_moe_layers
    alone_s = m * (num_dense * attention.dense_layer.total_s + attention.head.total_s)
    step_s = np.asarray(model.num_moe_layers * moe_layer_s + alone_s)
    return StepParts(
        attention=attention, experts=experts, dispatch=dispatch, combine=combine, hop=Parts(), step_s=step_s
    )


def _exchanges(setting: Setting, candidates: Candidates, group: CandidateGroup) -> tuple[Parts, Parts]:
    """Dispatch and combine, one way each."""
    precision, model = setting.precision, setting.model
    attention, experts = sides(setting, candidates, group)
    rows = slowest_rows(setting, candidates) * setting.distinct[candidates.expert_ep]
    rows_at_fullest = rows_received(setting, candidates, rows_of_fullest(setting, candidates))
    there_bytes, back_bytes = (model.hidden_size * size for size in (precision.dispatch_bytes, precision.combine_bytes))
    if group.near or len(setting.groups) == 1 == setting.groups[0].num_nodes:
        measured = _measured_exchange(setting, candidates, rows_at_fullest, there_bytes, back_bytes)
        if measured is not None:
            return measured
    fixed_s = setting.cluster.efficiency.exchange_s
    dispatch = m2n(
        attention, experts, rows_sent=rows, rows_received=rows_at_fullest, row_bytes=there_bytes, fixed_s=fixed_s
    )
    combine = m2n(
        experts, attention, rows_sent=rows_at_fullest, rows_received=rows, row_bytes=back_bytes, fixed_s=fixed_s
    )
    return dispatch, combine


def sides(setting: Setting, candidates: Candidates, group: CandidateGroup) -> tuple[Side, Side]:
    """Attention and expert workers, as the exchange between them sees them."""
    nets = [setting.networks[kind] for kind in (group.attention_kind, group.expert_kind)]
    attention_link, expert_link = (net.scale_up if group.near else net.scale_out for net in nets)
    return (
        Side(num_workers=real(candidates.attention_dp), tp=real(candidates.attention_tp), link=attention_link),
        Side(num_workers=real(candidates.expert_ep), tp=real(candidates.expert_tp), link=expert_link),
    )


def _measured_exchange(
    setting: Setting, candidates: Candidates, rows: FloatArray, there_bytes: float, back_bytes: float
) -> tuple[Parts, Parts] | None:
    """From a profile's messages: those of the fullest expert worker, one per attention worker."""
    if setting.profile is None or not setting.profile.messages:
        return None
    times = setting.profile.messages[0].times
    senders = real(candidates.attention_dp)
    dispatch = profiled_messages(times, rows / senders * there_bytes, senders)
    return dispatch, profiled_messages(times, rows / senders * back_bytes, senders)


def _colocated(setting: Setting, candidates: Candidates, group: CandidateGroup) -> StepParts:
    kind, model, precision = group.attention_kind, setting.model, setting.precision
    work = _colocated_work(setting, candidates, group)
    dense_layer = work.attention.dense_layer + work.sums
    layer_s, in_halves = _best_schedule(setting, candidates, group, work)
    num_dense = model.num_layers - model.num_moe_layers
    layers_s = model.num_moe_layers * layer_s + num_dense * dense_layer.total_s
    pp = real(candidates.pp)
    # the slowest stage has ceil(L / pp) of L layers; the head is on the last one
    stage_s = layers_s * share_of(model.num_layers, pp) / model.num_layers + work.attention.head.total_s
    hop_bytes = rows_each(setting, candidates) * model.hidden_size * precision.combine_bytes / candidates.attention_tp
    hop = setting.networks[kind].point_to_point(np.where(pp > 1, hop_bytes, 0.0), across=not group.near)
    # Requests in as many sets as there are stages keep every stage busy. This project's engine gives its next step to
    # all of them at once, so stages fill and empty in each.
    turns = 2 * pp - 1 if setting.limits.servable else pp
    return StepParts(
        attention=replace(work.attention, dense_layer=dense_layer),
        experts=work.experts,
        dispatch=work.exchange,
        combine=Parts(),
        hop=hop,
        step_s=np.asarray(turns * (stage_s + hop.total_s)),
        exposed_s=layer_s - work.attention.moe_layer.total_s - work.experts.total_s,
        in_halves=in_halves,
    )


def _colocated_work(
    setting: Setting, candidates: Candidates, group: CandidateGroup, *, whole: bool = True
) -> ServerStep:
    """Attention, experts and exchange of a micro-batch, each alone; measured where a profile covers it. `whole` False:
    of a layer with experts only."""
    net, rows = _stage_network(setting, candidates, group), step_rows(setting, candidates)
    pairs, held = rows_of_fullest(setting, candidates), real(candidates.slots)
    step = server_step(
        setting.model,
        setting.roofs[group.attention_kind],
        net,
        _degrees(candidates),
        setting.precision,
        rows,
        pairs=pairs,
        held=held,
        exchange=_layer_exchange(setting, candidates, group, net, pairs),
        whole=whole,
    )
    if setting.profile is None:
        return step
    experts = experts_as_profiled(setting, candidates, pairs, step.experts)
    return replace(step, attention=as_profiled(setting, candidates, rows, step.attention), experts=experts)


def _stage_network(setting: Setting, candidates: Candidates, group: CandidateGroup) -> Network:
    """A domain holds as many ranks of a stage as its pieces have devices."""
    pieces: Any = candidates.piece_devices
    return replace(setting.networks[group.attention_kind], domain=pieces)


def _degrees(candidates: Candidates) -> Degrees:
    return Degrees(
        attention_tp=real(candidates.attention_tp),
        attention_dp=real(candidates.attention_dp),
        expert_tp=real(candidates.expert_tp),
        expert_ep=real(candidates.expert_ep),
    )


def _best_schedule(
    setting: Setting, candidates: Candidates, group: CandidateGroup, work: ServerStep
) -> tuple[Number, Number]:
    """Time of one layer, and whether its micro-batch is cut in two. Only exchanges of rows are overlapped: layouts
    without expert parallelism have none."""
    exchange = work.exchange
    serial = _computed_s(work) + exchange.total_s
    if not setting.limits.overlapped:
        return serial, np.zeros(len(candidates))
    overlap, has_rows = setting.cluster.efficiency.overlap, _sends_rows(setting, candidates)
    beside = beside_dispatch_s(
        serial, shared_expert_s(setting, candidates, group.attention_kind), exchange.total_s, overlap
    )
    half = _colocated_work(setting, _half(candidates), group, whole=False)
    half_s = _computed_s(half) * _slowed_by_exchange(setting, group)
    # the fixed part of an exchange is its kernels' own work on the device: only the wire's part can be hidden
    fixed_s = half.exchange.fixed_s
    halves = two_batches_s(half_s + fixed_s, half.exchange.total_s - fixed_s, overlap)
    best = np.where(has_rows, np.minimum(beside, halves), serial)
    return best, np.where(has_rows & (np.asarray(halves) < beside), 1.0, 0.0)


def _computed_s(work: ServerStep) -> Number:
    """A layer with experts, without its exchange."""
    return work.attention.moe_layer.total_s + work.experts.total_s


def _sends_rows(setting: Setting, candidates: Candidates) -> BoolArray:
    """Whether rows go to the ranks of their experts. One attention group has all rows on all of its devices already:
    other engines compute each device's own experts and add up, as with experts in slices; this one sends rows."""
    return np.asarray((candidates.expert_ep > 1) & ((candidates.attention_dp > 1) | setting.limits.servable))


def _half(candidates: Candidates) -> Candidates:
    halves = {name: (getattr(candidates, name) + 1) // 2 for name in ("batch", "chunk", "longest_chunk")}
    return candidates.having(**halves)


def _slowed_by_exchange(setting: Setting, group: CandidateGroup) -> float:
    """Arithmetic beside an exchange over the same alone: prefill's exchange kernels hold some processors, decode's none
    while they wait."""
    num, held = setting.roofs[group.attention_kind].gemm.num_processors, setting.cluster.efficiency.exchange_processors
    return num / (num - held) if setting.phase == "prefill" and num > held else 1.0


def _layer_exchange(
    setting: Setting, candidates: Candidates, group: CandidateGroup, net: Network, pairs: FloatArray
) -> Parts:
    """Collectives of one MoE layer, both ways. `pairs`: of the fullest EP rank."""
    model, precision, degrees = setting.model, setting.precision, _degrees(candidates)
    tokens_each = rows_each(setting, candidates) * candidates.attention_dp / candidates.expert_ep
    distinct = setting.distinct[candidates.expert_ep]
    together = net.ranks_per_domain(degrees.expert_ep, degrees.expert_tp)
    spread = Spread(
        num_ranks=degrees.expert_ep,
        ranks_per_domain=together,
        ranks_per_row=distinct,
        domains_per_row=setting.distinct[np.ceil(candidates.expert_ep / np.asarray(together)).astype(np.int64)],
    )
    fullest: Number = rows_received(setting, candidates, pairs)
    sent = layer_exchange(
        net,
        degrees,
        spread,
        rows=slowest_rows(setting, candidates),
        row_bytes=model.hidden_size * row_bytes_of(precision),
        dispatch_row_bytes=model.hidden_size * precision.dispatch_bytes,
        combine_row_bytes=model.hidden_size * precision.combine_bytes,
        fused={"auto": None, "fused": True, "synchronous": False}[setting.limits.collectives],
        sliced=not group.whole_rows,
        per_node=setting.limits.per_node and setting.phase == "prefill",
        busiest=fullest / (tokens_each * distinct),
    )
    summed = (candidates.expert_ep > 1) & ~_sends_rows(setting, candidates)
    if not summed.any():
        return sent
    size_bytes = slowest_rows(setting, candidates) * model.hidden_size * row_bytes_of(precision)
    return select(summed, summed_exchange(net, Degrees(attention_tp=degrees.attention_tp), size_bytes), sent)
