"""Decode of all candidates: the largest batch under memory and promise, then instances for the rate.

1. Throughput does not fall with the batch (every cost grows at most in proportion to it), so the largest batch that
   keeps the promised time per token is the best one. It is found for all candidates at once: by interpolation between
   a batch that keeps it and one that does not, now and then in the middle.
2. With a rate, requests in flight are Poisson with mean rate * output * TPOT (Little); instances are added until the
   promise's percentile of that fits into their batches. Without one, as many instances run as fit.
3. Above the median the promise holds for the percentile's context (`planner.worker_times.decode_context`).

Rejected: a queue in front of decode. Prefill's is the one that requests wait in; decode admits or the plan has too few
instances, which is what step 2 decides.
"""

import numpy as np

from antiphon.cost.parts import FloatArray
from antiphon.planner.candidates import Candidates, IntArray
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import step_times
from antiphon.planner.table import RATE, TPOT, Outcome

FEW = 1000
"""Candidates up to which several batches are tried at once."""


def decode_outcome(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """`limits`: batch by memory, at least 1; `instances`: how many fit, at least 1."""
    pinned = setting.limits.pins.batch is not None
    batch = limits if pinned else largest_batch(setting, candidates, limits)
    return outcome_at(setting, candidates.with_batch(np.maximum(batch, 1)), instances)


def outcome_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    """What the candidates do at their own batch."""
    times = step_times(setting, candidates)
    in_flight = candidates.instance_batch.astype(np.float64)
    tpot_s = times.step_s / setting.workload.tokens_per_step
    capacity = in_flight / tpot_s
    workload, lengths = setting.workload, setting.lengths
    target_s = workload.slo.tpot_s
    too_slow = tpot_s > (np.inf if target_s is None else target_s)
    if workload.max_batch is not None:  # of the whole system
        instances = np.clip(workload.max_batch // candidates.instance_batch, 1, instances)
    if workload.requests_per_s is None:
        used = instances
        too_few = np.zeros(len(candidates), dtype=bool)
        tokens_per_s = capacity * used
    else:
        tokens = workload.requests_per_s * lengths.output
        each = _mean_in_flight(in_flight, lengths.tail_z) / tpot_s
        used = np.clip(np.ceil(tokens / each * (1 - 1e-12)), 1, 2.0**40).astype(np.int64)
        too_few = used > instances
        used = np.minimum(used, instances)
        tokens_per_s = np.where(too_few, each * used, tokens)
    nothing = np.full(len(candidates), np.nan)
    return Outcome(
        batch=candidates.batch.copy(),
        num_instances=used,
        step_s=times.step_s,
        t_a_s=times.t_a_s,
        t_e_s=times.t_e_s,
        t_c_s=times.t_c_s,
        tpot_s=tpot_s,
        ttft_s=nothing,
        queueing_s=nothing.copy(),
        capacity=capacity,
        tokens_per_s=tokens_per_s,
        why_not=np.where(too_slow, TPOT, np.where(too_few, RATE, 0)).astype(np.int64),
    )


def _mean_in_flight(places: FloatArray, tail_z: float) -> FloatArray:
    """The mean N of a Poisson number whose tail N + z sqrt(N) still fits into `places`."""
    root = (-tail_z + np.sqrt(tail_z**2 + 4 * places)) / 2
    return np.asarray(root**2)


def largest_batch(setting: Setting, candidates: Candidates, limits: IntArray) -> IntArray:
    """The largest whole batch of at most `limits` whose step keeps the promised time per token; 0 where even 1 does
    not."""
    target_s = setting.workload.slo.tpot_s
    if target_s is None:
        return limits.copy()
    target_s = target_s * setting.workload.tokens_per_step  # of a step
    result = np.zeros(len(candidates), dtype=np.int64)
    at_limit_s = step_times(setting, candidates.with_batch(limits)).step_s
    result[at_limit_s <= target_s] = limits[at_limit_s <= target_s]
    open_index = np.flatnonzero((at_limit_s > target_s) & (limits > 1))
    rest = candidates.take(open_index)
    at_one_s = step_times(setting, rest.with_batch(np.ones(len(rest), dtype=np.int64))).step_s
    possible = at_one_s <= target_s
    open_index, rest = open_index[possible], rest.take(possible)
    low, low_s = np.ones(len(rest), dtype=np.int64), at_one_s[possible]
    high, high_s = limits[open_index], at_limit_s[open_index]
    turn = 0
    while len(rest):
        result[open_index] = low
        going = high - low > 1
        open_index, rest, low, low_s = open_index[going], rest.take(going), low[going], low_s[going]
        high, high_s = high[going], high_s[going]
        if not len(rest):
            break
        guesses = _guesses(low, low_s, high, high_s, target_s, turn)
        each = np.repeat(np.arange(len(rest)), len(guesses))
        tried = rest.take(each).with_batch(guesses.T.reshape(-1))
        guesses_s = step_times(setting, tried).step_s.reshape(len(rest), -1).T
        for guess, guess_s in zip(guesses, guesses_s, strict=True):
            rises, falls = (guess_s <= target_s) & (guess > low), (guess_s > target_s) & (guess < high)
            low, low_s = np.where(rises, guess, low), np.where(rises, guess_s, low_s)
            high, high_s = np.where(falls, guess, high), np.where(falls, guess_s, high_s)
        turn += 1
    return result


def _guesses(
    low: IntArray, low_s: FloatArray, high: IntArray, high_s: FloatArray, target_s: float, turn: int
) -> IntArray:
    """[guesses, candidates] batches strictly between. Of many candidates one: where a straight line meets the target
    or, every third turn, the middle. Of few, for which a call costs more than its work, several at once."""
    share = (target_s - low_s) / np.maximum(high_s - low_s, 1e-15)
    line, middle = (low + share * (high - low)).astype(np.int64), (low + high) // 2
    if low.size > FEW:
        guesses = [middle if turn % 3 == 2 else line]
    else:
        guesses = [line - 1, line, line + 1, line + 2, middle, (low + middle) // 2, (middle + high) // 2]
    return np.clip(np.stack(guesses), low + 1, high - 1)
