"""Sequences fed through rotate_and_store and paged_attention in chosen chunks, and the same in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.api import AttentionBatch, HeadRows, KVCache, KVCacheSpec, RotaryTable
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.ops.attention import rotate

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    norm: bool = True
    block_size: int = 16
    window: int | None = None
    sinks: bool = False

    @property
    def row_width(self) -> int:
        return (self.num_heads + self.num_kv_heads) * self.key_dim + self.num_kv_heads * self.value_dim

    def cache_spec(self, num_blocks: int) -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=2,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )


class Sequences:
    """`lengths` tokens of random fused rows each, and the blocks they live in."""

    def __init__(self, heads: Heads, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.lengths, self.dtype = heads, lengths, dtype
        self.rows = [torch.randn(length, heads.row_width, generator=generator).to(dtype) for length in lengths]
        half = heads.rotary_dim // 2
        angles = torch.outer(torch.arange(max(lengths)).float(), 10.0 ** -torch.linspace(0, 4, half))
        self.rotary = RotaryTable(cos=angles.cos(), sin=angles.sin(), interleaved=heads.interleaved)
        self.norms = [(torch.rand(heads.key_dim, generator=generator) + 0.5).to(dtype) if heads.norm else None
                      for _ in range(2)]  # fmt: skip
        self.sinks = torch.randn(heads.num_heads, generator=generator) * 3 if heads.sinks else None
        widest = -(-max(lengths) // heads.block_size)
        self.num_blocks = len(lengths) * widest + 3
        self.tables = torch.randperm(self.num_blocks, generator=generator)[: len(lengths) * widest].int()
        self.tables = self.tables.view(len(lengths), widest)

    def run(self, backend: CpuBackend, cache: KVCache, steps: list[list[int]]) -> list[Tensor]:
        """Outputs of every sequence; step i feeds steps[i][s] further tokens of sequence s."""
        head_rows = HeadRows(
            num_heads=self.heads.num_heads,
            rotary=self.rotary,
            q_norm_D=self.norms[0],
            k_norm_D=self.norms[1],
            eps=EPS,
        )
        done = [0] * len(self.lengths)
        outputs: list[list[Tensor]] = [[] for _ in self.lengths]
        for step in steps:
            chosen = [(sequence, count) for sequence, count in enumerate(step) if count > 0]
            batch = self._batch(chosen, done)
            rows = torch.cat([self.rows[s][done[s] : done[s] + count] for s, count in chosen])
            q = backend.rotate_and_store(rows, cache, 1, batch, head_rows)
            out = backend.paged_attention(
                q,
                cache,
                1,
                batch,
                scale=self.heads.key_dim**-0.5,
                sliding_window=self.heads.window,
                sinks_N=self.sinks,
            )
            for (s, count), part in zip(chosen, out.split([count for _, count in chosen]), strict=True):
                outputs[s].append(part)
                done[s] += count
        return [torch.cat(parts) for parts in outputs]

    def _batch(self, chosen: list[tuple[int, int]], done: list[int]) -> AttentionBatch:
        size = self.heads.block_size
        positions = [torch.arange(done[s], done[s] + count) for s, count in chosen]
        slots = [self.tables[s][p // size] * size + p % size for (s, _), p in zip(chosen, positions, strict=True)]
        counts = [count for _, count in chosen]
        contexts = [done[s] + count for s, count in chosen]
        return AttentionBatch(
            positions_T=torch.cat(positions).int(),
            slots_T=torch.cat(slots).int(),
            query_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            context_lens_S=torch.tensor(contexts, dtype=torch.int32),
            block_tables_SB=self.tables[[s for s, _ in chosen]].contiguous(),
            query_lens=tuple(counts),
            context_lens=tuple(contexts),
        )

    def expected(self, sequence: int) -> Tensor:
        """Attention of one whole sequence in float64, from q and k rounded as the back-end rounds them."""
        heads, rows = self.heads, self.rows[sequence]
        length, dim = rows.shape[0], heads.key_dim
        q, k, v = rows.split([heads.num_heads * dim, heads.num_kv_heads * dim, heads.num_kv_heads * heads.value_dim], 1)
        cos, sin = self.rotary.cos[:length], self.rotary.sin[:length]
        q, k = (
            rotate(self._normed(part.reshape(length, -1, dim), norm), cos, sin, heads.interleaved).double()
            for part, norm in zip((q, k), self.norms, strict=True)
        )
        groups = heads.num_heads // heads.num_kv_heads
        k = k.repeat_interleave(groups, 1)
        v = v.reshape(length, -1, heads.value_dim).double().repeat_interleave(groups, 1)
        scores = torch.einsum("qnd,knd->nqk", q, k) * dim**-0.5
        position = torch.arange(length)
        visible = position[None] <= position[:, None]
        if heads.window is not None:
            visible &= position[None] > position[:, None] - heads.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double().view(-1, 1, 1).expand(-1, length, 1)), -1)
        return torch.einsum("nqk,knv->qnv", scores.softmax(-1)[..., :length], v)

    @staticmethod
    def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
