"""Memory of one device: weights by role, a reserve, and what is left for keys and values, in the engine's own blocks.

1. Weights: the same matrices as in the time model (`cost.shapes`), so what tensor parallelism copies is counted.
2. `memory_reserve` of the device is kept from both (activations, workspace, runtime).
3. What is left becomes blocks; sequences are admitted by `cost.kv_blocks`, which the serving engine calls too.

Rejected: MegaScale-Infer eq. 8 and MixServe eq. 8 as the limit; they are here for comparison. The first counts no
blocks and no reserve, the second all heads of the KV cache on every device.
"""

import numpy as np

from antiphon.cost.kv_blocks import admitted_sequences, blocks_in_budget, blocks_of, reserved_blocks
from antiphon.cost.parts import Number
from antiphon.cost.roofline import row_bytes_of
from antiphon.cost.shapes import (
    STATE_BYTES,
    attention_matrices,
    borrowed_elements,
    cached_width,
    elements_of,
    gated_matrices,
    share_of,
    state_matrices,
)
from antiphon.specs.model import ModelSpec
from antiphon.specs.precision import PrecisionSpec


def attention_weight_bytes(
    model: ModelSpec,
    tp: Number,
    precision: PrecisionSpec,
    *,
    pp: Number = 1,
    with_embeddings: bool = True,
) -> Number:
    """Weights on one device of an attention worker: attention, norms, gates, shared experts and dense layers; embedding
    and head, cut by rows of the vocabulary. `pp`: of the stage with most layers, embedding and head on one stage each
    (both, if there is one stage)."""
    layers = share_of(model.num_layers, pp) / model.num_layers
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
    plain = layers * (plain + model.num_moe_layers * gate)
    if with_embeddings:
        table = share_of(model.vocab_size, tp) * hidden
        one_stage = np.asarray(pp) == 1
        tables = np.where(one_stage, 1 if model.tie_embeddings else 2, 1)
        plain = plain + tables * table + hidden
    return layers * elements * precision.weight_bytes + plain * precision.plain_bytes


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


def max_sequences(
    num_blocks: Number,
    tokens_per_sequence: Number,
    *,
    block_size: int = 16,
    max_running: Number | None = None,
    num_reserved: Number | None = None,
) -> Number:
    """Sequences of that length that one attention worker runs side by side, as the engine admits them.

    Each takes whole blocks; all but a lone one leave the reserve free (None: the engine's own). `max_running`: the
    engine's limit on running sequences (None: none)."""
    tokens = np.ceil(np.asarray(tokens_per_sequence, dtype=np.float64))
    blocks = np.asarray(num_blocks, dtype=np.float64)
    reserved = reserved_blocks(blocks) if num_reserved is None else num_reserved
    admitted: Number = admitted_sequences(blocks, blocks_of(tokens, block_size), reserved)
    if max_running is None:
        return admitted
    limited: Number = np.minimum(admitted, max_running)
    return limited


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
