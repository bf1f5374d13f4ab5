"""Attention over a paged cache in plain PyTorch: decode in batches, prefill one sequence at a time.

The cache is a flat table of slots per layer, [slots, heads, width], slot = block * block_size + offset, so that a
sequence's context is one `index_select`. Tables start as zeros, which costs no memory until touched on a CPU and keeps
garbage (NaN) out of masked positions.

Decode rows are grouped by the power of two their context rounds up to: each group is two batched matrix products, no
sequence is padded to more than twice its length, and the shapes a row meets depend on its own length only. Where keys
lie and which are visible is worked out once per batch and kept for all layers (`AttentionPlans`).
Sinks (gpt-oss) are one more column of scores, dropped after the softmax; PyTorch's fused attention does not know them,
so prompts then go through plain products, some rows at a time.
In 8 bits a table of scales stands beside each table of codes, and what is gathered is multiplied out.
Rejected: padding all sequences to the longest (wasteful, and bits would depend on the neighbours).

Letters as in `antiphon.kernels.api`; C padded context, Q query rows of one sequence, M query heads per KV head.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.base.errors import ResourceError
from antiphon.base.units import format_bytes
from antiphon.kernels.api import AttentionBatch, KVCacheSpec
from antiphon.specs.model import KVStorage

CODE_DTYPES: dict[KVStorage, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


def in_codes(rows_X: Tensor, storage: KVStorage) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales of one column) of keys or values, each with its own scale."""
    dtype, limit = CODE_DTYPES[storage]
    wide = rows_X.float()
    scales = wide.abs().amax(-1, keepdim=True) / limit
    units = (wide / scales.masked_fill(scales == 0, 1.0)).clamp(-limit, limit)
    return (units.round() if dtype == torch.int8 else units).to(dtype), scales


def as_cached(rows_X: Tensor, storage: KVStorage) -> Tensor:
    """What a cache gives back of these keys or values."""
    if storage == "auto":
        return rows_X
    codes, scales = in_codes(rows_X, storage)
    return (codes.float() * scales).to(rows_X.dtype)


class ReferenceCache:
    """Keys [slots, G, key_dim] and values [slots, G, value_dim] of every layer; or values within keys. In 8 bits these
    are codes, and scales are float32 [slots, G, 1]."""

    def __init__(self, spec: KVCacheSpec, device: torch.device, model_dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = model_dtype
        dtype = model_dtype if spec.storage == "auto" else CODE_DTYPES[spec.storage][0]
        num_scales = 0 if spec.storage == "auto" else spec.num_layers
        slots = spec.num_blocks * spec.block_size
        wanted = spec.num_blocks * spec.block_bytes(model_dtype.itemsize)
        try:
            self.keys = [
                torch.zeros((slots, spec.num_kv_heads, spec.key_dim), device=device, dtype=dtype)
                for _ in range(spec.num_layers)
            ]
            self.values = [
                torch.zeros((slots, spec.num_kv_heads, spec.value_dim), device=device, dtype=dtype)
                for _ in range(0 if spec.values_in_keys else spec.num_layers)
            ]
            self.key_scales, self.value_scales = (
                [torch.zeros((slots, spec.num_kv_heads, 1), device=device) for _ in range(num)]
                for num in (num_scales, 0 if spec.values_in_keys else num_scales)
            )
        except (RuntimeError, MemoryError) as error:
            raise ResourceError(
                f"{device} cannot hold a KV cache of {format_bytes(wanted)} "
                f"({spec.num_blocks} blocks of {spec.block_size} tokens): lower the number of blocks"
            ) from error

    def store(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGV: Tensor | None) -> None:
        slots_T = slots_T.long()
        self._store(self.keys, self.key_scales, layer, slots_T, k_TGD)
        if v_TGV is not None:
            self._store(self.values, self.value_scales, layer, slots_T, v_TGV)

    def _store(self, tables: list[Tensor], scales: list[Tensor], layer: int, slots_T: Tensor, rows_TGX: Tensor) -> None:
        if self.spec.storage == "auto":
            tables[layer].index_copy_(0, slots_T, rows_TGX)
            return
        codes, scale_TG1 = in_codes(rows_TGX, self.spec.storage)
        tables[layer].view(torch.int8).index_copy_(0, slots_T, codes.view(torch.int8))
        scales[layer].index_copy_(0, slots_T, scale_TG1)

    def _read(self, tables: list[Tensor], scales: list[Tensor], layer: int, slots_SC: Tensor) -> Tensor:
        if self.spec.storage == "auto":
            return tables[layer][slots_SC]
        codes = tables[layer].view(torch.int8)[slots_SC].view(tables[layer].dtype)
        return (codes.float() * scales[layer][slots_SC]).to(self.dtype)

    def read_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """See `antiphon.kernels.api.KVCache`."""
        places = self._places(blocks, first, count, heads)
        for table_XB, rows_GTB in self._tables_and_rows(layer, blocks, (first, count), heads, rows):
            rows_GTB.copy_(table_XB.index_select(0, places).view(rows_GTB.shape))

    def write_tokens(self, layer: int, blocks: Tensor, first: int, count: int, heads: Tensor, rows: Tensor) -> None:
        """See `antiphon.kernels.api.KVCache`."""
        places = self._places(blocks, first, count, heads)
        for table_XB, rows_GTB in self._tables_and_rows(layer, blocks, (first, count), heads, rows):
            table_XB.index_copy_(0, places, rows_GTB.reshape(len(places), -1).to(table_XB.device))

    def _places(self, blocks: Tensor, first: int, count: int, heads: Tensor) -> Tensor:
        """[heads * tokens]: where these tokens are in a table of slots * heads rows, a head after another."""
        tokens_T = torch.arange(first, first + count, device=blocks.device)
        size = self.spec.block_size
        slots_T = blocks.long()[tokens_T // size] * size + tokens_T % size
        places_GT = slots_T * self.spec.num_kv_heads + heads.long().unsqueeze(1)
        return places_GT.flatten().to(self.keys[0].device)

    def _tables_and_rows(
        self, layer: int, blocks: Tensor, run: tuple[int, int], heads: Tensor, rows: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Each table of the layer [slots * heads, bytes], and its part of the rows [heads, tokens, bytes]."""
        self.spec.check_run(layer, blocks, run, heads, rows, self.dtype.itemsize)
        kinds = [(self.keys, self.key_scales), (self.values, self.value_scales)]
        kinds = kinds[: 1 if self.spec.values_in_keys else 2]
        groups = [[each[layer].view(torch.uint8).flatten(0, 1) for each in kind if each] for kind in kinds]
        widths = [[table.shape[1] for table in group] for group in groups]
        parts = torch.split(rows.view(len(heads), -1), [run[1] * sum(each) for each in widths], dim=1)
        found: list[tuple[Tensor, Tensor]] = []
        for group, width, part in zip(groups, widths, parts, strict=True):
            found += zip(group, torch.split(part.view(len(heads), run[1], -1), width, dim=2), strict=True)
        return found

    def gather(self, layer: int, slots_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, C, G, width] at `slots_SC`."""
        keys = self._read(self.keys, self.key_scales, layer, slots_SC)
        if self.spec.values_in_keys:
            return keys, keys[..., : self.spec.value_dim]
        return keys, self._read(self.values, self.value_scales, layer, slots_SC)


SMALLEST_CONTEXT = 32
DECODE_GATHER_ELEMENTS = 1 << 26
PREFILL_SCORE_ELEMENTS = 1 << 26
PLANS_IN_FLIGHT = 8  # of four micro-batches, each with and without a window


# One-row sequences of similar context: their rows [S'], the cache slots [S', C] that they read, and which of those are
# too late, too early, or not theirs [S', C].
DecodeGroup = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PrefillSequence:
    """Rows [first, last) of one sequence, its cache slots, and its mask; no mask for a plain causal prompt."""

    first: int
    last: int
    slots_1C: Tensor
    mask_QC: Tensor | None


AttentionPlan = tuple[list[DecodeGroup], list[PrefillSequence]]


MadePlan = TypeVar("MadePlan")


class AttentionPlans(Generic[MadePlan]):
    """Plans of the last few batches, known by identity (a batch is never changed, but for one that is refilled): every
    layer asks for the same one, micro-batches take turns. `make` makes one for a batch, a cache and a window."""

    def __init__(self, make: Callable[[AttentionBatch, KVCacheSpec, int | None], MadePlan]) -> None:
        self._make = make
        self._recent: deque[tuple[AttentionBatch, KVCacheSpec, int | None, MadePlan]] = deque(maxlen=PLANS_IN_FLIGHT)

    def of(self, batch: AttentionBatch, spec: KVCacheSpec, window: int | None) -> MadePlan:
        for known, its_spec, its_window, plan in self._recent:
            if known is batch and its_spec is spec and its_window == window:
                return plan
        plan = self._make(batch, spec, window)
        if not batch.refilled:
            self._recent.append((batch, spec, window, plan))
        return plan


def _plan_of_values(batch: AttentionBatch, spec: KVCacheSpec, window: int | None) -> AttentionPlan:
    """One group of all rows, made of what the tensors hold now, on the device alone."""
    rows_S = torch.arange(len(batch.query_lens), device=batch.slots_T.device)
    group = _group_of(batch, spec, window, max(batch.context_lens), rows_S, rows_S)
    return [group], []


def make_plan(batch: AttentionBatch, spec: KVCacheSpec, window: int | None) -> AttentionPlan:
    if batch.refilled:
        return _plan_of_values(batch, spec, window)
    members: dict[int, list[tuple[int, int]]] = {}
    prefills, start = [], 0
    for sequence, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if queries == 1:
            padded = max(SMALLEST_CONTEXT, 1 << (context - 1).bit_length())
            members.setdefault(padded, []).append((sequence, start))
        elif queries > 1:
            prefills.append(prefill_sequence(batch, spec, window, sequence, start))
        start += queries
    groups: list[DecodeGroup] = []
    for padded, chosen in members.items():
        step = max(1, DECODE_GATHER_ELEMENTS // (padded * spec.num_kv_heads * spec.key_dim))
        groups.extend(
            _decode_group(batch, spec, window, padded, chosen[first : first + step])
            for first in range(0, len(chosen), step)
        )
    return groups, prefills


def _decode_group(
    batch: AttentionBatch, spec: KVCacheSpec, window: int | None, padded: int, members: list[tuple[int, int]]
) -> DecodeGroup:
    sequences, rows_S = torch.tensor(members, device="cpu").to(batch.slots_T.device, non_blocking=True).unbind(1)
    return _group_of(batch, spec, window, padded, sequences, rows_S)


def _group_of(
    batch: AttentionBatch, spec: KVCacheSpec, window: int | None, padded: int, sequences: Tensor, rows_S: Tensor
) -> DecodeGroup:
    device = batch.slots_T.device
    lengths_S1 = batch.context_lens_S.index_select(0, sequences).unsqueeze(1)
    positions_C = torch.arange(padded, device=device)
    hidden_SC = positions_C >= lengths_S1
    if window is not None:
        hidden_SC |= positions_C < lengths_S1 - window
    return rows_S, _context_slots(batch, sequences, padded, spec.block_size), hidden_SC


def prefill_sequence(
    batch: AttentionBatch, spec: KVCacheSpec, window: int | None, sequence: int, first: int
) -> PrefillSequence:
    queries, context, device = batch.query_lens[sequence], batch.context_lens[sequence], batch.slots_T.device
    chosen = torch.full((1,), sequence, device=device)
    mask: Tensor | None = None
    if window is not None or queries != context:
        rows_Q1 = torch.arange(context - queries, context, device=device).unsqueeze(1)
        columns_C = torch.arange(context, device=device)
        mask = columns_C <= rows_Q1
        if window is not None:
            mask &= columns_C > rows_Q1 - window
    return PrefillSequence(first, first + queries, _context_slots(batch, chosen, context, spec.block_size), mask)


def _context_slots(batch: AttentionBatch, sequences: Tensor, length: int, block_size: int) -> Tensor:
    """Cache slots [S', length] of the first `length` positions of the chosen sequences."""
    positions = torch.arange(length, device=batch.slots_T.device)
    blocks = (positions // block_size).clamp_(max=batch.block_tables_SB.shape[1] - 1)
    tables = batch.block_tables_SB.index_select(0, sequences).long()
    return tables[:, blocks] * block_size + positions % block_size


def paged_attention(
    q_TND: Tensor, cache: ReferenceCache, layer: int, plan: AttentionPlan, scale: float, sinks_N: Tensor | None
) -> Tensor:
    out_TNV = q_TND.new_empty((*q_TND.shape[:2], cache.spec.value_dim))
    groups, prefills = plan
    attend_prefills(q_TND, out_TNV, cache, layer, prefills, scale, sinks_N)
    for rows_S, slots_SC, hidden_SC in groups:
        q_SND = q_TND.index_select(0, rows_S)
        out_TNV.index_copy_(0, rows_S, _decode(q_SND, *cache.gather(layer, slots_SC), hidden_SC, scale, sinks_N))
    return out_TNV


def attend_prefills(
    q_TND: Tensor,
    out_TNV: Tensor,
    cache: ReferenceCache,
    layer: int,
    prefills: list[PrefillSequence],
    scale: float,
    sinks_N: Tensor | None,
) -> None:
    """Rows of sequences with several, written to `out_TNV`."""
    for sequence in prefills:
        rows = slice(sequence.first, sequence.last)
        if sinks_N is None:
            out_TNV[rows] = _prefill(q_TND[rows], cache, layer, sequence, scale)
        else:
            out_TNV[rows] = _prefill_with_sinks(q_TND[rows], cache, layer, sequence, scale, sinks_N)


def _decode(
    q_SND: Tensor, keys_SCGD: Tensor, values_SCGV: Tensor, hidden_SC: Tensor, scale: float, sinks_N: Tensor | None
) -> Tensor:
    """One row of each sequence over its whole context."""
    (num_sequences, num_heads, dim), num_kv_heads = q_SND.shape, keys_SCGD.shape[2]
    q_SGMD = q_SND.view(num_sequences, num_kv_heads, num_heads // num_kv_heads, dim)
    scores_SGMC = torch.matmul(q_SGMD, keys_SCGD.permute(0, 2, 3, 1)).float().mul_(scale)
    scores_SGMC.masked_fill_(hidden_SC[:, None, None, :], float("-inf"))
    weights_SGMC = _softmax(scores_SGMC, sinks_N, num_kv_heads).to(q_SND.dtype)
    return torch.matmul(weights_SGMC, values_SCGV.transpose(1, 2)).reshape(num_sequences, num_heads, -1)


def _prefill(q_QND: Tensor, cache: ReferenceCache, layer: int, sequence: PrefillSequence, scale: float) -> Tensor:
    """The last Q rows of one sequence, each over the keys up to its own position."""
    keys_1CGD, values_1CGV = cache.gather(layer, sequence.slots_1C)
    out_1NQV = F.scaled_dot_product_attention(
        q_QND.transpose(0, 1).unsqueeze(0),
        keys_1CGD.transpose(1, 2),
        values_1CGV.transpose(1, 2),
        attn_mask=sequence.mask_QC,
        is_causal=sequence.mask_QC is None,
        scale=scale,
        enable_gqa=q_QND.shape[1] != cache.spec.num_kv_heads,
    )
    return out_1NQV[0].transpose(0, 1)


def _prefill_with_sinks(
    q_QND: Tensor, cache: ReferenceCache, layer: int, sequence: PrefillSequence, scale: float, sinks_N: Tensor
) -> Tensor:
    """As `_prefill`, with scores of as many rows at a time as `PREFILL_SCORE_ELEMENTS` holds."""
    keys_1CGD, values_1CGV = cache.gather(layer, sequence.slots_1C)
    keys_GDC, values_GCV = keys_1CGD[0].permute(1, 2, 0), values_1CGV[0].transpose(0, 1)
    (num_queries, num_heads, dim), (num_kv_heads, _, context) = q_QND.shape, keys_GDC.shape
    mask_QC = sequence.mask_QC
    if mask_QC is None:
        mask_QC = torch.ones((num_queries, context), dtype=torch.bool, device=q_QND.device).tril()
    out_QNV = q_QND.new_empty((num_queries, num_heads, values_GCV.shape[-1]))
    step = max(1, PREFILL_SCORE_ELEMENTS // (num_heads * context))
    for first in range(0, num_queries, step):
        rows = slice(first, first + step)
        q_GMQD = q_QND[rows].view(-1, num_kv_heads, num_heads // num_kv_heads, dim).permute(1, 2, 0, 3)
        scores_GMQC = torch.matmul(q_GMQD, keys_GDC.unsqueeze(1)).float().mul_(scale)
        scores_QGMC = scores_GMQC.masked_fill_(~mask_QC[rows], float("-inf")).permute(2, 0, 1, 3)
        weights_GMQC = _softmax(scores_QGMC, sinks_N, num_kv_heads).permute(1, 2, 0, 3).to(q_QND.dtype)
        out_GMQV = torch.matmul(weights_GMQC, values_GCV.unsqueeze(1))
        out_QNV[rows] = out_GMQV.permute(2, 0, 1, 3).flatten(1, 2)
    return out_QNV


def _softmax(scores_XGMC: Tensor, sinks_N: Tensor | None, num_kv_heads: int) -> Tensor:
    """Softmax over the last axis, with each head's sink as one more column that is then dropped."""
    if sinks_N is None:
        return scores_XGMC.softmax(-1)
    sinks = sinks_N.view(num_kv_heads, -1, 1).expand(*scores_XGMC.shape[:-1], 1)
    return torch.cat((scores_XGMC, sinks), -1).softmax(-1)[..., :-1]
