"""MixServe's equations as printed, in units of the sizes they are given: eq. 1 to 7, 9 and 11.

What the planner computes with is `cost.network`, `cost.dispatch` and `planner.outcome`; the difference is rows of
`antiphon reproduce`. At rho >= 1 a queue grows without end: every wait is infinite. Rejected: clipping rho below 1.
"""

import numpy as np

from antiphon.cost.parts import Number


def eq1_reduce_scatter(size: Number, degree: Number) -> Number:
    """Eq. 1, also all-gather: proportional to size / degree (bytes of one round to one peer)."""
    return size / degree


def eq2_all_reduce(size: Number, degree: Number) -> Number:
    """Eq. 2 as printed: RS(size / d, d) + AG(size / d, d). It divides by d twice, where the counted bytes of one
    round are 2 size / d."""
    return 2 * eq1_reduce_scatter(size / degree, degree)


def eq3_all_to_all(size: Number, degree: Number) -> Number:
    """Eq. 3: proportional to (size / degree) (degree - 1), which is what a rank sends."""
    return size / degree * (degree - 1)


def eq4_compute(parameters: Number, tp: Number, ep: Number, dp: Number, batch: Number, width: Number) -> Number:
    """Eq. 4: proportional to Psi / (d_TP d_EP) * b / d_DP * s h; `width` is s h."""
    return parameters / (tp * ep) * batch / dp * width


def eq5_communicated(batch: Number, width: Number, top_k: Number, tp: Number, ep: Number, dp: Number) -> Number:
    """Eq. 5, with eq. 1-3 for the collectives: 2 AR + 2 A2A; of d_DP and d_EP the larger shares out the batch and the
    smaller is the degree."""
    exchanged = eq3_all_to_all(batch / np.maximum(dp, ep) * width * top_k, np.minimum(dp, ep))
    return 2 * eq2_all_reduce(batch / dp * width, tp) + 2 * exchanged


def eq6_service_s(
    num_layers: Number, compute_s: Number, communication_s: Number, pp: Number = 1, hop_s: Number = 0.0
) -> Number:
    """Eq. 6: l (tau + lambda) + (d_PP - 1) P2P."""
    return num_layers * (compute_s + communication_s) + (pp - 1) * hop_s


def mm1_wait(arrivals_per_s: Number, service_per_s: Number) -> Number:
    """Mean wait before service, MixServe eq. 7; infinite at or above saturation."""
    rho = np.asarray(arrivals_per_s / service_per_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(rho < 1, rho / (service_per_s * (1 - rho)), np.inf)
    result: Number = wait if wait.ndim else float(wait)
    return result


def ttft(wait_s: Number, prefill_s: Number) -> Number:
    """MixServe eq. 9: wait, then service of the whole prompt."""
    return wait_s + prefill_s


def throughput(
    input_tokens: Number, output_tokens: Number, wait_s: Number, prefill_s: Number, decode_s: Number
) -> Number:
    """MixServe eq. 11: tokens per second of one request, prompt and output counted. 0 where the wait is infinite.

    It is one request's rate; times the number of requests served side by side it is the system's."""
    return (input_tokens + output_tokens) / (wait_s + prefill_s + output_tokens * decode_s)
