"""The steps of servers that decode and compute prompts on the same devices, and the times that their requests see.

1. In steady state every decoding sequence brings `prompt / output` tokens of prompts into a step. They come as prompts:
   some steps have none, in others one attention worker has a piece and all the others wait for it. So a mean step is a
   mean of two: one without, and one with as many pieces as those steps have (Poisson).
2. A request's time per token is a mean over its steps. Above the median it is that of short outputs, which meet more or
   fewer prompts than the mean by chance (compound Poisson).
3. A prompt waits for the step that runs and for prompts before it on its worker, which share a step's rows with it
   (M/G/1 in tokens); then it takes its own pieces, each beside all that decode.

Rejected: the time of a step with the mean number of tokens of prompts. Where memory bounds a step, they look free.

Rejected: clipping the utilization of a queue at 1. A plan that cannot keep up would look slow, not impossible.
"""

from dataclasses import dataclass, fields

import numpy as np

from antiphon.cost.roofline import FloatArray, Number
from antiphon.cost.skew import expected_max_rows
from antiphon.planner.candidates import Candidates, real
from antiphon.planner.room import prompt_tokens_each
from antiphon.planner.setting import Setting
from antiphon.planner.step_times import StepTimes, step_times


@dataclass(frozen=True, kw_only=True)
class MixedStep:
    """Columns at a full batch. `times`: of the mean step. `plain_s`: of a step without prompts. `token_s`: what one
    more token of a prompt on one worker adds to a step. `room`: tokens of prompts that fit into a worker's step, `fed`:
    the share of it that is used. `late`: time per token at the promise's percentile over the mean one."""

    times: StepTimes
    plain_s: FloatArray
    token_s: FloatArray
    room: FloatArray
    fed: FloatArray
    late: FloatArray


def mixed_step(setting: Setting, candidates: Candidates) -> MixedStep:
    """Candidates are at their batch and `step_tokens`."""
    share, mixed = with_prompts(setting, candidates)
    plain, full = step_times(setting, candidates), step_times(setting, mixed)
    mean = StepTimes(
        **{
            column.name: getattr(plain, column.name)
            + share * (getattr(full, column.name) - getattr(plain, column.name))
            for column in fields(StepTimes)
        }
    )
    m, lengths = real(candidates.micro_batches), setting.lengths
    sequences = real(candidates.batch) * m
    room = _room(setting, candidates)
    added_s = np.maximum(full.step_s - plain.step_s, 0.0)
    token_s = added_s / np.maximum(mixed.longest_chunk * m, 1.0)
    new = setting.new_tokens(lengths.prompt)
    of_prompts = sequences * prompt_tokens_each(setting)
    # prompts that come to an instance while a short output is decoded, each of which takes a part of its time
    prompts_per_step = of_prompts / new * candidates.attention_dp
    each_s = share * added_s / np.maximum(prompts_per_step, 1e-12)
    met = np.maximum(prompts_per_step * lengths.short_output / setting.workload.tokens_per_step, 1e-12)
    deviation = each_s * np.sqrt((1 + lengths.prompt_cv**2) * prompts_per_step * prompts_per_step / met)
    return MixedStep(
        times=mean,
        plain_s=plain.step_s,
        token_s=token_s,
        room=room,
        fed=of_prompts / room,
        late=1 + lengths.tail_z * deviation / mean.step_s,
    )


def _room(setting: Setting, candidates: Candidates) -> FloatArray:
    """Tokens of prompts that fit into a step of one worker beside what decodes."""
    rows = real(candidates.batch * candidates.micro_batches) * setting.workload.rows_per_step
    return np.asarray(np.maximum((candidates.step_tokens - rows) / setting.prompt_row_cost, 1.0))


def with_prompts(setting: Setting, candidates: Candidates) -> tuple[FloatArray, Candidates]:
    """The share of steps in which an instance computes prompts, and the candidates with such a step's tokens."""
    workers, m = real(candidates.attention_dp), real(candidates.micro_batches)
    room, prompt = _room(setting, candidates), setting.new_tokens(setting.lengths.prompt_by_token)
    of_prompts = real(candidates.batch) * m * prompt_tokens_each(setting)
    piece = np.minimum(prompt, room)
    pieces = np.maximum(workers * of_prompts / piece, 1e-9)
    share = -np.expm1(-pieces)
    together = pieces / share  # of a step that has any
    most = np.where(workers > 1, np.maximum(np.asarray(expected_max_rows(together, workers)), 1.0), together)
    longest = np.minimum(piece * most, room)
    mean = np.minimum(together * piece / workers, longest)
    return share, candidates.having(
        chunk=np.ceil(mean / m).astype(np.int64), longest_chunk=np.ceil(longest / m).astype(np.int64)
    )


def first_token_s(setting: Setting, step: MixedStep, load: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Waiting, and the time to the first token at the promise's percentile, at `load` (of what a full batch brings)."""
    lengths = setting.lengths
    prompt_s = setting.new_tokens(lengths.prompt) * (step.plain_s / step.room + step.token_s)
    mean_square = prompt_s**2 * (1 + lengths.prompt_cv**2)
    fed = np.minimum(load * step.fed, 1.0)
    wait_s = mg1_wait(fed / prompt_s, prompt_s, mean_square) + step.times.step_s / 2
    late_s = tail_of_wait_s(setting, wait_s, fed)
    return wait_s, late_s + own_s(setting, step)


def own_s(setting: Setting, step: MixedStep) -> FloatArray:
    """The steps of one prompt, that of the promise's percentile."""
    tail = setting.new_tokens(setting.lengths.tail_prompt)
    return np.asarray(np.maximum(tail / step.room, 1.0) * step.plain_s + tail * step.token_s)


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
