"""Waiting before service, and what a user sees: MixServe eq. 7, 9 and 11, with M/G/1 beside M/M/1.

1. M/M/1, as the paper: W_q = rho / (mu (1 - rho)).
2. M/G/1 (Pollaczek-Khinchine): W_q = lambda E[S^2] / (2 (1 - rho)). Equal to 1 for exponential service, half of it for
   constant service, more for spread lengths.
3. At rho >= 1 the queue grows without end: every wait is infinite.

Rejected: clipping rho below 1. A plan that cannot keep up would then look slow instead of impossible.
"""

import numpy as np
from numpy.typing import NDArray

from antiphon.cost.parts import Number


def mm1_wait(arrivals_per_s: Number, service_per_s: Number) -> Number:
    """Mean wait before service, MixServe eq. 7; infinite at or above saturation."""
    rho = np.asarray(arrivals_per_s / service_per_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(rho < 1, rho / (service_per_s * (1 - rho)), np.inf)
    return _plain(wait)


def mg1_wait(arrivals_per_s: Number, mean_s: Number, mean_square_s2: Number) -> Number:
    """Mean wait before a service whose time has that mean and mean square; infinite at or above saturation."""
    rho = np.asarray(arrivals_per_s * mean_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(rho < 1, arrivals_per_s * mean_square_s2 / (2 * (1 - rho)), np.inf)
    return _plain(wait)


def ttft(wait_s: Number, prefill_s: Number) -> Number:
    """MixServe eq. 9: wait, then service of the whole prompt."""
    return wait_s + prefill_s


def throughput(
    input_tokens: Number, output_tokens: Number, wait_s: Number, prefill_s: Number, decode_s: Number
) -> Number:
    """MixServe eq. 11: tokens per second of one request, prompt and output counted. 0 where the wait is infinite.

    It is one request's rate; times the number of requests served side by side it is the system's."""
    return (input_tokens + output_tokens) / (wait_s + prefill_s + output_tokens * decode_s)


def _plain(values: NDArray[np.float64]) -> Number:
    return values if values.ndim else float(values)
