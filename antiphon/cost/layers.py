"""Time of one layer of a worker of `tp` devices: attention with everything around it, and routed experts; and of a step
of a server whose devices have both (`server_step`).

Attention: everything of a layer but the routed experts.

1. Two norms, projections, scores over the context, output, then the gate and the shared expert, or the dense layer's
   feed-forward, which all run where attention does. The busiest device counts; tp synchronisation is not in here.
2. Decode: one row per sequence; keys and values of the whole context are read. Latent attention is absorbed: all heads
   meet the cached latent row, which is on every device. A step may do this and the next point at once (`StepRows`).
3. Prefill: causal, each row sees the tokens before it. Latent attention is expanded for whole prompts and absorbed for
   chunks with cached context, as the engine does it.
4. Each kernel by its own roofline, plus `layer_s` once per layer.

Rejected: T_a from its two projections alone (MegaScale-Infer, Table 2). The paper's own text calls attention bound by
the KV cache, which then would be missing.

Routed experts: grouped products over the experts that got rows.

1. Rows are (token, expert) pairs. Each touched expert's weights are read once per micro-batch, so what counts beside
   the rows is how many distinct experts they touch.
2. A token misses a given expert with probability 1 - k/E (its k experts are distinct), T tokens with (1 - k/E)^T.
3. With unequal shares each expert has its own probability, its own rows and its own roofline.

Rejected: reading all held experts' weights always. With few rows per step, as in decode with many experts, it is
several times too slow.

A server's step has rows that decode and tokens of prompts in one batch. The planner's search prices its candidates by
it, `cost.engine_step` the servers that others measured.

1. Attention's side of a layer, by the rows of one data-parallel rank: products take all of them together, so weights
   are read once; scores over the cache are apart, for decoding rows have long contexts and a prompt's tokens see what
   is before them. What attention does is the same in layers with experts and in dense ones, so it is priced once.
2. Experts, by the rows of the fullest rank; the caller knows how unequal they are.
3. The exchange between them, which the caller chooses: rows sent to the ranks of their experts, or sums over all ranks
   (`cost.exchange`).
4. Everything stays apart by layer and kind, because schedules overlap some of it, and an engine's constants multiply
   it.

Rejected: steps that only decode plus a share for prefill by its own times. It charges the reading of weights twice.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.cost.exchange import Degrees
from antiphon.cost.memory import (
    STATE_BYTES,
    Matrix,
    attended_width,
    attention_matrices,
    cached_width,
    gated_matrices,
    local_heads,
    score_width,
    share_of,
    state_matrices,
    visible_tokens,
)
from antiphon.cost.network import Network
from antiphon.cost.roofline import (
    LEAST_TILE_ROWS,
    Number,
    Parts,
    Roof,
    Roofs,
    gemm,
    grouped_gemm,
    kernel,
    row_bytes_of,
    select,
)
from antiphon.specs.model import ModelSpec, PrecisionSpec


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """What an attention worker computes in a step, or in a micro-batch of it: `decoding` sequences of `context` tokens
    (mean, the new one included), `queries` rows each, which read the context together (the new token and proposed
    ones); and `prompt_tokens` of prompts of `prompt` new tokens after `past` cached ones.

    Of prompts of unequal length `prompt` is the mean a *token* sees, E[X^2] / E[X], not the mean length. `halved`:
    prompts come in two pieces, so that half of their tokens see cached ones. `sampled`: rows whose logits are
    computed."""

    decoding: Number = 0.0
    context: Number = 1.0
    queries: Number = 1
    prompt_tokens: Number = 0.0
    prompt: Number = 1.0
    past: Number = 0.0
    halved: bool = False
    sampled: Number = 0.0

    @property
    def total(self) -> Number:
        """All rows."""
        return self.decoding * self.queries + self.prompt_tokens


def attended(model: ModelSpec, roofs: Roofs, rows: StepRows, tp: Number, precision: PrecisionSpec) -> Parts:
    """Projections, scores and values of one layer. Products take all rows together, so weights are read once; scores
    over the cache are apart for sequences that decode and for prompts."""
    total = _projections(model, roofs, rows.total, tp, precision)
    if np.any(rows.decoding):
        total = total + _decoding_scores(model, roofs, rows.decoding, rows.context, tp, precision, rows.queries)
    if np.any(rows.prompt_tokens):
        total = total + prompt_scores(
            model, roofs, rows.prompt_tokens, rows.prompt, tp, precision, past=rows.past, halved=rows.halved
        )
    sequences = rows.decoding + rows.prompt_tokens / np.maximum(rows.prompt, 1e-9)
    return _mixed(model, roofs, rows.total, sequences, tp, precision, total)


def attention_layer(
    model: ModelSpec, roofs: Roofs, rows: StepRows, tp: Number, precision: PrecisionSpec, *, moe_layer: bool = True
) -> Parts:
    """One layer without synchronisation. `moe_layer`: with gate and shared expert; else with the dense feed-forward."""
    beside = beside_experts(model, roofs, rows.total, tp, precision, moe_layer=moe_layer)
    return attended(model, roofs, rows, tp, precision) + beside


def prompt_scores(
    model: ModelSpec,
    roofs: Roofs,
    tokens: Number,
    context: Number,
    tp: Number,
    precision: PrecisionSpec,
    *,
    past: Number = 0.0,
    halved: bool = False,
) -> Parts:
    """The part of `attended` that prompts take over their projections: scores, values, an indexer."""
    if halved:
        half = context / 2
        first, second = (
            prompt_scores(model, roofs, tokens, half, tp, precision, past=cached) for cached in (past, past + half)
        )
        return 0.5 * (first + second)
    attention = model.attention
    visible = visible_tokens(attention, past + (context + 1) / 2)
    num_sequences = tokens / np.maximum(context, 1e-9)
    cached = num_sequences * (past + context)
    read_bytes = cached * attended_width(attention, tp) * precision.kv_bytes
    whole = np.asarray((np.asarray(past) == 0) & (attention.sparse is None))
    absorbed = _scores(model, roofs, tokens, tokens * visible, read_bytes, tp, precision, absorbed=True)
    expanded = _scores(model, roofs, tokens, tokens * visible, read_bytes, tp, precision, absorbed=False)
    pairs = tokens * (past + (context + 1) / 2)
    return select(whole, expanded, absorbed) + indexing(model, roofs, tokens, pairs, cached, precision)


def _decoding_scores(
    model: ModelSpec,
    roofs: Roofs,
    batch: Number,
    context: Number,
    tp: Number,
    precision: PrecisionSpec,
    queries: Number,
) -> Parts:
    """The part of `attended` that sequences which decode take over their projections."""
    visible, rows = visible_tokens(model.attention, context), batch * queries
    read_bytes = batch * visible * attended_width(model.attention, tp) * precision.kv_bytes
    scores = _scores(model, roofs, rows, rows * visible, read_bytes, tp, precision, absorbed=True, queries=queries)
    return scores + indexing(model, roofs, rows, rows * context, batch * context, precision)


def dense_feed_forward(
    model: ModelSpec, roofs: Roofs, rows: Number, intermediate: int, tp: Number, precision: PrecisionSpec
) -> Parts:
    """A gated feed-forward that all rows pass: dense layers and shared experts. Width 0: none."""
    if intermediate == 0:
        return Parts()
    into, out = gated_matrices(model.hidden_size, intermediate, tp)
    return (
        _apply(roofs, into, rows, precision)
        + elementwise(roofs, rows * 1.5 * into.outputs, precision)
        + _apply(roofs, out, rows, precision)
    )


def output_head(model: ModelSpec, roofs: Roofs, rows: Number, tp: Number, precision: PrecisionSpec) -> Parts:
    """The last norm and the logits of `rows` rows; once per iteration, not per layer."""
    hidden, words = model.hidden_size, share_of(model.vocab_size, tp)
    head = gemm(roofs.gemm, rows, hidden, words, precision.head_bytes, row_bytes_of(precision))
    return elementwise(roofs, rows * 2 * hidden, precision) + head


def elementwise(roofs: Roofs, num_elements: Number, precision: PrecisionSpec) -> Parts:
    """A kernel that reads and writes `num_elements` in all and computes next to nothing."""
    return kernel(roofs.gemm, 0.0, num_elements * row_bytes_of(precision))


def query_tile(roofs: Roofs, num_rows: Number, *, shared: bool) -> Number:
    """Query rows that a kernel computes for one key: where all of them share it (absorbed latent attention), they fill
    tiles of 64."""
    if not (shared and roofs.attention.num_processors):
        return num_rows
    filled: Number = LEAST_TILE_ROWS * np.ceil(np.asarray(num_rows) / LEAST_TILE_ROWS)
    return filled


def _apply(roofs: Roofs, matrix: Matrix, rows: Number, precision: PrecisionSpec) -> Parts:
    return gemm(
        roofs.gemm,
        rows,
        matrix.inner,
        matrix.outputs,
        precision.plain_bytes if matrix.stays_plain else precision.weight_bytes,
        row_bytes_of(precision),
        matrix.count,
    )


def indexing(
    model: ModelSpec, roofs: Roofs, rows: Number, pairs: Number, keys: Number, precision: PrecisionSpec
) -> Parts:
    """Sparse attention's search: all indexer heads meet one key of every (row, token) pair; nothing without one. It is
    not cut by tensor parallelism: all devices need the same tokens."""
    sparse = model.attention.sparse
    if sparse is None:
        return Parts()
    moved = keys * sparse.dim * precision.kv_bytes + rows * sparse.heads * sparse.dim * row_bytes_of(precision)
    return kernel(roofs.attention, 2 * pairs * sparse.heads * sparse.dim, moved)


def _mixed(
    model: ModelSpec,
    roofs: Roofs,
    rows: Number,
    num_sequences: Number,
    tp: Number,
    precision: PrecisionSpec,
    attended: Parts,
) -> Parts:
    """The mean over layers with `attended` and those with a state: it is read and written once per sequence, and every
    row adds to it and is answered from it (2 multiply-adds an element each)."""
    if model.state is None:
        return attended
    total = sum((_apply(roofs, matrix, rows, precision) for matrix in state_matrices(model, tp)), Parts())
    elements = share_of(model.state.elements, tp)
    total = total + kernel(roofs.attention, 4 * rows * elements, 2 * num_sequences * elements * STATE_BYTES)
    share = model.num_state_layers / model.num_layers
    return share * total + (1 - share) * attended


def _projections(model: ModelSpec, roofs: Roofs, rows: Number, tp: Number, precision: PrecisionSpec) -> Parts:
    return sum((_apply(roofs, matrix, rows, precision) for matrix in attention_matrices(model, tp)), Parts())


def _scores(
    model: ModelSpec,
    roofs: Roofs,
    rows: Number,
    pairs: Number,
    read_bytes: Number,
    tp: Number,
    precision: PrecisionSpec,
    *,
    absorbed: bool,
    queries: Number = 1,
) -> Parts:
    """Rotation and the write to the cache, then scores and values over all (row, visible token) pairs."""
    attention = model.attention
    heads = local_heads(attention, tp)
    shared = absorbed and attention.latent is not None
    tile = query_tile(roofs, heads * queries, shared=shared) / queries
    width = score_width(attention, absorbed)
    written = rows * cached_width(attention, tp) * precision.kv_bytes
    rows_bytes = rows * heads * width * row_bytes_of(precision)
    rotated = kernel(roofs.gemm, 0.0, written + rows * heads * attention.head_dim * row_bytes_of(precision))
    return rotated + kernel(roofs.attention, 2 * pairs * tile * width, read_bytes + rows_bytes)


def beside_experts(
    model: ModelSpec, roofs: Roofs, rows: Number, tp: Number, precision: PrecisionSpec, *, moe_layer: bool
) -> Parts:
    """Two norms, each adding a residual (4 passes over the rows), and what runs beside the routed experts."""
    total = 2 * elementwise(roofs, rows * 4 * model.hidden_size, precision)
    total = total + Parts(fixed_s=np.where(np.asarray(rows) > 0, roofs.layer_s, 0.0))
    width = model.feed_forward.dense_intermediate
    if moe_layer:
        router = Matrix(inner=model.hidden_size, outputs=model.router.num_experts, stays_plain=True)
        total, width = total + _apply(roofs, router, rows, precision), model.feed_forward.shared_intermediate
    return total + dense_feed_forward(model, roofs, rows, width, tp, precision)


def expected_touched(num_held: Number, rows: Number, *, num_experts: Number, top_k: Number) -> Number:
    """Expected number of the `num_held` experts that get at least one of `rows` rows arriving for them, all experts
    equally likely. `rows` = tokens * top_k * num_held / num_experts; at most `num_held`, at most `rows`."""
    tokens = rows * num_experts / (top_k * np.asarray(num_held, dtype=np.float64))
    touched = num_held * (1 - (1 - top_k / np.asarray(num_experts)) ** tokens)
    result: Number = np.minimum(np.minimum(touched, num_held), rows)
    return result


def expert_feed_forward(
    model: ModelSpec,
    roof: Roof,
    rows: Number,
    num_held: Number,
    tp: Number,
    precision: PrecisionSpec,
) -> Parts:
    """One layer of one worker of `tp` devices that holds `num_held` experts and gets `rows` (token, expert) pairs.

    They fall on the expected number of experts, all equally likely. Every device sees all rows and a 1/tp of the width;
    synchronisation is not in here. Bringing rows into expert order and back: one kernel each."""
    touched = expected_touched(num_held, rows, num_experts=model.router.num_experts, top_k=model.router.top_k)
    row_bytes = row_bytes_of(precision)
    into, out = gated_matrices(model.hidden_size, model.feed_forward.intermediate, tp)
    total = _permutations(model, roof, rows, row_bytes)
    for matrix in (into, out):
        total = total + grouped_gemm(
            roof, rows, touched, matrix.inner, matrix.outputs, precision.expert_bytes, row_bytes
        )
    return total + kernel(roof, 0.0, rows * 1.5 * into.outputs * row_bytes)


def _permutations(model: ModelSpec, roof: Roof, rows: Number, row_bytes: float) -> Parts:
    """Rows into expert order and weighted sums back: each row read and written."""
    return kernel(roof, 0.0, 4 * rows * model.hidden_size * row_bytes, num_kernels=2)


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Attention's side: of a layer with experts, of a dense layer (nothing if the model has none), and the head once
    per step."""

    moe_layer: Parts
    dense_layer: Parts
    head: Parts


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """On the busiest device, one micro-batch: attention's side, routed experts and exchange of a layer. `sums`: what a
    dense layer adds up over its ranks."""

    attention: AttentionTimes
    experts: Parts
    exchange: Parts
    sums: Parts


def attention_side(
    model: ModelSpec, roofs: Roofs, rows: StepRows, tp: Number, precision: PrecisionSpec, *, whole: bool = True
) -> AttentionTimes:
    """One rank's part, without synchronisation. `whole` False: of a layer with experts only."""
    core = attended(model, roofs, rows, tp, precision)
    moe_layer = core + beside_experts(model, roofs, rows.total, tp, precision, moe_layer=True)
    if not whole:
        return AttentionTimes(moe_layer=moe_layer, dense_layer=Parts(), head=Parts())
    dense = Parts()
    if model.num_moe_layers < model.num_layers:
        dense = core + beside_experts(model, roofs, rows.total, tp, precision, moe_layer=False)
    return AttentionTimes(
        moe_layer=moe_layer, dense_layer=dense, head=output_head(model, roofs, rows.sampled, tp, precision)
    )


def server_step(
    model: ModelSpec,
    roofs: Roofs,
    net: Network,
    degrees: Degrees,
    precision: PrecisionSpec,
    rows: StepRows,
    *,
    pairs: Number,
    held: Number,
    exchange: Parts,
    whole: bool = True,
) -> ServerStep:
    """A step of `rows` on each data-parallel rank. `pairs`: (token, expert) rows of the fullest EP rank, which holds
    `held` experts. `exchange`: both ways of a layer. `whole` False: of a layer with experts only."""
    size_bytes = rows.total * model.hidden_size * row_bytes_of(precision)
    has_dense = whole and model.num_moe_layers < model.num_layers
    return ServerStep(
        attention=attention_side(model, roofs, rows, degrees.attention_tp, precision, whole=whole),
        experts=expert_feed_forward(model, roofs.gemm, pairs, held, degrees.expert_tp, precision),
        exchange=exchange,
        sums=2 * net.all_reduce(size_bytes, degrees.attention_tp) if has_dense else Parts(),
    )
