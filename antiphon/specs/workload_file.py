"""Workloads from TOML files or request traces, shipped or a user's own, and to JSON and back.

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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.catalog import shipped_file
from antiphon.specs.strict_table import Table, is_number, read_table
from antiphon.specs.trace_file import Trace, read_trace
from antiphon.specs.workload import LengthSpec, SloSpec, WorkloadSpec

TRACE_SUFFIXES = (".jsonl", ".csv")


def load_workload(name_or_path: str | Path) -> WorkloadSpec:
    """A shipped workload by name, that of a TOML or JSON file, or a trace (JSONL, CSV) without promises."""
    path = shipped_file("workload", name_or_path)
    if path.suffix.lower() in TRACE_SUFFIXES:
        return workload_from_table(Table({"name": path.stem, "trace": path.name}, str(path)), path.parent)
    return workload_from_table(read_table(path), path.parent)


def workload_from_json(mapping: Mapping[str, Any], where: str = "workload") -> WorkloadSpec:
    """The workload that `workload_to_json` wrote."""
    return workload_from_table(Table(mapping, where), Path())


def workload_from_table(table: Table, folder: Path) -> WorkloadSpec:
    """`folder` is where a relative path of a trace starts."""
    for key in ("aliases", "summary"):  # of the shipped files, for lists
        table.has(key)
    trace = read_trace(folder / table.text("trace")) if table.has("trace") else None
    rate = table.optional_number("requests_per_s", above=0)
    if rate is None and trace is not None:
        rate = trace.requests_per_s
    arrivals = trace.arrivals_s if trace else _numbers(table, "arrivals_s")
    workload = table.build(
        WorkloadSpec,
        name=table.text("name"),
        input_tokens=_lengths(table, "input_tokens", trace),
        output_tokens=_lengths(table, "output_tokens", trace),
        requests_per_s=rate,
        slo=_slo(table),
        expert_skew=table.number("expert_skew", 0.0),
        expert_loads=_numbers(table, "expert_loads"),
        arrivals_s=arrivals,
        max_batch=table.optional_whole("max_batch"),
        max_length=table.optional_whole("max_length"),
        source=table.text("source", ""),
    )
    table.finish()
    return workload


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
        lengths: tuple[int, ...] = getattr(trace, key)
        return LengthSpec(median=statistics.median(lengths), trace=lengths)
    entry = table.table(key)
    sigma = entry.number("sigma", 0.0)
    given = tuple(entry.items("trace")) if entry.has("trace") else ()
    if any(isinstance(length, bool) or not isinstance(length, int) for length in given):
        raise entry.error("trace", "a list of whole numbers is needed")
    if entry.has("mean"):
        if entry.has("median"):
            raise UserError(f"{entry.where}: median and mean are both given: leave one of them out")
        median = entry.number("mean") * math.exp(-(sigma**2) / 2)
    else:
        median = entry.number("median", statistics.median(given) if given else None)
    lengths_spec = entry.build(LengthSpec, median=median, sigma=sigma, trace=given)
    entry.finish()
    return lengths_spec


def _slo(workload: Table) -> SloSpec:
    table = workload.optional_table("slo")
    slo = workload.build(
        SloSpec,
        ttft_s=table.optional_number("ttft_s"),
        tpot_s=table.optional_number("tpot_s"),
        percentile=table.number("percentile", SloSpec.percentile),
    )
    table.finish()
    return slo


def _numbers(table: Table, key: str) -> tuple[float, ...]:
    if not table.has(key):
        return ()
    values = table.items(key)
    if not all(map(is_number, values)):
        raise table.error(key, "a list of numbers is needed")
    return tuple(float(value) for value in values)
