"""Unequal loads: popular experts, chance, and sequences of unequal length. What counts is the slowest worker.

1. Popularity: a Zipf law; `placement.place` sums shares over the experts of each worker.
2. Chance: even with equal shares, rows fall on workers at random; a step waits for the fullest. Expected maximum of
   normal variables with the multinomial's mean and variance.
   What no placement follows, because popularity changes with what is asked, adds to that variance.
3. Barrier: n attention workers with work of mean 1 and coefficient of variation cv finish, expected, at
   1 + cv * E[max of n standard normals].

E[max] is integrated from the normal distribution function, so it is exact for normals and monotone in n.

Rejected: the mean over workers, which is what no step ever takes; and sqrt(2 ln n), 40% too high at n = 10.
"""

import functools
import math

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.roofline import FloatArray, Number

_REACH = 9.0  # standard deviations; beyond them nothing counts in double precision


def zipf_shares(num_experts: int, exponent: float) -> FloatArray:
    """Shares of experts in order of popularity, proportional to rank^-exponent, adding up to 1. Exponent 0: equal."""
    if num_experts < 1:
        raise UserError(f"{num_experts} experts: there must be at least 1")
    if not exponent >= 0:
        raise UserError(f"the Zipf exponent is {exponent}: it must be at least 0")
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    shares: FloatArray = weights / weights.sum()
    return shares


def expected_max_normal(count: Number) -> Number:
    """Expected maximum of `count` independent standard normals: 0 for 1, 0.564 for 2, 1.539 for 10, 2.508 for 100."""
    counts = np.asarray(count, dtype=np.float64)
    different, where = np.unique(counts, return_inverse=True)
    values = np.array([_expected_max_normal(float(number)) for number in different])
    result: Number = values[where].reshape(counts.shape) if counts.ndim else float(values[0])
    return result


def expected_max_rows(rows: Number, num_workers: Number, varies: Number = 0.0) -> Number:
    """Expected rows of the fullest of `num_workers` workers when `rows` fall on them at random, with equal shares.
    `varies`: coefficient of variation of a worker's share itself, from step to step.

    Never below the mean, nor below one row (if there is one), nor above all rows."""
    share = 1 / np.asarray(num_workers, dtype=np.float64)
    mean = rows * share
    spread = np.sqrt((mean + (mean * varies) ** 2) * (1 - share)) * expected_max_normal(num_workers)
    result: Number = np.minimum(np.maximum(mean + spread, np.minimum(rows, 1.0)), rows)
    return result


def expected_max_rows_of(rows: Number, shares_of_workers: FloatArray) -> Number:
    """As `expected_max_rows` with unequal shares (last axis: workers, adding up to 1); other axes go with `rows`."""
    rows = np.asarray(rows, dtype=np.float64)[..., None]
    means = rows * shares_of_workers
    deviations = np.sqrt(np.maximum(means * (1 - np.asarray(shares_of_workers)), 1e-300))
    low = np.max(means, axis=-1, keepdims=True)
    high = np.max(means + _REACH * deviations, axis=-1, keepdims=True)
    steps = np.linspace(0.0, 1.0, 129)
    grid = low + (high - low) * steps
    below = np.prod(_normal_cdf((grid[..., None, :] - means[..., :, None]) / deviations[..., :, None]), axis=-2)
    # E[max] = low + integral of (1 - F) above low - integral of F below it; rows are never below 0.
    above = _integral(1 - below, 1 / 128) * (high - low)[..., 0]
    under_grid = low * steps
    under = np.prod(_normal_cdf((under_grid[..., None, :] - means[..., :, None]) / deviations[..., :, None]), axis=-2)
    result: Number = low[..., 0] + above - _integral(under, 1 / 128) * low[..., 0]
    bounded: Number = np.minimum(
        np.maximum(np.maximum(result, low[..., 0]), np.minimum(rows[..., 0], 1.0)), rows[..., 0]
    )
    return bounded


def fullest_part(tokens: Number, num_parts: Number, *, num_experts: int, top_k: int) -> tuple[Number, Number]:
    """How much more the fullest of `num_parts` equal parts of the experts has than the mean one, when each token takes
    `top_k` different experts and all are equally likely: its (token, expert) pairs, and its experts with any row.

    Exact mean, variance and covariance between parts, then the expected maximum as of normal variables. What one part
    has more the others have less, so the fullest of two is further off than of two that know nothing of each other."""
    parts = np.asarray(num_parts, dtype=np.float64)
    held, chosen = num_experts / parts, top_k / num_experts
    pairs = tokens * top_k / parts
    # one token's pairs in one part are hypergeometric; over all parts they add up to top_k
    variance = tokens * top_k / parts * (1 - 1 / parts) * (num_experts - top_k) / max(num_experts - 1, 1)
    spread = np.sqrt(np.maximum(variance * parts / np.maximum(parts - 1, 1), 0.0))
    missed = (1 - chosen) ** tokens
    both = (max((1 - chosen) * (1 - top_k / max(num_experts - 1, 1)), 0.0)) ** np.asarray(tokens, dtype=np.float64)
    touched = held * (1 - missed)
    apart = np.sqrt(np.maximum(held * (missed - both), 0.0))  # variance less the covariance of two parts
    most = np.asarray(expected_max_normal(parts))
    busiest: Number = np.minimum(1 + most * spread / pairs, parts)
    widest: Number = np.minimum(1 + most * apart / touched, held / touched)
    return busiest, np.maximum(widest, 1.0)


def barrier_factor(num_attention_workers: Number, cv: Number) -> Number:
    """Expected time of the slowest of n attention workers over the mean, when their work has coefficient of variation
    `cv` (of a worker's whole batch: that of one sequence over the square root of the batch)."""
    factor: Number = 1 + cv * np.asarray(expected_max_normal(num_attention_workers))
    return factor


def _integral(values: FloatArray, step: float) -> FloatArray:
    """Trapezoids along the last axis."""
    total: FloatArray = step * (values.sum(axis=-1) - (values[..., 0] + values[..., -1]) / 2)
    return total


@functools.cache
def _expected_max_normal(count: float) -> float:
    if count < 1:
        raise UserError(f"the maximum of {count} values: there must be at least 1")
    grid, cdf = _normal_table()
    positive, negative = grid >= 0, grid <= 0
    above = _integral(1 - cdf[positive] ** count, grid[1] - grid[0])
    below = _integral(cdf[negative] ** count, grid[1] - grid[0])
    return max(float(above - below), 0.0)


@functools.cache
def _normal_table() -> tuple[FloatArray, FloatArray]:
    grid = np.linspace(-_REACH, _REACH, 3601)
    return grid, np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in grid])


def _normal_cdf(values: FloatArray) -> FloatArray:
    grid, cdf = _normal_table()
    return np.interp(values, grid, cdf)
