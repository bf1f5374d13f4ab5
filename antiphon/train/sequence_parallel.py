"""Attention over ranks that each hold some positions of every sequence (MegaScale-MoE, section 3.1).

    rows = parallel.gather(x)               tensor ranks get each other's rows
    q, k, v = ...                           of the heads of this tensor rank
    q, k, v = parallel.to_heads(q, k, v)    some positions, all heads -> all positions, some heads (Ulysses)
    out = attention(q, k, v)
    out = parallel.to_rows(out)             back to some positions, all heads
    x = parallel.scatter(out @ weights)     sums over tensor ranks, each gets its rows

Either group may have one rank; then its steps are the identity. Positions are split evenly, in order, over the ranks of
both groups; heads too, the longer parts first. A key-value head that several ranks need is sent to each of them.

Letters: B sequences, S positions, s those of this rank (after `gather`: of its tensor group), N query heads,
G KV heads, D head width, V width of a value, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, run
from antiphon.comm.mesh import Group, split_evenly
from antiphon.specs.model import AttentionSpec
from antiphon.train.partition import Range, Share


class SequenceParallel:
    """The way of one rank. `num_positions` of every sequence: at least one a rank."""

    def __init__(self, spec: AttentionSpec, share: Share, sequence: Group, tensor: Group, num_positions: int) -> None:
        self.sequence = sequence
        self.tensor = tensor
        self._per_kv = 1 if spec.latent is not None else spec.num_heads // spec.num_kv_heads
        self._first_kv = share.q_heads[0] if spec.latent is not None else share.kv_heads[0]
        self._share = share
        self._first_q = share.q_heads[0]
        self._heads = split_evenly(share.q_heads[1] - share.q_heads[0], sequence.size)
        parts = split_evenly(num_positions, sequence.size * tensor.size)
        by_group = [parts[first : first + tensor.size] for first in range(0, len(parts), tensor.size)]
        self._groups: list[Range] = [(group[0][0], group[-1][1]) for group in by_group]
        self._in_group = tuple(stop - start for start, stop in by_group[sequence.index])
        self.own: Range = by_group[sequence.index][tensor.index]

    @property
    def gathered(self) -> Range:
        """The positions between `gather` and `scatter`."""
        return self._groups[self.sequence.index]

    @property
    def heads(self) -> Range:
        """Query heads between `to_heads` and `to_rows`, counted from the first of this tensor rank."""
        return self._heads[self.sequence.index]

    def projected(self, head_dim: int) -> tuple[int, int]:
        """Widths of the queries and of the keys (and values) that this rank projects."""
        (q_first, q_last), (kv_first, kv_last) = self._share.q_heads, self._share.kv_heads
        return (q_last - q_first) * head_dim, (kv_last - kv_first) * head_dim

    def gather(self, x_BsH: Tensor) -> Tensor:
        if self.tensor.size == 1:
            return x_BsH
        collective = AllGather(self.tensor, "attention", self._in_group)
        return run(collective, x_BsH.transpose(0, 1)).transpose(0, 1)

    def scatter(self, x_BsH: Tensor) -> Tensor:
        """The sum over tensor ranks of what each has for all rows of the group."""
        if self.tensor.size == 1:
            return x_BsH
        collective = ReduceScatter(self.tensor, "attention", self._in_group)
        return run(collective, x_BsH.transpose(0, 1)).transpose(0, 1)

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """The sum over tensor ranks of something that each has of its heads."""
        return run(AllReduce(self.tensor, "attention"), x)

    def to_heads(self, q_BsND: Tensor, k_BsGD: Tensor, v_BsGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All positions of this rank's heads; keys and values fit the queries as `causal_attention` wants them."""
        if self.sequence.size == 1:
            first, last = self._kv_of(self.heads)
            keys, values = k_BsGD[:, :, first:last], v_BsGV[:, :, first:last]
            return q_BsND, self._for_queries(keys, q_BsND.shape[2]), self._for_queries(values, q_BsND.shape[2])
        wanted = [(heads, self._kv_of(heads), self._kv_of(heads)) for heads in self._heads]
        tensors = (q_BsND, k_BsGD, v_BsGV)
        send = [
            torch.cat([x[:, :, first:last].flatten() for x, (first, last) in zip(tensors, ranges, strict=True)])
            for ranges in wanted
        ]
        own, batch = wanted[self.sequence.index], q_BsND.shape[0]
        widths = [(last - first) * x.shape[3] for x, (first, last) in zip(tensors, own, strict=True)]
        lengths = [stop - start for start, stop in self._groups]
        received = self._exchange(send, [batch * length * sum(widths) for length in lengths])
        pieces = [
            torch.split(part, [batch * length * width for width in widths])
            for part, length in zip(received, lengths, strict=True)
        ]
        q, k, v = (
            torch.cat(
                [
                    piece[which].view(batch, length, own[which][1] - own[which][0], x.shape[3])
                    for piece, length in zip(pieces, lengths, strict=True)
                ],
                dim=1,
            )
            for which, x in enumerate(tensors)
        )
        return q, self._for_queries(k, q.shape[2]), self._for_queries(v, q.shape[2])

    def to_rows(self, out_BSNV: Tensor) -> Tensor:
        """[B, s, N, V]: all heads of this tensor rank, for this rank's positions."""
        if self.sequence.size == 1:
            return out_BSNV
        batch, width = out_BSNV.shape[0], out_BSNV.shape[3]
        send = [out_BSNV[:, start:stop].flatten() for start, stop in self._groups]
        rows = self.gathered[1] - self.gathered[0]
        heads = [last - first for first, last in self._heads]
        received = self._exchange(send, [batch * rows * count * width for count in heads])
        return torch.cat(
            [part.view(batch, rows, count, width) for part, count in zip(received, heads, strict=True)], dim=2
        )

    def _exchange(self, send: Sequence[Tensor], receive: Sequence[int]) -> Sequence[Tensor]:
        sizes = tuple(part.shape[0] for part in send)
        collective = AllToAll(self.sequence, "attention", sizes, tuple(receive))
        return torch.split(run(collective, torch.cat(list(send))), list(receive))

    def _kv_of(self, heads: Range) -> Range:
        """KV heads that these query heads read; both counted from the first of this tensor rank."""
        first, last = (self._first_q + head for head in heads)
        return first // self._per_kv - self._first_kv, -(-last // self._per_kv) - self._first_kv

    def _for_queries(self, x_BSGD: Tensor, num_queries: int) -> Tensor:
        """`x_BSGD` as it is where each head serves the same number of queries, else a copy a query."""
        first = self._first_q + self.heads[0]
        num_kv = x_BSGD.shape[2]
        if num_kv == 1 or (first % self._per_kv == 0 and num_queries == num_kv * self._per_kv):
            return x_BSGD
        return x_BSGD[:, :, [(first + query) // self._per_kv - first // self._per_kv for query in range(num_queries)]]
