"""What candidates do in a phase, all at once: the best batch of each, instances for the rate, times and tokens/s.

Decode: the largest batch under memory and promise, then instances for the rate.

1. Throughput does not fall with the batch (every cost grows at most in proportion to it), so the largest batch that
   keeps the promised time per token is the best one. It is found for all candidates at once: by interpolation between
   a batch that keeps it and one that does not (regula falsi, Illinois), now and then in the middle.
2. With a rate, requests in flight are Poisson with mean rate * output * TPOT (Little); instances are added until the
   promise's percentile of that fits into their batches. Without one, as many instances run as fit.
3. Above the median the promise holds for the percentile's context (`planner.worker_times.decode_context`).

4. What then still waits for a place, because chance sends more, waits in front of decode (M/M/c).

Rejected: instances by the mean number in flight. Then half of all requests would wait there.

Serve: as decode, with the time per token of steps that compute prompts, too (`planner.mixed_steps`); instances are
added until first tokens are in time as well.

Prefill: tokens of a pass, waiting before it, time to the first token, instances for the rate.

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
from collections.abc import Callable

import numpy as np

from antiphon.cost.memory import kv_bytes_per_token
from antiphon.cost.roofline import FloatArray
from antiphon.planner.candidate_table import RATE, TPOT, TTFT, Outcome
from antiphon.planner.candidates import BoolArray, Candidates, IntArray
from antiphon.planner.mixed_steps import (
    MixedStep,
    first_token_s,
    mg1_wait,
    mixed_step,
    own_s,
    tail_of_wait_s,
)
from antiphon.planner.room import fed_sequences
from antiphon.planner.setting import STEP_TOKENS, Setting
from antiphon.planner.step_times import StepTimes, step_times

MOST_FED = 0.98
"""The most of a step's room for prompts that they may take on average."""
NEAR = 64
"""Where steps compute prompts, too, a batch is found to this part of it: its time is a mean, no sharper than that."""
FEW = 1000
"""Candidates up to which several batches are tried at once."""
PROMPTS_PER_PASS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_BISECTIONS = 40


def best_outcome(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """What the candidates do at the best batch for the setting's phase. `limits`: of the batch of a worker and
    micro-batch by memory, at least 1; `instances`: how many fit, at least 1."""
    if setting.phase == "serve":
        return _best_of_serve(setting, candidates, limits, instances)
    if setting.limits.pins.batch is not None:
        return outcome_at(setting, candidates.having(batch=limits), instances)
    if setting.phase == "prefill":
        return _best_of_prefill(setting, candidates, limits, instances)
    batch = np.maximum(largest_batch(setting, candidates, limits), 1)
    return outcome_at(setting, candidates.having(batch=batch), instances)


def outcome_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    """What the candidates do at their own batch, in the setting's phase."""
    evaluate = {"decode": _decode_at, "prefill": _prefill_at, "serve": _serve_at}[setting.phase]
    return evaluate(setting, candidates, instances)


def _decode_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    times = step_times(setting, candidates)
    in_flight = candidates.instance_batch.astype(np.float64)
    tpot_s = times.step_s / setting.workload.tokens_per_step
    capacity = in_flight / tpot_s
    workload, lengths = setting.workload, setting.lengths
    target_s = workload.slo.tpot_s
    too_slow = tpot_s > (np.inf if target_s is None else target_s)
    instances = _instances_in_flight(setting, candidates, instances)
    if workload.requests_per_s is None:
        used = instances
        too_few = np.zeros(len(candidates), dtype=bool)
        tokens_per_s = capacity * used
    else:
        tokens = workload.requests_per_s * lengths.output
        each = mean_in_flight(in_flight, lengths.tail_z) / tpot_s
        used, too_few = used_instances(setting, tokens, each, instances)
        tokens_per_s = np.where(too_few, each * used, tokens)
    with np.errstate(invalid="ignore"):  # nan where nothing can be run
        load = tokens_per_s / (capacity * used)
    wait_s = place_wait_s(in_flight, load, lengths.output * tpot_s)
    known = {} if workload.requests_per_s is None else {"queueing_s": wait_s}
    why_not = np.where(too_slow, TPOT, np.where(too_few, RATE, 0))
    return _outcome(candidates, times, used, capacity, tokens_per_s, why_not, tpot_s=tpot_s, **known)


def _outcome(
    candidates: Candidates,
    times: StepTimes,
    instances: IntArray,
    capacity: FloatArray,
    tokens_per_s: FloatArray,
    why_not: IntArray,
    **known: FloatArray,
) -> Outcome:
    """`known`: those of the times per token, to the first one and in queues that the phase knows."""
    nothing = {name: np.full(len(candidates), np.nan) for name in ("tpot_s", "ttft_s", "queueing_s")}
    return Outcome(
        batch=candidates.batch.copy(),
        num_instances=instances,
        step_s=times.step_s,
        t_a_s=times.t_a_s,
        t_e_s=times.t_e_s,
        t_c_s=times.t_c_s,
        capacity=capacity,
        tokens_per_s=tokens_per_s,
        why_not=why_not.astype(np.int64),
        step_tokens=candidates.step_tokens,
        **nothing | known,
    )


def used_instances(setting: Setting, rate: float, each: FloatArray, most: IntArray) -> tuple[IntArray, BoolArray]:
    """Whole instances that together take `rate`, at most `most`, and where more would be needed; all that fit where the
    plan is for the least time."""
    needed = np.clip(np.ceil(rate / each * (1 - 1e-12)), 1, 2.0**40).astype(np.int64)
    return most if setting.wants_latency else np.minimum(needed, most), needed > most


def mean_in_flight(places: FloatArray, tail_z: float) -> FloatArray:
    """The mean N of a Poisson number whose tail N + z sqrt(N) still fits into `places`."""
    root = (-tail_z + np.sqrt(tail_z**2 + 4 * places)) / 2
    return np.asarray(root**2)


def place_wait_s(places: FloatArray, load: FloatArray, held_s: FloatArray) -> FloatArray:
    """Mean wait for one of `places` that are taken for `held_s` each, at `load` (of all of them): M/M/c by Sakasegawa's
    approximation (1977), exact for one place; infinite at or above saturation."""
    rho = np.asarray(load, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = rho ** np.sqrt(2 * (places + 1)) / rho * held_s / (places * (1 - rho))
    return np.where(rho <= 0, 0.0, np.where(rho < 1, wait, np.inf))


def _instances_in_flight(setting: Setting, candidates: Candidates, instances: IntArray) -> IntArray:
    """As many of `instances` as the workload's requests in flight, which are of the whole system, fill; all that are
    fixed."""
    if setting.workload.max_batch is None or setting.limits.num_instances is not None:
        return instances
    filled, rest = np.divmod(setting.workload.max_batch, candidates.instance_batch)
    return np.asarray(np.clip(filled + (rest > 0) if setting.holds_all else filled, 1, instances))


def largest_batch(setting: Setting, candidates: Candidates, limits: IntArray) -> IntArray:
    """The largest whole batch of at most `limits` whose step keeps the promised time per token; 0 where even 1 does
    not."""
    target_s = setting.workload.slo.tpot_s
    if target_s is None:
        return limits.copy()
    target_s = target_s * setting.workload.tokens_per_step  # of a step
    result = np.zeros(len(candidates), dtype=np.int64)
    at_limit_s = _token_step_s(setting, candidates.having(batch=limits))
    result[at_limit_s <= target_s] = limits[at_limit_s <= target_s]
    open_index = np.flatnonzero((at_limit_s > target_s) & (limits > 1))
    rest = candidates.take(open_index)
    at_one_s = _token_step_s(setting, rest.having(batch=np.ones(len(rest), dtype=np.int64)))
    possible = at_one_s <= target_s
    open_index, rest = open_index[possible], rest.take(possible)
    low, below = np.ones(len(rest), dtype=np.int64), target_s - at_one_s[possible]
    high, above = limits[open_index], at_limit_s[open_index] - target_s
    stays = np.zeros(len(rest), dtype=np.int8)  # which end the last turn left where it was: -1 low, 1 high
    turn = 0
    while len(rest):
        result[open_index] = low
        going = high - low > (1 if setting.phase != "serve" else np.maximum(low // NEAR, 1))
        open_index, rest, stays = open_index[going], rest.take(going), stays[going]
        low, below, high, above = low[going], below[going], high[going], above[going]
        if not len(rest):
            break
        guesses = _guesses(low, below, high, above, turn)
        each = np.repeat(np.arange(len(rest)), len(guesses))
        tried = rest.take(each).having(batch=guesses.T.reshape(-1))
        guesses_s = _token_step_s(setting, tried).reshape(len(rest), -1).T
        before = stays
        for guess, guess_s in zip(guesses, guesses_s, strict=True):
            rises, falls = (guess_s <= target_s) & (guess > low), (guess_s > target_s) & (guess < high)
            low, below = np.where(rises, guess, low), np.where(rises, target_s - guess_s, below)
            high, above = np.where(falls, guess, high), np.where(falls, guess_s - target_s, above)
            stays = np.where(rises, 1, np.where(falls, -1, stays)).astype(np.int8)
        # an end that stays twice is taken for nearer than it is, so that the line's next guess is beyond the target
        above = np.where((stays == 1) & (before == 1), above / 2, above)
        below = np.where((stays == -1) & (before == -1), below / 2, below)
        turn += 1
    return result


def _token_step_s(setting: Setting, candidates: Candidates) -> FloatArray:
    """The step that a token takes at the promise's percentile."""
    if setting.phase != "serve":
        return step_times(setting, candidates).step_s
    step = mixed_step(setting, candidates)
    return step.times.step_s * step.late


def _guesses(low: IntArray, below: FloatArray, high: IntArray, above: FloatArray, turn: int) -> IntArray:
    """[guesses, candidates] batches strictly between. `below`, `above`: by how much both miss the target. Of many
    candidates one: where a straight line meets the target or, every fourth turn, the middle. Of few, for which a call
    costs more than its work, several at once."""
    share = below / np.maximum(below + above, 1e-15)
    line, middle = (low + share * (high - low)).astype(np.int64), (low + high) // 2
    if low.size > FEW:
        guesses = [middle if turn % 4 == 3 else line]
    else:
        guesses = [line - 1, line, line + 1, line + 2, middle, (low + middle) // 2, (middle + high) // 2]
    return np.clip(np.stack(guesses), low + 1, high - 1)


def _best_of_serve(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """At the best limit of a step's rows and the largest batch under it that keeps the promises. A longer step is tried
    where a short one holds the batch down, or breaks a promise."""
    short, long = STEP_TOKENS
    most = fed_limits(setting, candidates, limits, short)
    best = _with_step_of(setting, candidates, short, most, instances)
    open_index = np.flatnonzero((best.batch >= most) & (most < limits) | (best.why_not == TTFT))
    if open_index.size:
        rest = candidates.take(open_index)
        most = fed_limits(setting, rest, limits[open_index], long)
        found = _with_step_of(setting, rest, long, most, instances[open_index])
        better = _is_better(found, best.take(open_index))
        best.put(open_index[better], found.take(better))
    return best


def fed_limits(setting: Setting, candidates: Candidates, limits: IntArray, tokens: int) -> IntArray:
    """`limits`, and what steps of `tokens` rows feed with prompts; a pinned batch stays."""
    if setting.limits.pins.batch:
        return limits
    return np.minimum(limits, fed_sequences(setting, candidates, tokens).astype(np.int64))


def _with_step_of(
    setting: Setting, candidates: Candidates, tokens: int, limits: IntArray, instances: IntArray
) -> Outcome:
    """With steps of up to `tokens` rows of a worker, one more than it decodes at least."""
    most = np.maximum(limits, 1)
    tried = candidates.having(step_tokens=np.maximum(tokens, most * candidates.micro_batches + 1))
    if not setting.limits.pins.batch:
        most = np.maximum(largest_batch(setting, tried, most), 1)
    return _soon_enough(setting, tried.having(batch=most), instances)


def _soon_enough(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    """At the candidates' batch; at a part of it where only that delivers first tokens in time."""
    best = _serve_at(setting, candidates, instances)
    for part in () if setting.limits.pins.batch else (2, 8, 32):
        late = np.flatnonzero(best.why_not == TTFT)
        if not late.size:
            break
        less = candidates.take(late)
        found = _serve_at(setting, less.having(batch=np.maximum(less.batch // part, 1)), instances[late])
        better = _is_better(found, best.take(late))
        best.put(late[better], found.take(better))
    return best


def _serve_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    step, lengths, workload = mixed_step(setting, candidates), setting.lengths, setting.workload
    in_flight = candidates.instance_batch.astype(np.float64)
    mean_s = step.times.step_s / workload.tokens_per_step
    tpot_s, slo = mean_s * step.late, workload.slo
    capacity = in_flight / mean_s
    instances = _instances_in_flight(setting, candidates, instances)
    # a request holds its place before its first token, too
    decoding = lengths.output * mean_s / (lengths.output * mean_s + own_s(setting, step))
    places = mean_in_flight(in_flight, lengths.tail_z) / in_flight if workload.is_online else np.ones(len(candidates))
    most = np.minimum(places * decoding, MOST_FED / np.maximum(step.fed, 1e-12))
    load, too_late = _most_load(setting, step, most)
    rate = workload.requests_per_s
    each = np.maximum(capacity * load, 1e-12)
    used, too_few = instances, np.zeros(len(candidates), dtype=bool)
    tokens_per_s: FloatArray = each * used
    if rate is not None:
        used, too_few = used_instances(setting, rate * lengths.output, each, instances)
        tokens_per_s = np.where(too_few, each * used, rate * lengths.output)
    wait_s, first_s = first_token_s(setting, step, tokens_per_s / (capacity * used))
    too_slow = tpot_s > (math.inf if slo.tpot_s is None else slo.tpot_s)
    why_not = np.where(too_slow, TPOT, np.where(too_late, TTFT, np.where(too_few, RATE, 0)))
    first_s = np.where(too_late, own_s(setting, step), first_s)
    known = {"tpot_s": tpot_s, "ttft_s": first_s, "queueing_s": wait_s}
    return _outcome(candidates, step.times, used, capacity, tokens_per_s, why_not, **known)


def _most_load(setting: Setting, step: MixedStep, most: FloatArray) -> tuple[FloatArray, BoolArray]:
    """The largest part, up to `most`, of what a full batch brings at which first tokens are in time, and where there is
    none."""
    target_s = setting.workload.slo.ttft_s
    if target_s is None:
        return most, np.zeros(most.size, dtype=bool)

    def keeps(load: FloatArray) -> BoolArray:
        return np.asarray(first_token_s(setting, step, load)[1] <= target_s)

    low = _largest_part(keeps, most, _BISECTIONS // 2)
    return low, np.asarray(low <= 0)


def _largest_part(keeps: Callable[[FloatArray], BoolArray], most: FloatArray, num_rounds: int) -> FloatArray:
    """By candidate the largest part of `most` that keeps a promise; 0 where none does."""
    low, high = np.zeros(most.size), most
    for _ in range(num_rounds):
        middle = (low + high) / 2
        kept = keeps(middle)
        low, high = np.where(kept, middle, low), np.where(kept, high, middle)
    return low


def _best_of_prefill(setting: Setting, candidates: Candidates, limits: IntArray, instances: IntArray) -> Outcome:
    """At the best length of a pass."""
    if setting.workload.slo.ttft_s is None:
        return _prefill_at(setting, candidates.having(batch=limits), instances)
    first = _tokens(setting, limits, PROMPTS_PER_PASS[0])
    best = _prefill_at(setting, candidates.having(batch=first), instances)
    open_index = np.arange(len(candidates))
    for num_prompts in PROMPTS_PER_PASS[1:]:
        tokens = _tokens(setting, limits[open_index], num_prompts)
        more = tokens < limits[open_index]
        open_index, tokens = open_index[more], tokens[more]
        if not open_index.size:
            break
        tried = _prefill_at(setting, candidates.take(open_index).having(batch=tokens), instances[open_index])
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


def _prefill_at(setting: Setting, candidates: Candidates, instances: IntArray) -> Outcome:
    lengths, workload = setting.lengths, setting.workload
    # a pass is limited in rows that see nothing; with a queue that never ends it is taken as it is
    row_cost = setting.prompt_row_cost if setting.workload.is_online else 1.0
    full = candidates.having(batch=np.maximum((candidates.batch / row_cost).astype(np.int64), 1))
    times, tokens = step_times(setting, full), full.instance_batch.astype(np.float64)
    capacity = tokens / times.step_s / (1 - workload.prefix_hit)  # cached tokens of prompts count as done
    passes = np.maximum(setting.new_tokens(lengths.tail_prompt) / full.batch, 1.0)
    service_s = passes * times.step_s + transfer_s(setting, candidates)
    rho = most_utilization(setting, times, capacity, service_s)
    rate = workload.requests_per_s
    if rate is None:
        used, utilization = instances, rho
        too_few = np.zeros(len(candidates), dtype=bool)
        tokens_per_s = capacity * used * rho
    else:
        prompt_rate = rate * lengths.prompt
        used, too_few = used_instances(setting, prompt_rate, np.maximum(capacity * rho, 1e-12), instances)
        utilization = prompt_rate / (capacity * used)
        tokens_per_s = np.where(too_few, capacity * used * rho, prompt_rate)
    offline = rate is None and (workload.slo.ttft_s is None or setting.wants_latency)
    wait_s = np.zeros(len(candidates)) if offline else mean_wait_s(setting, times, capacity, utilization)
    ttft_s = service_s + tail_of_wait_s(setting, wait_s, utilization)
    target_s = math.inf if workload.slo.ttft_s is None else workload.slo.ttft_s
    too_late = (service_s > target_s) | (rho <= 0)
    known = {"ttft_s": np.where(too_late, service_s, ttft_s)} | ({} if offline else {"queueing_s": wait_s})
    tokens_per_s = np.where(too_late, capacity * used, tokens_per_s)
    why_not = np.where(too_late, TTFT, np.where(too_few, RATE, 0))
    return _outcome(candidates, times, used, capacity, tokens_per_s, why_not, **known)


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
    queue_s = mg1_wait(utilization / prompt_s, prompt_s, mean_square)
    return np.asarray(queue_s + np.minimum(utilization, 1.0) * times.step_s / 2)


def most_utilization(setting: Setting, times: StepTimes, capacity: FloatArray, service_s: FloatArray) -> FloatArray:
    """The largest share of its capacity at which an instance keeps the promise; 0: at none. Without a promise all of
    it, or, where requests arrive at random, just below."""
    target_s = setting.workload.slo.ttft_s
    if target_s is None:
        return np.full(len(service_s), 1.0 if setting.workload.requests_per_s is None else 1.0 - 1e-6)

    def keeps(share: FloatArray) -> BoolArray:
        wait_s = tail_of_wait_s(setting, mean_wait_s(setting, times, capacity, share), share)
        return np.asarray(service_s + wait_s <= target_s)

    low = _largest_part(keeps, np.ones(len(service_s)), _BISECTIONS)
    return np.asarray(np.where(service_s <= target_s, low, 0.0))
