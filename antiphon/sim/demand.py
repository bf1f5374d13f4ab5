"""When each request comes, how long its prompt and its output are; drawn before anything is simulated or sent.

1. Arrivals: a trace's own, Poisson (or gamma) at a rate, or all at time 0 (offline).
2. Lengths: log-normal as the workload says, or a trace's, in its order and from its beginning again when it ends.
3. A workload's `max_length` cuts the prompt so that a token fits behind it, then the output.
4. Every kind of chance has its own stream, and gaps are scaled by the rate: at a higher rate the same requests come
   sooner.

Rejected: drawing while simulating. What one request is would then depend on what happened to others before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.specs.checked import LARGEST, SMALLEST
from antiphon.specs.workload import LengthSpec, WorkloadSpec

DEFAULT_NUM_REQUESTS = 1000
_ARRIVALS, _INPUTS, _OUTPUTS = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests in order of arrival. `num_cut`: how many the workload's `max_length` shortened."""

    arrivals_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    num_cut: int = 0

    def __len__(self) -> int:
        return int(self.arrivals_s.size)


def draw_demand(
    workload: WorkloadSpec,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    all_at_once: bool = False,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Demand:
    """Requests of `workload`. `num_requests` None: all of a trace, else 1,000. Arrivals, in this order: `all_at_once`,
    Poisson at `rate`, the trace's own, Poisson at the workload's rate, all at once. `burstiness`: in place of Poisson's
    gaps those of a gamma distribution with as large a mean, whose variance is 1 / `burstiness` of the mean's square."""
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if value is not None and not SMALLEST < value <= LARGEST:
            least = SMALLEST if value > 0 else 0
            raise UserError(f"{name} is {value}: it must be above {least:g}, at most {LARGEST:g}")
    traced = len(workload.input_tokens.trace)
    count = _count(workload, num_requests, own_arrivals=not all_at_once and rate is None)
    inputs = _lengths(workload.input_tokens, count, np.random.default_rng([seed, _INPUTS]))
    outputs = _lengths(workload.output_tokens, count, np.random.default_rng([seed, _OUTPUTS]))
    num_cut = 0
    if workload.max_length is not None:
        asked = inputs + outputs
        inputs = np.minimum(inputs, max(workload.max_length - 1, 1))
        outputs = np.minimum(outputs, np.maximum(workload.max_length - inputs, 1))
        num_cut = int(np.count_nonzero(inputs + outputs < asked))
    rate_used = workload.requests_per_s if rate is None else rate
    if all_at_once or (rate_used is None and not workload.arrivals_s):
        arrivals = np.zeros(count)
    elif rate is None and workload.arrivals_s and traced:
        arrivals = np.asarray(workload.arrivals_s[:count], dtype=np.float64)
    else:
        assert rate_used is not None
        chance = np.random.default_rng([seed, _ARRIVALS])
        is_poisson = burstiness == 1.0
        gaps = chance.exponential(1.0, count) if is_poisson else chance.gamma(burstiness, 1 / burstiness, count)
        arrivals = np.cumsum(gaps) / rate_used
    return Demand(arrivals_s=arrivals, input_tokens=inputs, output_tokens=outputs, num_cut=num_cut)


def _count(workload: WorkloadSpec, num_requests: int | None, *, own_arrivals: bool) -> int:
    traced = len(workload.arrivals_s)
    if num_requests is None:
        return len(workload.input_tokens.trace) or DEFAULT_NUM_REQUESTS
    if num_requests < 1:
        raise UserError(f"{num_requests} requests: give at least 1")
    if own_arrivals and traced and num_requests > traced:
        raise UserError(
            f"{num_requests} requests: the trace of {workload.name} has arrivals for {traced}: "
            "ask for fewer, or give a rate to draw arrivals"
        )
    return num_requests


def _lengths(lengths: LengthSpec, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    if lengths.trace:
        return np.resize(np.asarray(lengths.trace, dtype=np.int64), count)
    drawn = lengths.median * np.exp(lengths.sigma * random.standard_normal(count))
    return np.maximum(np.rint(drawn), 1.0).astype(np.int64)
