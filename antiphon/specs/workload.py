"""What the requests look like, how fast they come, and what is promised to them; from TOML files or request traces.

    name = "mine"
    requests_per_s = 4.0           # left out: as many as the plan can take
    [input_tokens]
    median = 571                   # log-normal; `mean` may be given instead of `median`
    sigma = 1.0                    # 0 or left out: all equal
    [output_tokens]
    median = 159
    [slo]
    tpot_s = 0.15
    percentile = 0.5

`trace = "requests.jsonl"` (relative to the file) replaces the two tables of lengths; a trace file may also be given
itself.
"""

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.catalog import shipped_file
from antiphon.specs.strict_table import CountFromZero, Positive, Table, is_number, read_table
from antiphon.specs.trace_file import Trace, read_trace

MOST_SKEW = 100.0  # beyond it all rows go to one expert, and shares leave the range of numbers


@dataclass(frozen=True, kw_only=True)
class LengthSpec:
    """Lengths in tokens: log-normal with a median and a shape `sigma` (0: all equal), or the very lengths of a trace.

    A log-normal's mean is median * exp(sigma^2 / 2).
    """

    median: float
    sigma: float = 0.0
    trace: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.median >= 1:
            raise UserError(f"lengths: the median is {self.median}: it must be at least 1 token")
        if not self.sigma >= 0:
            raise UserError(f"lengths: sigma is {self.sigma}: it must be at least 0")
        if any(length < 1 for length in self.trace):
            raise UserError(f"lengths: the trace has a length of {min(self.trace)}: each must be at least 1 token")

    @property
    def mean(self) -> float:
        if self.trace:
            return sum(self.trace) / len(self.trace)
        return self.median * math.exp(self.sigma**2 / 2)

    @property
    def mean_square(self) -> float:
        """E[X^2]; with the mean it gives the average remaining work and M/G/1's variance."""
        if self.trace:
            return sum(length * length for length in self.trace) / len(self.trace)
        return self.median**2 * math.exp(2 * self.sigma**2)


@dataclass(frozen=True, kw_only=True)
class SloSpec:
    """Promises. `percentile` says which percentile of requests must keep them (0.5: the median). None: no promise."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    percentile: float = 0.5

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"slo: {name} is {value}: it must be above 0, or be left out")
        if not 0 < self.percentile < 1:
            raise UserError(f"slo: percentile is {self.percentile}: it must lie between 0 and 1, for example 0.99")


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """`requests_per_s` None: as many as the plan can take (offline throughput). `expert_skew`: exponent of the Zipf
    law of expert popularity (0: uniform); `expert_loads`: measured shares instead, one per expert, adding up to 1.
    `arrivals_s`: when each request of a trace came, in order (the traces of lengths are in the same order).
    `max_batch`: requests in flight in the whole system at most; `max_length`: tokens of a prompt and its output
    together at most; None: as many as fit. `prefix_hit`: fraction of the prompts' tokens whose keys and values are
    cached from earlier requests. `draft_tokens`: tokens that a step proposes beside the next one (multi-token
    prediction), each accepted with probability `accept_rate` if those before it are. `source`: where the numbers are
    from."""

    name: str = "workload"
    input_tokens: LengthSpec
    output_tokens: LengthSpec
    requests_per_s: Positive | None = None
    slo: SloSpec = field(default_factory=SloSpec)
    expert_skew: float = 0.0
    expert_loads: tuple[float, ...] = ()
    arrivals_s: tuple[float, ...] = ()
    max_batch: int | None = None
    max_length: int | None = None
    prefix_hit: float = 0.0
    draft_tokens: CountFromZero = 0
    accept_rate: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        self._check_limits()
        if self.requests_per_s is not None and not self.requests_per_s > 0:
            raise UserError(f"workload: requests_per_s is {self.requests_per_s}: it must be above 0, or be left out")
        if not 0 <= self.expert_skew <= MOST_SKEW:
            raise UserError(f"workload: expert_skew is {self.expert_skew}: it must be 0 to {MOST_SKEW:g}")
        if self.expert_loads and (min(self.expert_loads) < 0 or abs(sum(self.expert_loads) - 1) > 1e-6):
            raise UserError(
                f"workload: expert_loads add up to {sum(self.expert_loads):.6g}: give shares that add up to 1"
            )

    def _check_limits(self) -> None:
        if not 0 <= self.prefix_hit < 1:
            raise UserError(f"workload: prefix_hit is {self.prefix_hit}: it must be at least 0 and below 1")
        if not 0 <= self.accept_rate <= 1:
            raise UserError(f"workload: accept_rate is {self.accept_rate}: it must be from 0 to 1")
        if self.draft_tokens < 0 or (self.accept_rate > 0) != (self.draft_tokens > 0):
            raise UserError(
                f"workload: draft_tokens is {self.draft_tokens} and accept_rate {self.accept_rate}: "
                "give both above 0, or leave both out"
            )
        for name in ("max_batch", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"workload: {name} is {value}: it must be at least 1, or be left out")
        if any(later < earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)):
            raise UserError("workload: arrivals_s goes back in time: give the requests in the order they came")
        lengths = (self.input_tokens.trace, self.output_tokens.trace)
        if self.arrivals_s and not len(self.arrivals_s) == len(lengths[0]) == len(lengths[1]):
            raise UserError(
                f"workload: {len(self.arrivals_s)} arrivals for {len(lengths[0])} inputs and {len(lengths[1])} outputs:"
                f" give as many of each"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of one sequence in a step of decode: the next token's, and those of the proposed ones."""
        return 1 + self.draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step adds to a sequence, on average: 1 + p + p^2 + ..."""
        return sum(self.accept_rate**count for count in range(self.draft_tokens + 1)) if self.draft_tokens else 1.0


TRACE_SUFFIXES = (".jsonl", ".csv")


def load_workload(name_or_path: str | Path) -> WorkloadSpec:
    """A shipped workload by name, that of a TOML or JSON file, or a trace (JSONL, CSV) without promises."""
    path = shipped_file("workload", name_or_path)
    if path.suffix.lower() in TRACE_SUFFIXES:
        return workload_from_table(Table({"name": path.stem, "trace": path.name}, str(path)), path.parent)
    return workload_from_table(read_table(path), path.parent)


def workload_from_table(table: Table, folder: Path) -> WorkloadSpec:
    """`folder` is where a relative path of a trace starts."""
    for key in ("aliases", "summary"):  # of the shipped files, for lists
        table.has(key)
    trace = read_trace(folder / table.text("trace")) if table.has("trace") else None
    ready: dict[str, Any] = {name: _lengths(table, name, trace) for name in ("input_tokens", "output_tokens")}
    if trace is not None:
        ready["arrivals_s"] = trace.arrivals_s
        if not table.has("requests_per_s"):
            ready["requests_per_s"] = trace.requests_per_s
    return table.read(WorkloadSpec, name=table.text("name"), **ready)


def workload_to_json(workload: WorkloadSpec) -> dict[str, Any]:
    """Plain JSON values; what is not stated is left out."""
    written = asdict(workload)
    for lengths in (written["input_tokens"], written["output_tokens"]):
        lengths["trace"] = list(lengths["trace"])
    written["slo"] = {key: value for key, value in written["slo"].items() if value is not None}
    written["expert_loads"], written["arrivals_s"] = list(workload.expert_loads), list(workload.arrivals_s)
    return {key: value for key, value in written.items() if value not in (None, "", [])}


def _lengths(table: Table, key: str, trace: Trace | None) -> LengthSpec:
    if trace is not None:
        if table.has(key):
            raise UserError(f"{table.where}: {key} and trace are both given: leave one of them out")
        traced: tuple[int, ...] = getattr(trace, key)
        return LengthSpec(median=statistics.median(traced), trace=traced)
    entry = table.table(key)
    if not entry.has("mean"):
        given = entry.items("trace") if entry.has("trace") and not entry.has("median") else ()
        lengths = [length for length in given if is_number(length)]
        return entry.read(LengthSpec, **({"median": statistics.median(lengths)} if lengths else {}))
    if entry.has("median"):
        raise UserError(f"{entry.where}: median and mean are both given: leave one of them out")
    sigma = entry.number("sigma", 0.0)
    return entry.read(LengthSpec, median=entry.number("mean") * math.exp(-(sigma**2) / 2))
