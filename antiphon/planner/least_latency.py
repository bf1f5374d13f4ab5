"""What candidates do where the least time counts, on all of the cluster: to the first token, or between two tokens.

1. The load is given: a rate, or the workload's requests in flight (`max_batch`; one where it states none).
2. At a rate all instances that fit share it, and the smallest batch that still takes it is the fastest: a step only
   gets longer with its batch, and a larger one takes more. It is found by bisection, for many candidates at once:
   of each layout from the fastest with a batch of 1 downwards, until none that is left can be faster.
3. Requests in flight are shared out over as many instances as have one each. Prefill computes their prompts in one
   pass (MixServe eq. 9 without a queue).
4. The time to the first token may rise or fall with the batch of a server (its step gets longer, its queue shorter),
   and with the length of a pass: several are tried.

Rejected: the largest batch that keeps a target, with the target lowered until none does. It asks for dozens of
searches, and passes of prefill stay as long as memory allows: 5 s to the first token where 0.2 s can be had.
"""

import math
from dataclasses import replace

import numpy as np

from antiphon.planner.candidate_table import RATE, Outcome
from antiphon.planner.candidates import BoolArray, Candidates, IntArray
from antiphon.planner.outcome import PROMPTS_PER_PASS, fed_limits, outcome_at
from antiphon.planner.setting import STEP_TOKENS, Setting

BLOCK = 512
"""Candidates of a layout that are looked at together."""
NEAR = 64
"""A batch is found to this part of it."""
LARGER = (1.5, 2.0, 4.0)
"""Batches of a server that are tried beside the smallest, as multiples of it."""


def least_latency(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """As `outcome.best_outcome`, by the phase's latency. `limits`: of the batch of a worker and micro-batch, at least
    1."""
    if setting.limits.pins.batch is not None:
        return outcome_at(setting, _with_step(candidates, STEP_TOKENS[0], setting).having(batch=limits), instances)
    if setting.workload.requests_per_s is None:
        return _in_flight(setting, candidates, limits, instances)
    if setting.phase == "prefill":
        return _best_pass(setting, candidates, limits, instances)
    if setting.phase == "decode":
        return _fastest_first(setting, candidates, limits, instances)
    best, longer = (_served(setting, candidates, limits, instances, tokens) for tokens in STEP_TOKENS)
    _keep_better(setting, best, longer)
    return best


def _with_step(candidates: Candidates, tokens: int, setting: Setting) -> Candidates:
    if setting.phase != "serve":
        return candidates
    return candidates.having(step_tokens=np.full(len(candidates), tokens, dtype=np.int64))


def _latency(setting: Setting, outcome: Outcome) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return outcome.ttft_s if setting.objective == "ttft" else outcome.tpot_s


def _keep_better(setting: Setting, best: Outcome, tried: Outcome) -> None:
    """Overwrite where `tried` is feasible before not, or sooner."""
    sooner = _latency(setting, tried) < _latency(setting, best)
    better = np.where((tried.why_not == 0) == (best.why_not == 0), sooner, tried.why_not == 0)
    best.put(better, tried.take(better))


def _in_flight(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """With a number of requests at once, shared out evenly."""
    wanted = setting.workload.max_batch or 1
    places = candidates.micro_batches * candidates.attention_dp
    used = np.clip(-(-wanted // places), 1, instances)
    each = -(-wanted // (used * places))
    if setting.phase == "prefill":
        prompt = setting.new_tokens(setting.lengths.prompt)
        tokens = np.ceil(each * prompt * setting.prompt_row_cost).astype(np.int64)
        found = outcome_at(setting, candidates.having(batch=np.minimum(tokens, limits)), used)
        too_many = tokens * used * places > limits * used * places + math.ceil(prompt) * places
    else:
        batch = np.minimum(each, limits)
        one = _with_step(candidates, STEP_TOKENS[0], setting)
        if setting.phase == "serve":
            one = one.having(step_tokens=np.maximum(one.step_tokens, batch * candidates.micro_batches + 1))
        found = outcome_at(setting, one.having(batch=batch), used)
        too_many = batch * used * places < wanted
    return replace(found, why_not=np.where((found.why_not == 0) & too_many, RATE, found.why_not))


def _best_pass(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """Passes of several lengths; the one after which the first token comes soonest."""
    prompt = setting.new_tokens(setting.lengths.prompt) * setting.prompt_row_cost
    best: Outcome | None = None
    for num_prompts in PROMPTS_PER_PASS:
        tokens = np.minimum(limits, math.ceil(num_prompts * prompt))
        tried = outcome_at(setting, candidates.having(batch=tokens), instances)
        if best is None:
            best = tried
        else:
            _keep_better(setting, best, tried)
    assert best is not None
    return best


def _fastest_first(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """Decode at its smallest batch, of those candidates that may be the fastest of their layout; else at 1."""
    best = outcome_at(setting, candidates.having(batch=np.ones(len(candidates), dtype=np.int64)), instances)
    at_one_s = best.tpot_s.copy()
    for code in np.unique(candidates.layout):
        order = np.flatnonzero(candidates.layout == code)
        order = order[np.argsort(at_one_s[order], kind="stable")]
        found_s = math.inf
        for start in range(0, order.size, BLOCK):
            index = order[start : start + BLOCK]
            if at_one_s[index[0]] >= found_s:
                break
            block = candidates.take(index)
            batch = _smallest(setting, block, limits[index], instances[index])
            outcome = outcome_at(setting, block.having(batch=batch), instances[index])
            best.put(index, outcome)
            found_s = min(found_s, float(np.min(outcome.tpot_s, where=outcome.why_not == 0, initial=math.inf)))
    return best


def _served(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray, tokens: int) -> Outcome:
    """Servers with steps of up to `tokens` rows."""
    candidates = _with_step(candidates, tokens, setting)
    limits = np.maximum(fed_limits(setting, candidates, limits, tokens), 1)
    least = _smallest(setting, candidates, limits, instances)
    best = outcome_at(setting, candidates.having(batch=least), instances)
    if setting.objective == "ttft":
        for factor in LARGER:
            batch = np.minimum(np.ceil(least * factor).astype(np.int64), limits)
            _keep_better(setting, best, outcome_at(setting, candidates.having(batch=batch), instances))
    return best


def _smallest(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> IntArray:
    """The smallest batch with which all instances take the rate; `limits` where none does."""

    def takes_it(chosen: Candidates, batch: IntArray, used: IntArray) -> BoolArray:
        return np.asarray(outcome_at(setting, chosen.having(batch=batch), used).why_not != RATE)

    result = limits.copy()
    low, high = np.zeros(len(candidates), dtype=np.int64), limits.copy()
    index = np.flatnonzero(takes_it(candidates, limits, instances))
    while index.size:
        middle = np.maximum((low[index] + high[index]) // 2, 1)
        enough = takes_it(candidates.take(index), middle, instances[index])
        high[index[enough]] = middle[enough]
        low[index[~enough]] = middle[~enough]
        result[index] = high[index]
        index = index[high[index] - low[index] > np.maximum(high[index] // NEAR, 1)]
    return result
