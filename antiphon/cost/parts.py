"""A time in five parts, so that every estimate can say what bounds it.

1. Arithmetic, memory traffic, the two levels of the network and fixed costs are kept apart; `total_s` is their sum.
2. Of a kernel that both computes and moves bytes, the longer of the two is booked and the other is 0: they overlap.
3. Fields are floats or arrays; arrays hold one value per candidate and broadcast, so that a search needs no loop.

Rejected: one number and a label. A label cannot be added up over the kernels of a layer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Number = float | FloatArray
"""One value, or one per candidate."""

BOUND_NAMES = ("compute", "memory bandwidth", "scale-up network", "scale-out network", "fixed cost")


@dataclass(frozen=True)
class Parts:
    """Seconds spent on arithmetic, on memory traffic, on the two network levels, and whatever the size."""

    compute_s: Number = 0.0
    memory_s: Number = 0.0
    scale_up_s: Number = 0.0
    scale_out_s: Number = 0.0
    fixed_s: Number = 0.0

    __array_ufunc__ = None  # so that `array * parts` asks Parts, instead of making an array of objects

    @property
    def total_s(self) -> Number:
        return self.compute_s + self.memory_s + self.scale_up_s + self.scale_out_s + self.fixed_s

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def __mul__(self, factor: Number) -> "Parts":
        return Parts(*(value * factor for value in self._values()))

    __rmul__ = __mul__

    def at(self, index: int) -> "Parts":
        """The parts of one candidate; a field that is one value for all stays what it is."""
        values = np.broadcast_arrays(*self._values())
        return Parts(*(float(value.reshape(-1)[index]) for value in values))

    def bound_by(self) -> str:
        """Name of the largest part of one candidate, out of `BOUND_NAMES`."""
        names = self.bound_by_each()
        assert names.size == 1, "bound_by() is for one candidate: use bound_by_each()"
        return str(names.reshape(-1)[0])

    def bound_by_each(self) -> NDArray[np.str_]:
        """Name of the largest part of each candidate; of equal ones the first in the order of `BOUND_NAMES`."""
        largest = np.argmax(np.stack(np.broadcast_arrays(*self._values())), axis=0)
        names: NDArray[np.str_] = np.asarray(BOUND_NAMES)[largest]
        return names

    def _values(self) -> tuple[Number, ...]:
        return self.compute_s, self.memory_s, self.scale_up_s, self.scale_out_s, self.fixed_s


def select(condition: bool | NDArray[np.bool_], then: Parts, otherwise: Parts) -> Parts:
    """By candidate: `then` where the condition holds, else `otherwise`."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    pairs = zip(then._values(), otherwise._values(), strict=True)
    return Parts(
        *(mine if _are_one_value(mine, theirs) else np.where(condition, mine, theirs) for mine, theirs in pairs)
    )


def _are_one_value(mine: Number, theirs: Number) -> bool:
    """Most parts are 0 on both sides; arrays of them would take most of a search's time."""
    return isinstance(mine, float) and isinstance(theirs, float) and mine == theirs


def longest(first: Parts, second: Parts) -> Parts:
    """By candidate: whichever takes longer in total, with its own parts. For two things that run side by side."""
    return select(np.asarray(first.total_s >= second.total_s), first, second)
