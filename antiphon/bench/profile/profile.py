"""`antiphon profile` without the command line: everything measured of this machine with one model, in three shapes.

- `LocalTimes`: the engine's own tables, which predict what it does here (`benchmarks/predict.py`)
- `Profile`: what the planner's cost model reads in place of its roofline (`cost.profile`)
- `ClusterSpec`: this machine as a cluster of one node, a device for each core (`this_machine`)

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
from antiphon.bench.profile.crew import Crew, RigHandle
from antiphon.bench.profile.effort import Effort
from antiphon.bench.profile.measure import (
    Bench,
    curve,
    exchange_times,
    limits_of,
    open_rigs,
    thread_times,
)
from antiphon.bench.profile.orders import Times, Work
from antiphon.bench.profile.row_calls import row_calls
from antiphon.bench.profile.step_parts import engine_turns
from antiphon.bench.quiet import FOREIGN_SHARE_LIMIT, CpuWatch
from antiphon.cost.local_times import EngineTimes, LocalTimes, Slowdowns, ThreadTimes, flat
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


def slowdowns(bench: Bench, one: RigHandle, other: RigHandle, num_threads: int) -> Slowdowns:
    """Two workers of `num_threads` threads on cores of their own; `one` is timed, `other` kept busy."""
    one.settle(num_threads, bench.cores[:num_threads])
    other.settle(num_threads, bench.cores[num_threads : 2 * num_threads])
    short, held = bench.effort.contexts[0], -(-bench.spec.router.num_experts // 2)
    ratios: dict[str, dict[int, float]] = {name: {} for name in vars(NO_SLOWDOWNS)}
    for rows in bench.beside_rows:
        attention = Work(kind="attention", rows=rows, context=short)
        whole = Work(kind="experts", rows=rows, context=short, num_held=bench.spec.router.num_experts)
        half = Work(kind="experts", rows=rows, context=short, num_held=held)
        replica = Work(kind="colocated", rows=rows, context=short)
        for name, own, others in (
            ("attention_beside_experts", attention, whole),
            ("experts_beside_attention", whole, attention),
            ("attention_beside_attention", attention, attention),
            ("experts_beside_experts", half, half),
            ("replica_beside_replica", replica, replica),
        ):
            alone = _compute_s(bench, bench.time(one, own))
            if name == "replica_beside_replica":  # against the pieces that a prediction adds up, which were timed alone
                alone = _pieces_s(bench, one, rows)
            other.keep_busy(others)
            beside = _compute_s(bench, bench.time(one, own))
            other.settle(num_threads, bench.cores[num_threads : 2 * num_threads])  # any order ends its work
            ratios[name][rows] = max(1.0, beside / alone)
        bench.advance()
    return Slowdowns(**{name: curve(values, may_fall=True) for name, values in ratios.items()})


def _compute_s(bench: Bench, times: Times) -> float:
    """Attention, experts and head of one step."""
    total = bench.spec.num_layers * median(times.attention) if times.attention else 0.0
    if times.experts:
        total += bench.spec.num_moe_layers * median(times.experts)
    return total + (median(times.head) if times.head and times.experts else 0.0)


def _pieces_s(bench: Bench, handle: RigHandle, rows: int) -> float:
    short = bench.effort.contexts[0]
    attention = bench.time(handle, Work(kind="attention", rows=rows, context=short))
    experts_s = bench.experts_s(handle, rows, bench.spec.router.num_experts)
    layers_s = bench.spec.num_layers * median(attention.attention) + bench.spec.num_moe_layers * experts_s
    return layers_s + median(attention.head)


ALONE, APART, TOGETHER = "colocated", "1+1/m1", "2+1/m1"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure. `threads`: numbers of threads of a worker; empty: all cores, and half of them."""

    model: Path
    effort: Effort
    threads: tuple[int, ...] = ()
    max_rows: int = 256
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
    effort = wanted.effort.bounded(wanted.max_rows, spec.max_position)
    done = count(1)

    def advance() -> None:
        number = next(done)
        report(number, max(number, _num_points(bench, len(threads))))

    bench = Bench(wanted.model, spec, dtype, wanted.kernels, effort, advance)
    threads = wanted.threads or default_threads(len(bench.cores))
    watch = CpuWatch()
    notes = []
    with Crew() as crew:
        first, second, opened = open_rigs(bench, crew, weight_bytes)
        by_threads = tuple(thread_times(bench, first, count) for count in threads)
        half = max(1, len(bench.cores) // 2)
        if second is None:
            notes.append("one worker only: no memory or no core for a second one, so nothing was timed beside another")
            second = crew.start("worker 1")
            beside = NO_SLOWDOWNS
        else:
            beside = slowdowns(bench, first, second, half)
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
        kernels=opened.kernels,
        cpu=cpu_name(),
        num_cores=len(bench.cores),
        threads=by_threads,
        slowdowns=beside,
        exchange=exchange,
        engine=engine,
        row_calls=row_calls(spec, dtype, effort.exchange_rows, effort.exchange_rounds),
        read_bytes_per_s={each.num_threads: each.read_bytes_per_s for each in limits.per_threads} if limits else {},
        gemm_flops_per_s={each.num_threads: each.gemm_flops_per_s for each in limits.per_threads} if limits else {},
        foreign_share=foreign,
        spread=median(bench.spreads) if bench.spreads else 0.0,
        notes=tuple(notes),
    )


def _num_points(bench: Bench, num_threads: int) -> int:
    effort = bench.effort
    return (
        1
        + num_threads * (len(bench.rows) + len(effort.prompts))
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
        further = curve({count: max(0.0, together[count].engine_s - apart[count].engine_s) for count in rows})
        head_ratio = curve(
            {count: max(1.0, apart[count].head_s / worker.head_s.value(count)) for count in rows}, may_fall=True
        )
    return EngineTimes(
        alone_s=curve({count: turn.engine_s for count, turn in alone.items()}),
        bookkeeping_s=curve({count: max(0.0, turn.bookkeeping_s) for count, turn in alone.items()}),
        apart_s=curve({count: turn.engine_s for count, turn in apart.items()}),
        apart_bookkeeping_s=curve({count: max(0.0, turn.bookkeeping_s) for count, turn in apart.items()}),
        apart_head_ratio=head_ratio,
        per_further_worker_s=further,
    )
