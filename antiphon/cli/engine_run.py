"""What commands that run an engine show of it: how far it has loaded, and at the end where its time went."""

from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from antiphon.base.progress import progress
from antiphon.base.units import format_bytes, format_seconds
from antiphon.cli.output import show, table, whole_file
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.timeline import TimelineSummary, summarise, write_trace


def start_with_progress(config: ServeConfig, check: Callable[[], None] = lambda: None) -> Engine:
    """A running engine; shows how much is loaded, and of how much as soon as every worker has said its part.

    `check` is called while it loads; what it raises ends the start."""
    with progress("loading weights", format_amount=format_bytes) as report:

        def loading(done: int, total: int) -> None:
            check()
            if done:
                report(done, total or None)

        return start_engine(config, loading)


def report_timeline(engine: Engine, path: Path, json: str | None = None) -> None:
    """Write the trace and print what it says."""
    spans = engine.take_spans()
    with whole_file("--timeline", path) as partial:
        write_trace(partial, spans)
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
