"""Sums over the ranks of a group for tensors of any device: a group's collectives take those in host memory."""

from torch import Tensor

from antiphon.comm.rank_group import RankGroup


def add_over_ranks(ranks: RankGroup, part: Tensor) -> Tensor:
    """The sum of all ranks' parts, the same bits on each. In host memory `part` itself is overwritten and returned."""
    if ranks.size == 1:
        return part
    total = part.cpu().contiguous()
    ranks.all_reduce(total)
    return total.to(part.device)
