"""What the lengths of requests mean for a batch: moments of running sequences, percentiles, tails.

1. Of running sequences, not of requests: an output stays in the batch in proportion to its length, so its progress has
   mean E[X^2] / 2 E[X] and mean square E[X^3] / 3 E[X].
2. A batch's total context is close to normal; the spread of its mean falls with the square root of its size.
3. Percentiles above the median push context and prompt up by the normal (log-normal) quantile; at the median and below
   means are used, as the papers do.

Rejected: simulating arrivals for each candidate. The request-level simulator does that for the one plan that is chosen.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from antiphon.specs.workload import LengthSpec, WorkloadSpec


def mean_cube(lengths: LengthSpec) -> float:
    """E[X^3]."""
    if lengths.trace:
        return sum(float(length) ** 3 for length in lengths.trace) / len(lengths.trace)
    return float(lengths.median**3 * math.exp(4.5 * lengths.sigma**2))


def quantile(lengths: LengthSpec, percentile: float) -> float:
    """The length that the fraction `percentile` of requests does not exceed."""
    if lengths.trace:
        ordered = sorted(lengths.trace)
        return float(ordered[min(math.ceil(percentile * len(ordered)), len(ordered)) - 1])
    return float(lengths.median * math.exp(lengths.sigma * NormalDist().inv_cdf(percentile)))


@dataclass(frozen=True, kw_only=True)
class LengthFacts:
    """What planning needs of a workload's lengths, in tokens.

    `context`: behind a running sequence, on average (the new token included), `context_cv` its coefficient of
    variation among running sequences. `held_tokens`: what admission counts on for a sequence. `prompt`, `output`:
    means. `prompt_by_token`: mean prompt that a prompt *token* is part of, E[X^2] / E[X]. `prompt_cv`: of the prompts.
    `tail_prompt`: the prompt at the promise's percentile; the mean up to the median. `tail_z`: its normal quantile, 0
    up to the median. `percentile`: of the promise.
    """

    context: float
    context_cv: float
    held_tokens: float
    prompt: float
    output: float
    prompt_by_token: float
    prompt_cv: float
    tail_prompt: float
    tail_z: float
    percentile: float


def length_facts(workload: WorkloadSpec) -> LengthFacts:
    """A `max_length` caps the mean prompt and the context; what is cut off the prompt leaves room for one token."""
    prompts, outputs = workload.input_tokens, workload.output_tokens
    longest = math.inf if workload.max_length is None else float(workload.max_length)
    prompt = min(prompts.mean, max(longest - 1, 1.0))
    output = min(outputs.mean, max(longest - prompt, 1.0))
    progress = outputs.mean_square / (2 * outputs.mean)
    variance = prompts.mean_square - prompts.mean**2 + mean_cube(outputs) / (3 * outputs.mean) - progress**2
    context = min(prompts.mean + progress, longest)
    percentile = workload.slo.percentile
    tail_z = max(NormalDist().inv_cdf(percentile), 0.0)
    tail_prompt = max(quantile(prompts, percentile), prompt) if tail_z > 0 else prompt
    return LengthFacts(
        context=context,
        context_cv=math.sqrt(max(variance, 0.0)) / context,
        held_tokens=min(max(context, prompt + output), longest),
        prompt=prompt,
        output=output,
        prompt_by_token=min(prompts.mean_square / prompts.mean, longest),
        prompt_cv=math.sqrt(max(prompts.mean_square / prompts.mean**2 - 1, 0.0)),
        tail_prompt=min(tail_prompt, longest),
        tail_z=tail_z,
        percentile=percentile,
    )
