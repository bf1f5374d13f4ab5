"""Attention over ranks that each hold some positions of every sequence (MegaScale-MoE, section 3.1).

    gather          tensor ranks get each other's rows
    q, k, v = ...   of the heads of this tensor rank
    to heads        some positions, all heads -> all positions, some heads (Ulysses)
    attention
    to rows         back to some positions, all heads
    scatter         the sum over tensor ranks of rows times their weights; each gets its rows

Each exchange is what is packed, a collective, and what is unpacked, which `train/attention` makes operators of. With
one sequence rank nothing is packed, and a collective over one tensor rank is the identity. Positions are split evenly,
in order, over the ranks of both groups; heads too, the longer parts first. A key-value head that several ranks need is
sent to each of them.

Letters: B sequences, S positions, s those of this rank (after the gather: of its tensor group), N query heads,
G KV heads, D head width, V width of a value, H hidden.
"""

import torch
from torch import Tensor

from antiphon.comm.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, run
from antiphon.comm.mesh import Group, split_evenly
from antiphon.models.shares import Range
from antiphon.specs.model import AttentionSpec
from antiphon.train.partition import Share


class SequenceParallel:
    """The way of one rank. `num_positions` of every sequence: at least one a rank."""

    def __init__(self, spec: AttentionSpec, share: Share, sequence: Group, tensor: Group, num_positions: int) -> None:
        self.sequence = sequence
        self.tensor = tensor
        self._widths = spec.head_dim, spec.head_dim if spec.latent is None else spec.latent.v_head_dim
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
        """The positions between gather and scatter."""
        return self._groups[self.sequence.index]

    @property
    def heads(self) -> Range:
        """Query heads of this sequence rank, counted from the first of this tensor rank."""
        return self._heads[self.sequence.index]

    def projected(self, head_dim: int) -> tuple[int, int]:
        """Widths of the queries and of the keys (and values) that this rank projects."""
        (q_first, q_last), (kv_first, kv_last) = self._share.q_heads, self._share.kv_heads
        return (q_last - q_first) * head_dim, (kv_last - kv_first) * head_dim

    def gather(self) -> AllGather:
        """Of rows, positions first."""
        return AllGather(self.tensor, "attention", self._in_group)

    def scatter(self) -> ReduceScatter:
        """Of what each tensor rank has for all rows of the group, positions first."""
        return ReduceScatter(self.tensor, "attention", self._in_group)

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """The sum over tensor ranks of something that each has of its heads."""
        return run(AllReduce(self.tensor, "attention"), x)

    def own_heads(self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where one sequence rank has all positions: keys and values as `causal_attention` wants them."""
        first, last = self._kv_of(self.heads)
        keys, values = k_BSGD[:, :, first:last], v_BSGV[:, :, first:last]
        return q_BSND, self._for_queries(keys, q_BSND.shape[2]), self._for_queries(values, q_BSND.shape[2])

    def pack_heads(self, q_BsND: Tensor, k_BsGD: Tensor, v_BsGV: Tensor) -> Tensor:
        """One dimension: for each sequence rank the heads it works on, at the positions here."""
        parts = []
        for heads in self._heads:
            (first, last), (first_kv, last_kv) = heads, self._kv_of(heads)
            parts += [q_BsND[:, :, first:last], k_BsGD[:, :, first_kv:last_kv], v_BsGV[:, :, first_kv:last_kv]]
        return torch.cat([part.flatten() for part in parts])

    def to_heads(self, packed: Tensor) -> AllToAll:
        """Of what `pack_heads` made."""
        widths, rows = [self._width_of(heads) for heads in self._heads], self._num_rows
        batch = packed.shape[0] // (rows * sum(widths))
        own = widths[self.sequence.index]
        send = tuple(batch * rows * width for width in widths)
        return AllToAll(self.sequence, "attention", send, tuple(batch * length * own for length in self._lengths))

    def unpack_heads(self, received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All positions of this rank's heads; keys and values fit the queries as `causal_attention` wants them."""
        first, last = self._kv_of(self.heads)
        counts = self.heads[1] - self.heads[0], last - first, last - first
        widths = self._widths[0], self._widths[0], self._widths[1]
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        batch = received.shape[0] // (sum(self._lengths) * sum(sizes))
        by_rank = torch.split(received, [batch * length * sum(sizes) for length in self._lengths])
        pieces = [
            [
                piece.view(batch, length, count, width)
                for piece, count, width in zip(
                    torch.split(part, [batch * length * size for size in sizes]), counts, widths, strict=True
                )
            ]
            for part, length in zip(by_rank, self._lengths, strict=True)
        ]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
        return q, self._for_queries(k, counts[0]), self._for_queries(v, counts[0])

    def pack_rows(self, out_BSNV: Tensor) -> Tensor:
        """One dimension: for each sequence rank its positions, of the heads here."""
        return torch.cat([out_BSNV[:, start:stop].flatten() for start, stop in self._groups])

    def to_rows(self, packed: Tensor) -> AllToAll:
        """Of what `pack_rows` made."""
        own, width = self.heads[1] - self.heads[0], self._widths[1]
        batch = packed.shape[0] // (sum(self._lengths) * own * width)
        receive = tuple(batch * self._num_rows * (last - first) * width for first, last in self._heads)
        send = tuple(batch * length * own * width for length in self._lengths)
        return AllToAll(self.sequence, "attention", send, receive)

    def unpack_rows(self, received: Tensor) -> Tensor:
        """[B, s, N * V]: all heads of this tensor rank, for this rank's positions."""
        heads, width = [last - first for first, last in self._heads], self._widths[1]
        batch = received.shape[0] // (self._num_rows * sum(heads) * width)
        parts = torch.split(received, [batch * self._num_rows * count * width for count in heads])
        shape = batch, self._num_rows
        return torch.cat([part.view(*shape, count * width) for part, count in zip(parts, heads, strict=True)], dim=2)

    @property
    def _lengths(self) -> list[int]:
        """Positions of each sequence rank's tensor group."""
        return [stop - start for start, stop in self._groups]

    @property
    def _num_rows(self) -> int:
        """Positions of this rank's tensor group."""
        return self._lengths[self.sequence.index]

    def _width_of(self, heads: Range) -> int:
        """Numbers a position of these query heads with the keys and values that they read."""
        first, last = self._kv_of(heads)
        return (heads[1] - heads[0]) * self._widths[0] + (last - first) * sum(self._widths)

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
