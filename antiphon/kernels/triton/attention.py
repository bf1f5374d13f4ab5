"""Paged attention of single rows, their keys cut into splits that run side by side.

    attend   one program a row, a group of query heads with one KV head, and a split of its keys: the split's weighted
             sum of values, its largest score and its sum of exponentials
    join     one program a row and head: the splits in order, and the sink, a key without a value

How a row's keys are cut depends on their number alone, so its bits depend neither on its neighbours nor on the batch.
Latent attention is one KV head whose values are the first part of its keys; these are then read once for both. Keys of
8 bits are multiplied out as they are read. The width of a key is cut into a power of two and the rest, because blocks
are powers of two and 576 is not.

Letters as in `antiphon.kernels.api`; M query heads a KV head, C keys at once, L splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.api import AttentionBatch, KVCacheSpec
from antiphon.kernels.reference_attention import (
    DECODE_GATHER_ELEMENTS,
    PrefillSequence,
    ReferenceCache,
    prefill_sequence,
)
from antiphon.kernels.triton.grouped import code_values
from antiphon.kernels.triton.launch import launch, power_of_two, product, wide_products
from antiphon.kernels.triton.rotary import cached_tables

_SPLIT_KEYS = tl.constexpr(256)  # at least
_MAX_SPLITS = tl.constexpr(32)
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _keys_of(row, contexts_ptr, window, HAS_WINDOW: tl.constexpr):
    """(first, end, keys a split) of a row. No row has more than `_MAX_SPLITS` splits."""
    end = tl.load(contexts_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, end - window)
    share = tl.cdiv(tl.cdiv(end - first, _MAX_SPLITS), 64) * 64
    return first, end, tl.maximum(share, _SPLIT_KEYS)


@triton.jit
def _tile(ptr, scales_ptr, places, here, columns, width, stride, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """[C, columns] of the cache's rows, which are `stride` long, as numbers."""
    inside = here[:, None] & (columns < width)[None, :]
    x = tl.load(ptr + places[:, None] * stride + columns[None, :], inside, 0)
    if CODES != "auto":
        x = code_values(x, CODES) * tl.load(scales_ptr + places, here, 0.0)[:, None]
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["num_splits"])
def _attend(q_ptr, rows_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sums_ptr, tops_ptr, totals_ptr,
            tables_ptr, contexts_ptr, table_width, num_heads, num_kv_heads, key_dim, value_dim, value_stride, scale,
            window, num_splits, HAS_WINDOW: tl.constexpr, CODES: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
            V: tl.constexpr):  # fmt: skip
    """`SHARED`: values are the first V of the keys' D columns. `REST`: the columns of keys beyond D, or 0."""
    row, split = tl.program_id(0), tl.program_id(2)
    heads_a_group = num_heads // num_kv_heads
    blocks_a_group = tl.cdiv(heads_a_group, M)
    group = tl.program_id(1) // blocks_a_group
    inner = (tl.program_id(1) % blocks_a_group) * M + tl.arange(0, M)
    heads, has_head = group * heads_a_group + inner, inner < heads_a_group
    first, end, share = _keys_of(row, contexts_ptr, window, HAS_WINDOW)
    first += split * share
    if first >= end:
        return
    last = tl.minimum(first + share, end)
    DTYPE: tl.constexpr = tl.float32 if WIDE else q_ptr.dtype.element_ty
    d, rest, v = tl.arange(0, D), D + tl.arange(0, REST if REST else 1), tl.arange(0, V)
    q_rows = q_ptr + (tl.load(rows_ptr + row).to(tl.int64) * num_heads + heads)[:, None] * key_dim
    q = tl.load(q_rows + d[None, :], has_head[:, None] & (d < key_dim)[None, :], 0.0)
    if REST:
        q_rest = tl.load(q_rows + rest[None, :], has_head[:, None] & (rest < key_dim)[None, :], 0.0)
    tops, totals = tl.full((M,), _LOWEST, tl.float32), tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, V), tl.float32)
    for start in range(first, last, C):
        key = start + tl.arange(0, C)
        here = key < last
        block = tl.load(tables_ptr + row.to(tl.int64) * table_width + key // BLOCK_SIZE, here, 0).to(tl.int64)
        places = (block * BLOCK_SIZE + key % BLOCK_SIZE) * num_kv_heads + group
        keys = _tile(keys_ptr, key_scales_ptr, places, here, d, key_dim, key_dim, CODES, DTYPE)
        scores = product(q, tl.trans(keys), tl.zeros((M, C), tl.float32), WIDE)
        if REST:
            more = _tile(keys_ptr, key_scales_ptr, places, here, rest, key_dim, key_dim, CODES, DTYPE)
            scores = product(q_rest, tl.trans(more), scores, WIDE)
        scores = tl.where(here[None, :], scores * scale, _LOWEST)
        top = tl.maximum(tops, tl.max(scores, 1))
        raised = tl.where(here[None, :], tl.exp(scores - top[:, None]), 0.0)
        shrink = tl.exp(tops - top)
        if SHARED:
            values = keys
        else:
            values = _tile(values_ptr, value_scales_ptr, places, here, v, value_dim, value_stride, CODES, DTYPE)
        sums = product(raised.to(DTYPE), values, sums * shrink[:, None], WIDE)
        totals = totals * shrink + tl.sum(raised, 1)
        tops = top
    places = (row.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(sums_ptr + places[:, None] * value_dim + v[None, :], sums, has_head[:, None] & (v < value_dim)[None, :])
    tl.store(tops_ptr + places, tops, has_head)
    tl.store(totals_ptr + places, totals, has_head)


@triton.jit(do_not_specialize=["num_splits"])
def _join(sums_ptr, tops_ptr, totals_ptr, sinks_ptr, contexts_ptr, rows_ptr, out_ptr, num_heads, value_dim, window,
          num_splits, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, V: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    first, end, share = _keys_of(row, contexts_ptr, window, HAS_WINDOW)
    v = tl.arange(0, V)
    place = row.to(tl.int64) * num_heads + head
    top, total = -1.0e30, 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks_ptr + head).to(tl.float32), 1.0
    sums = tl.zeros((V,), tl.float32)
    for split in range(tl.cdiv(end - first, share)):
        other = tl.load(tops_ptr + place * num_splits + split)
        higher = tl.maximum(top, other)
        shrink, grow = tl.exp(top - higher), tl.exp(other - higher)
        part = tl.load(sums_ptr + (place * num_splits + split) * value_dim + v, v < value_dim, 0.0)
        sums = sums * shrink + part * grow
        total = total * shrink + tl.load(totals_ptr + place * num_splits + split) * grow
        top = higher
    sums = tl.where(total > 0.0, sums / total, 0.0)
    out = out_ptr + (tl.load(rows_ptr + row).to(tl.int64) * num_heads + head) * value_dim
    tl.store(out + v, sums.to(out_ptr.dtype.element_ty), v < value_dim)


@dataclass(frozen=True)
class RowPlan:
    """A batch's sequences of one row, with that row's number, and its prompts."""

    window: int | None
    rows_S: Tensor
    tables_SB: Tensor
    contexts_S: Tensor
    prefills: list[PrefillSequence]


def plan_rows(batch: AttentionBatch, spec: KVCacheSpec, window: int | None) -> RowPlan:
    starts, prefills, single, row = batch.query_starts, [], [], 0
    for sequence, queries in enumerate(batch.query_lens):
        if queries == 1:
            single.append(sequence)
        elif queries:
            prefills.append(prefill_sequence(batch, spec, window, sequence, row))
        row += queries
    rows_S, tables_SB, contexts_S = starts, batch.block_tables_SB, batch.context_lens_S
    if len(single) != len(batch.query_lens):
        chosen = torch.tensor(single, dtype=torch.int64).to(starts.device, non_blocking=True)
        rows_S, tables_SB, contexts_S = (each.index_select(0, chosen) for each in (rows_S, tables_SB, contexts_S))
    return RowPlan(window, rows_S, tables_SB, contexts_S, prefills)


def attend_rows(
    q_TND: Tensor,
    out_TNV: Tensor,
    cache: ReferenceCache,
    layer: int,
    plan: RowPlan,
    *,
    scale: float,
    sinks_N: Tensor | None,
) -> None:
    """Each row of the plan's sequences of one row, over its keys, from `q_TND` to `out_TNV`; zeros where it has no
    key. As many rows at once as have sums of `DECODE_GATHER_ELEMENTS` numbers."""
    spec, (_, num_heads, key_dim), window, value_dim, m = cache.spec, q_TND.shape, plan.window, cache.spec.value_dim, 16
    splits = max(1, min(_MAX_SPLITS.value, -(-plan.tables_SB.shape[1] * spec.block_size // _SPLIT_KEYS.value)))
    step = max(1, DECODE_GATHER_ELEMENTS // (num_heads * splits * value_dim))
    d = power_of_two(key_dim, 16)
    if d > key_dim > 16:
        d //= 2
    rest = 0 if d >= key_dim else power_of_two(key_dim - d, 16)
    values_block = power_of_two(value_dim, 16)
    shared = spec.values_in_keys and d == values_block and value_dim == values_block
    keys, values, key_scales, value_scales = cached_tables(cache, layer)
    wide, is_wide, q_TND = wide_products(q_TND.dtype), q_TND.dtype == torch.float32, q_TND.contiguous()
    options = {"HAS_WINDOW": window is not None, "V": values_block}
    for first in range(0, len(plan.contexts_S), step):
        part = slice(first, first + step)
        rows_S, tables_SB, contexts_S = plan.rows_S[part], plan.tables_SB[part], plan.contexts_S[part]
        parts = len(contexts_S), num_heads, splits
        sums = torch.empty((*parts, value_dim), dtype=torch.float32, device=q_TND.device)
        tops, totals = (torch.empty(parts, dtype=torch.float32, device=q_TND.device) for _ in range(2))
        launch(
            _attend, (parts[0], spec.num_kv_heads * -(-(num_heads // spec.num_kv_heads) // m), splits),
            q_TND, rows_S, keys, values, key_scales, value_scales, sums, tops, totals, tables_SB, contexts_S,
            tables_SB.stride(0), num_heads, spec.num_kv_heads, key_dim, value_dim, values.shape[2], scale, window or 0,
            splits, CODES=spec.storage, SHARED=shared, WIDE=wide, BLOCK_SIZE=spec.block_size, M=m,
            C=32 if d > 128 or is_wide else 64, D=d, REST=rest, num_warps=8 if d > 256 or is_wide else 4,
            num_stages=2, **options,
        )  # fmt: skip
        launch(
            _join, parts[:2], sums, tops, totals, sinks_N, contexts_S, rows_S, out_TNV, num_heads, value_dim,
            window or 0, splits, HAS_SINKS=sinks_N is not None, num_warps=2, **options,
        )  # fmt: skip
