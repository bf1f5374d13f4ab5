"""What `antiphon bench serve` makes of its options: sizes and engines; with `--rate` the whole run, servers of ours and
one at a URL under load that does not wait for them."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from antiphon.base.errors import UserError
from antiphon.base.units import format_bytes
from antiphon.bench import serve as serving
from antiphon.bench.load import COLUMNS, LoadOptions, bench_load, best_within, load_case
from antiphon.bench.load_servers import nodes_for, own_servers, run_beside
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.bench.serving_peers import Peer, default_peers, make_peer
from antiphon.cli.bench_rows import check_limits, show_rows
from antiphon.cli.options import check_count, words_of
from antiphon.cli.output import check_output_file, write_whole
from antiphon.report.document import Grid, html
from antiphon.report.load import load_page
from antiphon.serve.signals import sigterm_exits
from antiphon.specs.model import ModelSpec

MOST_REQUESTS, MOST_TOKENS = 65_536, 10_000_000  # more is a slip


def say(text: str) -> None:
    print(text, file=sys.stderr)


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
    names = words_of(layouts)
    if load.nodes is not None and (against_url is not None or threads is not None or device != "cpu"):
        raise UserError(
            "--nodes: each process there is a worker of one thread on a CPU, and no server outside is seen; leave out "
            "--against-url, --threads and --device"
        )
    given = ["--device", device, *(["--threads", str(threads)] if threads else [])]
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-load-") as folder,
        sigterm_exits(),
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

    found = [engine(name) for name in layouts.split(",") if name]
    if expert_bytes is not None:
        found.append(engine("colocated", expert_bytes=expert_bytes))
        found[-1].name = f"antiphon, experts in {format_bytes(expert_bytes)}"
    return list(found)


def other_engines(peers: str | None, against_url: str | None, model: Path, device: str) -> list[Peer]:
    """The engines to compare with: those that `--peers` names, and a server that runs already."""
    names = default_peers(device, say) if peers is None else peers.split(",")
    found = [make_peer(name, model, device) for name in names if name]
    if against_url is not None:
        found.append(OpenAIPeer(against_url))
    return found


def parse_counts(text: str) -> list[int]:
    """``"1,8"`` -> ``[1, 8]``."""
    try:
        counts = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise UserError(f"--concurrency {text!r} is not a list of numbers: write for example 1,8,32") from error
    for count in counts:
        check_count(f"--concurrency {text!r}: a number", count, MOST_REQUESTS)
    return counts


def parse_prefill(text: str) -> list[tuple[int, int]]:
    """``"8x512"`` -> ``[(8, 512)]``."""
    try:
        numbers = [tuple(int(number) for number in part.split("x")) for part in text.split(",") if part]
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
