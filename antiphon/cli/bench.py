"""`antiphon bench serve`: throughput and latency of Antiphon's layouts beside other engines, on one machine."""

import json as jsonlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.antiphon_engine import AntiphonEngine
from antiphon.bench.peers.api import Peer
from antiphon.bench.peers.local_peers import transformers_peer, vllm_peer
from antiphon.bench.peers.openai_peer import OpenAIPeer
from antiphon.bench.serve import WorkloadSize, bench_serve
from antiphon.cli import options
from antiphon.cli.bench_balance import balance
from antiphon.cli.bench_collectives import collectives
from antiphon.cli.bench_dispatch import dispatch
from antiphon.cli.bench_hybrid import hybrid
from antiphon.cli.bench_m2n import m2n
from antiphon.cli.bench_train import train
from antiphon.cli.commands import CONTEXT_SETTINGS, new_app
from antiphon.cli.output import JsonOption, show_bench, table
from antiphon.kernels.select import resolve_device
from antiphon.models.config import load_model_spec
from antiphon.serve.config import MAX_THREADS
from antiphon.serve.signals import sigterm_exits
from antiphon.specs.model import ModelSpec

app = new_app("Measure Antiphon beside other engines.", invoke_without_command=True)
app.command(context_settings=CONTEXT_SETTINGS)(m2n)
app.command(context_settings=CONTEXT_SETTINGS)(train)
app.command(context_settings=CONTEXT_SETTINGS)(dispatch)
app.command(context_settings=CONTEXT_SETTINGS)(collectives)
app.command(context_settings=CONTEXT_SETTINGS)(balance)
app.command(context_settings=CONTEXT_SETTINGS)(hybrid)
MOST_REQUESTS, MOST_TOKENS, MOST_ROUNDS = 65_536, 10_000_000, 1000  # more is a slip of the finger
_COLUMNS = (
    "engine",
    "conc.",
    "in",
    "out",
    "out tok/s",
    "decode tok/s",
    "of bound",
    "prefill tok/s",
    "of bound",
    "foreign",
)


@app.callback()
def root(context: typer.Context) -> None:
    """Measure Antiphon beside other engines."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(context_settings=CONTEXT_SETTINGS)
def serve(
    model: options.ModelFolder,
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Requests at once.")] = "1,8,32,64",
    input_tokens: Annotated[int, typer.Option(metavar="N", help="Prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens generated per request.")] = 64,
    prefill: Annotated[str, typer.Option(metavar="NxN,NxN", help="Prompts x tokens; '': none.")] = "1x512,8x512",
    layouts: Annotated[str, typer.Option(metavar="L,L", help="colocated, colocated*2, 1+1/m2")] = "colocated",
    peers: Annotated[
        str | None, typer.Option(metavar="P,P", show_default="transformers,vllm", help="'': none.")
    ] = None,
    against_url: Annotated[str | None, typer.Option(metavar="URL", help="Any OpenAI-compatible server.")] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="At most this many repetitions.")] = 6,
    json: JsonOption = None,
) -> None:
    """Time serving MODEL beside other engines, in turns."""
    options.check_count("--threads", threads, MAX_THREADS)
    options.check_count("--rounds", rounds, MOST_ROUNDS)
    sizes = workload_sizes(concurrency, input_tokens, output_tokens, prefill)
    check_sizes(sizes, load_model_spec(model))
    resolve_device(device, 0)
    contestants = own_engines(layouts, model, sizes, device, threads)
    contestants += other_engines(peers, against_url, model, device)
    if not contestants:
        raise UserError("nobody to measure: give --layouts, --peers or --against-url")
    with sigterm_exits():  # workers that wait for their turn are stopped, and would stay so for ever
        rows, limits = bench_serve(model, contestants, sizes, max_rounds=rounds, say=_say, device=device)
    if not rows:
        raise ResourceError("nothing ran: no contestant could be started or came to an end; the lines above say why")
    show_bench(
        "serve",
        result_table(rows),
        rows,
        json=json,
        device=device_name(device),
        torch=torch.__version__,
        limits=jsonlib.loads(jsonlib.dumps(asdict(limits))),
    )


def workload_sizes(concurrency: str, input_tokens: int, output_tokens: int, prefill: str) -> list[WorkloadSize]:
    """What to measure, from the options' texts; `UserError` when that is nothing."""
    options.check_count("--input-tokens", input_tokens, MOST_TOKENS)
    options.check_count("--output-tokens", output_tokens, MOST_TOKENS)
    sizes = [WorkloadSize(count, input_tokens, output_tokens) for count in parse_counts(concurrency)]
    sizes += [WorkloadSize(count, tokens, 1) for count, tokens in parse_prefill(prefill)]
    if not sizes:
        raise UserError("nothing to measure: give --concurrency or --prefill")
    return sizes


def own_engines(
    layouts: str, model: Path, sizes: Sequence[WorkloadSize], device: str, threads: int | None
) -> list[Peer]:
    """One engine of ours for each layout, with room for the largest size."""
    max_concurrency = max(size.concurrency for size in sizes)
    max_tokens = max(size.input_tokens + size.output_tokens for size in sizes)
    return [
        AntiphonEngine(
            name, model, max_concurrency=max_concurrency, max_tokens=max_tokens, device=device, threads=threads
        )
        for name in layouts.split(",")
        if name
    ]


def other_engines(peers: str | None, against_url: str | None, model: Path, device: str) -> list[Peer]:
    """The engines to compare with: those that `--peers` names, and a server that runs already."""
    names = default_peers(device) if peers is None else peers.split(",")
    found = [make_peer(name, model, device) for name in names if name]
    if against_url is not None:
        found.append(OpenAIPeer(against_url))
    return found


def check_sizes(sizes: Sequence[WorkloadSize], spec: ModelSpec) -> None:
    """`UserError` for a request that the model's context cannot hold."""
    for size in sizes:
        if size.input_tokens + size.output_tokens > spec.max_position:
            raise UserError(
                f"{size.input_tokens} input and {size.output_tokens} output tokens are more than the model's context "
                f"of {spec.max_position}: lower --input-tokens, --output-tokens or --prefill"
            )


def default_peers(device: str) -> tuple[str, ...]:
    """The peers that this device has; says whom it leaves out."""
    if device == "cpu":
        return ("transformers", "vllm")
    _say(f"without vllm: it is set up for the CPU, not for --device {device}")
    return ("transformers",)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def make_peer(name: str, model: Path, device: str) -> Peer:
    """A peer by its name on the command line."""
    if name == "transformers":
        return transformers_peer(model, device=device)
    if name == "vllm":
        if device != "cpu":
            raise UserError(f"peer vllm is set up for the CPU: with --device {device} use --peers transformers")
        return vllm_peer(model)
    raise UserError(f"peer {name!r} is not known: use transformers or vllm, or --against-url")


def parse_counts(text: str) -> list[int]:
    """``"1,8"`` -> ``[1, 8]``."""
    try:
        counts = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"--concurrency {text!r} is not a list of numbers: write for example 1,8,32") from error
    for count in counts:
        options.check_count(f"--concurrency {text!r}: a number", count, MOST_REQUESTS)
    return counts


def parse_prefill(text: str) -> list[tuple[int, int]]:
    """``"8x512"`` -> ``[(8, 512)]``."""
    try:
        numbers = [tuple(int(number) for number in part.split("x")) for part in text.split(",") if part]
        pairs = [(count, tokens) for count, tokens in numbers]
    except ValueError as error:
        raise UserError(f"--prefill {text!r} is not a list like 1x512,8x512") from error
    for count, tokens in pairs:
        options.check_count(f"--prefill {text!r}: a number of prompts", count, MOST_REQUESTS)
        options.check_count(f"--prefill {text!r}: a prompt's length", tokens, MOST_TOKENS)
    return pairs


def device_name(device: str) -> str:
    """``cpu``, or the accelerator's own name behind its kind."""
    return device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}"


def result_table(rows: list[dict[str, Any]]) -> Any:
    """What people read; the JSON has more."""

    def share(value: float | None) -> str | None:
        return None if value is None else f"{value:.0%}"

    cells = [
        (
            row["engine"],
            row["concurrency"],
            row["input_tokens"],
            row["output_tokens"],
            row["output_tokens_per_s"],
            row["decode_tokens_per_s"],
            share(row.get("decode_fraction_of_bound")),
            row["prefill_tokens_per_s"],
            share(row["prefill_fraction_of_bound"]),
            share(row["foreign_cpu_share"]),
        )
        for row in rows
    ]
    return table(_COLUMNS, cells)
