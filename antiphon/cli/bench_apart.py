"""`antiphon bench` for attention and experts apart: ping-pong by micro-batches, and what it brings."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.bench import apart as separating
from antiphon.bench import ping_pong as pairing
from antiphon.cli import options
from antiphon.cli.bench_rows import check_limits, list_of, show_rows
from antiphon.cli.bench_serve import say
from antiphon.cli.commands import given_options, takes_groups
from antiphon.cli.output import JsonOption
from antiphon.serve.signals import sigterm_exits


@takes_groups
def ping_pong(
    model: options.ModelFolder,
    m: Annotated[str, typer.Option("--m", metavar="N,N", help="Micro-batches, beginning with 1.")] = "1,2,3,4",
    shares: Annotated[
        str | None,
        typer.Option(metavar="S,S", show_default="no box", help="In a box, links so slow that T_c is S of T_f."),
    ] = None,
    traces: Annotated[Path | None, typer.Option(metavar="DIR", help="A Perfetto trace for each m.")] = None,
    *,
    case: pairing.PingPongCase,
    json: JsonOption = None,
) -> None:
    """Time a layer with m micro-batches in turn, beside what T_a, T_e and T_c predict."""
    check_limits(case)
    counts = [whole_number("--m", text) for text in list_of("--m", m)]
    if shares is not None and traces is not None:
        raise UserError("--traces does not apply with --shares: clocks of nodes differ; leave one of them out")
    about = f"ping-pong, b = {case.micro_batch}"
    with progress(about, format_amount=lambda done: f"{done:.0f} runs") as report, sigterm_exits():
        if shares is None:
            rows = pairing.bench_ping_pong(model, case, counts, traces, report)
        else:
            wanted = [_link_share(text) for text in list_of("--shares", shares)]
            rows = pairing.bench_over_links(model, case, wanted, counts, report)
    show_rows("ping-pong", pairing.COLUMNS, rows, json, about=asdict(case))


def whole_number(option: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{option} has {text!r}: write numbers, for example 1,2,3")
    return int(text)


def _link_share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 100:
        raise UserError(f"--shares has {text!r}: T_c is 0.01 to 100 of T_f, for example 0.5")
    return value


@takes_groups
def apart(
    context: typer.Context,
    model: options.ModelFolder,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", show_default="the ablation", help="Sweep: attention workers for one expert worker."
        ),
    ] = None,
    *,
    case: separating.ApartCase,
    json: JsonOption = None,
) -> None:
    """Time attention and experts together, apart over gloo, and apart over M2N; or sweep attention workers, or what a
    slow one costs the others."""
    check_limits(case)
    refuse_other_half(context, case, is_sweep=attention is not None)
    with sigterm_exits():
        if attention is None:
            rows, columns = separating.bench_ablation(model, case, say), separating.ABLATION
        else:
            counts = [whole_number("--attention", text) for text in list_of("--attention", attention)]
            if case.slow is not None and len(counts) > 1:
                raise UserError(f"--attention {attention} with --slow: write one number, for example 3")
            with progress("attention workers", format_amount=lambda done: f"{done:.0f} engines") as report:
                if case.slow is None:
                    rows, columns = separating.bench_sweep(model, case, counts, report), separating.SWEEP
                else:
                    rows = separating.bench_slow_worker(model, case, counts[0], report)
                    columns = separating.SLOW_WORKER
    show_rows("apart", columns, rows, json, about=asdict(case))
    if attention is None:
        separating.check_steps(rows)


def refuse_other_half(context: typer.Context, case: separating.ApartCase, *, is_sweep: bool) -> None:
    """`UserError` for an option that was written and that only the other of both measurements reads."""
    of_sweep = {"slice_cores": "--slice", "expert_cores": "--expert-slice", "slow": "--slow"}
    others = {"together": "--together"} if is_sweep else of_sweep
    if given := given_options(context, others):
        why = "does not apply with --attention" if is_sweep else "is for the sweep: add --attention N,N"
        raise UserError(f"{others[min(given)]} {why}, or leave it out")
    workers = case.layout.partition("/")[0]
    if is_sweep and workers != "1+1":
        raise UserError(
            f"--layout {case.layout}: --attention says how many attention workers, beside one of experts; only its "
            f"micro-batches count, write for example 1+1/m2"
        )
