"""`antiphon bench hybrid`: a MoE layer's rows over nodes and ranks, fused and synchronous, beside plain EP and TP."""

from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.m2n.contestants import TRANSPORTS
from antiphon.bench.quiet import foreign_words
from antiphon.bench.two_level import TwoLevelCase, bench_two_level
from antiphon.cli.options import check_count, check_one_of, check_timeout
from antiphon.cli.output import JsonOption, show_bench, table

_COLUMNS = ("contestant", "median", "synchronous/this", "across a rank", "inside a rank", "on a link", "foreign")
_MOST = {"--nodes": 16, "--ranks-per-node": 16, "--tokens": 65_536, "--hidden": 65_536, "--experts": 4096}


def hybrid(
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(metavar="M", help="Ranks of a node.")] = 2,
    tokens: Annotated[int, typer.Option(metavar="T", help="Rows of each node.")] = 64,
    hidden: Annotated[int, typer.Option(metavar="H", help="Width of a row.")] = 2048,
    experts: Annotated[int, typer.Option(metavar="E", help="Experts in all.")] = 16,
    top_k: Annotated[int, typer.Option(metavar="K", help="Experts of a row.")] = 4,
    inside: Annotated[str, typer.Option(metavar="T", help="Transport inside a node.")] = "shm",
    across: Annotated[str, typer.Option(metavar="T", help="Transport between nodes.")] = "tcp",
    mbit: Annotated[
        float | None, typer.Option(metavar="R", show_default="no box", help="Nodes in a box, links of R 10^6 bits/s.")
    ] = None,
    calls: Annotated[int, typer.Option(metavar="N", help="Round trips of a turn.")] = 20,
    repetitions: Annotated[int, typer.Option(metavar="N", help="Turns of every contestant.")] = 5,
    timeout: Annotated[float, typer.Option(metavar="S", help="Patience of every wait.")] = 30.0,
    json: JsonOption = None,
) -> None:
    """Time dispatch and combine over N nodes of M ranks: hybrid TP-EP, fused and not, beside plain EP and TP."""
    given = {
        "--nodes": nodes,
        "--ranks-per-node": ranks_per_node,
        "--tokens": tokens,
        "--hidden": hidden,
        "--experts": experts,
    }
    for option, value in given.items():
        check_count(option, value, _MOST[option])
    check_count("--top-k", top_k, experts)
    check_count("--calls", calls, 100_000)
    check_count("--repetitions", repetitions, 1000)
    check_timeout("--timeout", timeout)
    check_one_of("--inside", inside, TRANSPORTS)
    check_one_of("--across", across, TRANSPORTS)
    if mbit is not None and not 0.1 <= mbit <= 100_000:
        raise UserError(f"--mbit is {mbit:g}: it must be 0.1 to 100000")
    if mbit is not None and across == "shm":
        raise UserError("--across shm passes no link: with --mbit use tcp or libfabric")
    num_ranks = nodes * ranks_per_node
    if hidden % num_ranks:
        raise UserError(f"--hidden is {hidden}: it must be a multiple of the {num_ranks} ranks, which share each row")
    if experts < num_ranks:
        raise UserError(f"--experts is {experts}: give each of the {num_ranks} ranks one at least")
    case = TwoLevelCase(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        tokens=tokens,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        inside=inside,
        across=across,
        mbit=mbit,
        calls=calls,
        repetitions=repetitions,
        timeout_s=timeout,
    )
    with progress(f"{nodes} x {ranks_per_node} ranks") as report:
        rows = bench_two_level(case, report)
    show_bench("hybrid", result_table(rows), rows, json=json)


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""
    cells = [
        (
            row["contestant"],
            format_seconds(row["median_s"]),
            f"{row['synchronous_to_this']:.3g}x",
            format_bytes(row["across_bytes"]),
            format_bytes(row["inside_bytes"]),
            "" if row["mbit"] is None else f"{format_bytes(row['link_bytes'])}, {format_seconds(row['link_s'])}",
            foreign_words(row),
        )
        for row in rows
    ]
    return table(_COLUMNS, cells, title="dispatch and combine; slowest rank, medians")
