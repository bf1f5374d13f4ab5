"""`antiphon bench dispatch`: all-to-all beside all-gather for a MoE layer's rows, between ranks on this machine."""

from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.bench.dispatch import TOLERANCES, DispatchCase, bench_dispatch
from antiphon.cli import options
from antiphon.cli.output import JsonOption, show_bench, table

MOST_RANKS, MOST_ROWS, MOST_WIDTH, MOST_EXPERTS, MOST_ROUNDS = 64, 1_000_000, 65_536, 4096, 1000  # a slip beyond
_COLUMNS = ("ranks", "top-k", "variant", "round trip ms", "to all-to-all", "sent a rank", "formula", "waited ms")


def dispatch(
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes, each with its experts.")] = 2,
    tokens: Annotated[int, typer.Option(metavar="N", help="Rows of each rank.")] = 1024,
    hidden: Annotated[int, typer.Option(metavar="N", help="Width of a row.")] = 1024,
    experts: Annotated[int, typer.Option(metavar="N", help="Experts in all.")] = 16,
    top_k: Annotated[str, typer.Option(metavar="K,K", help="Experts of a row.")] = "1,2,4,8",
    dtype: Annotated[str, typer.Option(metavar="D", help="float32 or bfloat16: of the rows.")] = "float32",
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed rounds, in turns.")] = 10,
    json: JsonOption = None,
) -> None:
    """Time a MoE layer's dispatch and combine, forward and backward, over gloo."""
    for name, value, most in (
        ("--ranks", ranks, MOST_RANKS),
        ("--tokens", tokens, MOST_ROWS),
        ("--hidden", hidden, MOST_WIDTH),
        ("--experts", experts, MOST_EXPERTS),
        ("--rounds", rounds, MOST_ROUNDS),
    ):
        options.check_count(name, value, most)
    if ranks < 2:
        raise UserError(f"--ranks is {ranks}: one rank sends nothing, use 2 or more")
    if dtype not in TOLERANCES:
        raise UserError(f"--dtype is {dtype!r}: use {' or '.join(TOLERANCES)}")
    cases = [
        DispatchCase(
            ranks=ranks, tokens=tokens, hidden=hidden, num_experts=experts, top_k=k, dtype=dtype, rounds=rounds
        )
        for k in parse_top_k(top_k)
    ]
    with progress("dispatch and combine", format_amount=lambda done: f"{done:.0f}") as report:
        rows = bench_dispatch(cases, report)
    show_bench("dispatch", result_table(rows), rows, json=json, torch=torch.__version__)


def parse_top_k(text: str) -> list[int]:
    """``"1,2,4"`` -> [1, 2, 4]."""
    found = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise UserError(f"--top-k is {text!r}: write whole numbers from 1 on, such as 1,2,4")
        found.append(int(part))
    return found


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""
    cells = [
        (
            row["ranks"],
            row["top_k"],
            row["variant"],
            f"{row['round_trip_s_median'] * 1e3:.2f}",
            f"{row['time_to_all_to_all']:.2f}",
            format_bytes(row["comm_bytes"]),
            format_bytes(row["formula_bytes"]),
            f"{row['waited_s'] * 1e3:.2f}",
        )
        for row in rows
    ]
    return table(_COLUMNS, cells, title="dispatch and combine, forward and backward; slowest rank, medians")
