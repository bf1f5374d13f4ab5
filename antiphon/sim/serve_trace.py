"""A serving simulation as a trace for Perfetto: a process per instance, a track per attention worker, counters.

Chrome's JSON, as `sim.gantt` writes it, with counter events ("C") beside the bars. A step is a bar on the track of
every attention worker that took part, with its rows, and one on the experts' track, with the share of the step in which
they were busy; failures and pauses are bars on the tracks they stopped. Rejected: bars of every layer. `--pipeline`
shows one step from inside.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.sim.instances import LivePool
from antiphon.sim.pools import Pool
from antiphon.sim.serve import ServingRun
from antiphon.sim.serve_log import StepBar

_EXPERTS_TRACK = 1_000_000


def write_serving_trace(path: Path, run: ServingRun) -> None:
    """Write `run`, which must have been recorded with its steps, to `path`, replacing it."""
    write_events(path, _events(run))


def _events(run: ServingRun) -> Iterator[dict[str, Any]]:
    pids: dict[tuple[str, int], int] = {
        (live.pool.name, index): number
        for number, (live, index) in enumerate(
            ((live, index) for live in run.pools for index in range(len(live.instances))), start=1
        )
    }
    for live in run.pools:
        for index in range(len(live.instances)):
            yield from _names(live, index, pids[live.pool.name, index])
    for bar in run.log.steps:
        yield from _step(bar, pids[bar.pool, bar.instance])
    pools = {live.pool.counts.prefix: live.pool for live in run.pools}
    for failure in run.log.failures:
        yield _down(failure.worker, failure.time_s, failure.until_s, pools, pids)
    for replacement in run.log.replacements:
        place = {"pid": pids[replacement.pool, replacement.instance], "tid": _EXPERTS_TRACK}
        arguments = {"experts": replacement.move.num_moved, "pause_s": replacement.move.pause_s}
        yield {"ph": "i", "s": "p", "name": "experts move", "ts": replacement.time_s * 1e6, **place, "args": arguments}
    for sample in run.log.samples:
        for live, one in zip(run.pools, sample.pools, strict=True):
            name = live.pool.name
            time = {"ph": "C", "pid": 0, "ts": sample.time_s * 1e6}
            yield {**time, "name": f"{name}: requests", "args": {"running": one.running, "waiting": one.waiting}}
            yield {**time, "name": f"{name}: KV usage", "args": {"used": one.kv_usage}}


def _names(live: LivePool, index: int, pid: int) -> Iterator[dict[str, Any]]:
    yield process_named(f"{live.pool.name}[{index}]", pid)
    for worker in live.instances[index].schedulers:
        yield thread_named(f"attention[{worker}]", pid, worker + 1)
    yield thread_named("experts", pid, _EXPERTS_TRACK)


def _step(bar: StepBar, pid: int) -> Iterator[dict[str, Any]]:
    step = bar.step
    times = {"ph": "X", "ts": step.start_s * 1e6, "dur": (step.end_s - step.start_s) * 1e6, "pid": pid}
    if step.price is None:
        yield {**times, "name": "experts move", "cat": "pause", "tid": _EXPERTS_TRACK}
        return
    for worker, rows in step.rows.items():
        yield {**times, "name": f"{rows} rows", "cat": "step", "tid": worker + 1, "args": {"rows": rows}}
    arguments = {"busy_ratio": step.price.experts_busy_s / step.price.duration_s, "decode_rows": step.num_decode}
    yield {**times, "name": "step", "cat": "experts", "tid": _EXPERTS_TRACK, "args": arguments}


def _down(
    worker: str, time_s: float, until_s: float, pools: dict[str, Pool], pids: dict[tuple[str, int], int]
) -> dict[str, Any]:
    prefix, _, rest = worker.rpartition(".")
    role, _, number = rest.rstrip("]").partition("[")
    pool = pools[prefix]
    each = pool.attention_per_instance if role == "attention" else pool.phase.parallel.expert_workers
    place = {"pid": pids[pool.name, int(number) // each]}
    tid = int(number) + 1 if role == "attention" else _EXPERTS_TRACK
    times = {"ts": time_s * 1e6, "dur": (until_s - time_s) * 1e6}
    return {"ph": "X", "name": f"{worker} is down", "cat": "failure", **times, **place, "tid": tid}
