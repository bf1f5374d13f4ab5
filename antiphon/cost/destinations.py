"""Where a row must go: expected numbers of workers, or nodes, that hold at least one of its experts.

1. All choices of experts are equally likely; experts are spread over workers in their order, as evenly as they divide.
2. With `num_groups` the gate first takes `top_k_groups` groups of neighbouring experts, all choices equally likely, and
   then the experts among them: fewer workers, and far fewer nodes.
3. The same formula counts nodes: a node is a worker that holds the experts of all its devices.

Rejected: top_k as the count. It is the limit for many workers; for a few it is too many by half.
"""

import math

import numpy as np

from antiphon.cost.parts import FloatArray, Number


def probability_of_none(num_experts: Number, top_k: Number, num_held: Number) -> Number:
    """C(E - held, k) / C(E, k): that none of a row's k experts is among `num_held` of E, all choices equally likely.

    `num_held` need not be whole: an expert with two equal replicas counts half on each."""
    experts, chosen, held = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (num_experts, top_k, num_held))
    )
    missed = np.ones(experts.shape)
    for draw in range(int(np.max(chosen, initial=0))):
        left = np.maximum(experts - draw, 1.0)
        missed = np.where(draw < chosen, missed * np.clip((left - held) / left, 0.0, 1.0), missed)
    result: Number = missed if missed.ndim else float(missed)
    return result


def expected_distinct(
    num_experts: Number, top_k: Number, num_workers: Number, *, num_groups: int = 1, top_k_groups: int = 1
) -> Number:
    """Expected number of expert workers that a row must be sent to, experts spread as evenly as they divide.

    N (1 - C(E - E/N, k) / C(E, k)) where N divides E; else E mod N workers hold one expert more. With replicas, E is
    still the number of experts: each worker serves E / N of them."""
    workers = np.asarray(num_workers, dtype=np.float64)
    held = np.floor(num_experts / workers)
    num_larger = num_experts - held * workers

    def touched(num_held: FloatArray) -> FloatArray:
        if top_k_groups >= num_groups:
            return 1 - np.asarray(probability_of_none(num_experts, top_k, num_held))
        return 1 - _none_of_groups(num_experts, top_k, num_held, num_groups, top_k_groups)

    result: Number = num_larger * touched(held + 1) + (workers - num_larger) * touched(held)
    return result


def _none_of_groups(
    num_experts: Number, top_k: Number, num_held: FloatArray, num_groups: int, top_k_groups: int
) -> FloatArray:
    """As `probability_of_none`, by how many of the groups that the held experts lie in are taken."""
    group_size = np.asarray(num_experts, dtype=np.float64) / num_groups
    spanned = np.clip(np.ceil(num_held / group_size), 1, num_groups).astype(np.int64)
    choices = math.comb(num_groups, top_k_groups)
    total = np.zeros(np.broadcast_shapes(spanned.shape, group_size.shape))
    for taken in range(top_k_groups + 1):
        ways = [
            math.comb(span, taken) * math.comb(num_groups - span, top_k_groups - taken) / choices
            for span in range(num_groups + 1)
        ]
        held = np.minimum(taken * num_held / spanned, top_k_groups * group_size)
        total = total + np.asarray(ways)[spanned] * probability_of_none(top_k_groups * group_size, top_k, held)
    return total
