"""`antiphon bench m2n`: the M2N library beside gloo and beside plain memory copy, in one run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.bench.m2n import cases
from antiphon.bench.m2n.api import Traffic
from antiphon.bench.m2n.contestants import choose_contestants
from antiphon.bench.m2n.harness import Settings, bench_m2n
from antiphon.bench.m2n.table import COLUMNS, table_cells
from antiphon.bench.m2n.timeline import write_trace
from antiphon.cli.options import check_count, check_timeout, parse_size, words_of
from antiphon.cli.output import JsonOption, check_output_file, show_bench, table, whole_file

MOST_ROUNDS, MOST_REPETITIONS = 1_000_000, 1000  # of a block; its times lie in memory. More is a slip of the finger.


def m2n(
    senders: Annotated[int | None, typer.Option(metavar="M", show_default="8", help="Sending processes.")] = None,
    receivers: Annotated[int | None, typer.Option(metavar="N", show_default="8", help="Receiving processes.")] = None,
    sizes: Annotated[
        str | None, typer.Option("--bytes", metavar="S,S", show_default="256KiB", help="Sizes of a message.")
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="The paper's: one-to-n, sizes, m-equals-n.")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="T,T", help="shm, tcp, libfabric; '': none.")] = "shm,tcp",
    against: Annotated[
        str, typer.Option(metavar="B,B", help="gloo, gloo-all-to-all, memcpy, mpi, ucx.")
    ] = "gloo,memcpy",
    rounds: Annotated[
        int | None, typer.Option(metavar="N", show_default="0.3 s of them", help="Rounds per repetition.")
    ] = None,
    repetitions: Annotated[int, typer.Option(metavar="N", help="Turns of every contestant.")] = 5,
    in_place: Annotated[bool, typer.Option("--in-place", help="Also with payloads written into the slots.")] = False,
    duplex: Annotated[bool, typer.Option("--duplex", help="Receivers send as much back meanwhile.")] = False,
    unbalanced: Annotated[bool, typer.Option("--unbalanced", help="A size per receiver, or a spread of one.")] = False,
    touch: Annotated[bool, typer.Option("--touch", help="Write and read every byte in every round.")] = False,
    waiting: Annotated[str, typer.Option(metavar="HOW", help="auto, poll, spin or block.")] = "auto",
    timeout: Annotated[float, typer.Option(metavar="S", help="Patience of every wait.")] = 30.0,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write some rounds as a Perfetto trace.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Time M senders writing to N receivers: Antiphon, gloo, plain copy."""
    check_output_file("--timeline", timeline)
    chosen_cases = choose_cases(senders, receivers, sizes, figure, both_ways=duplex, unbalanced=unbalanced)
    chosen_cases = [replace(case, touched=touch) for case in chosen_cases]
    contestants = choose_contestants(words_of(transport), words_of(against), in_place=in_place, waiting=waiting)
    settings = make_settings(rounds, repetitions, timeout, record=timeline is not None)
    outcome = bench_m2n(contestants, chosen_cases, settings)
    show_bench("m2n", table(COLUMNS, table_cells(outcome.rows)), outcome.rows, json=json)
    if timeline is not None:
        with whole_file("--timeline", timeline) as partial:
            write_trace(partial, outcome.recordings)


def choose_cases(
    senders: int | None,
    receivers: int | None,
    sizes: str | None,
    figure: str | None,
    *,
    both_ways: bool,
    unbalanced: bool,
) -> list[Traffic]:
    """Cases from the options; a figure brings its own sizes and refuses others."""
    if figure is None:
        return cases.make_cases(
            cases.DEFAULT_SENDERS if senders is None else senders,
            cases.DEFAULT_RECEIVERS if receivers is None else receivers,
            [cases.DEFAULT_BYTES] if sizes is None else [parse_size("--bytes", size) for size in words_of(sizes)],
            both_ways=both_ways,
            unbalanced=unbalanced,
        )
    given = {"--senders": senders, "--receivers": receivers, "--bytes": sizes, "--unbalanced": unbalanced or None}
    if excess := [option for option, value in given.items() if value is not None]:
        raise UserError(f"--figure {figure} brings its own sizes: leave out {', '.join(excess)}")
    return cases.figure_cases(figure, both_ways=both_ways)


def make_settings(rounds: int | None, repetitions: int, timeout: float, *, record: bool) -> Settings:
    """`UserError` for what cannot be. `rounds` None: as many as take 0.3 s."""
    check_count("--rounds", rounds, MOST_ROUNDS)
    check_count("--repetitions", repetitions, MOST_REPETITIONS)
    check_timeout("--timeout", timeout)
    return Settings(num_rounds=rounds or 0, num_repetitions=repetitions, timeout_s=timeout, record=record)
