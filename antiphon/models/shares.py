"""Which part of a model one of several ranks works on: tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3).

    q, k, v       rows that belong to the rank's heads        out    the matching columns: a sum over ranks is the whole
    gate, up      rows: some of the feed-forward's width      down   the matching columns
    embedding, head: rows, some of the vocabulary             everything else: whole, on every rank

What the ranks computed of a row is added up by `add_over_ranks`; over slow links by `sum_of_blocks`: a block of rows is
summed while the next one is multiplied (MegaScale-Infer, section 6, has that inside one kernel on GPUs).

Ranks get whole groups of query heads with their KV head as long as there are enough KV heads. With more ranks than KV
heads the query heads are split evenly and a KV head is held by every rank whose queries see it. Latent attention splits
heads; its one cached row a token is on every rank. Sizes that do not divide are split as evenly as they can be.

Training splits the same parameters by the same heads (`train/weights`), which is why `head_ranges` is here.
Rejected: padding heads or widths to a multiple. Padding is computed and read in every step.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.base.split_evenly import split_evenly
from antiphon.comm.rank_group import RankGroup
from antiphon.specs.model import AttentionSpec, ModelSpec

Range = tuple[int, int]
Ranges = tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What rank `rank` of `num_ranks` works on: query heads; KV heads in its own order (one may occur twice, so that
    each serves equally many query heads); rows of the vocabulary."""

    rank: int
    num_ranks: int
    q_heads: Range
    kv_heads: tuple[int, ...]
    vocabulary: Range

    @property
    def is_whole(self) -> bool:
        return self.num_ranks == 1

    @property
    def leads(self) -> bool:
        """Whether this rank adds what must be added once: biases behind a sum, the experts' part."""
        return self.rank == 0

    def columns(self, width: int) -> Range:
        """The rank's part of a feed-forward of this width."""
        return split_evenly(width, self.num_ranks)[self.rank]

    def counted_kv_heads(self, group: int) -> tuple[int, ...]:
        """Places of `kv_heads` that no other rank counts, where `group` query heads see one KV head: for sums over all
        KV heads."""
        first, last = self.q_heads
        own = [head for head in dict.fromkeys(self.kv_heads) if first <= head * group < last]
        return tuple(self.kv_heads.index(head) for head in own)

    def local_spec(self, spec: ModelSpec) -> ModelSpec:
        """The model as this rank sees it: its heads, its widths. The vocabulary stays what token ids refer to."""
        if self.is_whole:
            return spec
        widths = spec.feed_forward

        def part(width: int) -> int:
            first, last = self.columns(width)
            return last - first

        heads = self.q_heads[1] - self.q_heads[0]
        return replace(
            spec,
            attention=replace(spec.attention, num_heads=heads, num_kv_heads=len(self.kv_heads)),
            feed_forward=replace(
                widths,
                intermediate=part(widths.intermediate),
                shared_intermediate=part(widths.shared_intermediate),
                dense_intermediate=part(widths.dense_intermediate),
            ),
        )


def share_of(spec: ModelSpec, rank: int = 0, num_ranks: int = 1) -> Share:
    """The share of one rank; `check_ranks` says beforehand whether there is one for each."""
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    attention = spec.attention
    group = 1 if attention.latent is not None else attention.num_heads // attention.num_kv_heads
    if attention.num_heads // group >= num_ranks:  # enough KV heads for all ranks
        first, last = split_evenly(attention.num_heads // group, num_ranks)[rank]
        q_heads = first * group, last * group
    else:
        q_heads = split_evenly(attention.num_heads, num_ranks)[rank]
    kv_heads = tuple(range(q_heads[0], q_heads[1])) if attention.latent is not None else _kv_heads(q_heads, group)
    return Share(
        rank=rank,
        num_ranks=num_ranks,
        q_heads=q_heads,
        kv_heads=kv_heads,
        vocabulary=split_evenly(spec.vocab_size, num_ranks)[rank],
    )


def _kv_heads(q_heads: Range, group: int) -> tuple[int, ...]:
    """The KV heads that these query heads see, each as often as it takes to serve equally many of them."""
    seen = [head // group for head in range(*q_heads)]
    runs = [(head, len(list(run))) for head, run in itertools.groupby(seen)]
    served = math.gcd(*(length for _, length in runs))
    return tuple(head for head, length in runs for _ in range(length // served))


def check_ranks(spec: ModelSpec, option: str, num_ranks: int, *, attention: bool, experts: bool) -> None:
    """`UserError` naming `option` unless every rank gets a part of the attention half, or of the experts."""
    widths = spec.feed_forward
    sizes: list[tuple[str, int]] = []
    if attention:
        sizes += [("attention heads", spec.attention.num_heads), ("tokens in its vocabulary", spec.vocab_size)]
        sizes += [("columns in its shared expert", widths.shared_intermediate)] if widths.shared_intermediate else []
        sizes += [("columns in its dense layers", widths.dense_intermediate)] if not all(spec.moe_layers) else []
    if experts:
        sizes.append(("columns in an expert", widths.intermediate))
    for what, size in sizes:
        if num_ranks > size:
            raise UserError(f"{option} is {num_ranks}: the model has {size} {what}, so it must be at most {size}")


def pick(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """These ranges of a dimension, put together; `x` itself if they are all of it."""
    if ranges == ((0, x.shape[dim]),):
        return x
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def head_ranges(attention: AttentionSpec, purpose: str, q_heads: Range, kv_heads: Ranges) -> tuple[int, Ranges] | None:
    """(dimension, ranges) of the parameter `purpose` that belong to these heads; None for what belongs to all heads."""

    def times(heads: Range, width: int, offset: int = 0) -> Range:
        return offset + heads[0] * width, offset + heads[1] * width

    def each(heads: Ranges, width: int, offset: int = 0) -> Ranges:
        return tuple(times(head, width, offset) for head in heads)

    num_q, num_kv, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    latent = attention.latent
    if latent is not None:
        up = latent.qk_nope_head_dim + latent.v_head_dim
        direct = num_q * width
        by_purpose: dict[str, tuple[int, Ranges]] = {
            "q_up": (0, (times(q_heads, width),)),
            "kv_up": (0, (times(q_heads, up),)),
            "out": (1, (times(q_heads, latent.v_head_dim),)),
        }
        if latent.q_lora_rank is None:
            by_purpose["down"] = (0, (times(q_heads, width), (direct, direct + latent.key_dim)))
        return by_purpose.get(purpose)
    keys = each(kv_heads, width, num_q * width)
    values = each(kv_heads, width, (num_q + num_kv) * width)
    fused = (0, (times(q_heads, width), *keys, *values))
    by_purpose = {
        "qkv": fused,
        "qkv_bias": fused,
        "out": (1, (times(q_heads, width),)),
        "sinks": (0, (q_heads,)),
    }
    if attention.qk_norm == "full":
        by_purpose["q_norm"] = (0, (times(q_heads, width),))
        by_purpose["k_norm"] = (0, each(kv_heads, width))
    return by_purpose.get(purpose)


def add_over_ranks(ranks: RankGroup, part: Tensor) -> Tensor:
    """The sum of all ranks' parts, the same bits on each. `part` itself may be overwritten and returned."""
    if ranks.size == 1:
        return part
    total = (part if ranks.takes(part.device) else part.cpu()).contiguous()
    ranks.all_reduce(total)
    return total.to(part.device)


def sum_of_blocks(ranks: RankGroup, num_rows: int, make: Callable[[int, int], Tensor]) -> Tensor:
    """As `add_over_ranks(ranks, make(0, num_rows))`, where `make(first, last)` computes this rank's part of some rows.

    Where the ranks want blocks, one is summed while the next one is made. A row's bits do not depend on the rows that
    are multiplied with it, so they are the same. Raises as the ranks' collectives do, when no sum is under way."""
    blocks = ranks.row_blocks(num_rows)
    if len(blocks) == 1:
        return add_over_ranks(ranks, make(0, num_rows))
    sums = []
    try:
        for first, last in blocks:
            made = make(first, last)
            sums.append(made.cpu().contiguous())
            ranks.begin_sum(sums[-1])
    finally:
        ranks.finish_sums()
    return torch.cat(sums).to(made.device)
