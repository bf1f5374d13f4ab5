"""The benchmarks of engines: `antiphon bench serve`, `step`, `balance`, `pools`, `ping-pong` and `apart`."""

import json as jsonlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.bench import apart as separating
from antiphon.bench import balance as balancing
from antiphon.bench import ping_pong as pairing
from antiphon.bench import pools as pooling
from antiphon.bench import serve as serving
from antiphon.bench import step_cost
from antiphon.bench.harness.processes import run_beside
from antiphon.bench.load import COLUMNS, LoadOptions, bench_load, best_within, load_case, nodes_for, own_servers
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serving_peers import Peer, default_peers, make_peer
from antiphon.cli import options
from antiphon.cli.commands import given_options, takes_groups
from antiphon.cli.options import check_count, check_limits, list_of, numbers_of, parse_size, refuse_alone
from antiphon.cli.output import JsonOption, check_output_file, check_output_folder, show, show_rows, write_whole
from antiphon.kernels.select import resolve_device
from antiphon.models.config import load_model_spec
from antiphon.report.document import Grid, html
from antiphon.report.serving import load_page
from antiphon.serve.config import MAX_THREADS
from antiphon.specs.model import ModelSpec

MOST_REQUESTS, MOST_TOKENS, MOST_TURNS = 65_536, 10_000_000, 1000  # more is a slip


def say(text: str) -> None:
    print(text, file=sys.stderr)


@takes_groups
def serve(
    context: typer.Context,
    model: options.ModelFolder,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Requests at once.")] = "1,8,32,64",
    input_tokens: Annotated[int, typer.Option(metavar="N", help="Prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens generated per request.")] = 64,
    prefill: Annotated[str, typer.Option(metavar="NxN,NxN", help="Prompts x tokens; '': none.")] = "1x512,8x512",
    layouts: Annotated[str, typer.Option(metavar="L,L", help="colocated, colocated*2, 1+1/m2")] = "colocated",
    peers: Annotated[
        str | None,
        typer.Option(metavar="P,P", show_default="transformers,vllm", help="'': none; llama.cpp: of a GGUF."),
    ] = None,
    against_url: Annotated[str | None, typer.Option(metavar="URL", help="Any OpenAI-compatible server.")] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    expert_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Also colocated with experts in the file, SIZE for those in use.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="At most this many repetitions.")] = 6,
    *,
    load: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Time serving MODEL beside other engines, in turns; with --rate under load that does not wait."""
    check_count("--threads", threads, MAX_THREADS)
    check_count("--rounds", rounds, MOST_TURNS)
    expert_bytes = None if expert_memory is None else parse_size("--expert-memory", expert_memory)
    if load.rate is not None:
        if expert_memory is not None:
            raise UserError(f"--expert-memory {expert_memory} does not apply with --rate: leave one of them out")
        serve_load(model, layouts, against_url, device, threads, load, json)
        return
    refuse_alone(context, LoadOptions, "rate", "only of load, so give --rate too, or leave it out")
    sizes = workload_sizes(concurrency, input_tokens, output_tokens, prefill)
    check_sizes(sizes, load_model_spec(model))
    resolve_device(device, 0)
    contestants = own_engines(layouts, model, sizes, device, threads, expert_bytes)
    contestants += other_engines(peers, against_url, model, device)
    if not contestants:
        raise UserError("nothing to measure: give --layouts, --peers or --against-url")
    rows, limits = serving.bench_serve(model, contestants, sizes, max_rounds=rounds, say=say, device=device)
    if not rows:
        raise ResourceError("nothing ran: no contestant could be started or came to an end; the lines above say why")
    measured = jsonlib.loads(jsonlib.dumps(asdict(limits)))
    machine: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__, "limits": measured}
    show_rows("serve", serving.COLUMNS, rows, json, about=None, **machine)


def serve_load(
    model: Path,
    layouts: str,
    against_url: str | None,
    device: str,
    threads: int | None,
    load: LoadOptions,
    json: str | None,
) -> None:
    """Start the servers, time them, show the rows and write the page. Blocks until all requests are answered."""

    check_limits(load)
    check_output_file("--html", load.html)
    case = load_case(load, model)
    names = list_of("--layouts", layouts, may_be_empty=True)
    if load.nodes is not None and (against_url is not None or threads is not None or device != "cpu"):
        raise UserError(
            "--nodes: each process there is a worker of one thread on a CPU, and no server outside is seen; leave out "
            "--against-url, --threads and --device"
        )
    given = ["--device", device, *(["--threads", str(threads)] if threads else [])]
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-load-") as folder,
        nodes_for(load) as box,
        own_servers(model, names, case, Path(folder), given, box) as peers,
    ):
        if against_url is not None:
            peers.append(OpenAIPeer(against_url))
        if not peers:
            raise UserError("no server to measure: give --layouts or --against-url")
        rows = run_beside(box, partial(bench_load, model, peers, case, say=say))
    slo = case.workload.slo
    within = None if slo.tpot_s is None else best_within(rows, slo.tpot_s)
    about = {
        "workload": case.workload.name,
        "slo": asdict(slo),
        "burstiness": case.burstiness,
        "nodes": load.nodes,
        "mbit": None if load.nodes is None else load.mbit or 100.0,
        "output_tokens_per_s_within_tpot": within,
    }
    show_rows("serve-load", COLUMNS, rows, json, about=about, device=device_name(device))
    for name, tokens_per_s in (within or {}).items():
        reached = "no rate" if tokens_per_s is None else f"{tokens_per_s:,.0f} output tokens/s"
        say(f"{name}: {reached} with a median time per token of at most {(slo.tpot_s or 0) * 1e3:g} ms")
    if load.html is not None:
        cells = [["" if cell is None else str(cell) for cell in row] for row in COLUMNS.cells(rows)]
        grid = Grid(columns=COLUMNS.headings, rows=cells, right=range(1, len(COLUMNS.headings)))
        write_whole("--html", load.html, html(load_page(rows, model.name, case.workload.name, slo, grid)))


def workload_sizes(concurrency: str, input_tokens: int, output_tokens: int, prefill: str) -> list[serving.WorkloadSize]:
    """What to measure, from the options' texts; `UserError` when that is nothing."""
    check_count("--input-tokens", input_tokens, MOST_TOKENS)
    check_count("--output-tokens", output_tokens, MOST_TOKENS)
    sizes = [serving.WorkloadSize(count, input_tokens, output_tokens) for count in parse_counts(concurrency)]
    sizes += [serving.WorkloadSize(count, tokens, 1) for count, tokens in parse_prefill(prefill)]
    if not sizes:
        raise UserError("nothing to measure: give --concurrency or --prefill")
    return sizes


def check_sizes(sizes: Sequence[serving.WorkloadSize], spec: ModelSpec) -> None:
    """`UserError` for a request that the model's context cannot hold."""
    for size in sizes:
        if size.input_tokens + size.output_tokens > spec.max_position:
            raise UserError(
                f"{size.input_tokens} input and {size.output_tokens} output tokens are more than the model's context "
                f"of {spec.max_position}: lower --input-tokens, --output-tokens or --prefill"
            )


def own_engines(
    layouts: str,
    model: Path,
    sizes: Sequence[serving.WorkloadSize],
    device: str,
    threads: int | None,
    expert_bytes: int | None = None,
) -> list[Peer]:
    """One engine of ours for each layout, with room for the largest size; and one whose experts stay in the file."""
    max_concurrency = max(size.concurrency for size in sizes)
    max_tokens = max(size.input_tokens + size.output_tokens for size in sizes)

    def engine(name: str, **changes: object) -> serving.AntiphonEngine:
        return serving.AntiphonEngine(
            name,
            model,
            max_concurrency=max_concurrency,
            max_tokens=max_tokens,
            device=device,
            threads=threads,
            changes=changes,
        )

    names = list_of("--layouts", layouts, may_be_empty=True)
    for name in names:
        serving.parse_contestant(name, "--layouts")
    found = [engine(name) for name in names]
    if expert_bytes is not None:
        found.append(engine("colocated", expert_bytes=expert_bytes))
        found[-1].name = f"antiphon, experts in {format_bytes(expert_bytes)}"
    return list(found)


def other_engines(peers: str | None, against_url: str | None, model: Path, device: str) -> list[Peer]:
    """The engines to compare with: those that `--peers` names, and a server that runs already."""
    names = default_peers(device, say) if peers is None else list_of("--peers", peers, may_be_empty=True)
    found = [make_peer(name, model, device) for name in names]
    if against_url is not None:
        found.append(OpenAIPeer(against_url))
    return found


def parse_counts(text: str) -> list[int]:
    """``"1,8"`` -> ``[1, 8]``."""
    counts = numbers_of("--concurrency", text, "1,8,32", may_be_empty=True)
    for count in counts:
        check_count(f"--concurrency {text!r}: a number", count, MOST_REQUESTS)
    return counts


def parse_prefill(text: str) -> list[tuple[int, int]]:
    """``"8x512"`` -> ``[(8, 512)]``."""
    words = list_of("--prefill", text, may_be_empty=True)
    try:
        numbers = [tuple(map(int, word.split("x"))) for word in words]
        pairs = [(count, tokens) for count, tokens in numbers]
    except ValueError as error:
        raise UserError(f"--prefill {text!r} is not a list like 1x512,8x512") from error
    for count, tokens in pairs:
        check_count(f"--prefill {text!r}: a number of prompts", count, MOST_REQUESTS)
        check_count(f"--prefill {text!r}: a prompt's length", tokens, MOST_TOKENS)
    return pairs


def device_name(device: str) -> str:
    """``cpu``, or the accelerator's own name behind its kind."""
    return device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}"


# --- parts of a step, policies, pools


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
    options.sampling_params(case.params)
    rows = step_cost.bench_step(model, counts, case, say, threads=threads)
    show_rows("step", step_cost.COLUMNS, rows, json, about=asdict(case))


@takes_groups
def balance(
    model: options.ModelFolder,
    cases: Annotated[
        str | None, typer.Option(metavar="NAME,...", show_default="all", help="plain, hot, slow, skewed, recorded.")
    ] = None,
    *,
    chosen: balancing.BalanceOptions,
    json: JsonOption = None,
) -> None:
    """Time serving under each --balance policy: plain, a hot expert, a slow worker, skewed or recorded load."""
    check_limits(chosen)
    chosen.check()
    names = balancing.chosen_cases(cases, chosen.routing)
    orders = [balancing.BalanceOrder(model=model, case=case, **vars(chosen)) for case in names]
    rows: list[dict[str, Any]] = []
    for order in orders:
        with (
            tempfile.TemporaryDirectory(prefix="antiphon-hot-") as folder,
            progress(f"balance, {order.case}", format_amount=lambda done: f"{done:.0f}") as report,
        ):
            rows += balancing.bench_balance(order, chosen.chosen, Path(folder), report)
    about = {"slots": chosen.slots(model), "batch": chosen.batch}
    show_rows("balance", balancing.columns(rows), rows, json, about=about, torch=torch.__version__)


@takes_groups
def pools(
    model: options.ModelFolder,
    prompts: Annotated[str, typer.Option(metavar="N,N", help="Lengths of long prompts.")] = "512,2048,8192",
    *,
    case: pooling.PoolsCase,
    json: JsonOption = None,
) -> None:
    """Time one pool of workers against prefill and decode apart, on the same cores."""
    check_limits(case)
    lengths = numbers_of("--prompts", prompts, "512,2048")
    for length in lengths:
        check_count("--prompts", length, MOST_TOKENS)
    rows = pooling.bench_pools(model, lengths, case, say)
    said = pooling.verdicts(rows)
    show_rows("pools", pooling.columns(case), rows, json, about={"verdicts": said})
    show("\n".join(said), json=json)


# --- attention and experts apart


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
    counts = numbers_of("--m", m, "1,2,3")
    if shares is not None and traces is not None:
        raise UserError("--traces does not apply with --shares: clocks of nodes differ; leave one of them out")
    check_output_folder("--traces", traces)
    about = f"ping-pong, b = {case.micro_batch}"
    with progress(about, format_amount=lambda done: f"{done:.0f} runs") as report:
        if shares is None:
            rows = pairing.bench_ping_pong(model, case, counts, traces, report)
        else:
            wanted = [_link_share(text) for text in list_of("--shares", shares)]
            rows = pairing.bench_over_links(model, case, wanted, counts, report)
    show_rows("ping-pong", pairing.COLUMNS, rows, json, about=asdict(case))


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
    if attention is None:
        rows, columns = separating.bench_ablation(model, case, say), separating.ABLATION
    else:
        counts = numbers_of("--attention", attention, "1,2,3")
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
