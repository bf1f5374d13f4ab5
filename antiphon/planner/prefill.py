"""Prefill of all candidates: tokens of a pass, waiting before it, time to the first token, instances for the rate.

1. A pass takes `batch` tokens per attention worker and micro-batch; a prompt longer than that needs several passes.
2. A prompt waits for prompts before it (M/G/1, service in proportion to length) and for the pass that is running.
3. Time to first token: wait + passes + transfer of the KV cache to the decode pool. Above the median, of the
   percentile's prompt, and of the wait's tail, exponential as in heavy traffic.
4. Without a rate: the largest utilization at which the promise holds, all that fits without a promise.
5. Longer passes have more throughput and wait longer. Without a promise the longest that fits is taken; with one,
   passes of 1 to 48 mean prompts are tried, on a grid that does not depend on memory: more of it is never worse.

Rejected: bisection over tokens as in decode. The time to the first token falls, then rises with the tokens of a pass.
"""

import math

import numpy as np

from antiphon.cost.memory import kv_bytes_per_token
from antiphon.cost.parts import FloatArray
from antiphon.cost.queueing import mg1_wait
from antiphon.planner.candidates import BoolArray, Candidates, IntArray
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepTimes, step_times
from antiphon.planner.table import RATE, TTFT, Outcome

PROMPTS_PER_PASS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_BISECTIONS = 40


def prefill_outcome(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """`limits`: tokens per worker and micro-batch by memory, at least 1; `instances`: how many fit, at least 1."""
    if setting.workload.slo.ttft_s is None or setting.limits.pins.batch is not None:
        return outcome_at(setting, candidates.with_batch(limits), instances)
    first = _tokens(setting, limits, PROMPTS_PER_PASS[0])
    best = outcome_at(setting, candidates.with_batch(first), instances)
    open_index = np.arange(len(candidates))
    for num_prompts in PROMPTS_PER_PASS[1:]:
        tokens = _tokens(setting, limits[open_index], num_prompts)
        more = tokens < limits[open_index]
        open_index, tokens = open_index[more], tokens[more]
        if not open_index.size:
            break
        tried = outcome_at(setting, candidates.take(open_index).with_batch(tokens), instances[open_index])
        better = _is_better(tried, best.take(open_index))
        best.put(open_index[better], tried.take(better))
        # passes that hold the whole prompt and are too late stay too late when they get longer
        open_index = open_index[(tried.why_not != TTFT) | (tokens < setting.new_tokens(setting.lengths.tail_prompt))]
    return best


def _tokens(setting: Setting, limits: IntArray, num_prompts: float) -> IntArray:
    return np.minimum(limits, math.ceil(num_prompts * setting.new_tokens(setting.lengths.prompt)))


def _is_better(tried: Outcome, best: Outcome) -> BoolArray:
    """Feasible before not; of two feasible ones fewer instances for a rate, more tokens without; else sooner."""
    value = tried.tokens_per_s / tried.num_instances > best.tokens_per_s / best.num_instances * (1 + 1e-12)
    sooner = tried.ttft_s < best.ttft_s
    both, neither = (tried.why_not == 0) & (best.why_not == 0), (tried.why_not > 0) & (best.why_not > 0)
    return np.asarray(np.where(both, value, np.where(neither, sooner, tried.why_not == 0)))


def outcome_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    """What the candidates do at their own batch."""
    times, lengths, workload = step_times(setting, candidates), setting.lengths, setting.workload
    tokens = candidates.instance_batch.astype(np.float64)
    capacity = tokens / times.step_s / (1 - workload.prefix_hit)  # cached tokens of prompts count as done
    passes = np.maximum(setting.new_tokens(lengths.tail_prompt) / candidates.batch, 1.0)
    service_s = passes * times.step_s + transfer_s(setting, candidates)
    rho = most_utilization(setting, times, capacity, service_s)
    rate = workload.requests_per_s
    if rate is None:
        used, utilization = instances, rho
        too_few = np.zeros(len(candidates), dtype=bool)
        tokens_per_s = capacity * used * rho
    else:
        prompt_rate = rate * lengths.prompt
        needed = np.ceil(prompt_rate / np.maximum(capacity * rho, 1e-12) * (1 - 1e-12))
        used = np.clip(needed, 1, 2.0**40).astype(np.int64)
        too_few = used > instances
        used = np.minimum(used, instances)
        utilization = prompt_rate / (capacity * used)
        tokens_per_s = np.where(too_few, capacity * used * rho, prompt_rate)
    offline = rate is None and workload.slo.ttft_s is None
    wait_s = np.zeros(len(candidates)) if offline else mean_wait_s(setting, times, capacity, utilization)
    ttft_s = service_s + tail_of_wait_s(setting, wait_s, utilization)
    target_s = math.inf if workload.slo.ttft_s is None else workload.slo.ttft_s
    too_late = (service_s > target_s) | (rho <= 0)
    return Outcome(
        batch=candidates.batch.copy(),
        num_instances=used,
        step_s=times.step_s,
        t_a_s=times.t_a_s,
        t_e_s=times.t_e_s,
        t_c_s=times.t_c_s,
        tpot_s=np.full(len(candidates), np.nan),
        ttft_s=np.where(too_late, service_s, ttft_s),
        queueing_s=np.full(len(candidates), np.nan) if offline else wait_s,
        capacity=capacity,
        tokens_per_s=np.where(too_late, capacity * used, tokens_per_s),
        why_not=np.where(too_late, TTFT, np.where(too_few, RATE, 0)).astype(np.int64),
    )


def transfer_s(setting: Setting, candidates: Candidates) -> FloatArray:
    """A prompt's KV cache from the devices of a prefill worker to the decode pool, over their NICs."""
    if not setting.transfers_kv:
        return np.zeros(len(candidates))
    per_token = float(kv_bytes_per_token(setting.model, 1, setting.precision))
    rates = np.array([float(net.scale_out.bytes_per_s) for net in setting.networks])
    slowest = np.minimum(rates[candidates.attention_kind], rates.min())  # the decode pool may be of any kind
    latency_s = setting.cluster.scale_out_latency_s
    return np.asarray(latency_s + setting.lengths.tail_prompt * per_token / (candidates.attention_tp * slowest))


def mean_wait_s(setting: Setting, times: StepTimes, capacity: FloatArray, utilization: FloatArray) -> FloatArray:
    """M/G/1 over prompts, and the rest of the pass that is running; infinite at full utilization."""
    lengths = setting.lengths
    prompt_s = lengths.prompt / capacity
    mean_square = prompt_s**2 * (1 + lengths.prompt_cv**2)
    queue_s = np.asarray(mg1_wait(utilization / prompt_s, prompt_s, mean_square))
    return np.asarray(queue_s + np.minimum(utilization, 1.0) * times.step_s / 2)


def tail_of_wait_s(setting: Setting, wait_s: FloatArray, utilization: FloatArray) -> FloatArray:
    """The promise's percentile of the wait, at least the mean: P(W > t) = rho exp(-rho t / mean)."""
    percentile = setting.lengths.percentile
    if percentile <= 0.5:
        return wait_s
    rho = np.clip(utilization, 1e-9, 1.0)
    tail = wait_s / rho * np.log(np.maximum(rho / (1 - percentile), 1.0))
    return np.asarray(np.maximum(wait_s, tail))


def most_utilization(setting: Setting, times: StepTimes, capacity: FloatArray, service_s: FloatArray) -> FloatArray:
    """The largest share of its capacity at which an instance keeps the promise; 0: at none. Without a promise all of
    it, or, where requests arrive at random, just below."""
    target_s = setting.workload.slo.ttft_s
    if target_s is None:
        return np.full(len(service_s), 1.0 if setting.workload.requests_per_s is None else 1.0 - 1e-6)
    low, high = np.zeros(len(service_s)), np.ones(len(service_s))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        wait_s = tail_of_wait_s(setting, mean_wait_s(setting, times, capacity, middle), middle)
        keeps = service_s + wait_s <= target_s
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    return np.asarray(np.where(service_s <= target_s, low, 0.0))
