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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.catalog import shipped_file
from antiphon.specs.strict_table import Table, is_number, read_table
from antiphon.specs.trace_file import Trace, read_trace
from antiphon.specs.workload import LengthSpec, WorkloadSpec

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
