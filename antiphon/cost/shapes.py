"""Which matrices one device holds of a layer under tensor parallelism: the same list for time and for memory.

1. Heads and widths are cut; what does not divide is rounded up, because the busiest device sets the pace.
2. Key/value heads are copied where there are fewer of them than devices.
3. Latent attention's down-projections and its cache are on every device, for all heads read the same latent row.

Rejected: dividing parameter counts by tp. It is too small for all three of these, and for DeepSeek-V3 by a lot.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from antiphon.cost.parts import Number
from antiphon.specs.model import AttentionSpec, LatentSpec, ModelSpec


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
