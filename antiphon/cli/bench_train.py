"""`antiphon bench train`: the trainer's step beside a plain loop over transformers, in one run."""

import sys
from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.bench.train import bench_train
from antiphon.bench.train_turns import TOLERANCES, TrainingCase
from antiphon.cli import options
from antiphon.cli.bench_ladder import LadderOptions, case_of, run_ladder
from antiphon.cli.commands import takes_groups
from antiphon.cli.output import JsonOption, show_bench, table
from antiphon.models.config import load_model_spec
from antiphon.serve.config import MAX_THREADS
from antiphon.train.config import Dtype, apply_change

MOST_SEQUENCES, MOST_POSITIONS, MOST_ROUNDS, MOST_RANKS = 65_536, 1_000_000, 1000, 64  # more is a slip of the finger
_COLUMNS = (
    *("variant", "ranks", "dtype", "tok/s", "step s", "waits s", "sends", "kept for backward"),
    *("to loop", "of GEMM peak", "steps", "foreign"),
)


@takes_groups
def train(
    model: options.ModelFolder,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences of a step.")] = 8,
    sequence_length: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 256,
    dtype: Annotated[str, typer.Option(metavar="D,D", help="float32, bfloat16: of the arithmetic.")] = "float32",
    threads: Annotated[int | None, typer.Option(metavar="N", show_default="all cores")] = None,
    ranks: Annotated[str, typer.Option(metavar="N,N", help="On one process, and on several ranks.")] = "1",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of our ranks: parallel.KEY=N."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="At most this many steps each.")] = 12,
    *,
    chosen: LadderOptions,
    json: JsonOption = None,
) -> None:
    """Time a training step of MODEL beside a plain loop over transformers, in turns."""
    options.check_count("--batch", batch, MOST_SEQUENCES)
    options.check_count("--sequence-length", sequence_length, MOST_POSITIONS)
    options.check_count("--threads", threads, MAX_THREADS)
    options.check_count("--rounds", rounds, MOST_ROUNDS)
    dtypes = parse_dtypes(dtype)
    if chosen.ladder is not None:
        if threads is not None or ranks != "1" or changes or len(dtypes) > 1:
            raise UserError(
                "--threads, --ranks, --set or several dtypes: a ladder says itself what runs, so leave them out"
            )
        run_ladder(
            chosen,
            case_of(chosen, model=model, batch=batch, sequence_length=sequence_length, dtype=dtypes[0], rounds=rounds),
            json,
        )
        return
    chosen.refuse_without_ladder()
    if changes and all(count == 1 for count in parse_ranks(ranks)):
        raise UserError(f"--set {changes[0]}: one process shares nothing; add --ranks, for example --ranks 2")
    cores = threads or torch.get_num_threads()
    cases = [
        TrainingCase(
            folder=model,
            batch=batch,
            sequence_length=sequence_length,
            dtype=name,
            max_rounds=rounds,
            ranks=count,
            threads=max(1, cores // count),
            parallel=parse_parallel(changes or [], count) if count > 1 else {},
        )
        for count in parse_ranks(ranks)
        for name in dtypes
    ]
    for case in cases:
        case.check_sizes(load_model_spec(case.folder))
    torch.set_num_threads(cores)
    with progress("timing training steps") as report:
        rows = bench_train(cases, lambda text: print(text, file=sys.stderr), report)
    show_bench("train", result_table(rows), rows, json=json, torch=torch.__version__)


def parse_ranks(text: str) -> list[int]:
    """``"1,2,4"`` -> all of them."""
    if not all(name.isdecimal() for name in text.split(",")):
        raise UserError(f"--ranks {text!r}: write numbers, for example 1,2,4")
    found = [int(name) for name in text.split(",")]
    for count in found:
        options.check_count("--ranks", count, MOST_RANKS)
    return found


def parse_parallel(changes: list[str], ranks: int) -> dict[str, Any]:
    """The trainer's table `parallel`: experts over all ranks, and what ``parallel.KEY=VALUE`` says."""
    table: dict[str, Any] = {"expert": ranks}
    for change in changes:
        key = change.partition("=")[0]
        if not key.startswith("parallel."):
            raise UserError(f"--set {change}: only keys of parallel can be set here, for example parallel.zero=1")
        apply_change(table, change.removeprefix("parallel."))
    return table


def parse_dtypes(text: str) -> list[Dtype]:
    """``"float32,bfloat16"`` -> both."""
    found: list[Dtype] = []
    for name in text.split(","):
        if name not in TOLERANCES:
            raise UserError(f"--dtype {text!r}: {name!r} is not measured, use {' or '.join(TOLERANCES)}")
        found.append(name)
    return found


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""
    cells = [
        (
            row["variant"],
            row["world_size"],
            row["dtype"],
            row["tokens_per_s"],
            row["step_s_median"],
            row["exposed_comm_s"],
            format_bytes(row["comm_bytes"]),
            format_bytes(row["activation_bytes"]),
            f"{row['ratio_to_loop']:.2f}",
            f"{row['fraction_of_gemm_peak']:.0%}",
            row["steps"],
            f"{row['foreign_cpu_share']:.0%}",
        )
        for row in rows
    ]
    return table(_COLUMNS, cells)
