"""What one plan's step is made of, as tables of seconds by size: the planner's own costs, evaluated on a grid once.

Per layer and micro-batch of one attention worker:
    attention(rows) at no context, TP synchronisation included; where a profile has both, the smaller of that many
        sequences and a prompt of that many tokens: both have these rows, and more beside them
    + decode(sequences, visible tokens each) for reading keys and values, by all rows of a sequence together
    + chunk(new tokens, cached tokens) for each piece of a prompt
Experts by (token, expert) pairs at the fullest worker; messages by rows of the busiest sender and the fullest receiver;
colocated layouts' collectives, stage hops and the head by rows of a DP rank. All from `planner` and `cost`.

Rejected: the planner's T_a at its own mean context. A simulated batch has contexts of its own.

A table is read by straight interpolation in about a microsecond. Costs are sums of products of sizes and of maxima of
such, so between two sizes a quarter apart a straight line is off by less than the cost model itself. Beyond the last
size the last slope goes on, below the first the first value holds. Rejected: calling the vectorised functions for every
step. One call takes as long as a hundred table reads.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from antiphon.cost.layers import StepRows, attention_layer
from antiphon.cost.network import Side, m2n
from antiphon.cost.profile import LayerKind, profiled_attention, profiled_messages
from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidates import Candidates
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import CandidateGroup, StepParts, group_of, sides, step_parts
from antiphon.planner.worker_times import (
    attention_alone,
    expert_layer,
    expert_times,
    has_both_sides,
    rows_of_fullest,
    step_rows,
)


def sizes_up_to(largest: float, ratio: float = 1.2) -> FloatArray:
    """Ascending sizes from 1 to at least `largest`: whole numbers first, then `ratio` apart."""
    sizes = [1.0]
    while sizes[-1] < largest:
        sizes.append(max(sizes[-1] + 1.0, np.floor(sizes[-1] * ratio)))
    return np.asarray(sizes)


class Line:
    """A function of one size."""

    def __init__(self, sizes: FloatArray, values: FloatArray) -> None:
        self._sizes = [float(size) for size in sizes]
        self._values = [float(value) for value in np.broadcast_to(values, np.shape(sizes))]
        assert len(self._sizes) > 1
        self._last = len(self._sizes) - 2

    def __call__(self, size: float) -> float:
        sizes, values = self._sizes, self._values
        if size <= sizes[0]:
            return values[0]
        low = min(bisect_right(sizes, size) - 1, self._last)
        share = (size - sizes[low]) / (sizes[low + 1] - sizes[low])
        return values[low] + share * (values[low + 1] - values[low])


class Plane:
    """A function of two sizes, `values[i, j]` at (first[i], second[j]); exact for products of the two."""

    def __init__(self, first: FloatArray, second: FloatArray, values: FloatArray) -> None:
        self._first = [float(size) for size in first]
        self._rows = [Line(second, row) for row in np.broadcast_to(values, (len(first), len(second)))]
        assert len(self._first) > 1
        self._last = len(self._first) - 2

    def __call__(self, one: float, two: float) -> float:
        first = self._first
        if one <= first[0]:
            return self._rows[0](two)
        low = min(bisect_right(first, one) - 1, self._last)
        share = (one - first[low]) / (first[low + 1] - first[low])
        below, above = self._rows[low](two), self._rows[low + 1](two)
        return below + share * (above - below)


def line(sizes: FloatArray, function: Callable[[FloatArray], object]) -> Line:
    """`function` of an array of sizes as a table."""
    return Line(sizes, np.asarray(function(sizes), dtype=np.float64))


def plane(first: FloatArray, second: FloatArray, function: Callable[[FloatArray, FloatArray], object]) -> Plane:
    """`function` of two arrays of sizes, broadcast against each other, as a table."""
    one, two = np.meshgrid(first, second, indexing="ij")
    return Plane(first, second, np.asarray(function(one, two), dtype=np.float64))


_LEAST_CONTEXT = 1.0


@dataclass(frozen=True, kw_only=True)
class StepAttention:
    """One layer of one attention worker, in seconds."""

    rows: Line
    decode: Plane
    chunk: Plane
    whole_prompt: Line

    def decode_s(self, num_sequences: int, visible_tokens: float) -> float:
        """What `num_sequences` rows that see `visible_tokens` in all add to `rows`."""
        return self.decode(num_sequences, visible_tokens / num_sequences)

    def chunk_s(self, num_tokens: int, num_cached: int) -> float:
        """What a piece of a prompt adds to `rows`."""
        return self.chunk(num_tokens, num_cached) if num_cached else self.whole_prompt(num_tokens)


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """All tables of one phase of a plan. `messages`: dispatch and combine, each as the side of the attention workers by
    rows of the busiest one, and that of the expert workers by token rows at the fullest one, of which the slower side
    counts; None: colocated, and `exchange` (what of it is not hidden), `hop` count instead, by rows of a DP rank.
    `dense` None: all layers have experts. `distinct`: expected expert workers that a row goes to."""

    moe: StepAttention
    dense: StepAttention | None
    head: Line
    experts: Line
    messages: tuple[tuple[Line, Line], tuple[Line, Line]] | None
    exchange: Line
    hop: Line
    distinct: float
    mean_fullest: Line  # pairs at the fullest worker by rows of a DP rank, as the planner expects them


def step_tables(setting: Setting, one: Candidates, *, most_rows: float, most_context: float) -> StepTables:
    """Tables of the single candidate `one` for micro-batches of up to `most_rows` rows per attention worker and
    sequences of up to `most_context` tokens; beyond, they go on straight."""
    queries = setting.workload.rows_per_step
    rows = sizes_up_to(most_rows * queries)
    contexts = sizes_up_to(most_context, 1.6)
    plain = replace(setting.workload, draft_tokens=0, accept_rate=0.0, accept_rates=(), prefix_hit=0.0)
    setting = replace(setting, phase="decode", workload=plain)
    group = group_of(setting, one)
    grid = _with_rows(one, rows)
    parts = step_parts(setting, grid, group)
    expert_kind = int(one.expert_kind[0])
    pairs = sizes_up_to(most_rows * queries * float(one.attention_dp[0]) * setting.model.router.top_k, 1.3)
    has_dense = setting.model.num_moe_layers < setting.model.num_layers
    return StepTables(
        moe=_attention(setting, one, parts, grid, rows, contexts, queries, "moe"),
        dense=_attention(setting, one, parts, grid, rows, contexts, queries, "dense") if has_dense else None,
        head=line(rows, lambda _: parts.attention.head.total_s),
        experts=_experts(setting, one, grid, pairs, expert_kind, apart=group.apart),
        messages=_messages(setting, one, group, rows) if group.apart else None,
        exchange=line(rows, lambda _: parts.exposed_s),
        hop=line(rows, lambda _: parts.hop.total_s),
        distinct=float(setting.distinct[int(one.expert_ep[0])]),
        mean_fullest=line(rows, lambda _: rows_of_fullest(setting, grid)),
    )


def _with_rows(one: Candidates, rows: FloatArray) -> Candidates:
    """`one` repeated, with these rows as its batch."""
    return one.take(np.zeros(rows.size, dtype=np.int64)).having(batch=rows.astype(np.int64))


def _attention(
    setting: Setting,
    one: Candidates,
    parts: StepParts,
    grid: Candidates,
    rows: FloatArray,
    contexts: FloatArray,
    queries: int,
    layer: LayerKind,
) -> StepAttention:
    kind = int(one.attention_kind[0])
    alone = attention_alone(setting, grid, kind, step_rows(setting, grid))
    whole, own = (each.moe_layer if layer == "moe" else each.dense_layer for each in (parts.attention, alone))
    sync_s = np.asarray(whole.total_s) - np.asarray(own.total_s)
    profile, tp = setting.profile, int(one.attention_tp[0])
    has_prompts = profile is not None and profile.attention_table("prefill", layer, tp) is not None

    def rows_alone(num: FloatArray, each: int = 1) -> FloatArray:
        decoding_s = _decode_s(setting, one, kind, layer, num, _LEAST_CONTEXT, each)
        return np.minimum(decoding_s, _prefill_s(setting, one, kind, layer, num, 0.0)) if has_prompts else decoding_s

    def beside_rows(num: FloatArray, context: FloatArray) -> FloatArray:
        return np.maximum(_decode_s(setting, one, kind, layer, num, context, queries) - rows_alone(num, queries), 0.0)

    def chunk(num: FloatArray, cached: Any) -> FloatArray:
        return np.maximum(_prefill_s(setting, one, kind, layer, num, cached) - rows_alone(num), 0.0)

    return StepAttention(
        rows=Line(rows, rows_alone(rows) + sync_s),
        decode=plane(rows, contexts, beside_rows),
        chunk=plane(rows, contexts, chunk),
        whole_prompt=line(rows, lambda num: chunk(num, 0.0)),
    )


def _decode_s(
    setting: Setting, one: Candidates, kind: int, layer: LayerKind, num: FloatArray, context: Any, queries: int = 1
) -> FloatArray:
    """One layer of `num` sequences of `context` tokens, `queries` rows each, without synchronisation; from the profile
    if it covers it."""
    tp = int(one.attention_tp[0])
    if setting.profile is not None:
        table = setting.profile.attention_table("decode", layer, tp, both_sides=bool(has_both_sides(one)[0]))
        if table is not None:
            return np.asarray(profiled_attention(table, num, np.broadcast_to(context, num.shape)).total_s)
    rows = StepRows(decoding=num, context=context, queries=queries)
    return _modelled_s(setting, kind, tp, layer, rows)


def _modelled_s(setting: Setting, kind: int, tp: int, layer: LayerKind, rows: StepRows) -> FloatArray:
    roofs, is_moe = setting.roofs[kind], layer == "moe"
    parts = attention_layer(setting.model, roofs, rows, float(tp), setting.precision, moe_layer=is_moe)
    return np.asarray(parts.total_s)


def _prefill_s(
    setting: Setting, one: Candidates, kind: int, layer: LayerKind, num: FloatArray, cached: Any
) -> FloatArray:
    """The same of one prompt's next `num` tokens after `cached` ones. What these add is modelled where a profile does
    not have it."""
    tp = int(one.attention_tp[0])

    def modelled(past: Any) -> FloatArray:
        return _modelled_s(setting, kind, tp, layer, StepRows(prompt_tokens=num, prompt=num, past=past))

    if setting.profile is None:
        return modelled(cached)
    table = setting.profile.attention_table("prefill", layer, tp, both_sides=bool(has_both_sides(one)[0]))
    if table is None:
        return modelled(cached)
    alone_s = np.asarray(profiled_attention(table, num, num, cached).total_s)
    return alone_s if table.per_cached_s is not None else alone_s + np.maximum(modelled(cached) - modelled(0.0), 0.0)


def _experts(setting: Setting, one: Candidates, grid: Candidates, pairs: FloatArray, kind: int, *, apart: bool) -> Line:
    """The fullest worker by its pairs, its TP group's synchronisation included where that is not in the exchange."""
    alone_s = np.asarray(expert_layer(setting, _with_rows(one, pairs), pairs, kind).total_s)
    if not apart:
        return Line(pairs, alone_s)
    fullest = rows_of_fullest(setting, grid)
    own = expert_layer(setting, grid, fullest, kind).total_s
    sync_s = np.asarray(expert_times(setting, grid, kind).total_s) - np.asarray(own)
    return Line(pairs, alone_s + _extended(fullest, sync_s, pairs))


def _extended(known: FloatArray, values: FloatArray, wanted: FloatArray) -> FloatArray:
    """Straight between known sizes, of which some may be equal; the last slope goes on."""
    sizes, where = np.unique(known, return_index=True)
    if sizes.size == 1:
        return np.full(wanted.size, values[0])
    table = Line(sizes, values[where])
    return np.asarray([table(float(size)) for size in wanted])


def _messages(
    setting: Setting, one: Candidates, group: CandidateGroup, rows: FloatArray
) -> tuple[tuple[Line, Line], tuple[Line, Line]]:
    model, precision = setting.model, setting.precision
    attention, experts = sides(setting, one, group)
    num_senders, distinct = int(one.attention_dp[0]), float(setting.distinct[int(one.expert_ep[0])])
    there, back = (model.hidden_size * size for size in (precision.dispatch_bytes, precision.combine_bytes))
    at_fullest = sizes_up_to(float(rows[-1]) * num_senders)
    fixed_s = setting.cluster.efficiency.exchange_s
    if setting.profile is not None and setting.profile.messages:
        times = setting.profile.messages[0].times

        def measured(size: float) -> Line:
            return line(at_fullest, lambda num: profiled_messages(times, num / num_senders * size, num_senders).total_s)

        nothing = Line(rows, np.zeros(rows.size))
        return (nothing, measured(there)), (nothing, measured(back))

    def one_way(first: Side, second: Side, sent: Any, received: Any, size: float) -> Any:
        exchange = m2n(first, second, rows_sent=sent, rows_received=received, row_bytes=size, fixed_s=fixed_s)
        return exchange.total_s

    return (
        (
            line(rows, lambda num: one_way(attention, experts, num * distinct, 0.0, there)),
            line(at_fullest, lambda num: one_way(attention, experts, 0.0, num, there)),
        ),
        (
            line(rows, lambda num: one_way(experts, attention, 0.0, num * distinct, back)),
            line(at_fullest, lambda num: one_way(experts, attention, num, 0.0, back)),
        ),
    )
