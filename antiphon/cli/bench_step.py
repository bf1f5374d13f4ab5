"""`antiphon bench step`: what a decode step costs outside its kernels."""

from dataclasses import asdict
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.bench import step_cost
from antiphon.cli import options
from antiphon.cli.bench_rows import check_limits, show_rows
from antiphon.cli.bench_serve import parse_counts, say
from antiphon.cli.commands import takes_groups
from antiphon.cli.options import check_count
from antiphon.cli.output import JsonOption
from antiphon.serve.config import MAX_THREADS
from antiphon.serve.signals import sigterm_exits


@takes_groups
def step(
    model: options.ModelFolder,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Requests at once.")] = "1,8,32",
    threads: options.ThreadsOption = None,
    *,
    case: step_cost.StepCostCase,
    json: JsonOption = None,
) -> None:
    """Time a decode step outside its kernels, by the clock and in processor time."""
    check_count("--threads", threads, MAX_THREADS)
    check_limits(case)
    if not (counts := parse_counts(concurrency)):
        raise UserError("--concurrency is empty: name at least one number")
    case.check(model)
    with sigterm_exits():
        rows = step_cost.bench_step(model, counts, case, say, threads=threads)
    show_rows("step", step_cost.COLUMNS, rows, json, about=asdict(case))
