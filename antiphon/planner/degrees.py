"""Which degrees are worth a try: of tensor parallelism, of experts over workers, of devices in a pipeline stage.

Rejected: powers of two only. Nodes of 7 devices and 3 nodes exist.
"""

import numpy as np

from antiphon.planner.candidates import IntArray

MANY_DOMAINS = 64


def degrees_up_to(limit: int) -> IntArray:
    """TP degrees to try: all up to 8 that divide or are powers of two, all where the limit is odd or not such a
    power."""
    powers = {2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit}
    divisors = {degree for degree in range(1, limit + 1) if limit % degree == 0}
    everything = set(range(1, limit + 1)) if limit <= 16 and limit not in powers else set()
    return np.array(sorted(powers | divisors | everything), dtype=np.int64)


def fewest_for_each_share(total: int) -> IntArray:
    """The smallest n for each value of ceil(total / n): more workers than that hold just as much."""
    return np.array(sorted({-(-total // held) for held in range(1, total + 1)}), dtype=np.int64)


def stage_sizes(num_devices: int, width: int, num_experts: int) -> list[int]:
    """Devices of a pipeline stage: any number inside a domain of `width`, then whole domains: all of them as far as
    `MANY_DOMAINS`, from there on powers of two and half of the next, up to one domain per expert."""
    most = num_devices // width
    domains = set(range(2, min(most, MANY_DOMAINS) + 1))
    steps = [start << power for power in range(64) for start in (2, 3) if start << power <= min(most, num_experts)]
    return [*range(1, min(width, num_devices) + 1), *(width * count for count in sorted(domains | set(steps)))]


def piece_of(stage_devices: int, domain: int) -> int:
    """Devices of a stage in one domain: all of them if they fit, else the most that divide the stage evenly."""
    return max(piece for piece in range(1, min(stage_devices, domain) + 1) if stage_devices % piece == 0)
