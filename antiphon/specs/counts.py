"""Exact counts that follow from a `ModelSpec`: parameters by part, floating-point operations per token, blocks of KV.

Nothing here is estimated. A parameter is an element of a checkpoint's tensor; a FLOP is a multiplication or an
addition of a matrix product, so a matrix with P elements costs 2 P per row (norms, rotation, softmax and activations
are left out: they are bandwidth, not arithmetic). All results are for ONE layer unless the name says otherwise.

Latent attention (DeepSeek-V2, section 2.1) has two orders of the same products, and both are counted:
- absorbed (decode): queries go through the key up-projection and meet the cached rows themselves;
- expanded (prefill of a whole prompt): keys and values of all heads are made from the cached row, once per token.
One row costs the same projections either way (the up-projection is applied to the query and the output, or to the row);
what differs is the work per token of context: `score_flops_absorbed` against `score_flops_expanded`.

KV memory is counted in blocks. A block holds `block_size` tokens of one sequence over all layers; admission leaves a
reserve free for running sequences to grow into. The serving engine admits by these functions with integers, and the
planner counts with arrays: so they are written with operators alone.

Rejected: counting by building the model on torch's meta device; it takes seconds and needs torch. Bytes per token times
tokens for KV memory: sequences then fit that the engine, rounding up to blocks and keeping its reserve, never admits;
planners elsewhere over-predicted throughput several times by that.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from antiphon.specs.model import KV_SCALE_BYTES, AttentionSpec, KVStorage, LatentSpec, ModelSpec

GATED_MATRICES = 3  # gate, up, down: the feed-forwards of all supported families are gated
Counts = TypeVar("Counts", bound=Any)
"""Whole numbers: an `int`, or an array of them."""


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Elements of the checkpoint's tensors. The first five are of one layer that has such a part.

    `router` and `expert` include their biases, `shared_expert` its gate, `attention` the sinks and the norms of
    queries, keys and latents, `layer_norms` the two norms of a layer. `head` is 0 when it shares the embedding's
    table. `active` is what one token uses: all but the routed experts that were not chosen. Some publishers leave the
    embedding out of it.
    """

    attention: int
    router: int
    expert: int
    shared_expert: int
    dense: int
    layer_norms: int
    final_norm: int
    embedding: int
    head: int
    total: int
    active: int


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """FLOPs of one token in one layer, `head` once per model. `expert` is one routed expert: times `top_k` per token;
    `shared_expert` includes its gate.

    `score_flops_absorbed` and `score_flops_expanded` are per token of context (scores and weighted values, all query
    heads); grouped-query attention has one way only, so both are equal.
    """

    attention_projections: int
    score_flops_absorbed: int
    score_flops_expanded: int
    router: int
    expert: int
    shared_expert: int
    dense: int
    head: int


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameters by part, their total, and how many of them one token uses."""
    hidden, router, feed_forward = model.hidden_size, model.router, model.feed_forward
    num_moe, num_dense = model.num_moe_layers, model.num_layers - model.num_moe_layers
    attention = attention_parameters(model)
    gate = hidden * router.num_experts
    gate += router.num_experts * (router.has_score_bias + router.has_logit_bias)
    expert = GATED_MATRICES * hidden * feed_forward.intermediate
    expert += 2 * feed_forward.intermediate + hidden if feed_forward.expert_bias else 0
    shared = GATED_MATRICES * hidden * feed_forward.shared_intermediate + (hidden if feed_forward.shared_gate else 0)
    dense = GATED_MATRICES * hidden * feed_forward.dense_intermediate
    norm = 2 * hidden if model.norm == "layer" else hidden
    embedding = model.vocab_size * hidden
    head = 0 if model.tie_embeddings else embedding
    head += model.vocab_size if model.lm_head_bias else 0
    per_layer = (
        _all_attention(model, attention) + model.num_layers * 2 * norm + num_moe * (gate + shared) + num_dense * dense
    )
    common = per_layer + norm + embedding + head
    return ParameterCounts(
        attention=attention,
        router=gate,
        expert=expert,
        shared_expert=shared,
        dense=dense,
        layer_norms=2 * norm,
        final_norm=norm,
        embedding=embedding,
        head=head,
        total=common + num_moe * router.num_experts * expert,
        active=common + num_moe * router.top_k * expert,
    )


def attention_parameters(model: ModelSpec) -> int:
    """Projections with their biases, and the norms of queries, keys and latent vectors, of one layer."""
    attention = model.attention
    if attention.latent is not None:
        latent = _latent_attention_parameters(attention, attention.latent, model.hidden_size)
        return latent + indexer_elements(attention, model.hidden_size)
    hidden = model.hidden_size
    query_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    count = _query_elements(attention, hidden) + hidden * 2 * kv_width + query_width * hidden
    count += attention.query_rank or 0
    count += query_width + 2 * kv_width if attention.qkv_bias else 0
    count += hidden if attention.out_bias else 0
    count += attention.num_heads if attention.sinks else 0
    return count + {"none": 0, "head": 2 * attention.head_dim, "full": query_width + kv_width}[attention.qk_norm]


def _all_attention(model: ModelSpec, each: int) -> int:
    """Elements of attention in all layers: a layer that takes keys and values from another has no projections for them,
    one with a state has its own."""
    attention, state = model.attention, model.state
    num_layers = model.num_layers - model.num_state_layers
    borrowed = (num_layers - model.num_caching_layers) * model.hidden_size
    count = num_layers * each - borrowed * 2 * attention.num_kv_heads * attention.head_dim
    return count if state is None else count + model.num_state_layers * (state_elements(model) + state.rest)


def state_elements(model: ModelSpec) -> int:
    """Elements of the matrices of a layer with a state."""
    return 0 if model.state is None else model.hidden_size * (model.state.in_width + model.state.out_width)


def indexer_elements(attention: AttentionSpec, hidden: int) -> int:
    """Elements of the matrices by which sparse attention finds its tokens: queries, one key, a weight per head."""
    sparse = attention.sparse
    if sparse is None:
        return 0
    rank = attention.latent.q_lora_rank if attention.latent is not None else None
    return (rank or hidden) * sparse.heads * sparse.dim + hidden * (sparse.dim + sparse.heads)


def _query_elements(attention: AttentionSpec, hidden: int) -> int:
    """Elements of the matrices from a row to the queries of all heads, and to their gates."""
    width = attention.num_heads * attention.head_dim * (2 if attention.output_gate else 1)
    rank = attention.query_rank
    return hidden * width if rank is None else rank * (hidden + width)


def _latent_attention_parameters(attention: AttentionSpec, latent: LatentSpec, hidden: int) -> int:
    biased = hidden if attention.out_bias else 0
    if attention.qkv_bias:
        biased += latent.key_dim + (latent.q_lora_rank or 0)
    norms = latent.kv_lora_rank + (latent.q_lora_rank or 0)
    return _latent_matrices(attention, latent, hidden) + norms + biased


def count_flops(model: ModelSpec) -> FlopCounts:
    """FLOPs of one token by part."""
    attention, hidden = model.attention, model.hidden_size
    latent = attention.latent
    if latent is None:
        query_width = attention.num_heads * attention.head_dim
        kv_and_out = 2 * attention.num_kv_heads * attention.head_dim + query_width
        projections = 2 * (_query_elements(attention, hidden) + hidden * kv_and_out)
        absorbed = expanded = 4 * query_width
    else:
        projections = 2 * (_latent_matrices(attention, latent, hidden) + indexer_elements(attention, hidden))
        absorbed = 2 * attention.num_heads * (latent.key_dim + latent.kv_lora_rank)
        expanded = 2 * attention.num_heads * (attention.head_dim + latent.v_head_dim)
    feed_forward = model.feed_forward
    return FlopCounts(
        attention_projections=projections,
        score_flops_absorbed=absorbed,
        score_flops_expanded=expanded,
        router=2 * hidden * model.router.num_experts,
        expert=2 * GATED_MATRICES * hidden * feed_forward.intermediate,
        shared_expert=2 * GATED_MATRICES * hidden * feed_forward.shared_intermediate
        + (2 * hidden if feed_forward.shared_gate else 0),
        dense=2 * GATED_MATRICES * hidden * feed_forward.dense_intermediate,
        head=2 * hidden * model.vocab_size,
    )


def _latent_matrices(attention: AttentionSpec, latent: LatentSpec, hidden: int) -> int:
    """Elements of the matrices a row passes: as the parameters, without norms and biases. kv_b_proj makes all heads'
    keys and values from a latent row."""
    query_width = attention.num_heads * attention.head_dim
    rank = latent.q_lora_rank
    query = hidden * query_width if rank is None else hidden * rank + rank * query_width
    expansion = latent.kv_lora_rank * attention.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    out = attention.num_heads * latent.v_head_dim * hidden
    return query + hidden * latent.key_dim + expansion + out


def flops_per_token(model: ModelSpec, context: float, *, absorbed: bool = True, with_head: bool = True) -> float:
    """Forward FLOPs of one token over the whole model, with `context` tokens (its own included) to attend to."""
    counts = count_flops(model)
    score = counts.score_flops_absorbed if absorbed else counts.score_flops_expanded
    num_moe, num_state = model.num_moe_layers, model.num_state_layers
    visible = context if model.attention.sparse is None else min(context, model.attention.sparse.top_tokens)
    routed = counts.router + model.router.top_k * counts.expert + counts.shared_expert
    return (
        (model.num_layers - num_state) * (counts.attention_projections + visible * score)
        + num_state * 2 * state_elements(model)
        + num_moe * routed
        + (model.num_layers - num_moe) * counts.dense
        + (counts.head if with_head else 0)
    )


def logprob_row_cost(model: ModelSpec, ranking_columns: int) -> float:
    """What a row that reports log-probabilities costs, in rows that do not: it needs the head, and a ranking of the
    vocabulary, which takes as long as a head of `ranking_columns` columns."""
    rest = flops_per_token(model, 0, with_head=False)
    head = flops_per_token(model, 0) - rest
    return 1 + (head + 2 * ranking_columns * model.vocab_size) / rest


def context_tokens_per_row(model: ModelSpec) -> float:
    """How many tokens of context cost as many FLOPs to attend to as everything else of one token, the head left out.

    Layers with a sliding window see a bounded context and count as everything else, unless all layers have one."""
    rest = flops_per_token(model, 0, with_head=False)
    per_token = flops_per_token(model, 1, with_head=False) - rest
    return rest / (per_token * ((1 - model.attention.windowed_share) or 1.0))


def kv_cache_block_bytes(spec: ModelSpec, block_size: int, bytes_per_element: int, storage: KVStorage = "auto") -> int:
    """Bytes of one KV block over all layers: keys and values of all KV heads, or latent rows (which hold both). In 8
    bits an element is a byte and every key and value has a scale."""
    if storage == "auto":
        return block_size * spec.kv_bytes_per_token(bytes_per_element)
    attention = spec.attention
    rows = 2 * attention.num_kv_heads if attention.latent is None else 1
    return block_size * (spec.kv_bytes_per_token(1) + spec.num_caching_layers * rows * KV_SCALE_BYTES)


def blocks_of(num_tokens: Counts, block_size: int) -> Counts:
    """Blocks that a sequence of `num_tokens` occupies: the last one may be partly filled."""
    num_blocks: Counts = -(-num_tokens // block_size)
    return num_blocks


def blocks_in_budget(budget_bytes: Counts, block_bytes: Any) -> Counts:
    """Whole blocks that fit in a KV budget."""
    num_blocks: Counts = budget_bytes // block_bytes
    return num_blocks


def reserved_blocks(num_blocks: Counts) -> Counts:
    """Blocks that admission leaves free while other sequences run: 1% of all, at least one."""
    reserved: Counts = num_blocks // 100 + (num_blocks < 100)
    return reserved


def admitted_sequences(num_blocks: Counts, blocks_per_sequence: Any, num_reserved: Any) -> Counts:
    """Sequences of equal length that are admitted side by side. The first needs no reserve; where it is the only one
    that fits the reserve does not keep it out."""
    beside: Any = (num_blocks - num_reserved) // blocks_per_sequence
    alone: Any = num_blocks // blocks_per_sequence
    admitted: Counts = beside * (beside > 0) + (alone > 0) * (beside <= 0)
    return admitted
