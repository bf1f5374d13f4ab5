"""The attention half of a model: all but the routed experts. It holds requests' state only in the KV cache.

A micro-batch travels through the layers as (x_TH, delta_TH): the residual stream, and what the previous layer's experts
and local feed-forward add to it. The addition happens at the head of the next `attend`, fused with its norm. So a
worker can leave a micro-batch between any two calls and take up another:

    x, delta = half.embed(ids), None
    for layer in half.layers:
        x, y = half.attend(layer, x, delta, cache, batch)
        delta = half.local_feed_forward(layer, y)        # None where there is neither shared expert nor dense layer
        if half.routes(layer):
            ids, weights = half.gate(layer, y)           # the experts' output is added to delta
        delta = half.sum_over_ranks(delta)
    logits = half.head(x[rows], delta[rows])

Under tensor parallelism (`models/shares`) several ranks run this loop on the same rows. x, y and the gate's choice are
the same bits on all of them; attention and feed-forward are parts, which `attend` and `sum_over_ranks` add up,
or `sum_of_rows` block by block while the next one is computed.

`warm_up` computes everything once before the first request, so that no request waits for a compiler. Triton compiles a
kernel at its first use, one variant for each class of sizes. Batches of 1 to 128 rows, decoded and as one prompt, use
all of them: beyond, tiles are those of 128. Rejected: a first request of the engine's own. It would have to wait for
all workers, and would fill one bucket alone.

Letters as in `antiphon.kernels.api`; W vocabulary.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.rank_group import RankGroup
from antiphon.kernels.api import AttentionBatch, KernelBackend, KVCache, KVCacheSpec, PackedExperts, PackedLinear
from antiphon.models.attention import Attention
from antiphon.models.shares import add_over_ranks, share_of, sum_of_blocks
from antiphon.specs.model import KVStorage, ModelSpec

_log = get_logger("kernels")
LAST_ROWS = 128  # tiles of no product are higher


@dataclass(eq=False)
class RMSNorm:
    """By a kernel."""

    backend: KernelBackend
    weight_H: Tensor
    eps: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        """The normalised rows."""
        return self.backend.rms_norm(x_TH, self.weight_H, self.eps)

    def after_adding(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the residual step that starts each half-layer."""
        return self.backend.add_rms_norm(x_TH, delta_TH, self.weight_H, self.eps)


@dataclass(eq=False)
class LayerNorm:
    """PyTorch's, with the calls of `RMSNorm` (DBRX, Phi-3.5-MoE)."""

    weight_H: Tensor
    bias_H: Tensor | None
    eps: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        return F.layer_norm(x_TH, self.weight_H.shape, self.weight_H, self.bias_H, self.eps)

    def after_adding(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = x_TH + delta_TH
        return x_TH, self(x_TH)


Norm = RMSNorm | LayerNorm


@dataclass(eq=False)
class LocalFeedForward:
    """A feed-forward that stays with attention: a dense layer's, or the shared expert that all tokens pass.

    Either is a grouped feed-forward with one expert: every row goes to expert 0 with the model's residual multiplier (1
    but for Granite) as its weight, times the sigmoid of a learned gate (Qwen2-MoE). One kernel therefore serves them
    and the routed experts.
    """

    backend: KernelBackend
    expert: PackedExperts
    shared_gate: PackedLinear | None
    residual_multiplier: float = 1.0

    def __call__(self, y_TH: Tensor) -> Tensor:
        if self.shared_gate is None:
            ids_T1 = torch.zeros((y_TH.shape[0], 1), dtype=torch.int32, device=y_TH.device)
            weights_T1 = torch.full_like(ids_T1, self.residual_multiplier, dtype=torch.float32)
        else:
            ids_T1, weights_T1 = self.backend.shared_gate(y_TH, self.shared_gate, self.residual_multiplier)
        return self.backend.grouped_ffn(y_TH, ids_T1, weights_T1, self.expert)


@dataclass(kw_only=True)
class AttentionLayer:
    """One layer without its routed experts; `router` is None in a dense layer."""

    input_norm: Norm
    attention: Attention
    post_norm: Norm
    router: PackedLinear | None
    score_bias_E: Tensor | None
    local: LocalFeedForward | None


@dataclass(kw_only=True, eq=False)
class AttentionHalf:
    """Embedding, attention layers, routers, shared experts, dense layers, head.

    `spec` is the whole model, `layers` and tables are what this rank of `ranks` has of it: layers by their number in
    the model. A head without `embedding_WH` is the embedding too. With neither it is a later stage of a pipeline:
    `embed` and `head` are not called. `weight_bytes` were read from the checkpoint. Positions end with the rotary
    table: a longer sequence is a bug of the caller's, which back-ends need not notice.
    """

    spec: ModelSpec
    backend: KernelBackend
    embedding_WH: Tensor | None
    layers: Mapping[int, AttentionLayer]
    final_norm: Norm | None
    output_head: PackedLinear | None
    weight_bytes: int
    ranks: RankGroup

    def __post_init__(self) -> None:
        self._share = share_of(self.spec, self.ranks.rank, self.ranks.size)
        self._is_whole = self._share.is_whole
        self._cached_layer = {layer: index for index, layer in enumerate(self.layers)}

    def embed(self, token_ids_T: Tensor) -> Tensor:
        rows_TH = self._embedded(token_ids_T)
        return rows_TH if self.spec.embedding_multiplier == 1.0 else rows_TH.mul_(self.spec.embedding_multiplier)

    def embedder(self, out_TH: Tensor) -> Callable[[list[int]], None]:
        """What writes the embedded rows of token ids to the first rows of `out_TH`: in one operation of NumPy, where
        the table is plain."""
        table_WH, is_plain = self.embedding_WH, self._is_whole and self.spec.embedding_multiplier == 1.0

        def embed(token_ids: list[int]) -> None:
            out_TH[: len(token_ids)] = self.embed(torch.tensor(token_ids, device=self.backend.device))

        if table_WH is None or not is_plain or table_WH.dtype != out_TH.dtype or table_WH.device.type != "cpu":
            return embed
        words = {2: torch.int16, 4: torch.int32}[out_TH.itemsize]  # NumPy has no bfloat16
        table, out = table_WH.view(words).numpy(), out_TH.view(words).numpy()

        def take(token_ids: list[int]) -> None:
            table.take(token_ids, 0, out[: len(token_ids)], "clip")  # the other modes copy twice

        return take

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        """Rows of the table; those of another rank's tokens are zeros here, so that the sum over ranks is exact."""
        if self._is_whole:
            return self._table_rows(token_ids_T)
        first, last = self._share.vocabulary
        elsewhere_T = (token_ids_T < first) | (token_ids_T >= last)
        rows_TH = self._table_rows((token_ids_T - first).clamp_(0, last - first - 1))
        return add_over_ranks(self.ranks, rows_TH.masked_fill_(elsewhere_T.unsqueeze(1), 0.0))

    def _table_rows(self, ids_T: Tensor) -> Tensor:
        if self.embedding_WH is not None:
            return self.embedding_WH.index_select(0, ids_T)
        assert self.output_head is not None, "this is a later stage"
        return self.backend.weight_rows(self.output_head, ids_T)

    def attend(
        self, layer: int, x_TH: Tensor, delta_TH: Tensor | None, cache: KVCache, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """(residual stream after attention, its norm: what router, experts and local feed-forward read)."""
        weights, cached = self.layers[layer], self._cached_layer[layer]
        if delta_TH is None:
            y_TH = weights.input_norm(x_TH)
        else:
            x_TH, y_TH = weights.input_norm.after_adding(x_TH, delta_TH)
        attention = weights.attention
        heads_TV = attention.heads(cached, y_TH, cache, batch)
        if self._is_whole:
            x_TH = attention.project(heads_TV, x_TH)
            return x_TH, weights.post_norm(x_TH)
        delta_TH = self.sum_of_rows(y_TH.shape[0], lambda first, last: attention.project(heads_TV[first:last], None))
        return weights.post_norm.after_adding(x_TH, delta_TH)

    def sum_over_ranks(self, delta_TH: Tensor) -> Tensor:
        """What a layer's feed-forward adds to the residual stream, from this rank's part, which it may overwrite."""
        return delta_TH if self._is_whole else add_over_ranks(self.ranks, delta_TH)

    def sum_of_rows(self, num_rows: int, make: Callable[[int, int], Tensor]) -> Tensor:
        """The same, from what computes this rank's part of the rows from `first` to `last`: of all, or block by block
        while the ranks sum the block before."""
        return sum_of_blocks(self.ranks, num_rows, make)

    def dense_feed_forward(self, layer: int, y_TH: Tensor) -> Tensor:
        """What a dense layer's feed-forward adds to the residual stream, summed over the ranks."""
        local = self.layers[layer].local
        assert local is not None, "a layer without experts has a dense feed-forward"
        return self.sum_of_rows(y_TH.shape[0], lambda first, last: local(y_TH[first:last]))

    def routes(self, layer: int) -> bool:
        """Whether this layer has routed experts."""
        return self.spec.moe_layers[layer]

    def gate(self, layer: int, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(global expert ids int32 [T, K], weights float32 [T, K])."""
        weights = self.layers[layer]
        assert weights.router is not None, f"layer {layer} is dense"
        return self.backend.gate(y_TH, weights.router, weights.score_bias_E, self.spec.router)

    def local_feed_forward(self, layer: int, y_TH: Tensor) -> Tensor | None:
        """The dense layer's feed-forward or the shared expert, this rank's part; None where the layer has neither."""
        local = self.layers[layer].local
        return None if local is None else local(y_TH)

    def head(self, x_TH: Tensor, delta_TH: Tensor | None = None) -> Tensor:
        """Float32 logits [T, W] of the rows given, which the caller selected; `delta_TH` is the last layer's."""
        assert self.final_norm is not None, "this is a later stage"
        assert self.output_head is not None, "this is a later stage"
        y_TH = self.final_norm(x_TH) if delta_TH is None else self.final_norm.after_adding(x_TH, delta_TH)[1]
        logits_TW = self.backend.linear(y_TH, self.output_head, out_dtype=torch.float32)
        if not self._is_whole:
            logits_TW = self._of_whole_vocabulary(logits_TW)
        return logits_TW if self.spec.logits_divisor == 1.0 else logits_TW.div_(self.spec.logits_divisor)

    def _of_whole_vocabulary(self, logits_TW: Tensor) -> Tensor:
        ranks = range(self.ranks.size)
        shares = [share_of(self.spec, rank, self.ranks.size).vocabulary for rank in ranks]
        given_TW = logits_TW if self.ranks.takes(logits_TW.device) else logits_TW.cpu()
        columns_WT = given_TW.t().contiguous()
        whole_WT = self.ranks.all_gather(columns_WT, [last - first for first, last in shares])
        return whole_WT.t().contiguous().to(logits_TW.device)

    def cache_spec(self, num_blocks: int, block_size: int, storage: KVStorage = "auto") -> KVCacheSpec:
        attention = self._share.local_spec(self.spec).attention
        latent = attention.latent
        return KVCacheSpec(
            num_layers=len(self.layers),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=attention.num_kv_heads if latent is None else 1,
            key_dim=attention.head_dim if latent is None else latent.key_dim,
            value_dim=attention.head_dim if latent is None else latent.kv_lora_rank,
            values_in_keys=latent is not None,
            storage=storage,
        )

    def new_cache(self, num_blocks: int, block_size: int, storage: KVStorage = "auto") -> KVCache:
        """`ResourceError` if the memory cannot be had."""
        return self.backend.new_kv_cache(self.cache_spec(num_blocks, block_size, storage))

    def warm_up(self, cache: KVCache, most_rows: int) -> None:
        """Batches of up to `most_rows` rows of zeros through the layers. `cache` stays as it is, and what comes out is
        dropped. No other rank is asked, because none is connected yet: parts are not summed."""
        started = time.monotonic()
        if self.ranks.size > 1 and self.spec.attention.qk_norm == "full":
            return  # its norms are sums over ranks
        last = min(most_rows, LAST_ROWS)
        sizes = [1 << power for power in range(last.bit_length()) if 1 << power < last]
        for num_rows in [*sizes, last]:
            self._compute_alone(cache, _new_sequences((1,) * num_rows, self.backend.device))
            if num_rows > 1:
                self._compute_alone(cache, _new_sequences((num_rows,), self.backend.device))
        _log.info("kernels of attention for up to %d rows: ready after %.1f s", most_rows, time.monotonic() - started)

    def _compute_alone(self, cache: KVCache, batch: AttentionBatch) -> None:
        """As a step does, without sums over ranks and without routed experts."""
        backend = self.backend
        x_TH = torch.zeros((batch.num_tokens, self.spec.hidden_size), dtype=backend.dtype, device=backend.device)
        for cached, (layer, weights) in enumerate(self.layers.items()):
            y_TH = weights.input_norm(x_TH)
            heads_TV = weights.attention.heads(cached, y_TH, cache, batch)
            part_TH = weights.attention.project(heads_TV, x_TH if self.ranks.size == 1 else None)
            y_TH = weights.post_norm(part_TH)
            if self.routes(layer):
                self.gate(layer, y_TH)
            local_TH = self.local_feed_forward(layer, y_TH)
            weights.input_norm.after_adding(part_TH, part_TH if local_TH is None else local_TH)
        if self.output_head is not None and self.final_norm is not None:
            y_TH = self.final_norm.after_adding(x_TH, x_TH)[1]
            backend.linear(y_TH, self.output_head, out_dtype=torch.float32)


def _new_sequences(query_lens: tuple[int, ...], device: torch.device) -> AttentionBatch:
    """A batch of them, whose rows have no slot in the cache."""
    starts = torch.tensor([sum(query_lens[:sequence]) for sequence in range(len(query_lens) + 1)])
    positions = torch.cat([torch.arange(queries) for queries in query_lens])
    return AttentionBatch(
        positions_T=positions.int().to(device),
        slots_T=torch.full((sum(query_lens),), -1, dtype=torch.int32, device=device),
        query_starts=starts.int().to(device),
        context_lens_S=torch.tensor(query_lens, dtype=torch.int32, device=device),
        block_tables_SB=torch.zeros((len(query_lens), max(query_lens)), dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens=query_lens,
    )
