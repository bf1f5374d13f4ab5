"""What one device holds of a model: its matrices under tensor parallelism, the same list for time and for memory;
their bytes; and what is left for keys and values, in the engine's own blocks.

1. Heads and widths are cut; what does not divide is rounded up, because the busiest device sets the pace.
2. Key/value heads are copied where there are fewer of them than devices.
3. Latent attention's down-projections and its cache are on every device, for all heads read the same latent row.
4. `memory_reserve` of the device is kept from weights and cache (activations, workspace, runtime).
5. What is left becomes blocks; sequences are admitted by `specs.counts`, which the serving engine calls too.

Rejected: dividing parameter counts by tp. It is too small for the first three, and for DeepSeek-V3 by a lot. Rejected:
MegaScale-Infer eq. 8 and MixServe eq. 8 as the limit; they are here for comparison. The first counts no blocks and no
reserve, the second all heads of the KV cache on every device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from antiphon.cost.roofline import Number, row_bytes_of
from antiphon.specs.counts import admitted_sequences, blocks_in_budget, blocks_of, reserved_blocks
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec, PrecisionSpec


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """`count` equal weights [inner, outputs] that one kernel applies. `stays_plain`: in floats, when others are
    rounded to few bits."""

    inner: Number
    outputs: Number
    count: Number = 1
    stays_plain: bool = False

    @property
    def num_elements(self) -> Number:
        return self.count * self.inner * self.outputs


def elements_of(matrices: Iterable[Matrix]) -> Number:
    """Elements of all of them."""
    total: Number = 0.0
    for matrix in matrices:
        total = total + matrix.num_elements
    return total


def share_of(total: Number, tp: Number) -> Number:
    """What the busiest of `tp` devices gets of `total` things that cannot be cut further."""
    share: Number = np.ceil(total / np.asarray(tp))
    return share


def local_heads(attention: AttentionSpec, tp: Number) -> Number:
    """Query heads of the busiest device."""
    return share_of(attention.num_heads, tp)


def cached_width(attention: AttentionSpec, tp: Number) -> Number:
    """Cached elements of one token, layer and device: what attention reads, and the key by which sparse attention finds
    its tokens."""
    return attended_width(attention, tp) + (0 if attention.sparse is None else attention.sparse.dim)


def attended_width(attention: AttentionSpec, tp: Number) -> Number:
    """Keys and values of one token in a device's KV heads, or the whole latent row."""
    if attention.latent is not None:
        return float(attention.latent.key_dim)
    return 2 * share_of(attention.num_kv_heads, tp) * attention.head_dim


def visible_tokens(attention: AttentionSpec, context: Number) -> Number:
    """How many of `context` tokens a row attends to. Where windowed layers alternate with full ones: the mean over
    them."""
    if attention.sparse is not None:
        return np.minimum(context, attention.sparse.top_tokens)
    if attention.sliding_window is None:
        return context
    share = attention.windowed_share
    visible: Number = share * np.minimum(context, attention.sliding_window) + (1 - share) * context
    return visible


def score_width(attention: AttentionSpec, absorbed: bool) -> int:
    """Multiply-adds of one query head with one visible token: its score, and its share of the weighted values."""
    latent = attention.latent
    if latent is None:
        return 2 * attention.head_dim
    return latent.key_dim + latent.kv_lora_rank if absorbed else attention.head_dim + latent.v_head_dim


def attention_matrices(model: ModelSpec, tp: Number) -> tuple[Matrix, ...]:
    """Projections of one attention layer on the busiest device, in the order of use."""
    attention, hidden = model.attention, model.hidden_size
    heads = local_heads(attention, tp)
    if attention.latent is not None:
        return _latent_matrices(attention, attention.latent, hidden, heads)
    query_width = heads * attention.head_dim
    asked = query_width * (2 if attention.output_gate else 1)
    kv_width, rank, out = attended_width(attention, tp), attention.query_rank, Matrix(inner=query_width, outputs=hidden)
    if rank is not None:
        return Matrix(inner=hidden, outputs=rank + kv_width), Matrix(inner=rank, outputs=asked), out
    return Matrix(inner=hidden, outputs=asked + kv_width), out


def borrowed_elements(model: ModelSpec, tp: Number) -> Number:
    """Elements of the projections to keys and values that layers lack because they take another layer's."""
    num_layers = model.num_layers - model.num_state_layers - model.num_caching_layers
    return num_layers * model.hidden_size * attended_width(model.attention, tp)


STATE_BYTES = 4
"""The bytes of an element of a recurrent state: engines keep it in 32 bits, it is added to for as long as a sequence
lasts."""


def state_matrices(model: ModelSpec, tp: Number) -> tuple[Matrix, ...]:
    """Projections of one layer with a state on the busiest device; none where the model has no such layer."""
    if model.state is None:
        return ()
    into, out = share_of(model.state.in_width, tp), share_of(model.state.out_width, tp)
    return Matrix(inner=model.hidden_size, outputs=into), Matrix(inner=out, outputs=model.hidden_size)


def _latent_matrices(attention: AttentionSpec, latent: LatentSpec, hidden: int, heads: Number) -> tuple[Matrix, ...]:
    query_width = heads * attention.head_dim
    rank = latent.q_lora_rank
    if rank is None:
        first: tuple[Matrix, ...] = (Matrix(inner=hidden, outputs=query_width + latent.key_dim),)
    else:
        first = (Matrix(inner=hidden, outputs=rank + latent.key_dim), Matrix(inner=rank, outputs=query_width))
    sparse = attention.sparse
    if sparse is not None:
        weights = Matrix(inner=hidden, outputs=sparse.dim + sparse.heads)
        first = (*first, Matrix(inner=rank or hidden, outputs=sparse.heads * sparse.dim), weights)
    return (
        *first,
        Matrix(inner=latent.qk_nope_head_dim, outputs=latent.kv_lora_rank, count=heads, stays_plain=True),
        Matrix(inner=latent.kv_lora_rank, outputs=latent.v_head_dim, count=heads, stays_plain=True),
        Matrix(inner=heads * latent.v_head_dim, outputs=hidden),
    )


def gated_matrices(hidden: int, intermediate: int, tp: Number) -> tuple[Matrix, Matrix]:
    """Gate and up projections as one product, then down, of a gated feed-forward."""
    width = share_of(intermediate, tp)
    return Matrix(inner=hidden, outputs=2 * width), Matrix(inner=width, outputs=hidden)


# --- bytes


def attention_weight_bytes(model: ModelSpec, tp: Number, precision: PrecisionSpec, *, pp: Number = 1) -> Number:
    """Weights on one device of an attention worker: attention, norms, gates, shared experts and dense layers; embedding
    and head, cut by rows of the vocabulary. `pp`: of the stage with most layers, embedding and head on one stage each
    (both, if there is one stage)."""
    rounded, plain = attention_elements(model, tp)
    layers = share_of(model.num_layers, pp) / model.num_layers
    table = share_of(model.vocab_size, tp) * model.hidden_size
    heads = np.where((np.asarray(pp) == 1) & (not model.tie_embeddings), 1, 0)
    plain = layers * plain + table + model.hidden_size
    return (
        layers * rounded * precision.weight_bytes + plain * precision.plain_bytes + heads * table * precision.head_bytes
    )


def attention_elements(model: ModelSpec, tp: Number) -> tuple[Number, Number]:
    """Elements of the layers of an attention worker: of matrices that may be rounded to few bits, and of all else."""
    hidden, widths = model.hidden_size, model.feed_forward
    num_state = model.num_state_layers
    projections = attention_matrices(model, tp)
    absorbed = tuple(matrix for matrix in projections if matrix.stays_plain)
    elements = (model.num_layers - num_state) * (elements_of(projections) - elements_of(absorbed))
    elements = elements - borrowed_elements(model, tp) + num_state * elements_of(state_matrices(model, tp))
    elements = elements + model.num_moe_layers * elements_of(gated_matrices(hidden, widths.shared_intermediate, tp))
    num_dense = model.num_layers - model.num_moe_layers
    elements = elements + num_dense * elements_of(gated_matrices(hidden, widths.dense_intermediate, tp))
    router = model.router
    gate = (hidden + router.has_score_bias) * router.num_experts
    plain = (model.num_layers - num_state) * elements_of(absorbed) + model.num_layers * _norm_elements(model)
    return elements, plain + model.num_moe_layers * gate


def expert_weight_bytes(
    model: ModelSpec, num_held: Number, tp: Number, precision: PrecisionSpec, *, pp: Number = 1
) -> Number:
    """Weights on one device of a worker that holds `num_held` routed experts of each MoE layer. `pp` as above."""
    layers = share_of(model.num_moe_layers, pp)
    each = elements_of(gated_matrices(model.hidden_size, model.feed_forward.intermediate, tp))
    return layers * num_held * each * precision.expert_bytes


def kv_bytes_per_token(model: ModelSpec, tp: Number, precision: PrecisionSpec, *, pp: Number = 1) -> Number:
    """KV bytes of one token on one device, over the layers of its stage. Latent rows are on every device."""
    return share_of(model.num_caching_layers, pp) * cached_width(model.attention, tp) * precision.kv_bytes


def tokens_of_state(model: ModelSpec, tp: Number, precision: PrecisionSpec) -> Number:
    """How many tokens of KV cache take as much memory as the state of one sequence, in the layers that have one; 0
    where none has."""
    if model.state is None:
        return 0.0
    state_bytes = model.num_state_layers * share_of(model.state.elements, tp) * STATE_BYTES
    result: Number = state_bytes / np.maximum(kv_bytes_per_token(model, tp, precision), 1e-9)
    return result


def kv_blocks(
    kv_budget_bytes: Number,
    model: ModelSpec,
    tp: Number,
    precision: PrecisionSpec,
    *,
    block_size: int = 16,
    pp: Number = 1,
) -> Number:
    """Whole KV blocks of one device; 0 where the weights leave nothing."""
    block_bytes = block_size * kv_bytes_per_token(model, tp, precision, pp=pp)
    num_blocks: Number = blocks_in_budget(np.maximum(kv_budget_bytes, 0.0), block_bytes)
    return num_blocks


def max_sequences(num_blocks: Number, tokens_per_sequence: Number, *, block_size: int = 16) -> Number:
    """Sequences of that length that one attention worker runs side by side, as the engine admits them: each takes whole
    blocks, and all but a lone one leave the engine's reserve free."""
    tokens = np.ceil(np.asarray(tokens_per_sequence, dtype=np.float64))
    blocks = np.asarray(num_blocks, dtype=np.float64)
    admitted: Number = admitted_sequences(blocks, blocks_of(tokens, block_size), reserved_blocks(blocks))
    return admitted


def attention_activation_bytes(model: ModelSpec, rows: Number, tp: Number, precision: PrecisionSpec) -> Number:
    """Rows an attention worker's device holds at its fullest moment: residual, norm and output, projections, and the
    widest feed-forward that runs there. For checking that a pass fits into the reserve."""
    widths = model.feed_forward
    feed_forward = 3 * share_of(max(widths.shared_intermediate, widths.dense_intermediate), tp)
    widest = attention_matrices(model, tp)[0].outputs
    return rows * (3 * model.hidden_size + np.maximum(feed_forward, widest)) * row_bytes_of(precision)


def expert_activation_bytes(model: ModelSpec, rows: Number, tp: Number, precision: PrecisionSpec) -> Number:
    """Rows an expert worker's device holds at its fullest moment: received, in expert order, inner, and results."""
    inner = 3 * share_of(model.feed_forward.intermediate, tp)
    return rows * (3 * model.hidden_size + inner) * row_bytes_of(precision)


def msi_memory_bytes(
    num_micro_batches: Number,
    batch: Number,
    sequence: Number,
    hidden: Number,
    num_layers: Number,
    query_heads_per_kv_head: Number,
    attention_parameters: Number,
) -> Number:
    """Left side of MegaScale-Infer eq. 8, of one attention worker: 4 m b_a s h L / g + 2 P_a, BF16."""
    cache = 4 * num_micro_batches * batch * sequence * hidden * num_layers / query_heads_per_kv_head
    return cache + 2 * attention_parameters


def mix_memory_bytes(
    attention_bytes: Number,
    moe_bytes: Number,
    tp: Number,
    ep: Number,
    pp: Number,
    batch: Number,
    sequence: Number,
    hidden: Number,
    num_layers: Number,
) -> Number:
    """Left side of MixServe eq. 8: Psi_attn / d_TP + Psi_moe / (d_EP d_TP) + 2 b s h l / d_PP.

    The 2 is keys and values; as printed it counts elements of one byte. Weights here are in bytes."""
    return attention_bytes / tp + moe_bytes / (ep * tp) + 2 * batch * sequence * hidden * num_layers / pp


def _norm_elements(model: ModelSpec) -> int:
    """Norm weights of one layer: two over rows, and those of latent vectors."""
    latent = model.attention.latent
    of_latents = 0 if latent is None else latent.kv_lora_rank + (latent.q_lora_rank or 0)
    return 2 * model.hidden_size * (2 if model.norm == "layer" else 1) + of_latents
