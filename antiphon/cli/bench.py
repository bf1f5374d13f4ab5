"""`antiphon bench`: Antiphon beside other engines, libraries and loops, on one machine. Those of engines are in
`bench_serve`.

What a benchmark can be asked for stands in the frozen dataclass of its case, as options; a command checks their limits,
runs the benchmark and shows its columns. Options that several values share, written as one text, are read here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.system import sigterm_exits
from antiphon.base.units import format_bytes
from antiphon.bench import collectives as collecting
from antiphon.bench import dispatch as dispatching
from antiphon.bench import hybrid as two_levels
from antiphon.bench import train as training
from antiphon.bench import training_ladder
from antiphon.bench.ladder_variants import LadderCase, LadderOptions, check_ladder
from antiphon.bench.m2n import cases
from antiphon.bench.m2n import contest as m2n_contest
from antiphon.cli import options
from antiphon.cli.bench_serve import MOST_TURNS, apart, balance, ping_pong, pools, say, serve, step
from antiphon.cli.commands import CONTEXT_SETTINGS, new_app, takes_groups
from antiphon.cli.options import (
    check_count,
    check_limits,
    check_one_of,
    check_timeout,
    list_of,
    numbers_of,
    parse_size,
    refuse_alone,
    words_of,
)
from antiphon.cli.output import JsonOption, check_output_file, show_rows, whole_file, write_whole
from antiphon.models.config import load_model_spec
from antiphon.serve.config import MAX_THREADS

app = new_app("Measure Antiphon beside other engines.", invoke_without_command=True)
MOST_ROUNDS = 1_000_000  # more is a slip
MOST_SEQUENCES, MOST_POSITIONS, MOST_RANKS, MOST_NODES = 65_536, 1_000_000, 64, 16
MOST_TENSOR_BYTES = 1 << 30


@app.callback()
def root(context: typer.Context) -> None:
    """Measure Antiphon beside other engines."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    context.with_resource(sigterm_exits())  # else ranks, workers that wait for their turn and folders would stay


# --- communication


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
    if figure is None:
        written = words_of(sizes or "") if unbalanced else list_of("--bytes", sizes or "", may_be_empty=True)
        chosen = cases.make_cases(
            cases.DEFAULT_SENDERS if senders is None else senders,
            cases.DEFAULT_RECEIVERS if receivers is None else receivers,
            [cases.DEFAULT_BYTES] if sizes is None else [parse_size("--bytes", size) for size in written],
            both_ways=duplex,
            unbalanced=unbalanced,
        )
    else:
        given = {"--senders": senders, "--receivers": receivers, "--bytes": sizes, "--unbalanced": unbalanced or None}
        if excess := [option for option, value in given.items() if value is not None]:
            raise UserError(f"--figure {figure} brings its own sizes: leave out {', '.join(excess)}")
        chosen = cases.figure_cases(figure, both_ways=duplex)
    chosen = [replace(case, touched=touch) for case in chosen]
    named = (list_of(*each, may_be_empty=True) for each in (("--transport", transport), ("--against", against)))
    contestants = cases.choose_contestants(*named, in_place=in_place, waiting=waiting)
    check_count("--rounds", rounds, MOST_ROUNDS)
    check_count("--repetitions", repetitions, MOST_TURNS)
    check_timeout("--timeout", timeout)
    rows, recordings = m2n_contest.bench_m2n(
        contestants,
        chosen,
        num_rounds=rounds or 0,
        num_repetitions=repetitions,
        timeout_s=timeout,
        record=timeline is not None,
    )
    show_rows("m2n", m2n_contest.COLUMNS, rows, json)
    if timeline is not None:
        with whole_file("--timeline", timeline) as partial:
            m2n_contest.write_trace(partial, recordings)


@takes_groups
def collectives(
    ranks: Annotated[str, typer.Option(metavar="N,N", help="Ranks of a group.")] = "2,4,8",
    sizes: Annotated[
        str, typer.Option("--bytes", metavar="S,S", help="Sizes of the tensor.")
    ] = "1KiB,16KiB,256KiB,1MiB,16MiB",
    only: Annotated[str, typer.Option(metavar="C,C", help="Which collectives.")] = ",".join(collecting.COLLECTIVES),
    *,
    settings: collecting.CollectiveSettings,
    json: JsonOption = None,
) -> None:
    """Time collectives between N ranks: Antiphon beside gloo, checked first, in turns."""
    check_limits(settings)
    settings.check()
    chosen = [check_one_of("--only", name, collecting.COLLECTIVES) for name in list_of("--only", only)]
    sizes_bytes = [_tensor_bytes(text) for text in list_of("--bytes", sizes)]
    counts = [_number_of_ranks(text) for text in list_of("--ranks", ranks)]
    rows: list[dict[str, Any]] = []
    for count in counts:
        with progress(f"{count} ranks") as report:
            rows += collecting.bench_collectives(count, chosen, sizes_bytes, settings, report)
    show_rows("collectives", collecting.COLUMNS, rows, json)


def _tensor_bytes(text: str) -> int:
    num_bytes = parse_size("--bytes", text)
    if not 1 <= num_bytes <= MOST_TENSOR_BYTES:
        raise UserError(f"--bytes has {text}: a tensor has 1 byte to {format_bytes(MOST_TENSOR_BYTES)}")
    return num_bytes


def _number_of_ranks(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= MOST_RANKS:
        raise UserError(f"--ranks has {text}: a group to measure has 2 to {MOST_RANKS} ranks")
    return int(text)


@takes_groups
def dispatch(chosen: dispatching.DispatchOptions, json: JsonOption = None) -> None:
    """Time a MoE layer's dispatch and combine, forward and backward, over gloo."""
    check_limits(chosen)
    with progress("dispatch and combine", format_amount=lambda done: f"{done:.0f}") as report:
        rows = dispatching.bench_dispatch(chosen, report)
    show_rows("dispatch", dispatching.COLUMNS, rows, json, torch=torch.__version__)


@takes_groups
def hybrid(case: two_levels.TwoLevelCase, json: JsonOption = None) -> None:
    """Time dispatch and combine over N nodes of M ranks: hybrid TP-EP, fused and not, beside plain EP and TP."""
    check_limits(case)
    case.check()
    with progress(f"{case.nodes} x {case.ranks_per_node} ranks") as report:
        rows = two_levels.bench_two_level(case, report)
    show_rows("hybrid", two_levels.COLUMNS, rows, json)


# --- training


@takes_groups
def train(
    context: typer.Context,
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
    compiled: Annotated[bool, typer.Option("--compiled", help="Also the loop through torch.compile.")] = False,
    *,
    chosen: LadderOptions,
    json: JsonOption = None,
) -> None:
    """Time a training step of MODEL beside a plain loop over transformers, in turns."""
    check_count("--batch", batch, MOST_SEQUENCES)
    check_count("--sequence-length", sequence_length, MOST_POSITIONS)
    check_count("--threads", threads, MAX_THREADS)
    check_count("--rounds", rounds, MOST_TURNS)
    dtypes = training.parse_dtypes(dtype)
    step: dict[str, Any] = {"folder": model, "batch": batch, "sequence_length": sequence_length}
    if chosen.ladder is not None:
        if threads is not None or ranks != "1" or changes or len(dtypes) > 1 or compiled:
            raise UserError(
                "--threads, --ranks, --set, --compiled or several dtypes: a ladder says what runs, so leave them out"
            )
        _run_ladder(chosen, step | {"dtype": dtypes[0], "rounds": rounds}, json)
        return
    refuse_alone(context, LadderOptions, "ladder", "only a ladder runs in a box, so give --ladder too, or leave it out")
    counts = numbers_of("--ranks", ranks, "1,2,4")
    for count in counts:
        check_count("--ranks", count, MOST_RANKS)
    if changes and all(count == 1 for count in counts):
        raise UserError(f"--set {changes[0]}: one process shares nothing; add --ranks, for example --ranks 2")
    if compiled and counts != [1]:
        raise UserError(f"--compiled: it is timed on one process, --ranks is {ranks}: leave one of them out")
    cores = threads or torch.get_num_threads()
    cases = [
        training.TrainingCase(
            **step,
            dtype=name,
            max_rounds=rounds,
            ranks=count,
            threads=max(1, cores // count),
            parallel=training.parse_parallel(changes or [], count) if count > 1 else {},
            compiled=compiled,
        )
        for count in counts
        for name in dtypes
    ]
    for case in cases:
        case.check_sizes(load_model_spec(case.folder))
    torch.set_num_threads(cores)
    with progress("timing training steps") as report:
        rows = training.bench_train(cases, say, report)
    show_rows("train", training.COLUMNS, rows, json, torch=torch.__version__)


def _run_ladder(chosen: LadderOptions, step: dict[str, Any], json: str | None) -> None:
    """Time its variants, in turns, and show them."""
    check_count("--nodes", chosen.nodes, MOST_NODES)
    check_count("--ranks-per-node", chosen.ranks_per_node, MOST_NODES)
    case = LadderCase(**step, **vars(chosen))
    check_timeout("--timeout", case.timeout)
    check_output_file("--figure", chosen.figure)
    check_ladder(case)
    with progress(f"ladder {case.ladder}", format_amount=lambda done: f"{done:.0f} steps") as report:
        rows = training_ladder.bench_ladder(case, report)
    show_rows("train", training_ladder.columns(rows), rows, json, torch=torch.__version__)
    if chosen.figure is not None:
        title = (
            f"{case.ladder}: {case.nodes} nodes x {case.ranks_per_node} ranks, {case.mbit:g} Mbit/s, "
            f"{case.tokens_per_step} tokens a step"
        )
        write_whole("--figure", chosen.figure, training_ladder.draw(rows, title))


for command in (  # in the order of the help
    m2n,
    train,
    dispatch,
    collectives,
    balance,
    hybrid,
    serve,
    step,
    pools,
    ping_pong,
    apart,
):
    app.command(context_settings=CONTEXT_SETTINGS)(command)
