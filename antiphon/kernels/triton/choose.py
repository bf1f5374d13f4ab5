"""Which of several ways to compute the same thing is taken on this GPU: each is run once, compared and timed.

The first way is the one that is trusted. Another is taken if it gives the same numbers up to rounding and is quicker.
The choice is made for a kind of work, not for a batch, so rows do not change their bits with the batch they are in; it
is logged with all times. Rejected: a table of cards and libraries, which is old with the next release of either.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor
from triton.testing import do_bench

from antiphon.base.logging import get_logger

_log = get_logger("kernels")
TOLERANCE = 3e-2  # of the largest magnitude: two roundings to bfloat16

Way = Callable[[], Tensor]


class WayChoice:
    """Remembers what was chosen for each kind of work."""

    def __init__(self, device: torch.device) -> None:
        self._can_measure = device.type == "cuda"
        self._chosen: dict[Hashable, str] = {}

    def is_open(self, kind: Hashable) -> bool:
        """Whether nothing was chosen yet, and it can be measured now: not while a graph is recorded."""
        return kind not in self._chosen and self._can_measure and not torch.cuda.is_current_stream_capturing()

    def of(self, kind: Hashable, default: str) -> str:
        return self._chosen.get(kind, default)

    def choose(self, kind: Hashable, work: str, sizes: Sequence[Mapping[str, Way]]) -> str:
        """The quickest of the named ways for `kind`, measured at several sizes, by geometric mean; `work` says in the
        log what it is for."""
        names = list(sizes[0])
        times: dict[str, float] = {}
        notes: list[str] = []
        for name in names:
            try:
                time = _time_s(name, sizes)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                notes.append(f"{name} cannot ({str(error).splitlines()[0][:120]})")
                continue
            if time is None:
                notes.append(f"{name} gives other numbers than {names[0]}")
                continue
            times[name] = time
            notes.append(f"{name} {time * 1e6:.1f} us")
        best = min(times, key=lambda name: times[name], default=names[0])
        self._chosen[kind] = best
        _log.info("kernels: %s: %s; %s is taken", work, ", ".join(notes), best)
        return best


def _time_s(name: str, sizes: Sequence[Mapping[str, Way]]) -> float | None:
    """The geometric mean of the times; None if the way disagrees with the first."""
    product = 1.0
    for ways in sizes:
        expected, found = ways[next(iter(ways))]().float(), ways[name]().float()
        if not bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6)):
            return None
        product *= measure_s(ways[name])
    return float(product ** (1 / len(sizes)))


def measure_s(way: Way) -> float:
    """Seconds of one call on the current stream."""
    return float(do_bench(way, warmup=3, rep=10, return_mode="median")) / 1e3
