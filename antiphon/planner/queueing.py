"""Queues of requests that come at random: waits before a service, places that hold a fluctuating number, instances.

Requests come as a Poisson process. One server with general service times (M/G/1) for what is computed in turn; a
Poisson number in flight (Little) for what is decoded side by side. Rejected: clipping utilization at 1. A plan that
cannot keep up would look slow, not impossible.
"""

import numpy as np

from antiphon.cost.parts import FloatArray, Number
from antiphon.planner.candidates import BoolArray, IntArray
from antiphon.planner.setting import Setting


def instances_for(rate: float, each: FloatArray, most: IntArray) -> tuple[IntArray, BoolArray]:
    """Whole instances that together take `rate`, at most `most`; and where more would be needed."""
    needed = np.clip(np.ceil(rate / each * (1 - 1e-12)), 1, 2.0**40).astype(np.int64)
    return np.minimum(needed, most), needed > most


def used_instances(setting: Setting, rate: float, each: FloatArray, most: IntArray) -> tuple[IntArray, BoolArray]:
    """As `instances_for`; all that fit where the plan is for the least time."""
    used, too_few = instances_for(rate, each, most)
    return (most, too_few) if setting.wants_latency else (used, too_few)


def place_wait_s(places: FloatArray, load: FloatArray, held_s: FloatArray) -> FloatArray:
    """Mean wait for one of `places` that are taken for `held_s` each, at `load` (of all of them): M/M/c by Sakasegawa's
    approximation (1977), exact for one place; infinite at or above saturation."""
    rho = np.asarray(load, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = rho ** np.sqrt(2 * (places + 1)) / rho * held_s / (places * (1 - rho))
    return np.where(rho <= 0, 0.0, np.where(rho < 1, wait, np.inf))


def mean_in_flight(places: FloatArray, tail_z: float) -> FloatArray:
    """The mean N of a Poisson number whose tail N + z sqrt(N) still fits into `places`."""
    root = (-tail_z + np.sqrt(tail_z**2 + 4 * places)) / 2
    return np.asarray(root**2)


def mg1_wait(arrivals_per_s: Number, mean_s: Number, mean_square_s2: Number) -> FloatArray:
    """Mean wait before a service whose time has that mean and mean square (Pollaczek-Khinchine): infinite at
    or above saturation."""
    rho = np.asarray(arrivals_per_s * mean_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(rho < 1, arrivals_per_s * mean_square_s2 / (2 * (1 - rho)), np.inf)
    return np.asarray(wait)


def tail_of_wait_s(setting: Setting, wait_s: FloatArray, utilization: FloatArray) -> FloatArray:
    """The promise's percentile of the wait, at least the mean: P(W > t) = rho exp(-rho t / mean)."""
    percentile = setting.lengths.percentile
    if percentile <= 0.5:
        return wait_s
    rho = np.clip(utilization, 1e-9, 1.0)
    tail = wait_s / rho * np.log(np.maximum(rho / (1 - percentile), 1.0))
    return np.asarray(np.maximum(wait_s, tail))
