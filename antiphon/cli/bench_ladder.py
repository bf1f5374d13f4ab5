"""`antiphon bench train --ladder`: variants of a training step beside each other, on a cluster in a box."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.bench.ladder.figure import draw
from antiphon.bench.ladder.ladders import LadderCase
from antiphon.bench.ladder.launch import bench_ladder, check_ladder
from antiphon.cli import options
from antiphon.cli.output import JsonOption, check_output_file, show_bench, table, write_whole
from antiphon.train.config import Dtype

MOST_NODES = 16  # of one machine's cores; more is a slip of the finger
_COLUMNS = ("variant", "tok/s", "step s", "waits s", "sends", "keeps", "to the first", "simulated s", "error")


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """Which ladder, and on which box. What is None was left out."""

    ladder: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variants of a step instead: msm, compression, lina.")
    ] = None
    nodes: Annotated[int | None, typer.Option(metavar="N", show_default="2", help="Of a ladder: nodes.")] = None
    ranks_per_node: Annotated[
        int | None, typer.Option(metavar="N", show_default="2", help="Of a ladder: ranks of a node.")
    ] = None
    mbit: Annotated[
        float | None, typer.Option(metavar="R", show_default="100", help="Of a ladder: each link, in 10^6 bits/s.")
    ] = None
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="no figure", help="Of a ladder: write it as SVG.")
    ] = None

    timeout: Annotated[
        float | None, typer.Option(metavar="S", show_default="3600", help="Of a ladder: to its end.")
    ] = None

    def refuse_without_ladder(self) -> None:
        given: dict[str, object] = {"--nodes": self.nodes, "--ranks-per-node": self.ranks_per_node, "--mbit": self.mbit}
        given |= {"--figure": self.figure, "--timeout": self.timeout}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise UserError(f"{', '.join(named)}: only a ladder runs in a box, so give --ladder too, or leave it out")


def run_ladder(chosen: LadderOptions, case: LadderCase, json: JsonOption) -> None:
    """Time its variants, in turns, and show them."""
    timeout_s = 3600.0 if chosen.timeout is None else chosen.timeout
    options.check_timeout("--timeout", timeout_s)
    check_output_file("--figure", chosen.figure)
    check_ladder(case)
    with progress(f"ladder {case.ladder}", format_amount=lambda done: f"{done:.0f} steps") as report:
        rows = bench_ladder(case, timeout_s, report)
    show_bench("train", result_table(rows), rows, json=json, torch=torch.__version__)
    if chosen.figure is not None:
        title = (
            f"{case.ladder}: {case.nodes} nodes x {case.ranks_per_node} ranks, {case.mbit:g} Mbit/s, "
            f"{case.tokens_per_step} tokens a step"
        )
        write_whole("--figure", chosen.figure, draw(rows, title))


def case_of(
    chosen: LadderOptions, *, model: Path, batch: int, sequence_length: int, dtype: Dtype, rounds: int
) -> LadderCase:
    """`UserError` for what cannot be."""
    nodes = 2 if chosen.nodes is None else chosen.nodes
    ranks = 2 if chosen.ranks_per_node is None else chosen.ranks_per_node
    options.check_count("--nodes", nodes, MOST_NODES)
    options.check_count("--ranks-per-node", ranks, MOST_NODES)
    return LadderCase(
        folder=model,
        ladder=chosen.ladder or "",
        nodes=nodes,
        ranks_per_node=ranks,
        mbit=100.0 if chosen.mbit is None else chosen.mbit,
        batch=batch,
        sequence_length=sequence_length,
        dtype=dtype,
        rounds=rounds,
    )


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""
    first_s = rows[0]["step_s_median"]
    cells = []
    for row in rows:
        step_s, predicted_s = row["step_s_median"], row["predicted_step_s"]
        cells.append(
            (
                row["variant"],
                row["tokens_per_s"],
                step_s,
                row["exposed_comm_s"],
                format_bytes(row["comm_bytes"]),
                format_bytes(row["activation_bytes"]),
                f"{first_s / step_s:.2f}",
                predicted_s,
                "" if predicted_s is None else f"{predicted_s / step_s - 1:+.0%}",
            )
        )
    title = f"{rows[0]['nodes']} nodes, {rows[0]['world_size']} ranks, {rows[0]['mbit']:g} Mbit/s"
    return table(_COLUMNS, cells, title=title)
