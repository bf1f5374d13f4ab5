"""`antiphon profile`: what this machine does with one model, for `antiphon plan` and `benchmarks/predict.py`."""

import json as jsonlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.profile.effort import NORMAL, QUICK
from antiphon.bench.profile.local_times import LocalTimes, local_times_to_json
from antiphon.bench.profile.profile import Wanted, measure
from antiphon.bench.profile.this_machine import cost_profile, this_cluster
from antiphon.cli import options
from antiphon.cli.output import JsonOption, check_output_file, emit_json, show, table, whole_file
from antiphon.models.config import load_model_spec
from antiphon.serve.config import MAX_THREADS
from antiphon.specs.cluster import cluster_to_json

CLUSTER_FILE, LOCAL_FILE, PROFILE_FILE = "this-machine.json", "local.json", "profile.json"


def profile(
    model: options.ModelFolder,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Write profile, cluster and engine tables here.")
    ] = None,
    threads: Annotated[
        str,
        typer.Option("--threads", metavar="N,N", show_default="all cores, half of them", help="Threads of a worker."),
    ] = "",
    max_rows: Annotated[int, typer.Option("--max-rows", metavar="N", help="Most requests of a step.")] = 256,
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="bfloat16, float16, float32.")] = "auto",
    kernels: Annotated[str, typer.Option("--kernels", metavar="NAME", help="cpu (native), reference.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, briefly: to try it out.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure this machine with MODEL, for antiphon plan --profile.

    DIR gets profile.json (plan --profile), this-machine.json (plan --cluster), local.json (benchmarks/predict.py)."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {folder} is a file: name a folder, it is made if it does not exist")
    if folder is not None:
        _make_folder(folder)
    wanted = Wanted(
        model=model,
        effort=QUICK if quick else NORMAL,
        threads=parse_threads(threads),
        max_rows=max_rows,
        dtype=dtype,
        kernels=kernels,
    )
    with progress("measuring") as report:
        times = measure(wanted, report)
    spec = load_model_spec(model)
    measured = asdict(cost_profile(times, spec, " ".join(["antiphon", *sys.argv[1:]])))
    if folder is not None:
        contents = {PROFILE_FILE: measured, CLUSTER_FILE: cluster_to_json(this_cluster(times, spec))}
        for name, content in (contents | {LOCAL_FILE: local_times_to_json(times)}).items():
            with whole_file("--folder", folder / name) as path:
                path.write_text(jsonlib.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    show(workers_table(times), json=json)
    show(exchange_table(times), json=json)
    for line in remarks(times, folder):
        show(line, json=json)
    emit_json(json, measured)


def _make_folder(folder: Path) -> None:
    """`UserError` before minutes of measuring if nothing could be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--folder {folder} cannot be made: {error.strerror}; name one that you can write to"
        ) from error
    check_output_file("--folder", folder / CLUSTER_FILE)


def parse_threads(text: str) -> tuple[int, ...]:
    """``"2,1"`` -> ``(2, 1)``."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise UserError(f"--threads {text!r} is not a list of numbers: write for example 2,1") from error
    if not all(1 <= count <= MAX_THREADS for count in counts) or len(set(counts)) != len(counts):
        raise UserError(f"--threads {text!r}: give different numbers of 1 to {MAX_THREADS}")
    return counts


def workers_table(times: LocalTimes) -> Any:
    """One layer of one worker, by threads and rows, and how much slower beside another worker."""
    rows: list[tuple[object, ...]] = []
    slow = times.slowdowns
    for worker in times.threads:
        all_experts = worker.experts_s[max(worker.experts_s)]
        for count in worker.attention_s.x:
            rows.append(
                (
                    worker.num_threads,
                    int(count),
                    format_seconds(worker.attention_s.at(count)),
                    format_seconds(worker.attention_layer_s(count, 1024)),
                    format_seconds(all_experts.at(count)),
                    format_seconds(worker.head_s.at(count)),
                    f"{slow.attention_beside_experts.at(count):.2f}",
                    f"{slow.experts_beside_attention.at(count):.2f}",
                )
            )
    short = times.threads[0].base_context
    columns = ("threads", "rows", f"attention, context {short}", "context 1024", "experts", "head", "beside", "beside")
    return table(columns, rows)


def exchange_table(times: LocalTimes) -> Any:
    """The exchange over shared memory by message size."""
    exchange = times.exchange
    cells = []
    for count, size in zip(exchange.message_bytes.x, exchange.message_bytes.y, strict=True):
        calls = (exchange.dispatch_s, exchange.receive_s, exchange.reply_s, exchange.combine_s, exchange.one_way_s)
        cells.append((int(count), format_bytes(size), *(format_seconds(call.at(count)) for call in calls)))
    return table(("rows", "message", "dispatch", "receive", "reply", "combine", "one way"), cells)


def remarks(times: LocalTimes, folder: Path | None) -> list[str]:
    """What else people should know."""
    reads = max(times.read_bytes_per_s.values(), default=0.0)
    products = max(times.gemm_flops_per_s.values(), default=0.0)
    lines = [
        f"{times.cpu}, {times.num_cores} cores: reads {reads / 1e9:.1f} GB/s, multiplies {products / 1e9:.0f} GFLOP/s",
        f"middle half of the repetitions: {times.spread:.0%} of the median; other programs: {times.foreign_share:.0%}",
        *times.notes,
    ]
    if folder is not None:
        lines.append(f"written to {folder}: {PROFILE_FILE}, {CLUSTER_FILE}, {LOCAL_FILE}")
    return lines
