"""How layers, heads, experts or rows are split over ranks: as evenly as whole numbers go."""

import itertools


def split_evenly(total: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous ranges [first, last) of `total` whose lengths differ by at most one, the longer first."""
    size, more = divmod(total, parts)
    starts = [index * size + min(index, more) for index in range(parts + 1)]
    return list(itertools.pairwise(starts))
