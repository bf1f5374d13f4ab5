"""Progress of operations that may last: silent when short, a bar on a terminal, a line now and then in a log.

    with progress("loading weights", format_amount=format_bytes) as report:
        report(done_bytes, total_bytes)

`report` may be called as often as convenient; it is cheap. `total` may be None while it is unknown. Nothing appears
in the first second, so that quick operations leave no trace. Rejected: tqdm (a second library beside rich), and
bars in log files.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SILENT_S = 1.0
LINE_INTERVAL_S = 5.0

Report = Callable[[float, float | None], None]


def format_count(amount: float) -> str:
    """``12345`` -> ``"12,345"``: the default way to print amounts."""
    return f"{amount:,.0f}"


@contextmanager
def progress(
    description: str,
    *,
    format_amount: Callable[[float], str] = format_count,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """Yield `report(done, total)`; shows on `stream` (default: standard error). Call it from one thread only."""
    target = sys.stderr if stream is None else stream
    show = _bar if target.isatty() else _lines
    with show(description, format_amount, target, clock) as report:
        yield report


@contextmanager
def _bar(
    description: str, format_amount: Callable[[float], str], stream: TextIO, clock: Callable[[], float]
) -> Iterator[Report]:
    """A rich bar that appears with the first report after `SILENT_S` and vanishes at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start_s = clock()
    bar: Progress | None = None
    task = TaskID(0)

    def report(done: float, total: float | None) -> None:
        nonlocal bar, task
        if bar is None:
            if clock() - start_s < SILENT_S:
                return
            bar = Progress(*columns, console=Console(file=stream), transient=True)
            task = bar.add_task(description, amount="")
            bar.start()
        bar.update(task, completed=done, total=total, amount=_amount(done, total, format_amount))

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def _lines(
    description: str, format_amount: Callable[[float], str], stream: TextIO, clock: Callable[[], float]
) -> Iterator[Report]:
    """A plain line with the first report after `SILENT_S`, then every `LINE_INTERVAL_S`, and one at the end."""
    start_s = clock()
    next_line_s, outcome = start_s + SILENT_S, "stopped after"
    has_begun = False

    def write(text: str) -> None:
        print(f"{description}: {text}", file=stream, flush=True)

    def report(done: float, total: float | None) -> None:
        nonlocal next_line_s, has_begun
        now_s = clock()
        if now_s >= next_line_s:
            next_line_s, has_begun = now_s + LINE_INTERVAL_S, True
            write(_amount(done, total, format_amount))

    try:
        yield report
        outcome = "done in"
    finally:
        if has_begun:
            write(f"{outcome} {clock() - start_s:.1f} s")


def _amount(done: float, total: float | None, format_amount: Callable[[float], str]) -> str:
    if total is None:
        return format_amount(done)
    share = f" ({done / total:.0%})" if total > 0 else ""
    return f"{format_amount(done)} of {format_amount(total)}{share}"
