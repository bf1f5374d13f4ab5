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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.cost.layers import (
    attention_decode,
    attention_mixed,
    attention_prefill,
    dense_feed_forward,
    expert_feed_forward,
    output_head,
)
from antiphon.cost.parts import FloatArray, Number, Parts, select
from antiphon.cost.profile import LayerKind, profiled_attention, profiled_experts
from antiphon.cost.roofline import row_bytes_of
from antiphon.cost.skew import barrier_factor, expected_max_rows
from antiphon.planner.candidates import Candidates, real
from antiphon.planner.setting import Setting


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """One layer and micro-batch: an MoE layer's attention side, a dense layer, and the head once per step."""

    moe_layer: Parts
    dense_layer: Parts
    head: Parts


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


def attention_times(setting: Setting, candidates: Candidates, kind: int, *, gathers: bool) -> AttentionTimes:
    """All candidates have attention on devices of `kind`. `gathers`: results come back in pieces, one per device of the
    TP group, and are gathered there (disaggregated); otherwise the exchange's cost holds the synchronisation of MoE
    layers."""
    model, net = setting.model, setting.networks[kind]
    tp, batch = real(candidates.attention_tp), slowest_rows(setting, candidates)
    if not gathers:
        pieces: Any = candidates.piece_devices
        net = replace(net, domain=pieces)  # ranks of a stage that share a domain
    row_bytes = model.hidden_size * row_bytes_of(setting.precision)
    sync = net.all_reduce(batch * row_bytes, tp)
    moe = attention_layer(setting, candidates, kind, "moe")
    if gathers:
        moe = moe + sync + net.all_gather(batch * row_bytes, tp)
    dense = Parts()
    if model.num_moe_layers < model.num_layers:
        dense = attention_layer(setting, candidates, kind, "dense") + 2 * sync
    rows = batch
    if setting.phase == "prefill":
        rows = np.maximum(batch / setting.new_tokens(setting.lengths.prompt), 1.0)
    elif setting.phase == "serve":
        rows = batch - candidates.longest_chunk * (1 - 1 / max(setting.new_tokens(setting.lengths.prompt), 1.0))
    return AttentionTimes(moe_layer=moe, dense_layer=dense, head=_head(setting, rows, kind, tp))


def attention_layer(setting: Setting, candidates: Candidates, kind: int, layer: LayerKind) -> Parts:
    """One layer without synchronisation, on the slowest attention worker."""
    tp, batch, lengths = real(candidates.attention_tp), slowest_rows(setting, candidates), setting.lengths
    is_moe = layer == "moe"
    if setting.phase == "serve":
        return _serving_layer(setting, candidates, kind, layer)
    if setting.phase == "decode":
        context: Number = decode_context(setting, candidates)
        modelled = attention_decode(
            setting.model,
            setting.roofs[kind],
            real(candidates.batch),
            context,
            tp,
            setting.precision,
            queries=setting.workload.rows_per_step,
            moe_layer=is_moe,
        )
    else:
        context = setting.new_tokens(lengths.prompt_by_token)
        modelled = attention_prefill(
            setting.model,
            setting.roofs[kind],
            batch,
            context,
            tp,
            setting.precision,
            past=lengths.prompt_by_token - context,
            halved=setting.cuts_prompts,
            moe_layer=is_moe,
        )
    if setting.profile is None:
        return modelled
    for degree in np.unique(tp):
        table = setting.profile.attention_table(setting.phase, layer, int(degree))
        if table is not None:
            measured = profiled_attention(table, batch, np.asarray(context))
            modelled = select(np.asarray(tp == degree), measured, modelled)
    return modelled


def _serving_layer(setting: Setting, candidates: Candidates, kind: int, layer: LayerKind) -> Parts:
    """As `attention_layer`, of a step that decodes and computes prompts. A profile knows the two apart."""
    tp, lengths = real(candidates.attention_tp), setting.lengths
    context, prompt = decode_context(setting, candidates), setting.new_tokens(lengths.prompt_by_token)
    modelled = attention_mixed(
        setting.model,
        setting.roofs[kind],
        real(candidates.batch),
        context,
        real(candidates.longest_chunk),
        prompt,
        tp,
        setting.precision,
        queries=setting.workload.rows_per_step,
        past=lengths.prompt_by_token - prompt,
        halved=setting.cuts_prompts,
        moe_layer=layer == "moe",
    )
    if setting.profile is None:
        return modelled
    for degree in np.unique(tp):
        tables = [setting.profile.attention_table(name, layer, int(degree)) for name in ("decode", "prefill")]
        if tables[0] is not None and tables[1] is not None:
            measured = profiled_attention(tables[0], real(candidates.batch), context)
            tokens = np.maximum(real(candidates.longest_chunk), 1.0)
            of_prompts = profiled_attention(tables[1], tokens, np.minimum(tokens, prompt))
            measured = measured + np.where(candidates.longest_chunk > 0, 1.0, 0.0) * of_prompts
            modelled = select(np.asarray(tp == degree), measured, modelled)
    return modelled


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


def expert_times(setting: Setting, candidates: Candidates, kind: int, *, with_sync: bool) -> Parts:
    """One layer and micro-batch of the fullest expert worker, on devices of `kind`. `with_sync`: rows come in pieces,
    are gathered in the TP group, and partial sums are reduced and scattered there (disaggregated)."""
    rows, tp = rows_of_fullest(setting, candidates), real(candidates.expert_tp)
    total = expert_layer(setting, rows, real(candidates.slots), kind, tp)
    if not with_sync:
        return total
    net = setting.networks[kind]
    row_bytes = setting.model.hidden_size * row_bytes_of(setting.precision)
    tokens = rows_received(setting, candidates, rows)
    return total + net.all_gather(tokens * row_bytes, tp) + net.reduce_scatter(tokens * row_bytes, tp)


def expert_layer(setting: Setting, rows: FloatArray, held: FloatArray, kind: int, tp: FloatArray) -> Parts:
    """The grouped products of a worker that holds `held` experts and gets `rows` pairs."""
    modelled = expert_feed_forward(setting.model, setting.roofs[kind].gemm, rows, held, tp, setting.precision)
    if setting.profile is None:
        return modelled
    for degree in np.unique(tp):
        table = setting.profile.expert_table(int(degree))
        if table is not None:
            measured = profiled_experts(table, rows, held)
            modelled = select(np.asarray(tp == degree), measured, modelled)
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


def _head(setting: Setting, rows: Number, kind: int, tp: FloatArray) -> Parts:
    modelled = output_head(setting.model, setting.roofs[kind], rows, tp, setting.precision)
    if setting.profile is None or setting.profile.head is None:
        return modelled
    measured = Parts(fixed_s=np.asarray(setting.profile.head.at(np.asarray(rows, dtype=np.float64))))
    return select(np.asarray(tp == 1), measured, modelled)
