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


class _Display:
    """What the two ways to show progress have in common."""

    def __init__(
        self,
        description: str,
        format_amount: Callable[[float], str],
        stream: TextIO,
        clock: Callable[[], float],
    ) -> None:
        self._description = description
        self._format_amount = format_amount
        self._stream = stream
        self._clock = clock
        self._start_s = clock()


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
    kind = _Bar if target.isatty() else _Lines
    display = kind(description, format_amount, target, clock)
    try:
        yield display.report
    except BaseException:
        display.close(finished=False)
        raise
    display.close(finished=True)


class _Bar(_Display):
    """A rich bar that appears with the first report after `SILENT_S` and vanishes at the end."""

    _bar: Progress | None = None
    _task = TaskID(0)

    def report(self, done: float, total: float | None) -> None:
        if self._bar is None and self._clock() - self._start_s < SILENT_S:
            return
        if self._bar is None:
            self._bar = self._start()
        amount = _amount(done, total, self._format_amount)
        self._bar.update(self._task, completed=done, total=total, amount=amount)

    def _start(self) -> Progress:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._task = bar.add_task(self._description, amount="")
        bar.start()
        return bar

    def close(self, *, finished: bool) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines(_Display):
    """A plain line with the first report after `SILENT_S`, then every `LINE_INTERVAL_S`, and one at the end."""

    _next_line_s = 0.0
    _num_lines = 0

    def report(self, done: float, total: float | None) -> None:
        now_s = self._clock()
        if now_s < max(self._start_s + SILENT_S, self._next_line_s):
            return
        self._next_line_s = now_s + LINE_INTERVAL_S
        self._print(_amount(done, total, self._format_amount))

    def close(self, *, finished: bool) -> None:
        if self._num_lines:
            outcome = "done in" if finished else "stopped after"
            self._print(f"{outcome} {self._clock() - self._start_s:.1f} s")

    def _print(self, text: str) -> None:
        self._num_lines += 1
        print(f"{self._description}: {text}", file=self._stream, flush=True)


def _amount(done: float, total: float | None, format_amount: Callable[[float], str]) -> str:
    if total is None:
        return format_amount(done)
    share = f" ({done / total:.0%})" if total > 0 else ""
    return f"{format_amount(done)} of {format_amount(total)}{share}"
