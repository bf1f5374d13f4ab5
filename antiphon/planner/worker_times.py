"""T_a and T_e of one layer and micro-batch on one worker, as the slowest of its kind: the pieces of every layout.

1. Attention, by roofline or measured table, plus the synchronisation of its TP group. The slowest attention worker
   has the longest contexts (decode) or the longest prompts (prefill), by the expected maximum over workers
   (`cost.skew.barrier_factor`).
2. Experts: rows of the fullest worker, by popularity and placement, and by chance (expected maximum over as many
   workers as can be that popular), plus the synchronisation of its TP group where the layout's exchange does not hold
   it.
3. A measured profile takes the roofline's place for workers of the TP degree that it was measured with.

Rejected: times of an average worker. A step waits for the slowest.
"""

from collections.abc import Iterator

import numpy as np

from antiphon.cost.layers import AttentionTimes, StepRows, attention_side, dense_feed_forward, expert_feed_forward
from antiphon.cost.profile import LayerKind, profiled_attention, profiled_experts
from antiphon.cost.roofline import FloatArray, Number, Parts, row_bytes_of, select
from antiphon.cost.skew import barrier_factor, expected_max_rows
from antiphon.planner.candidates import TP_PP, BoolArray, Candidates, real
from antiphon.planner.setting import Setting


def rows_each(setting: Setting, candidates: Candidates) -> FloatArray:
    """Rows of one micro-batch and attention worker, on average: tokens in prefill; in decode sequences, and rows for
    their proposed tokens; what the step computes of prompts besides."""
    per_step = setting.workload.rows_per_step if setting.decodes else 1
    return real(candidates.batch) * per_step + candidates.chunk


def slowest_rows(setting: Setting, candidates: Candidates) -> FloatArray:
    """Rows of one micro-batch on the attention worker that the others wait for. A pass of whole prompts has as many
    tokens as they happen to have: the longest sum of all workers' (and, in a pipeline, micro-batches') prompts."""
    rows, lengths = rows_each(setting, candidates), setting.lengths
    if setting.decodes:
        return rows + candidates.longest_chunk - candidates.chunk
    if not setting.takes_whole_prompts:
        return rows
    cv = lengths.prompt_cv / np.sqrt(np.maximum(rows / setting.new_tokens(lengths.prompt), 1.0))
    return np.asarray(rows * barrier_factor(real(candidates.attention_dp * candidates.pp), cv))


def step_rows(setting: Setting, candidates: Candidates) -> StepRows:
    """What the slowest attention worker computes in one micro-batch."""
    lengths, batch = setting.lengths, slowest_rows(setting, candidates)
    new, each = setting.new_tokens(lengths.prompt_by_token), setting.new_tokens(lengths.prompt)
    of_prompts: Number = batch if setting.phase == "prefill" else 0.0
    sampled = np.maximum(batch / each, 1.0) if setting.phase == "prefill" else batch
    if setting.phase == "serve":
        of_prompts = real(candidates.longest_chunk)
        sampled = batch - of_prompts * (1 - 1 / max(each, 1.0))
    return StepRows(
        decoding=real(candidates.batch) if setting.decodes else 0.0,
        context=decode_context(setting, candidates) if setting.decodes else 1.0,
        queries=setting.workload.rows_per_step if setting.decodes else 1,
        prompt_tokens=of_prompts,
        prompt=new,
        past=lengths.prompt_by_token - new,
        halved=setting.cuts_prompts,
        sampled=sampled,
    )


def attention_times(setting: Setting, candidates: Candidates, kind: int, *, whole: bool = True) -> AttentionTimes:
    """Times of attention workers apart from experts, on devices of `kind`: results come back in pieces, one per device
    of the TP group, and are gathered there. `whole` False: of a layer with experts only."""
    net, tp, rows = setting.networks[kind], real(candidates.attention_tp), step_rows(setting, candidates)
    alone = attention_alone(setting, candidates, kind, rows, whole=whole)
    size_bytes = rows.total * setting.model.hidden_size * row_bytes_of(setting.precision)
    sync = net.all_reduce(size_bytes, tp)
    has_dense = whole and setting.model.num_moe_layers < setting.model.num_layers
    return AttentionTimes(
        moe_layer=alone.moe_layer + sync + net.all_gather(size_bytes, tp),
        dense_layer=alone.dense_layer + 2 * sync if has_dense else Parts(),
        head=alone.head,
    )


def attention_alone(
    setting: Setting, candidates: Candidates, kind: int, rows: StepRows, *, whole: bool = True
) -> AttentionTimes:
    """The slowest attention worker without synchronisation; measured where a profile covers it."""
    tp = real(candidates.attention_tp)
    modelled = attention_side(setting.model, setting.roofs[kind], rows, tp, setting.precision, whole=whole)
    return as_profiled(setting, candidates, rows, modelled)


def as_profiled(setting: Setting, candidates: Candidates, rows: StepRows, modelled: AttentionTimes) -> AttentionTimes:
    """`modelled`, and the profile's times in its place for the TP degrees that were measured."""
    profile, tp = setting.profile, real(candidates.attention_tp)
    if profile is None:
        return modelled
    moe, dense, head = modelled.moe_layer, modelled.dense_layer, modelled.head
    for degree, both_sides, here in _kinds_of_workers(candidates, tp):
        found = _measured_layer(setting, rows, "moe", degree, both_sides=both_sides)
        moe = moe if found is None else select(here, found, moe)
        if setting.model.num_moe_layers < setting.model.num_layers:
            found = _measured_layer(setting, rows, "dense", degree, both_sides=both_sides)
            dense = dense if found is None else select(here, found, dense)
    if profile.head is not None:
        measured = Parts(fixed_s=np.asarray(profile.head.at(np.asarray(rows.sampled, dtype=np.float64))))
        head = select(np.asarray(tp == 1), measured, head)
    return AttentionTimes(moe_layer=moe, dense_layer=dense, head=head)


def _kinds_of_workers(candidates: Candidates, tp: FloatArray) -> Iterator[tuple[int, bool, BoolArray]]:
    """For a profile's tables: each TP degree, whether one process has both sides, and the candidates that are so."""
    whole = has_both_sides(candidates)
    for degree in np.unique(tp):
        for both_sides in np.unique(whole[tp == degree]):
            yield int(degree), bool(both_sides), (tp == degree) & (whole == both_sides)


def has_both_sides(candidates: Candidates) -> BoolArray:
    """Replicas of one process: it has all layers, and attention and experts of each."""
    whole = (candidates.layout == TP_PP) & (candidates.pp == 1) & (candidates.attention_tp == 1)
    return np.asarray(whole)


def _measured_layer(
    setting: Setting, rows: StepRows, layer: LayerKind, degree: int, *, both_sides: bool
) -> Parts | None:
    """One layer by the profile's tables, which know decoding and prompts apart; None where one is missing."""
    assert setting.profile is not None
    total = None
    if setting.decodes:
        table = setting.profile.attention_table("decode", layer, degree, both_sides=both_sides)
        if table is None:
            return None
        total = profiled_attention(table, np.asarray(rows.decoding), np.asarray(rows.context))
    if setting.phase != "decode":
        table = setting.profile.attention_table("prefill", layer, degree, both_sides=both_sides)
        if table is None:
            return None
        if total is None:
            return profiled_attention(table, np.asarray(rows.prompt_tokens), np.asarray(rows.prompt), rows.past)
        tokens = np.maximum(np.asarray(rows.prompt_tokens), 1.0)
        of_prompts = profiled_attention(table, tokens, np.minimum(tokens, rows.prompt), rows.past)
        total = total + np.where(np.asarray(rows.prompt_tokens) > 0, 1.0, 0.0) * of_prompts
    return total


def decode_context(setting: Setting, candidates: Candidates) -> FloatArray:
    """Mean context in the micro-batch of the slowest attention worker, at the promise's percentile."""
    lengths = setting.lengths
    one = lengths.context_cv / np.sqrt(np.maximum(candidates.batch, 1))
    whole = lengths.context_cv / np.sqrt(np.maximum(candidates.instance_batch, 1))
    workers = candidates.attention_dp * candidates.pp  # stages wait for each other, too
    factor = barrier_factor(real(workers), one) + lengths.tail_z * whole
    return np.asarray(lengths.context * factor)


def rows_of_fullest(setting: Setting, candidates: Candidates) -> FloatArray:
    """(token, expert) pairs of one micro-batch at the fullest expert worker (EP rank)."""
    pairs = rows_each(setting, candidates) * candidates.attention_dp * setting.model.router.top_k
    share = setting.busiest_each(candidates.expert_ep, candidates.slots)
    held = np.maximum(setting.model.router.num_experts / real(candidates.expert_ep), 1.0)
    return np.asarray(expected_max_rows(pairs, 1 / share, setting.workload.expert_spread / np.sqrt(held)))


def expert_times(setting: Setting, candidates: Candidates, kind: int) -> Parts:
    """One layer and micro-batch of the fullest expert worker, apart from attention, on devices of `kind`: rows come in
    pieces, are gathered in the TP group, and partial sums are reduced and scattered there."""
    rows, tp = rows_of_fullest(setting, candidates), real(candidates.expert_tp)
    net = setting.networks[kind]
    size_bytes = rows_received(setting, candidates, rows) * setting.model.hidden_size * row_bytes_of(setting.precision)
    alone = expert_layer(setting, candidates, rows, kind)
    return alone + net.all_gather(size_bytes, tp) + net.reduce_scatter(size_bytes, tp)


def expert_layer(setting: Setting, candidates: Candidates, rows: FloatArray, kind: int) -> Parts:
    """The grouped products of an expert worker that gets `rows` pairs; measured where a profile covers it."""
    held, tp = real(candidates.slots), real(candidates.expert_tp)
    modelled = expert_feed_forward(setting.model, setting.roofs[kind].gemm, rows, held, tp, setting.precision)
    return experts_as_profiled(setting, candidates, rows, modelled)


def experts_as_profiled(setting: Setting, candidates: Candidates, rows: FloatArray, modelled: Parts) -> Parts:
    """`modelled`, and the profile's times in its place for the TP degrees that were measured."""
    if setting.profile is None:
        return modelled
    for degree, both_sides, here in _kinds_of_workers(candidates, real(candidates.expert_tp)):
        table = setting.profile.expert_table(degree, both_sides=both_sides)
        if table is not None:
            modelled = select(here, profiled_experts(table, rows, real(candidates.slots)), modelled)
    return modelled


def shared_expert_s(setting: Setting, candidates: Candidates, kind: int) -> Number:
    """The part of an attention layer's time that its shared expert takes."""
    model = setting.model
    tp = real(candidates.attention_tp)
    return dense_feed_forward(
        model,
        setting.roofs[kind],
        slowest_rows(setting, candidates),
        model.feed_forward.shared_intermediate,
        tp,
        setting.precision,
    ).total_s


def rows_received(setting: Setting, candidates: Candidates, pairs: FloatArray) -> FloatArray:
    """Token rows at the fullest expert worker: each token once, however many of its experts are there."""
    tokens = rows_each(setting, candidates) * candidates.attention_dp
    per_worker = setting.distinct[candidates.expert_ep] / candidates.expert_ep
    mean_pairs = tokens * setting.model.router.top_k / candidates.expert_ep
    return np.asarray(np.minimum(tokens * per_worker * (pairs / mean_pairs), tokens))
