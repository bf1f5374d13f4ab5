"""Request traces: how long each request's prompt and output were, and when it came.

JSONL: one object a line with `input_tokens`, `output_tokens` and optionally `arrival_s`. CSV: the same names in the
first line. Other columns are left alone, because traces carry user and model columns, which is no mistake; a line
that cannot be read is an error that names file, line and value. A trace has arrivals for all of its lines or for none.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.strict_table import read_text

LENGTHS = ("input_tokens", "output_tokens")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order they came; `arrivals_s` is empty if the file has none, else it starts at 0."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    arrivals_s: tuple[float, ...]

    @property
    def requests_per_s(self) -> float | None:
        """Mean rate between the first and the last arrival; None without arrivals."""
        span_s = self.arrivals_s[-1] if self.arrivals_s else 0.0
        return (len(self.arrivals_s) - 1) / span_s if span_s > 0 else None


def read_trace(path: Path) -> Trace:
    """`UserError` names file, line and value."""
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
    return Trace(
        input_tokens=tuple(request[0] for request in requests),
        output_tokens=tuple(request[1] for request in requests),
        arrivals_s=tuple(arrival - first_s for arrival in sorted(arrivals)),
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: {line[:60]!r} is not JSON ({error}): write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: {line[:60]!r} is not an object: write input_tokens and output_tokens by name")
        yield where, row


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(read_text(path).splitlines(), skipinitialspace=True)
    if missing := [name for name in LENGTHS if name not in (reader.fieldnames or ())]:
        raise UserError(f"{path}: line 1: no column {', '.join(missing)}: name the columns in the first line")
    for row in reader:
        yield f"{path}: line {reader.line_num}", row


def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    value = _number(row, name, where)
    if value is None or not value.is_integer() or value < 1:
        raise UserError(f"{where}: {name} is {row.get(name)!r}: a whole number of at least 1 is needed")
    return int(value)


def _arrival(row: Mapping[str, Any], where: str) -> float | None:
    if row.get("arrival_s") in (None, ""):
        return None
    value = _number(row, "arrival_s", where)
    if value is None:
        raise UserError(f"{where}: arrival_s is {row['arrival_s']!r}: a number of seconds is needed")
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
    return number if math.isfinite(number) else None
