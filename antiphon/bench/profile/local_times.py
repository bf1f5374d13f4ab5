"""Everything that `antiphon profile` measures of this machine with one model: `LocalTimes`, the engine's own tables,
which predict what it does here (`benchmarks/predict.py`). What the planner reads is made of them in `this_machine`.

Two workers on different cores share memory, and some caches and clocks. What that costs is measured: one process is
timed while the other repeats its own work. Rejected: a bandwidth model. Whether two readers share one bandwidth, and
two multipliers one clock, differs from machine to machine and, on virtual ones, from hour to hour.
"""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from antiphon.base.progress import Report
from antiphon.base.system import cpu_name
from antiphon.bench.harness.children import Child, Children
from antiphon.bench.harness.quiet import FOREIGN_SHARE_LIMIT, CpuWatch
from antiphon.bench.profile.exchange import row_calls
from antiphon.bench.profile.measure import (
    PROCESSES,
    Bench,
    Effort,
    curve,
    engine_turns,
    exchange_times,
    limits_of,
    open_rigs,
    thread_times,
)
from antiphon.bench.profile.rig import PartSeconds, RigWork
from antiphon.cost.profile import (
    EngineTimes,
    LocalTimes,
    Slowdowns,
    ThreadTimes,
    flat,
)
from antiphon.kernels.select import check_backend, resolve_device, resolve_dtype
from antiphon.models.config import load_model_spec, read_config
from antiphon.models.load import open_checkpoint

NO_SLOWDOWNS = Slowdowns(
    attention_beside_experts=flat(1.0),
    experts_beside_attention=flat(1.0),
    attention_beside_attention=flat(1.0),
    experts_beside_experts=flat(1.0),
    replica_beside_replica=flat(1.0),
)


def slowdowns(bench: Bench, one: Child, other: Child, num_threads: int) -> Slowdowns:
    """Two workers of `num_threads` threads on cores of their own; `one` is timed, `other` kept busy."""
    one.ask("settle", num_threads, bench.cores[:num_threads])
    other.ask("settle", num_threads, bench.cores[num_threads : 2 * num_threads])
    short, held = bench.effort.contexts[0], -(-bench.spec.router.num_experts // 2)
    ratios: dict[str, dict[int, float]] = {name: {} for name in vars(NO_SLOWDOWNS)}
    for rows in bench.beside_rows:
        attention = RigWork(kind="attention", rows=rows, context=short)
        whole = RigWork(kind="experts", rows=rows, context=short, num_held=bench.spec.router.num_experts)
        half = RigWork(kind="experts", rows=rows, context=short, num_held=held)
        replica = RigWork(kind="colocated", rows=rows, context=short)
        for name, own, others in (
            ("attention_beside_experts", attention, whole),
            ("experts_beside_attention", whole, attention),
            ("attention_beside_attention", attention, attention),
            ("experts_beside_experts", half, half),
            ("replica_beside_replica", replica, replica),
        ):
            alone = _compute_s(bench, bench.time(one, own))
            other.ask("keep_busy", others)
            beside = _compute_s(bench, bench.time(one, own))
            other.ask("settle", num_threads, bench.cores[num_threads : 2 * num_threads])  # any order ends its work
            ratios[name][rows] = max(1.0, beside / alone)
        bench.advance()
    return Slowdowns(**{name: curve(values, may_fall=True) for name, values in ratios.items()})


def _compute_s(bench: Bench, times: PartSeconds) -> float:
    """Attention, experts and head of one step."""
    total = bench.spec.num_layers * median(times.attention) if times.attention else 0.0
    if times.experts:
        total += bench.spec.num_moe_layers * median(times.experts)
    return total + (median(times.head) if times.head and times.experts else 0.0)


ALONE, APART, TOGETHER = "colocated", "1+1/m1", "2+1/m1"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure. `threads`: numbers of threads of a worker; empty: all cores, and half of them. `max_context`:
    None: the model's own."""

    model: Path
    effort: Effort
    threads: tuple[int, ...] = ()
    max_rows: int = 256
    max_context: int | None = None
    dtype: str = "auto"
    kernels: str = "auto"


def default_threads(num_cores: int) -> tuple[int, ...]:
    """A worker alone has all cores, one of two has half of them."""
    return tuple(sorted({num_cores, max(1, num_cores // 2)}, reverse=True))


def measure(wanted: Wanted, report: Report) -> LocalTimes:
    """Blocks for a minute or so. `UserError` if the model or the machine is at fault."""
    spec = load_model_spec(wanted.model)
    dtype = spec.dtype if wanted.dtype == "auto" else wanted.dtype
    check_backend(wanted.kernels, resolve_device("cpu", 0), resolve_dtype(dtype))
    checkpoint = open_checkpoint(wanted.model, spec)
    weight_bytes = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    effort = wanted.effort.bounded(wanted.max_rows, wanted.max_context or spec.max_position)
    done = count(1)

    def advance() -> None:
        number = next(done)
        report(number, max(number, _num_points(bench, len(workers))))

    bench = Bench(wanted.model, spec, dtype, wanted.kernels, effort, advance)
    threads = wanted.threads or default_threads(len(bench.cores))
    workers = [
        (count, both_sides)
        for count in threads
        for both_sides in ((False, True) if effort.apart and count < len(bench.cores) else (True,))
    ]
    watch = CpuWatch()
    notes = []
    with Children(PROCESSES) as crew:
        first, second, has_both, kernels = open_rigs(bench, crew, weight_bytes)
        by_threads = tuple(thread_times(bench, first, count, both_sides=both_sides) for count, both_sides in workers)
        beside = NO_SLOWDOWNS
        if has_both:
            beside = slowdowns(bench, first, second, max(1, len(bench.cores) // 2))
        elif effort.beside_rows:
            notes.append("one worker only: no memory or no core for a second one, so nothing was timed beside another")
        exchange = exchange_times(bench, first, second)
    engine = _engine_times(bench, min(by_threads, key=lambda each: each.num_threads))
    limits = limits_of(bench)
    foreign = watch.foreign_share()
    if foreign > FOREIGN_SHARE_LIMIT:
        notes.append(f"other programs used {foreign:.0%} of the CPU meanwhile: the times are too long by about as much")
    return LocalTimes(
        model=wanted.model.resolve().name,
        model_config=read_config(wanted.model),
        dtype=dtype,
        kernels=kernels,
        cpu=cpu_name(),
        num_cores=len(bench.cores),
        threads=by_threads,
        slowdowns=beside,
        exchange=exchange,
        engine=engine,
        row_calls=row_calls(spec, dtype, effort.exchange_rows, effort.exchange_rounds),
        read_bytes_per_s=limits.read_by_threads if limits else {},
        gemm_flops_per_s=limits.gemm_by_threads if limits else {},
        foreign_share=foreign,
        spread=median(bench.spreads) if bench.spreads else 0.0,
        notes=tuple(notes),
    )


def _num_points(bench: Bench, num_workers: int) -> int:
    effort = bench.effort
    return (
        1
        + num_workers * (len(bench.rows) + len(effort.prompts))
        + len(bench.beside_rows)
        + len(effort.exchange_rows)
        + (1 + 2 * effort.together) * len(effort.engine_rows)
    )


def _engine_times(bench: Bench, worker: ThreadTimes) -> EngineTimes:
    """`worker`: the times alone of one worker of two."""
    rows, steps = bench.effort.engine_rows, bench.effort.engine_steps
    model = Path(bench.model)
    alone = engine_turns(ALONE, model, rows, steps, bench.advance)
    apart, further, head_ratio = alone, flat(0.0), flat(1.0)
    if bench.effort.together:
        apart = engine_turns(APART, model, rows, steps, bench.advance)
        together = engine_turns(TOGETHER, model, rows, steps, bench.advance)
        further = curve({count: max(0.0, together[count]["engine"] - apart[count]["engine"]) for count in rows})
        head_ratio = curve(
            {count: max(1.0, apart[count]["head"] / worker.head_s.value(count)) for count in rows}, may_fall=True
        )
    return EngineTimes(
        alone_s=curve({count: turn["engine"] for count, turn in alone.items()}),
        bookkeeping_s=curve({count: max(0.0, turn["bookkeeping"]) for count, turn in alone.items()}),
        apart_s=curve({count: turn["engine"] for count, turn in apart.items()}),
        apart_bookkeeping_s=curve({count: max(0.0, turn["bookkeeping"]) for count, turn in apart.items()}),
        apart_head_ratio=head_ratio,
        per_further_worker_s=further,
    )
