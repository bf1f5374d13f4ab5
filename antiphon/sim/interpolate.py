"""Cost functions as tables: evaluated once on a grid, then read by straight interpolation in about a microsecond.

Costs are sums of products of sizes and of maxima of such, so between two sizes a quarter apart a straight line is off
by less than the cost model itself. Beyond the last size the last slope goes on, below the first the first value holds.
Rejected: calling the vectorised functions for every step. One call takes as long as a hundred table reads.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def sizes_up_to(largest: float, ratio: float = 1.2) -> Floats:
    """Ascending sizes from 1 to at least `largest`: whole numbers first, then `ratio` apart."""
    sizes = [1.0]
    while sizes[-1] < largest:
        sizes.append(max(sizes[-1] + 1.0, np.floor(sizes[-1] * ratio)))
    return np.asarray(sizes)


class Line:
    """A function of one size."""

    def __init__(self, sizes: Floats, values: Floats) -> None:
        self._sizes = [float(size) for size in sizes]
        self._values = [float(value) for value in np.broadcast_to(values, np.shape(sizes))]
        assert len(self._sizes) > 1
        self._last = len(self._sizes) - 2

    def __call__(self, size: float) -> float:
        sizes, values = self._sizes, self._values
        if size <= sizes[0]:
            return values[0]
        low = min(bisect_right(sizes, size) - 1, self._last)
        share = (size - sizes[low]) / (sizes[low + 1] - sizes[low])
        return values[low] + share * (values[low + 1] - values[low])


class Plane:
    """A function of two sizes, `values[i, j]` at (first[i], second[j]); exact for products of the two."""

    def __init__(self, first: Floats, second: Floats, values: Floats) -> None:
        self._first = [float(size) for size in first]
        self._rows = [Line(second, row) for row in np.broadcast_to(values, (len(first), len(second)))]
        assert len(self._first) > 1
        self._last = len(self._first) - 2

    def __call__(self, one: float, two: float) -> float:
        first = self._first
        if one <= first[0]:
            return self._rows[0](two)
        low = min(bisect_right(first, one) - 1, self._last)
        share = (one - first[low]) / (first[low + 1] - first[low])
        below, above = self._rows[low](two), self._rows[low + 1](two)
        return below + share * (above - below)


def line(sizes: Floats, function: Callable[[Floats], object]) -> Line:
    """`function` of an array of sizes as a table."""
    return Line(sizes, np.asarray(function(sizes), dtype=np.float64))


def plane(first: Floats, second: Floats, function: Callable[[Floats, Floats], object]) -> Plane:
    """`function` of two arrays of sizes, broadcast against each other, as a table."""
    one, two = np.meshgrid(first, second, indexing="ij")
    return Plane(first, second, np.asarray(function(one, two), dtype=np.float64))
