"""What commands that run an engine share: its configuration, made of options and a plan (`--plan`), or why both cannot
be obeyed; and what they show: how far it has loaded, that it is ready, what its plan predicts, where its time went."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from antiphon import __version__, _native
from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.bench.profile.this_machine import THIS_CORE
from antiphon.cli.commands import given_options
from antiphon.cli.options import SIZES, CapacityOptions, WorkerOptions
from antiphon.cli.output import show, table, whole_file
from antiphon.kernels.select import resolve_dtype
from antiphon.models.checkpoint_folder import weights_folder
from antiphon.models.config import load_model_spec
from antiphon.report.words import plural
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start
from antiphon.serve.layout_text import LAYOUT_FIELDS
from antiphon.serve.mask_pool import MakeMatcher
from antiphon.serve.prepare import PreparedEngine
from antiphon.serve.served_plan import ServedPlan, check_workers_fit, served_plan_of
from antiphon.serve.timeline import TimelineSummary, summarise, write_trace
from antiphon.specs.counts import kv_cache_block_bytes
from antiphon.specs.model import ModelSpec
from antiphon.specs.plan import Collectives, read_plan

PLANNED = (*SIZES, "max_running", "prefill_collectives", "decode_collectives")  # options a plan decides
EXAMPLE_BODY = '{"prompt": "class Stack:", "max_tokens": 32}'


def planned_config(
    context: typer.Context, model: Path, workers: WorkerOptions, capacity: CapacityOptions, *, trace: bool
) -> tuple[ServeConfig, ServedPlan | None]:
    """The configuration that was asked for, and the plan it obeys if one was given. An option that contradicts the
    plan is a `UserError`; `context` knows which options were written and which are defaults."""
    model = weights_folder(model)
    if workers.plan is None:
        return workers.config(model, capacity, trace=trace), None
    if workers.prefill is not None or workers.decode is not None:
        raise UserError("--prefill and --decode do not apply with --plan: a plan with both phases names the workers")
    served = served_plan_of(read_plan(workers.plan), load_model_spec(model), workers.plan)
    values = {**vars(workers), **vars(capacity)}
    served.refuse_other({name.replace("_", "-"): values[name] for name in given_options(context, PLANNED)})
    room = None if given_options(context, ["max_batch_tokens"]) else capacity.max_batch_tokens
    if served.prefill is None:
        return _obey(served, workers, capacity, model, room, trace=trace), served
    decode, prefill = workers.for_pools(served.layout, served.prefill.layout)
    config = _obey(served, decode, capacity, model, room, trace=trace)
    prefill_config = replace(_obey(served.prefill, prefill, capacity, model, room, trace=trace), pool="prefill")
    return replace(config, prefill=prefill_config, pool="decode"), served


def config_here(
    context: typer.Context, model: Path, workers: WorkerOptions, capacity: CapacityOptions, *, trace: bool
) -> ServeConfig:
    """`planned_config` of workers that all start on this machine, which must be able to carry those of a plan."""
    planned, served = planned_config(context, model, workers, capacity, trace=trace)
    config = workers.with_micro_batches(planned)
    if served is not None:
        check_plan_fits(config, served)
    return config


def _obey(
    served: ServedPlan, workers: WorkerOptions, capacity: CapacityOptions, model: Path, room: int | None, *, trace: bool
) -> ServeConfig:
    """The configuration of the workers that `served` names. `room`: tokens of a step, unless the plan needs more; None:
    what `capacity` says was asked for."""
    planned = replace(
        workers,
        layout=served.layout,
        instances=served.num_instances if served.layout != "colocated" else None,
        attention=served.num_attention,
        experts=served.num_experts if served.layout == "disaggregated" else None,
        tp=served.attention_tp,
        expert_tp=served.expert_tp if served.layout != "colocated" else None,
        pp=served.num_stages,
        micro_batches=served.num_micro_batches,
        prefill_collectives=_decided(served.prefill_collectives, workers.prefill_collectives),
        decode_collectives=_decided(served.decode_collectives, workers.decode_collectives),
        attention_device=workers.attention_device or served.attention_device,
        expert_device=workers.expert_device or served.expert_device,
        prefill=None,
        decode=None,
    )
    most = capacity.max_batch_tokens if room is None else max(served.max_batch_tokens or room, served.max_running)
    if most < served.max_running:
        raise UserError(
            f"--max-batch-tokens is {most}: {served.written_in} has a batch of {served.max_running} on each attention "
            "worker, and it must be at least that"
        )
    planned_capacity = replace(capacity, max_running=served.max_running, max_batch_tokens=most)
    config = planned.config(model, planned_capacity, trace=trace, written_in=served.written_in)
    return replace(config, placement=config.placement or served.placement)


def _decided(planned: Collectives, asked: Collectives) -> Collectives:
    """What the plan says, unless it leaves the choice open."""
    return asked if planned == "auto" else planned


def check_plan_fits(config: ServeConfig, served: ServedPlan) -> None:
    """`UserError` if this machine cannot carry the plan's workers, those that join from other machines not counted."""
    num_devices = allowance().num_cores if config.device == "cpu" else max(1, torch.cuda.device_count())
    check_workers_fit(config, num_devices, served.file)


def server_facts(engine: Engine, config: ServeConfig, spec: ModelSpec, name: str, url: str) -> dict[str, Any]:
    """The server as JSON: where it listens, which processes it has, what it can hold."""
    info = engine.info
    num_tokens = engine.stats().kv_blocks_total * config.block_size
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    bytes_per_token = kv_cache_block_bytes(spec, 1, resolve_dtype(dtype).itemsize, config.kv_dtype)
    return {
        "version": __version__,
        "model": name,
        "architecture": _describe(spec),
        "dtype": dtype,
        "device": config.device,
        "layout": info.layout,
        "num_attention": info.num_attention,
        "num_experts_workers": info.num_experts_workers,
        "num_instances": config.num_instances,
        "attention_tp": config.attention_tp,
        "expert_tp": config.expert_tp,
        "num_stages": config.num_stages,
        "num_micro_batches": info.num_micro_batches,
        "stepping": config.stepping,
        "kernels": sorted(engine.workforce.kernels),
        "max_model_len": info.max_model_len,
        "kv_cache_tokens": num_tokens,
        "kv_cache_bytes": num_tokens * bytes_per_token,
        "url": url,
        "pid": os.getpid(),
        "pools": {pool.pool: _layout_facts(pool) for pool in reversed(config.pools) if pool.pool},
        "workers": [{"name": str(worker), "pid": engine.worker_pid(worker)} for worker in engine.workforce.names],
    }


def _layout_facts(config: ServeConfig) -> dict[str, Any]:
    """What `layout_line` says of one pool."""
    facts = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return facts | {"num_experts_workers": config.num_expert_workers, "stepping": config.stepping}


def banner(facts: dict[str, Any], *, needs_key: bool) -> str:
    """The same for people, with a request to copy."""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    kernels = ", ".join(f"{name} ({_native.isa()})" if name == "cpu" else name for name in facts["kernels"])
    lines = [
        f"Antiphon {facts['version']} serves {facts['model']}",
        f"  model     {facts['architecture']}, {facts['dtype']} on {facts['device']}",
        f"  layout    {layout_line(facts)}",
        f"  workers   {workers_line(facts['workers'])}",
        f"  kernels   {kernels}",
        f"  KV cache  {facts['kv_cache_tokens']:,} tokens, {format_bytes(facts['kv_cache_bytes'])}; "
        f"a request may have {facts['max_model_len']:,}",
        f"  URL       {facts['url']}; watch it at {facts['url']}/dashboard",
        "",
        f"  curl {facts['url']}/v1/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{EXAMPLE_BODY}'",
        "",
        "Ctrl-C finishes what runs and stops.",
    ]
    return "\n".join(lines)


def layout_line(facts: dict[str, Any]) -> str:
    """``disaggregated: 1 attention + 2 expert workers, 2 micro-batches in turn``; of two pools both."""
    if facts.get("pools"):
        return "\n            ".join(f"{name} {layout_line(pool)}" for name, pool in facts["pools"].items())
    attention_ranks, expert_ranks = (
        f" of {ranks} ranks" if ranks > 1 else "" for ranks in (facts["attention_tp"], facts["expert_tp"])
    )
    if facts["num_stages"] > 1:
        attention_ranks = f" of {facts['num_stages']} stages" + (
            f" with {attention_ranks[4:]}" if attention_ranks else ""
        )
    if facts["layout"] == "colocated":
        replicas = plural(facts["num_attention"], "replica") + attention_ranks
        return f"colocated: {replicas} with attention and experts {'on each' if attention_ranks else 'in one process'}"
    instances = f"{facts['num_instances']} times " if facts["num_instances"] > 1 else ""
    if facts["layout"] == "hybrid":
        replicas = plural(facts["num_attention"], "replica") + attention_ranks
        shared = plural(facts["expert_tp"], "rank")
        sharing = (
            "that share their experts" if facts["num_attention"] > 1 else "with all experts (--attention adds more)"
        )
        return f"hybrid: {instances}{replicas} {sharing}, each expert on {shared}"
    experts = plural(facts["num_experts_workers"], "expert worker") + expert_ranks
    batches = plural(facts["num_micro_batches"], "micro-batch", "micro-batches")
    batches += " in turn" if facts["stepping"] == "barrier" else " side by side"
    return f"disaggregated: {instances}{facts['num_attention']} attention{attention_ranks} + {experts}, {batches}"


def workers_line(workers: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{worker['name']} {worker['pid']}" for worker in workers)


def _describe(spec: ModelSpec) -> str:
    """One line about a model, for logs."""
    router = spec.router
    return f"{spec.family}, {spec.num_layers} layers, {router.num_experts} experts, top-{router.top_k}"


def machine_name(device: str) -> str:
    """What a plan would call this machine's devices: a core, as `antiphon profile` does, or a GPU's own name."""
    return THIS_CORE if device == "cpu" else torch.cuda.get_device_name()


def join_lines(config: ServeConfig) -> str:
    """What to start on the other machines."""
    if config.prefill is not None:
        return "\n".join(line for pool in reversed(config.pools) if (line := join_lines(pool)))
    role, here = "attention" if config.num_expert_workers else "replica", config.ranks_here
    attention = config.num_instances * config.joined_attention * config.attention_ranks
    experts = config.num_instances * config.joined_experts * config.expert_tp
    wanted = [(role, attention - here)] if attention else []
    if experts:
        wanted.append(("experts", experts - (0 if attention else here)))
    join = f"--join {config.join_address}"
    lines = [f"  elsewhere antiphon worker --role {role} {join}, {plural(count, 'time')}" for role, count in wanted]
    return "\n".join(lines)


def plan_lines(served: ServedPlan, machine: str) -> str:
    """What the banner says of a plan. A GPU's own name holds the plan's: ``NVIDIA H20`` is an ``H20``."""
    predicted = served.predicted
    promises = []
    if served.prefill is not None and predicted.ttft_s is not None:
        promises.append(f"{format_seconds(predicted.ttft_s)} to the first token")
    if predicted.tpot_s is not None:
        promises.append(f"{format_seconds(predicted.tpot_s)} a token")
    if predicted.tokens_per_s:
        promises.append(f"{predicted.tokens_per_s:,.0f} tokens/s")
    said = f"predicts {' and '.join(promises)}" if promises else "predicts nothing"
    notes = [*served.notes, *(() if served.prefill is None else served.prefill.notes)]
    if others := [device for device in served.devices if device not in machine]:
        notes.append(f"planned for {', '.join(others)}: what it predicts is not of this machine")
    return "\n".join([f"  plan      {served.file}: {said}", *(f"            {note}" for note in notes)])


def start_with_progress(
    run: PreparedEngine,
    check: Callable[[], None] = lambda: None,
    make_matcher: MakeMatcher | None = None,
) -> Engine:
    """A running engine; shows how much is loaded, and of how much as soon as every worker has said its part.

    `check` is called while it loads; what it raises ends the start. `make_matcher` as in `launch.start`."""
    with progress("loading weights", format_amount=format_bytes) as report:

        def loading(done: int, total: int) -> None:
            check()
            if done:
                report(done, total or None)

        return start(run, loading, make_matcher)


def report_timeline(engine: Engine, path: Path, json: str | None = None) -> None:
    """Write the trace and print what it says."""
    spans = engine.take_spans()
    with whole_file("--timeline", path) as partial:
        write_trace(partial, spans)
    summary = summarise(spans)
    exposed = format_seconds(summary.exposed_communication_s)
    show(f"steps took {format_seconds(summary.step_s)}, of it {exposed} exposed communication", json=json)
    show(timeline_table(summary), json=json)
    if silent := [str(name) for name, recorded in spans.items() if not recorded.starts_ns]:
        show(f"no step of {', '.join(sorted(silent))} since it started", json=json)
    show(f"trace: {path} (open it in ui.perfetto.dev)", json=json)


def timeline_table(summary: TimelineSummary) -> Table:
    """One row per worker, as a table."""
    rows: list[tuple[object, ...]] = []
    for name, idle in sorted(summary.attention_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", None))
    for name, idle in sorted(summary.expert_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", summary.rows_per_expert_worker[name]))
    return table(("worker", "idle", "rows"), rows)
