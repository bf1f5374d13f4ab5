"""`antiphon profile`: what this machine does with one model, for `antiphon plan` and `benchmarks/predict.py`.

Serving and training are measured apart (`--phase`), into one file: what the folder's `profile.json` holds of the same
model and the other phase stays in it.
"""

import json as jsonlib
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.system import one_writer, sigterm_exits
from antiphon.base.units import format_bytes, format_seconds, split_address
from antiphon.bench.profile.host import host_times
from antiphon.bench.profile.links import MeasuredLink, follow_link, measure_links, own_host_towards, slowest, with_link
from antiphon.bench.profile.local_times import Wanted, measure
from antiphon.bench.profile.measure import NORMAL, QUICK
from antiphon.bench.profile.this_machine import cost_profile, this_cluster, training_profile
from antiphon.bench.profile.training import WantedTraining, measure_training
from antiphon.bench.serving_peers import PeerError
from antiphon.cli import options
from antiphon.cli.commands import given_options
from antiphon.cli.output import JsonOption, check_output_file, check_output_folder, emit_json, show, table, write_whole
from antiphon.cli.plan_inputs import CLUSTER_FILE, LINKED_FILE, PROFILE_FILE
from antiphon.cost.profile import HostTimes, LocalTimes, Profile, TrainingTables, read_profile
from antiphon.models.checkpoint_folder import model_folder
from antiphon.models.config import load_model_spec
from antiphon.serve.config import MAX_THREADS
from antiphon.serve.joining import exchange_secret, read_join_secret, refuse_wildcard
from antiphon.specs.cluster import ComputeDtype, cluster_to_json, load_cluster


def profile(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, or a GGUF file.",
            callback=lambda value: None if value is None else model_folder(value),
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Write profile and cluster here.")
    ] = None,
    threads: Annotated[
        str,
        typer.Option("--threads", metavar="N,N", show_default="all cores, half of them", help="Threads of a worker."),
    ] = "",
    max_rows: Annotated[int, typer.Option("--max-rows", metavar="N", help="Most requests of a step.")] = 256,
    dtype: options.DtypeOption = "auto",
    kernels: options.KernelsOption = "auto",
    phase: Annotated[
        Literal["serve", "train"], typer.Option("--phase", metavar="NAME", help="serve or train.")
    ] = "serve",
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", help="train: tokens of a sequence.")
    ] = 256,
    ranks: Annotated[str, typer.Option("--ranks", metavar="N,N", help="train: how many ranks at a time.")] = "1,2,4",
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, briefly: to try it out.")] = False,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Measure the link to a machine that joins here.")
    ] = None,
    join: Annotated[
        str | None, typer.Option("--join", metavar="HOST:PORT", help="Be the other end of such a link.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE", help="Measure to all other nodes of this cluster.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="Secret that both ends know.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure this machine with MODEL, for antiphon plan --profile; or the link to another one.

    DIR gets profile.json (plan --profile) and, of serving, this-machine.json (plan --cluster). --listen adds
    these-machines.json: two of this machine, or the nodes of --cluster, with the link as it was measured."""
    context.with_resource(sigterm_exits())  # else ranks, servers and folders would stay
    is_link = listen is not None or join is not None
    refuse_other_use(context, phase, is_link=is_link)
    if is_link:
        _measure_link(context, model, folder, listen, join, cluster, secret_file, json)
        return
    if model is None:
        raise UserError("MODEL is missing: name a checkpoint, or give --listen or --join to measure a link")
    if secret_file is not None:
        raise UserError(f"--secret-file {secret_file} is for --listen and --join: leave it out")
    if cluster is not None:
        raise UserError(f"--cluster {cluster} is for --listen: its nodes join there; leave it out")
    effort = QUICK if quick else NORMAL
    if phase == "train":
        counts = parse_counts("--ranks", ranks)
        trained = WantedTraining(
            model=model, effort=effort, sequence_length=sequence_length, ranks=counts, dtype=training_dtype(dtype)
        )
        take_folder(context, folder, PROFILE_FILE)
        _train(trained, folder, json)
        return
    wanted = Wanted(
        model=model,
        effort=effort,
        threads=parse_counts("--threads", threads),
        max_rows=max_rows,
        dtype=dtype,
        kernels=kernels,
    )
    take_folder(context, folder, PROFILE_FILE, CLUSTER_FILE)
    _serve(wanted, folder, json)


def _serve(wanted: Wanted, folder: Path | None, json: str | None) -> None:
    """Measure serving, write the folder's two files and show the tables."""
    with progress("measuring") as report:
        times = measure(wanted, report)
    spec = load_model_spec(wanted.model)
    host, lacks = None, []
    with progress("measuring HTTP") as report:
        try:
            host = host_times(wanted.model, times, spec, wanted.effort, report)
        except (UserError, PeerError) as error:
            lacks = [f"what HTTP takes was not measured, so simulations leave it out: {error}"]
    former = _former(folder, times.model)
    measured = cost_profile(times, spec, _command(), host)
    measured = replace(measured, training=None if former is None else former.training)
    if folder is not None:
        _write(folder, CLUSTER_FILE, cluster_to_json(this_cluster(times, spec)))
        _write(folder, PROFILE_FILE, asdict(measured))
    show(workers_table(times), json=json)
    show(exchange_table(times), json=json)
    for line in host_remarks(host) + lacks + remarks(times, folder):
        show(line, json=json)
    emit_json(json, asdict(measured))


_SERVING_ONLY = {"threads": "--threads", "max_rows": "--max-rows", "kernels": "--kernels"}
_TRAINING_ONLY = {"sequence_length": "--sequence-length", "ranks": "--ranks"}
_MEASURING = _SERVING_ONLY | _TRAINING_ONLY | {"dtype": "--dtype", "phase": "--phase", "quick": "--quick"}


def refuse_other_use(context: typer.Context, phase: Literal["serve", "train"], *, is_link: bool) -> None:
    """`UserError` for an option that was written and that this use does not read."""
    others = _MEASURING if is_link else _SERVING_ONLY if phase == "train" else _TRAINING_ONLY
    if given := given_options(context, others):
        use = "--listen or --join: a link is measured alone" if is_link else f"--phase {phase}"
        raise UserError(f"{others[min(given)]} does not apply with {use}; leave it out")


def _measure_link(
    context: typer.Context,
    model: Path | None,
    folder: Path | None,
    listen: str | None,
    join: str | None,
    cluster: str | None,
    secret_file: Path | None,
    json: str | None,
) -> None:
    if model is not None or (listen is not None and join is not None):
        both = "--join" if listen is not None and join is not None else f"MODEL {model}"
        raise UserError(f"{both} does not apply with --listen: a link is measured alone; leave it out")
    secret = exchange_secret(read_join_secret(secret_file))
    if join is not None:
        if folder is not None:
            raise UserError(f"--folder {folder} does not apply with --join: the side that listens writes the figures")
        if cluster is not None:
            raise UserError(f"--cluster {cluster} does not apply with --join: the side that listens knows the nodes")
        split_address(join)
        show(f"measuring the link to {join}", json=json)
        follow_link(join, own_host_towards(join), secret)
        return
    nodes = None
    if cluster is not None:
        nodes = load_cluster(cluster)
        if sum(group.num_nodes for group in nodes.groups) < 2:
            raise UserError(f"--cluster {cluster} has one node: no link to measure; leave it out for two like it")
        if len(nodes.groups) != 1:
            raise UserError(f"--cluster {cluster} has {len(nodes.groups)} kinds of nodes: a measured link joins equals")
    elif folder is not None:
        if not (folder / CLUSTER_FILE).exists():
            raise UserError(
                f"{folder} has no {CLUSTER_FILE}: first measure this machine, antiphon profile MODEL --folder {folder}"
            )
        nodes = load_cluster(folder / CLUSTER_FILE)
    take_folder(context, folder, LINKED_FILE)
    refuse_wildcard("--listen", listen or "", split_address(listen or "")[0])
    num_joining = 1 if cluster is None or nodes is None else nodes.groups[0].num_nodes - 1
    where = "the other machine" if num_joining == 1 else f"each of the {num_joining} other machines"
    show(f"on {where}: antiphon profile --join {listen}", json=json)
    with progress("measuring the link") as report:
        links = measure_links(listen or "", secret, report, num_joining=num_joining)
    link = slowest(links)
    if nodes is not None and folder is not None:
        _write(folder, LINKED_FILE, cluster_to_json(with_link(nodes, link)))
    if num_joining > 1:
        rates = ", ".join(f"{format_bytes(each.bytes_per_s)}/s" for each in links)
        show(f"of {num_joining} links in the order in which they joined ({rates}) the slowest:", json=json)
    show(link_table(link), json=json)
    show(
        f"latency {format_seconds(link.latency_s)}, {format_bytes(link.bytes_per_s)}/s, half of it at "
        f"{format_bytes(link.half_bytes)}; both directions at once: {link.both_ways:.2f} times as long; "
        f"sizes that were not fitted: within {link.error:.0%}",
        json=json,
    )
    if folder is not None:
        show(f"written to {folder}: {LINKED_FILE} (antiphon plan MODEL --cluster {folder / LINKED_FILE})", json=json)
    emit_json(json, asdict(link))


def link_table(link: MeasuredLink) -> Any:
    """One way by message size, measured and by the fitted link."""
    rows = [
        (
            format_bytes(wire.size_bytes),
            format_seconds(wire.one_way_s),
            format_seconds(wire.predicted_s),
            f"{wire.size_bytes / wire.one_way_s / link.bytes_per_s:.2f}",
            format_seconds(wire.both_ways_s),
            "yes" if wire.is_fitted else "",
        )
        for wire in link.wires
    ]
    return table(("message", "one way", "predicted", "Util", "both ways at once", "fitted"), rows)


def _train(wanted: WantedTraining, folder: Path | None, json: str | None) -> None:
    with progress("measuring") as report:
        tables = measure_training(wanted, report)
    name = wanted.model.resolve().name
    found = _former(folder, name) or training_profile(wanted.model, name, _command())
    found = replace(found, training=tables)
    if folder is not None:
        _write(folder, PROFILE_FILE, asdict(found))
    show(training_table(tables), json=json)
    rate = f"multiplies {tables.flops_per_s / 1e9:.0f} GFLOP/s in {tables.dtype}"
    show(f"{found.machine.name}, {found.machine.num_cores} cores: {rate}", json=json)
    if folder is not None:
        show(f"written to {folder}: {PROFILE_FILE}", json=json)
    emit_json(json, asdict(found))


def _command() -> str:
    return " ".join(["antiphon", *sys.argv[1:]])


def take_folder(context: typer.Context, folder: Path | None, *names: str) -> None:
    """`UserError` before minutes of measuring if these files cannot be written there, what is there cannot be kept, or
    another command measures into it: of two, the one that ends first would be lost. Others are refused until
    `context` ends."""
    if folder is None:
        return
    check_output_folder("--folder", folder)
    for name in names:
        check_output_file("--folder", folder / name)
    if PROFILE_FILE in names:
        _former(folder, "")
    context.with_resource(one_writer(folder, "another antiphon profile measures into it: wait for it, or name another"))


def _former(folder: Path | None, model: str) -> Profile | None:
    """What the folder holds of the same model."""
    if folder is None or not (folder / PROFILE_FILE).exists():
        return None
    try:
        found = read_profile(folder / PROFILE_FILE)
    except UserError as error:
        raise UserError(f"--folder {folder}: its {PROFILE_FILE} is in the way: {error}; or remove it") from error
    return found if found.model == model else None


def _write(folder: Path, name: str, content: object) -> None:
    write_whole("--folder", folder / name, jsonlib.dumps(content, indent=1, allow_nan=False) + "\n")


def training_dtype(name: str) -> ComputeDtype:
    """What `--dtype` means in training; the trainer's own default is float32."""
    known: dict[str, ComputeDtype] = {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}
    if name not in known:
        raise UserError(f"--dtype is {name}: to train it must be float32 or bfloat16")
    return known[name]


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """``"2,1"`` -> ``(2, 1)``."""
    counts = tuple(options.numbers_of(option, text, "2,1", may_be_empty=True))
    if not all(1 <= count <= MAX_THREADS for count in counts):
        raise UserError(f"{option} {text!r}: give numbers of 1 to {MAX_THREADS}")
    return counts


def training_table(tables: TrainingTables) -> Any:
    """Both passes of a layer by how ranks share it, with each number of ranks at work."""
    tokens = tables.head.second[-1]
    rows = []
    for layer in tables.layers:
        names = f"{layer.attention}, {layer.experts}, {layer.dispatch}" if layer.model_parallel > 1 else "alone"
        for ranks in layer.forward.first:
            times = (layer.forward, layer.backward, layer.waiting)
            cells = (format_seconds(float(each.at(ranks, tokens))) for each in times)
            rows.append((int(ranks), layer.model_parallel, layer.layer, names, *cells))
    columns = ("ranks", "share a layer", "layer", f"how, {tokens:.0f} tokens", "forward", "backward", "waiting")
    return table(columns, rows)


def workers_table(times: LocalTimes) -> Any:
    """One layer of one worker, by threads and rows, and how much slower beside another worker."""
    rows: list[tuple[object, ...]] = []
    slow = times.slowdowns
    for worker in times.threads:
        all_experts = worker.experts_s[max(worker.experts_s)]
        for count in worker.attention_s.sizes:
            rows.append(
                (
                    worker.num_threads,
                    "both" if worker.both_sides else "one",
                    int(count),
                    format_seconds(worker.attention_s.value(count)),
                    format_seconds(worker.attention_layer_s(count, 1024)),
                    format_seconds(all_experts.value(count)),
                    format_seconds(worker.head_s.value(count)),
                    f"{slow.attention_beside_experts.value(count):.2f}",
                    f"{slow.experts_beside_attention.value(count):.2f}",
                )
            )
    short = times.threads[0].base_context
    slower = ("attention beside experts", "experts beside attention")  # times as long
    columns = ("threads", "sides", "rows", f"attention, context {short}", "context 1024", "experts", "head", *slower)
    return table(columns, rows)


def exchange_table(times: LocalTimes) -> Any:
    """The exchange over shared memory by message size."""
    exchange = times.exchange
    cells = []
    for count, size in zip(exchange.message_bytes.sizes, exchange.message_bytes.seconds, strict=True):
        calls = (exchange.dispatch_s, exchange.receive_s, exchange.reply_s, exchange.combine_s, exchange.one_way_s)
        cells.append((int(count), format_bytes(size), *(format_seconds(call.value(count)) for call in calls)))
    return table(("rows", "message", "dispatch", "receive", "reply", "combine", "one way"), cells)


def host_remarks(host: HostTimes | None) -> list[str]:
    """What serving over HTTP takes."""
    if host is None:
        return []
    at = host.token_s.sizes[-1]
    server = f"{format_seconds(host.request_s)} a request, {format_seconds(host.token_s.value(at))} a token"
    client = f"{format_seconds(host.client_request_s)} and {format_seconds(host.client_token_s.value(at))}"
    waits = f"waiting {format_seconds(host.wait_s)}, a prompt handed over {format_seconds(host.handover_s)}"
    ratio = host.step_ratio
    slower = ", ".join(f"{value:.2f} of {rows:.0f}" for rows, value in zip(ratio.sizes, ratio.seconds, strict=True))
    return [
        f"HTTP with {at:.0f} streams, of a core: {server}; the client {client}; {waits}",
        f"decode steps within the server, times as long as alone, by rows: {slower}",
    ]


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
        lines.append(f"written to {folder}: {PROFILE_FILE}, {CLUSTER_FILE}")
    return lines
