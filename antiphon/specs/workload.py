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
itself. JSONL: one object a line with `input_tokens`, `output_tokens` and optionally `arrival_s`. CSV: the same names in
the first line. Other columns are left alone, because traces carry user and model columns, which is no mistake; a line
that cannot be read is an error that names file, line and value. A trace has arrivals for all of its lines or for none.
"""

import csv
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.catalog import LISTED, a_file_of, shipped_file
from antiphon.specs.checked import (
    LARGEST,
    MOST,
    Count,
    NotNegative,
    Number,
    Positive,
    Share,
    Text,
    Whole,
    checked,
    describe,
    is_number,
    parse_json,
    placed,
    plain,
    read,
    read_mapping,
    read_text,
)

MOST_DRAFTS = 1000  # the rates of all of them are written out

LENGTHS = ("input_tokens", "output_tokens")


def read_trace(path: Path) -> dict[str, Any]:
    """Lengths, arrivals from 0 on, and their mean rate, as keys of a workload, in the order the requests came; without
    arrivals in the file there is no rate. `UserError` names file, line and value."""
    rows = list(_csv_rows(path) if path.suffix.lower() == ".csv" else _jsonl_rows(path))
    if not rows:
        raise UserError(f"{path}: holds no requests: give at least one line with input_tokens and output_tokens")
    requests = [
        (_length(row, "input_tokens", where), _length(row, "output_tokens", where), _arrival(row, where))
        for where, row in rows
    ]
    arrivals = [arrival for _, _, arrival in requests if arrival is not None]
    if arrivals and len(arrivals) != len(requests):
        missing = next(where for (where, _), (_, _, arrival) in zip(rows, requests, strict=True) if arrival is None)
        raise UserError(f"{missing}: arrival_s is missing: give it in every line or in none")
    if arrivals:
        requests.sort(key=lambda request: request[2] or 0.0)
    first_s = min(arrivals, default=0.0)
    arrivals_s = tuple(arrival - first_s for arrival in sorted(arrivals))
    span_s = arrivals_s[-1] if arrivals_s else 0.0
    lengths = tuple(request[0] for request in requests), tuple(request[1] for request in requests)
    specs = [LengthSpec(median=statistics.median(trace), trace=trace) for trace in lengths]
    return {
        **dict(zip(LENGTHS, specs, strict=True)),
        "arrivals_s": arrivals_s,
        "requests_per_s": (len(arrivals_s) - 1) / span_s if span_s > 0 else None,
    }


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            row = parse_json(line, unique_keys=True)
        except ValueError as error:
            raise UserError(f"{where}: {line[:60]!r} is not JSON ({error}): write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: {line[:60]!r} is not an object: write input_tokens and output_tokens by name")
        yield where, row


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(read_text(path).splitlines(), skipinitialspace=True)
    columns = list(reader.fieldnames or ())
    if missing := [name for name in LENGTHS if name not in columns]:
        raise UserError(f"{path}: line 1: no column {', '.join(missing)}: name the columns in the first line")
    if twice := [name for name in (*LENGTHS, "arrival_s") if columns.count(name) > 1]:
        raise UserError(f"{path}: line 1: two columns {twice[0]}: leave one of them out")
    for row in reader:
        yield f"{path}: line {reader.line_num}", row


def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    value = _number(row, name, where)
    if value is None or not value.is_integer() or not 1 <= value <= MOST:
        raise UserError(f"{where}: {name} is {describe(row.get(name))}: a whole number from 1 to {MOST:,} is needed")
    return int(value)


def _arrival(row: Mapping[str, Any], where: str) -> float | None:
    if row.get("arrival_s") in (None, ""):
        return None
    value = _number(row, "arrival_s", where)
    if value is None:
        raise UserError(f"{where}: arrival_s is {describe(row['arrival_s'])}: a number of seconds is needed")
    return value


def _number(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """The value of a column; None if it is not a finite number."""
    if name not in row:
        raise UserError(f"{where}: {name} is missing: give it in every line")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


MOST_SKEW = 100.0  # beyond it all rows go to one expert, and shares leave the range of numbers


@checked("lengths")
@dataclass(frozen=True, kw_only=True)
class LengthSpec:
    """Lengths in tokens: log-normal with a median and a shape `sigma` (0: all equal), or the very lengths of a trace.

    A log-normal's mean is median * exp(sigma^2 / 2).
    """

    median: Annotated[Number, Field(ge=1, le=1e10)]
    sigma: Annotated[NotNegative, Field(le=4)] = 0.0
    trace: tuple[Count, ...] = ()

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


@checked("slo")
@dataclass(frozen=True, kw_only=True)
class SloSpec:
    """Promises. `percentile` says which percentile of requests must keep them (0.5: the median). None: no promise."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    percentile: Annotated[Positive, Field(lt=1)] = 0.5


@checked("workload")
@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """`requests_per_s` None: as many as the plan can take (offline throughput). `expert_skew`: exponent of the Zipf
    law of expert popularity (0: uniform); `expert_loads`: measured shares instead, one per expert, adding up to 1.
    `expert_spread`: coefficient of variation of an expert's share around that, from step to step, which no placement
    follows. `arrivals_s`: when each request of a trace came, in order (the traces of lengths are in the same order).
    `max_batch`: requests in flight in the whole system at most; `max_length`: tokens of a prompt and its output
    together at most; None: as many as fit. `prefix_hit`: fraction of the prompts' tokens whose keys and values are
    cached from earlier requests. `draft_tokens`: tokens that a step proposes beside the next one (multi-token
    prediction), each accepted with probability `accept_rate` if those before it are; `accept_rates`: by position
    instead, for later ones are accepted less often. `source`: where the numbers are
    from."""

    name: Text = "workload"
    input_tokens: LengthSpec
    output_tokens: LengthSpec
    requests_per_s: Positive | None = None
    slo: SloSpec = field(default_factory=SloSpec)
    expert_skew: Annotated[NotNegative, Field(le=MOST_SKEW)] = 0.0
    expert_loads: tuple[NotNegative, ...] = ()
    expert_spread: Annotated[NotNegative, Field(le=MOST_SKEW)] = 0.0
    arrivals_s: tuple[Number, ...] = ()
    max_batch: Count | None = None
    max_length: Count | None = None
    prefix_hit: Annotated[NotNegative, Field(lt=1)] = 0.0
    draft_tokens: Annotated[Whole, Field(ge=0, le=MOST_DRAFTS)] = 0
    accept_rate: Share = 0.0
    accept_rates: tuple[Share, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.expert_loads and abs(sum(self.expert_loads) - 1) > 1e-6:
            raise UserError(f"expert_loads add up to {sum(self.expert_loads):.6g}: give shares that add up to 1")
        if self.accept_rates and (self.accept_rate or len(self.accept_rates) != self.draft_tokens):
            raise UserError(
                f"accept_rates has {len(self.accept_rates)} values, draft_tokens is {self.draft_tokens} and "
                f"accept_rate {self.accept_rate}: give one for each proposed token, and no accept_rate"
            )
        if not self.accept_rates and (self.accept_rate > 0) != (self.draft_tokens > 0):
            raise UserError(
                f"draft_tokens is {self.draft_tokens} and accept_rate {self.accept_rate}: give both above 0, or leave "
                "both out"
            )
        if any(later < earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)):
            raise UserError("arrivals_s goes back in time: give the requests in the order they came")
        lengths = (self.input_tokens.trace, self.output_tokens.trace)
        if self.arrivals_s and not len(self.arrivals_s) == len(lengths[0]) == len(lengths[1]):
            raise UserError(
                f"{len(self.arrivals_s)} arrivals for {len(lengths[0])} inputs and {len(lengths[1])} outputs: give as "
                "many of each"
            )

    @property
    def is_online(self) -> bool:
        """Whether requests come at random: at a rate, or so that a promise to the first token means something."""
        return self.requests_per_s is not None or self.slo.ttft_s is not None

    @property
    def says_loads(self) -> bool:
        """Whether anything is stated about how equally experts are loaded."""
        return bool(self.expert_skew or self.expert_loads or self.expert_spread)

    @property
    def rows_per_step(self) -> int:
        """Rows of one sequence in a step of decode: the next token's, and those of the proposed ones."""
        return 1 + self.draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step adds to a sequence, on average: 1 + p_1 + p_1 p_2 + ..."""
        rates = self.accept_rates or (self.accept_rate,) * self.draft_tokens
        return 1.0 + sum(math.prod(rates[: count + 1]) for count in range(len(rates)))


UNKNOWN_LOADS = 0.2
"""`expert_spread` where nothing is known of the loads. SGLang's prefill of DeepSeek-V3 on 32 GPUs reaches 59,337
tokens/s of a node with experts balanced by assumption, and 52,300 of shorter prompts with its balancer and 32 copies
(lmsys.org/blog/2025-05-05-large-scale-ep). This spread makes a third of that difference in the cost model; all of it
would make every other deployment that is described (docs/reproduction.md) up to 30% slower than it is."""
TRACE_SUFFIXES = (".jsonl", ".csv")


def load_workload(name_or_path: str | Path) -> WorkloadSpec:
    """A shipped workload by name, that of a TOML or JSON file, or a trace (JSONL, CSV) without promises."""
    path = shipped_file("workload", name_or_path)
    with a_file_of("workload", path):
        if path.suffix.lower() in TRACE_SUFFIXES:
            return workload_from_json({"name": path.stem, "trace": path.name}, str(path), path.parent)
        return workload_from_json(read_mapping(path), str(path), path.parent)


def workload_from_json(mapping: Mapping[str, Any], where: str, folder: Path = Path()) -> WorkloadSpec:
    """What `workload_to_json` or a file says. `folder` is where a relative path of a trace starts."""
    values = {key: value for key, value in mapping.items() if key not in LISTED}
    if "trace" in values:
        trace = _trace(values.pop("trace"), where, folder)
        for name in LENGTHS:
            if name in values:
                raise UserError(f"{where}: {name} and trace are both given: leave one of them out")
        values = trace | values | {"arrivals_s": trace["arrivals_s"]}
    for name in LENGTHS:
        if isinstance(entry := values.get(name), Mapping):
            with placed(f"{where}: {name}"):
                values[name] = _with_median(entry)
    return read(WorkloadSpec, values, where)


def workload_to_json(workload: WorkloadSpec) -> dict[str, Any]:
    """Plain JSON values; what is not stated is left out."""
    return {key: value for key, value in plain(workload).items() if value not in ("", [])}


def _trace(value: object, where: str, folder: Path) -> dict[str, Any]:
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: trace is {describe(value)}: it must be the path of a file")
    return read_trace(folder / value)


def _with_median(lengths: Mapping[str, Any]) -> dict[str, Any]:
    """`lengths` with the median that its mean or its trace has, where it states none itself."""
    values = dict(lengths)
    if "mean" in values:
        if "median" in values:
            raise UserError("median and mean are both given: leave one of them out")
        mean, sigma = values.pop("mean"), values.get("sigma", 0.0)
        if not is_number(mean):
            raise UserError(f"mean is {describe(mean)}: it must be a valid number")
        return values | {"median": mean * math.exp(-(sigma**2) / 2) if is_number(sigma) and abs(sigma) < 10 else mean}
    trace = values.get("trace")
    numbers = list(filter(is_number, trace)) if isinstance(trace, (list, tuple)) else []
    return {"median": statistics.median(numbers), **values} if numbers else values
