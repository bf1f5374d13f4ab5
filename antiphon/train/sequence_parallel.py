"""Attention over ranks that each hold some positions of every sequence (MegaScale-MoE, section 3.1).

    gather          tensor ranks get each other's rows
    q, k, v = ...   of the heads of this tensor rank
    to heads        some positions, all heads -> all positions, some heads (Ulysses)
    attention
    to rows         back to some positions, all heads
    scatter         the sum over tensor ranks of rows times their weights; each gets its rows

Each exchange is what is packed, a collective, and what is unpacked, which `train/attention` makes operators of. With
one sequence rank nothing is packed, and a collective over one tensor rank is the identity. In tiles rows
travel, each with some heads of a position. Positions are split evenly, in order, over the ranks of both groups; heads
too, the longer parts first. A key-value head that several ranks need is sent to each of them.

Letters: B sequences, S positions, s those of this rank (after the gather: of its tensor group), N query heads,
G KV heads, D head width, V width of a value, H hidden, P positions that have rotations, R rotated width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.collectives import AllGather, AllReduce, AllToAll, Collective, MovesRows, ReduceScatter, moving, run
from antiphon.comm.float8 import Float8Rows
from antiphon.comm.mesh import Group
from antiphon.kernels.ops.attention import attention_mask, first_keys
from antiphon.models.shares import Range, Ranges
from antiphon.specs.model import AttentionSpec, ModelSpec
from antiphon.train.weights import RankShare


class SequenceParallel:
    """The way of one rank. `num_positions` of every sequence: at least one a rank. `narrow`: tensor ranks send each
    other rows as E4M3."""

    def __init__(
        self,
        spec: AttentionSpec,
        share: RankShare,
        sequence: Group,
        tensor: Group,
        num_positions: int,
        *,
        narrow: bool = False,
    ) -> None:
        self.narrow = narrow
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

    def worked_on(self, head_dim: int) -> tuple[int, int]:
        """Widths of the queries and of the keys (and values) that this rank works on, at all positions."""
        first, last = self._kv_of(self.heads)
        return (self.heads[1] - self.heads[0]) * head_dim, (last - first) * head_dim

    def gather(self, x_BsH: Tensor) -> MovesRows:
        """The gather of rows, positions first."""
        return self._formatted(AllGather(self.tensor, "attention", self._in_group), x_BsH)

    def scatter(self, x_BSH: Tensor) -> MovesRows:
        """The sum, scattered, of what each tensor rank has for all rows of the group, positions first."""
        return self._formatted(ReduceScatter(self.tensor, "attention", self._in_group), x_BSH)

    def in_rows(self, collective: Collective, x_BsH: Tensor) -> Collective:
        """`gather` or `scatter` for a row of each token, as tiles have it; its sums are in float32 at least."""
        whole, num_sequences = moving(collective), x_BsH.shape[0]
        if isinstance(whole, Float8Rows):
            whole = replace(whole, out=torch.promote_types(whole.out, torch.float32), tokens=None)
        return whole.with_sizes(lambda runs: tuple(num_sequences * positions for positions in runs))

    def _formatted(self, plain: MovesRows, x_BsH: Tensor) -> MovesRows:
        if self.narrow and self.tensor.size > 1:
            return Float8Rows(plain, x_BsH.dtype, tokens=x_BsH.shape[0])
        return plain

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """The sum over tensor ranks of something that each has of its heads."""
        return run(AllReduce(self.tensor, "attention"), x)

    def share_heads(self, q_BsND: Tensor, k_BsGD: Tensor, v_BsGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads that this rank works on, at all positions. Waits for the others."""
        if self.sequence.size == 1:
            return self.own_heads(q_BsND, k_BsGD, v_BsGV)
        packed = self.pack_heads(q_BsND, k_BsGD, v_BsGV)
        return self.unpack_heads(run(self.to_heads(packed), packed))

    def share_rows(self, out_BSNV: Tensor) -> Tensor:
        """[B, s, N * V]: what attention made of all heads, at this rank's positions. Waits for the others."""
        if self.sequence.size == 1:
            return out_BSNV.flatten(2)
        packed = self.pack_rows(out_BSNV)
        return self.unpack_rows(run(self.to_rows(packed), packed))

    def own_heads(self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as `causal_attention` wants them, where one sequence rank has all positions."""
        first, last = self._kv_of(self.heads)
        return self.fitted(q_BSND, k_BSGD[:, :, first:last], v_BSGV[:, :, first:last])

    def fitted(self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the heads that this rank works on, with keys and values as `causal_attention` wants them."""
        num_queries = q_BSND.shape[2]
        return q_BSND, self._for_queries(k_BSGD, num_queries), self._for_queries(v_BSGV, num_queries)

    def pack_heads(self, q_BsND: Tensor, k_BsGD: Tensor, v_BsGV: Tensor) -> Tensor:
        """One dimension: for each sequence rank the heads it works on, at the positions here."""
        parts = []
        for heads in self._heads:
            (first, last), (first_kv, last_kv) = heads, self._kv_of(heads)
            parts += [q_BsND[:, :, first:last], k_BsGD[:, :, first_kv:last_kv], v_BsGV[:, :, first_kv:last_kv]]
        return torch.cat([part.flatten() for part in parts])

    def to_heads(self, packed: Tensor) -> AllToAll:
        """The exchange of what `pack_heads` made."""
        widths, rows = [self._width_of(heads) for heads in self._heads], self.num_rows
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
        return self.fitted(q, k, v)

    def pack_rows(self, out_BSNV: Tensor) -> Tensor:
        """One dimension: for each sequence rank its positions, of the heads here."""
        return torch.cat([out_BSNV[:, start:stop].flatten() for start, stop in self._groups])

    def to_rows(self, packed: Tensor) -> AllToAll:
        """The exchange of what `pack_rows` made."""
        own, width = self.heads[1] - self.heads[0], self._widths[1]
        batch = packed.shape[0] // (sum(self._lengths) * own * width)
        receive = tuple(batch * self.num_rows * (last - first) * width for first, last in self._heads)
        send = tuple(batch * length * own * width for length in self._lengths)
        return AllToAll(self.sequence, "attention", send, receive)

    def unpack_rows(self, received: Tensor) -> Tensor:
        """[B, s, N * V]: all heads of this tensor rank, for this rank's positions."""
        heads, width = [last - first for first, last in self._heads], self._widths[1]
        batch = received.shape[0] // (self.num_rows * sum(heads) * width)
        parts = torch.split(received, [batch * self.num_rows * count * width for count in heads])
        shape = batch, self.num_rows
        return torch.cat([part.view(*shape, count * width) for part, count in zip(parts, heads, strict=True)], dim=2)

    @property
    def projected_columns(self) -> list[Ranges]:
        """For each sequence rank, the columns of the fused projection, q then k then v, that make its heads."""
        q_width, kv_width = self.projected(self._widths[0])

        def of(begin: int, heads: Range, width: int) -> Range:
            return begin + heads[0] * width, begin + heads[1] * width

        width, width_v = self._widths
        return [
            (of(0, heads, width), of(q_width, kv, width), of(q_width + kv_width, kv, width_v))
            for heads, kv in ((heads, self._kv_of(heads)) for heads in self._heads)
        ]

    @property
    def output_columns(self) -> list[Ranges]:
        """For each sequence rank, the columns of all heads' output that it makes."""
        width = self._widths[1]
        return [((first * width, last * width),) for first, last in self._heads]

    @property
    def widest_row(self) -> int:
        """Numbers of the widest row that travels in tiles."""
        return max(max(self._width_of(heads), (heads[1] - heads[0]) * self._widths[1]) for heads in self._heads)

    def rows_to_heads(self, num_sequences: int) -> AllToAll:
        """The exchange of rows, each with the heads of one rank: those here go to each rank."""
        send = (num_sequences * self.num_rows,) * self.sequence.size
        return AllToAll(self.sequence, "attention", send, tuple(num_sequences * length for length in self._lengths))

    def heads_to_rows(self, num_rows: int) -> Collective:
        """The exchange of `num_rows` rows of all positions in order of rank."""
        return self.rows_to_heads(num_rows // sum(self._lengths)).reverse()

    def by_rank(self, x_BSW: Tensor) -> Tensor:
        """[P, W]: the rows of all positions in order of the rank that has them."""
        return torch.cat([x_BSW[:, start:stop].flatten(0, 1) for start, stop in self._groups])

    def by_position(self, x_PW: Tensor) -> Tensor:
        """[B, S, W]: rows in order of rank, as `by_rank` gives them, in order of position."""
        num_sequences = x_PW.shape[0] // sum(self._lengths)
        parts = torch.split(x_PW, [num_sequences * length for length in self._lengths])
        return torch.cat([part.view(num_sequences, -1, x_PW.shape[1]) for part in parts], dim=1)

    @property
    def _lengths(self) -> list[int]:
        """Positions of each sequence rank's tensor group."""
        return [stop - start for start, stop in self._groups]

    @property
    def num_rows(self) -> int:
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


@dataclass(frozen=True)
class Sequences:
    """Rotations and `masks` are over all positions; masks by sliding window, see `attention_mask`, and the same as
    `first_keys`."""

    parallel: SequenceParallel
    cos_BSR: Tensor
    sin_BSR: Tensor
    masks: dict[int | None, Tensor | None]
    first_keys: dict[int | None, Tensor | None]

    @staticmethod
    def of(
        spec: ModelSpec,
        parallel: SequenceParallel,
        cos_PR: Tensor,
        sin_PR: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor | None,
    ) -> "Sequences":
        """`positions_BS` count within documents; `documents_BS` None: one document a sequence."""
        windows = {spec.attention.window_of(layer) for layer in range(spec.num_layers)}
        masks, firsts = (
            {window: make(documents_BS, positions_BS.shape[1], window, positions_BS.device) for window in windows}
            for make in (attention_mask, first_keys)
        )
        whole = {key: None if x is None else x.expand(positions_BS.shape).contiguous() for key, x in firsts.items()}
        return Sequences(parallel, cos_PR[positions_BS], sin_PR[positions_BS], masks, whole)

    @property
    def projected_rotations(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions that this rank projects."""
        own = slice(*self.parallel.gathered)
        return self.cos_BSR[:, own], self.sin_BSR[:, own]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them: not a layer's own."""
        of_windows = (*self.masks.values(), *self.first_keys.values())
        return [self.cos_BSR, self.sin_BSR, *(each for each in of_windows if each is not None)]
