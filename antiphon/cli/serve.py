"""`antiphon serve`: an OpenAI-compatible server over one checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.cli import options
from antiphon.cli.output import show, table
from antiphon.serve.api.app import create_app
from antiphon.serve.api.server import run_server
from antiphon.serve.api.settings import ServerSettings, read_api_keys
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.tokenizer import TextTokenizer, load_tokenizer
from antiphon.serve.timeline import TimelineSummary, summarise, write_trace


def serve(
    model: options.ModelFolder,
    layout: options.LayoutOption = "auto",
    attention: options.AttentionOption = 1,
    experts: options.ExpertsOption = 0,
    micro_batches: options.MicroBatchesOption = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0: any free one.")] = 8000,
    device: options.DeviceOption = "cpu",
    dtype: options.DtypeOption = "auto",
    kernels: options.KernelsOption = "auto",
    max_model_len: options.MaxModelLenOption = 0,
    kv_bytes: options.KvBytesOption = "0",
    max_running: options.MaxRunningOption = 256,
    max_batch_tokens: options.MaxBatchTokensOption = 2048,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 1024,
    max_streams: Annotated[int, typer.Option(help="HTTP requests generating at once.")] = 1024,
    max_body_bytes: Annotated[str, typer.Option(help="Largest request body.")] = "8MiB",
    max_prompt_tokens: Annotated[int, typer.Option(help="Longest prompt. 0: the context's limit.")] = 0,
    threads: options.ThreadsOption = 0,
    timeout: options.TimeoutOption = 30.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds running requests get at shutdown.")] = 30.0,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API. Default: the folder's.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here at the end.")] = None,
) -> None:
    """Serve MODEL over HTTP; attention and experts in one process or apart."""
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
        max_body_bytes=options.parse_bytes(max_body_bytes),
        max_prompt_tokens=max_prompt_tokens or None,
        max_concurrent_streams=max_streams,
        drain_timeout_s=drain_timeout,
    )
    run(config, settings, timeline)


def run(config: ServeConfig, settings: ServerSettings, timeline: Path | None) -> None:
    """Start engine and server, serve until a signal, write the timeline, stop everything."""
    if timeline is not None and not timeline.resolve().parent.is_dir():
        raise UserError(f"--timeline {timeline}: the folder {timeline.resolve().parent} does not exist; create it")
    tokenizer = load_tokenizer(config.model)
    engine = start_with_progress(config)
    try:
        app = create_app(engine, tokenizer, settings, attach_grammars(engine, tokenizer))
        run_server(app, settings, on_listening=lambda url: show(f"serving {engine.info.model_name} on {url}"))
        if timeline is not None:
            report_timeline(engine, timeline)
    finally:
        engine.stop()


def start_with_progress(config: ServeConfig) -> Engine:
    with progress("loading weights", format_amount=format_bytes) as report:
        return start_engine(config, report)


def attach_grammars(engine: Engine, tokenizer: TextTokenizer) -> GrammarCompiler | None:
    """Let the engine follow grammars, if this model's vocabulary allows it."""
    if not engine.info.eos_token_ids:
        return None
    grammars = GrammarCompiler(tokenizer.backend, engine.info.vocab_size, engine.info.eos_token_ids)
    engine.make_matcher = grammars.matcher
    return grammars


def report_timeline(engine: Engine, path: Path) -> None:
    """Write the trace and print what it says."""
    spans = engine.take_spans()
    write_trace(path, spans)
    show(timeline_table(summarise(spans)))
    show(f"trace: {path} (open it in ui.perfetto.dev)")


def timeline_table(summary: TimelineSummary) -> Table:
    """One row per worker, as a table."""
    rows: list[tuple[object, ...]] = []
    for name, idle in sorted(summary.attention_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", None))
    for name, idle in sorted(summary.expert_idle_ratio.items()):
        rows.append((name, f"{idle:.0%}", summary.rows_per_expert_worker[name]))
    exposed = format_seconds(summary.exposed_communication_s)
    title = f"steps took {format_seconds(summary.step_s)}, exposed communication {exposed}"
    return table(("worker", "idle", "rows"), rows, title=title)
