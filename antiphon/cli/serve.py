"""`antiphon serve`: an OpenAI-compatible server over one checkpoint."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.cli import options
from antiphon.cli.banner import banner, server_facts
from antiphon.cli.output import emit_json, show, table
from antiphon.models.config import load_model_spec
from antiphon.serve.api.app import create_app
from antiphon.serve.api.server import reserve, run_server
from antiphon.serve.api.settings import ServerSettings, read_api_keys
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import load_tokenizer
from antiphon.serve.timeline import TimelineSummary, summarise, write_trace


def serve(
    model: options.ModelFolder,
    layout: options.LayoutOption = "auto",
    attention: options.AttentionOption = 1,
    experts: options.ExpertsOption = 0,
    micro_batches: options.MicroBatchesOption = 0,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any.")] = 8000,
    device: options.DeviceOption = "cpu",
    dtype: options.DtypeOption = "auto",
    kernels: options.KernelsOption = "auto",
    max_model_len: options.MaxModelLenOption = 0,
    kv_bytes: options.KvBytesOption = "0",
    max_running: options.MaxRunningOption = 256,
    max_batch_tokens: options.MaxBatchTokensOption = 2048,
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Requests in line; more: 429.")] = 1024,
    max_streams: Annotated[int, typer.Option(metavar="N", help="HTTP requests at once; more: 429.")] = 1024,
    max_body_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "8MiB",
    max_prompt_tokens: Annotated[int, typer.Option(metavar="N", show_default="no limit", help="Longest prompt.")] = 0,
    threads: options.ThreadsOption = 0,
    timeout: options.TimeoutOption = 30.0,
    drain_timeout: Annotated[float, typer.Option(metavar="S", help="Time to finish at the end.")] = 30.0,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="API keys, one a line.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="the folder's", help="Name in the API.")
    ] = None,
    timeline: options.TimelineOption = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="When ready, write URL and processes as JSON.")
    ] = None,
) -> None:
    """Serve MODEL over HTTP; attention and experts in one process or apart."""
    options.check_output_file("--timeline", timeline)
    config = options.serve_config(
        model,
        layout=layout,
        attention=attention,
        experts=experts,
        micro_batches=micro_batches,
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        threads=threads,
        timeout=timeout,
        trace=timeline is not None,
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_api_keys(api_key_file) if api_key_file else (),
        served_model_name=served_model_name,
        max_body_bytes=options.parse_size("--max-body-bytes", max_body_bytes),
        max_prompt_tokens=max_prompt_tokens or None,
        max_concurrent_streams=max_streams,
        drain_timeout_s=drain_timeout,
    )
    run(config, settings, timeline, json)


def run(config: ServeConfig, settings: ServerSettings, timeline: Path | None, json: str | None) -> None:
    """Start engine and server, serve until a signal, write the timeline, stop everything."""
    spec = load_model_spec(config.model)
    tokenizer = load_tokenizer(config.model)
    address = reserve(settings.host, settings.port)
    with closing(address):
        engine = start_with_progress(config)
        try:
            app = create_app(engine, tokenizer, settings)
            grammars: GrammarCompiler | None = app.state.context.grammars
            if grammars is not None:
                engine.make_matcher = grammars.matcher

            def on_listening(url: str) -> None:
                facts = server_facts(engine, config, spec, app.state.context.model_name, url)
                show(banner(facts, needs_key=bool(settings.api_keys)), json=json)
                emit_json(json, facts)

            run_server(app, settings, on_listening, address)
            if timeline is not None:
                report_timeline(engine, timeline, json)
        finally:
            engine.stop()


def start_with_progress(config: ServeConfig) -> Engine:
    """A running engine; shows how much is loaded, and of how much as soon as every worker has said its part."""
    with progress("loading weights", format_amount=format_bytes) as report:

        def loading(done: int, total: int) -> None:
            if done:
                report(done, total or None)

        return start_engine(config, loading)


def report_timeline(engine: Engine, path: Path, json: str | None = None) -> None:
    """Write the trace and print what it says."""
    spans = engine.take_spans()
    write_trace(path, spans)
    summary = summarise(spans)
    exposed = format_seconds(summary.exposed_communication_s)
    show(f"steps took {format_seconds(summary.step_s)}, of it {exposed} exposed communication", json=json)
    show(timeline_table(summary), json=json)
    show(f"trace: {path} (open it in ui.perfetto.dev)", json=json)


def timeline_table(summary: TimelineSummary) -> Table:
    """One row per worker, as a table."""
    rows: list[tuple[object, ...]] = []
    for name, idle in sorted(summary.attention_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", None))
    for name, idle in sorted(summary.expert_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", summary.rows_per_expert_worker[name]))
    return table(("worker", "idle", "rows"), rows)
