"""`antiphon bench collectives`: collectives between ranks of this machine, ours beside gloo's."""

from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.collectives import COLLECTIVES, CollectiveSettings, bench_collectives
from antiphon.bench.m2n.contestants import TRANSPORTS, WAITING
from antiphon.bench.quiet import foreign_words
from antiphon.cli.options import check_count, check_one_of, check_timeout, parse_size, words_of
from antiphon.cli.output import JsonOption, show_bench, table

_COLUMNS = ("collective", "ranks", "bytes", "median", "gloo", "gloo/this", "foreign")
_MOST_RANKS, _MOST_BYTES, _MOST_REPETITIONS = 64, 1 << 30, 1000
_MOST_QUIET_S = 3600.0


def collectives(
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Ranks of a group.")] = "2,4,8",
    sizes: Annotated[
        str, typer.Option("--bytes", metavar="S,S", help="Sizes of the tensor.")
    ] = "1KiB,16KiB,256KiB,1MiB,16MiB",
    only: Annotated[str, typer.Option(metavar="C,C", help="Which collectives.")] = ",".join(COLLECTIVES),
    transport: Annotated[str, typer.Option(metavar="T", help="shm, tcp or libfabric.")] = "shm",
    waiting: Annotated[str, typer.Option(metavar="HOW", help="auto, poll, spin or block.")] = "auto",
    repetitions: Annotated[int, typer.Option(metavar="N", help="Turns of every contestant.")] = 5,
    timeout: Annotated[float, typer.Option(metavar="S", help="Patience of every wait.")] = 30.0,
    quiet_timeout: Annotated[float, typer.Option(metavar="S", help="Wait so long for other programs to rest.")] = 5.0,
    json: JsonOption = None,
) -> None:
    """Time collectives between N ranks: Antiphon beside gloo, checked first, in turns."""
    check_count("--repetitions", repetitions, _MOST_REPETITIONS)
    check_timeout("--timeout", timeout)
    if not 0 <= quiet_timeout <= _MOST_QUIET_S:
        raise UserError(f"--quiet-timeout is {quiet_timeout:g}: use 0 to {_MOST_QUIET_S:g} seconds")
    settings = CollectiveSettings(
        transport=check_one_of("--transport", transport, TRANSPORTS),
        waiting=check_one_of("--waiting", waiting, WAITING),
        num_repetitions=repetitions,
        quiet_timeout_s=quiet_timeout,
        timeout_s=timeout,
    )
    chosen = [check_one_of("--only", name, COLLECTIVES) for name in _words("--only", only)]
    sizes_bytes = [_size(text) for text in _words("--bytes", sizes)]
    counts = [_number_of_ranks(text) for text in _words("--ranks", ranks)]
    rows: list[dict[str, Any]] = []
    for count in counts:
        with progress(f"{count} ranks") as report:
            rows += bench_collectives(count, chosen, sizes_bytes, settings, report)
    show_bench("collectives", result_table(rows), rows, json=json)


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""
    cells = [
        (
            row["collective"],
            row["ranks"],
            format_bytes(row["bytes"]),
            format_seconds(row["median_s"]),
            format_seconds(row["gloo_median_s"]),
            f"{row['speedup_over_gloo']:.3g}x",
            foreign_words(row),
        )
        for row in rows
    ]
    return table(_COLUMNS, cells, title="slowest rank, medians")


def _words(option: str, text: str) -> list[str]:
    if not (words := words_of(text)):
        raise UserError(f"{option} is empty: name at least one")
    return words


def _size(text: str) -> int:
    num_bytes = parse_size("--bytes", text)
    if not 1 <= num_bytes <= _MOST_BYTES:
        raise UserError(f"--bytes has {text}: a tensor has 1 byte to {format_bytes(_MOST_BYTES)}")
    return num_bytes


def _number_of_ranks(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= _MOST_RANKS:
        raise UserError(f"--ranks has {text}: a group to measure has 2 to {_MOST_RANKS} ranks")
    return int(text)
