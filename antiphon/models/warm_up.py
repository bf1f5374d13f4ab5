"""Attention halves computed once before the first request, so that no request waits for a compiler.

Triton compiles a kernel at its first use, one variant for each class of sizes. Batches of 1 to 128 rows, decoded and as
one prompt, use all of them: beyond, tiles are those of 128. Rows are zeros, their keys are not stored, and what comes
out is dropped. No other rank is asked, because none is connected yet: parts are not summed.

Rejected: a first request of the engine's own. It would have to wait for all workers, and would fill one bucket alone.
"""

import time

import torch

from antiphon.base.logging import get_logger
from antiphon.kernels.api import AttentionBatch, KVCache
from antiphon.models.attention_half import AttentionHalf

_log = get_logger("kernels")
LAST_ROWS = 128  # tiles of no product are higher


def warm_up_attention(half: AttentionHalf, cache: KVCache, most_rows: int) -> None:
    """Batches of up to `most_rows` rows through the layers of `half`. `cache` stays as it is."""
    started, spec = time.monotonic(), half.spec
    if half.ranks.size > 1 and spec.attention.qk_norm == "full":
        return  # its norms are sums over ranks
    last = min(most_rows, LAST_ROWS)
    sizes = [1 << power for power in range(last.bit_length()) if 1 << power < last]
    for num_rows in [*sizes, last]:
        _compute(half, cache, _batch(half, (1,) * num_rows))
        if num_rows > 1:
            _compute(half, cache, _batch(half, (num_rows,)))
    _log.info("kernels of attention for up to %d rows: ready after %.1f s", most_rows, time.monotonic() - started)


def _batch(half: AttentionHalf, query_lens: tuple[int, ...]) -> AttentionBatch:
    """New sequences, whose rows have no slot in the cache."""
    device, num_rows = half.backend.device, sum(query_lens)
    starts = torch.tensor([sum(query_lens[:sequence]) for sequence in range(len(query_lens) + 1)])
    positions = torch.cat([torch.arange(queries) for queries in query_lens])
    return AttentionBatch(
        positions_T=positions.int().to(device),
        slots_T=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        query_starts=starts.int().to(device),
        context_lens_S=torch.tensor(query_lens, dtype=torch.int32, device=device),
        block_tables_SB=torch.zeros((len(query_lens), max(query_lens)), dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens=query_lens,
    )


def _compute(half: AttentionHalf, cache: KVCache, batch: AttentionBatch) -> None:
    """As a step does, without sums over ranks and without routed experts."""
    backend = half.backend
    x_TH = torch.zeros((batch.num_tokens, half.spec.hidden_size), dtype=backend.dtype, device=backend.device)
    for cached, (layer, weights) in enumerate(half.layers.items()):
        y_TH = weights.input_norm(x_TH)
        heads_TV = weights.attention.heads(cached, y_TH, cache, batch)
        part_TH = weights.attention.project(heads_TV, x_TH if half.ranks.size == 1 else None)
        y_TH = weights.post_norm(part_TH)
        if half.routes(layer):
            half.gate(layer, y_TH)
        local_TH = half.local_feed_forward(layer, y_TH)
        weights.input_norm.after_adding(part_TH, part_TH if local_TH is None else local_TH)
    if half.output_head is not None and half.final_norm is not None:
        y_TH = half.final_norm.after_adding(x_TH, x_TH)[1]
        backend.linear(y_TH, half.output_head, out_dtype=torch.float32)
