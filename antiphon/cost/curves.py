"""Measured times by size: points, and how a time is read off between and beyond them.

1. `Curve`: (size, seconds) points. `Surface`: a grid of them over two sizes.
2. Between points: linear. Below the first: its value (a fixed cost does not shrink). Beyond the last: straight on,
   with the slope from the middle point to the last, for the last two are often within noise of each other.
3. More work is never faster: a point below one of smaller size is raised to it before anything is read off.

Rejected: splines, or polynomials of size. They fit better and swing between the points, even to negative times.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.roofline import FloatArray, Number
from antiphon.specs.checked import Flag, NotNegative, is_number


@dataclass(frozen=True)
class Curve:
    """`seconds[i]` is the time at size `sizes[i]`; sizes ascend. `may_fall`: not of growing work but a ratio, or the
    time of a part of it: points stay as they are, and beyond the last one its value holds."""

    sizes: tuple[NotNegative, ...]
    seconds: tuple[NotNegative, ...]
    may_fall: Flag = False

    def __post_init__(self) -> None:
        _check_sizes("sizes", self.sizes)
        if len(self.seconds) != len(self.sizes):
            raise UserError(f"{len(self.sizes)} sizes but {len(self.seconds)} times: give one time per size")
        _check_seconds(self.seconds)

    def at(self, size: Number) -> Number:
        """Seconds at any size; 0 at size 0."""
        sizes, seconds = self._points
        size = np.minimum(size, sizes[-1]) if self.may_fall else size
        value = _along(np.asarray(sizes), seconds.reshape(-1, *([1] * np.ndim(size))), np.asarray(size, np.float64))
        result: Number = np.where(np.asarray(size) > 0, value, 0.0)
        return result

    def value(self, size: float) -> float:
        """`at` for one size, as a plain number."""
        return float(self.at(size))

    @functools.cached_property
    def _points(self) -> tuple[FloatArray, FloatArray]:
        seconds = np.asarray(self.seconds, np.float64)
        return np.asarray(self.sizes, np.float64), seconds if self.may_fall else np.maximum.accumulate(seconds)


@dataclass(frozen=True)
class Surface:
    """`seconds[i][j]` is the time at `first[i]` and `second[j]`; both ascend."""

    first: tuple[NotNegative, ...]
    second: tuple[NotNegative, ...]
    seconds: tuple[tuple[NotNegative, ...], ...]

    def __post_init__(self) -> None:
        _check_sizes("first sizes", self.first)
        _check_sizes("second sizes", self.second)
        if len(self.seconds) != len(self.first) or any(len(row) != len(self.second) for row in self.seconds):
            raise UserError(
                f"a grid of {len(self.first)} x {len(self.second)} sizes, but times of shape "
                f"{[len(row) for row in self.seconds]}: give one row per first size, one time in it per second size"
            )
        for row in self.seconds:
            _check_seconds(row)

    def at(self, first: Number, second: Number) -> Number:
        """Seconds at any pair of sizes, linear in each; 0 where either is 0."""
        one, two = np.broadcast_arrays(np.asarray(first, np.float64), np.asarray(second, np.float64))
        grid = self._grid.reshape(len(self.first), len(self.second), *([1] * one.ndim))
        rows = np.stack([_along(np.asarray(self.second, np.float64), row, two) for row in grid])
        value = _along(np.asarray(self.first, np.float64), rows, one)
        result: Number = np.where((one > 0) & (two > 0), value, 0.0)
        return result

    @functools.cached_property
    def _grid(self) -> FloatArray:
        grid = np.asarray(self.seconds, np.float64)
        return np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)


def _along(sizes: FloatArray, values: FloatArray, at: FloatArray) -> FloatArray:
    """Interpolation along the first axis of `values` [sizes, ...], which broadcasts with `at` [...]."""
    values = np.broadcast_to(values, (sizes.size, *at.shape))
    if sizes.size == 1:
        return np.array(values[0])
    left = np.clip(np.searchsorted(sizes, at, side="right") - 1, 0, sizes.size - 2)
    low, high = (np.take_along_axis(values, index[None], axis=0)[0] for index in (left, left + 1))
    inside = low + (high - low) * (np.clip(at, sizes[0], sizes[-1]) - sizes[left]) / (sizes[left + 1] - sizes[left])
    middle = (sizes.size - 1) // 2
    slope = (values[-1] - values[middle]) / (sizes[-1] - sizes[middle])
    result: FloatArray = inside + np.maximum(at - sizes[-1], 0.0) * slope
    return result


def _check_sizes(what: str, sizes: Sequence[float]) -> None:
    if not sizes:
        raise UserError(f"{what} are empty: give at least one measured point")
    if not all(is_number(size) and size >= 0 for size in sizes):
        raise UserError(f"{what} are {list(sizes)}: each must be a number of at least 0")
    if any(after <= before for before, after in itertools.pairwise(sizes)):
        raise UserError(f"{what} are {list(sizes)}: they must ascend")


def _check_seconds(seconds: Sequence[float]) -> None:
    if not all(is_number(time) and time >= 0 for time in seconds):
        raise UserError(f"times are {list(seconds)}: each must be a number of seconds, at least 0")
